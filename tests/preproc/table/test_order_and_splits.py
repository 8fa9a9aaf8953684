"""Splits, order and comparison of the rows of a table: `split`, `test_source`, and SQL over text."""

import random
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from preproc.table.duckdb_engine import SPLIT_TYPE, DuckDBEngine, QueryError
from preproc.table.text_order import is_text, refuse_text_order
from preproc.transformed_rows import open_transformed_rows
from tests.helpers.preproc_command import Refused, data_files
from tests.preproc.table.test_history import Row, build, check, reference, write_rows
from tests.preproc.table.test_history import described as with_history

DAYS = [range(0, 40), range(40, 60), range(60, 71)]


def write_days(directory: Path) -> list[Path]:
    """Write days whose rows are numbered over all, in an order of their own."""
    files = []
    for day, numbers in enumerate(DAYS):
        order = random.Random(day).sample(list(numbers), len(numbers))
        files.append(directory / f"day_{day}.csv")
        files[-1].write_text("\n".join(["y,n", *(f"{n % 2},{n}" for n in order), ""]))
    return files


def table_of(source, **more) -> dict:
    return {
        "sources": {"t": {"files": source}},
        "label": {"name": "y"},
        "numerical": [{"name": "n", "transforms": []}],
        "categorical": [{"name": "c", "expression": "n", "buckets": 9}],
    } | more


def numbers(output: Path) -> dict[str, list[int]]:
    """Return the number of every row by split."""
    return {
        split.name: np.fromfile(split / "numerical.bin", "f2").astype(int).tolist()
        for split in output.iterdir()
        if (split / "numerical.bin").exists()
    }


def test_the_files_of_test_source_are_the_test_split(tmp_path):
    first, second, third = files = list(map(str, write_days(tmp_path)))
    lines = [[int(line.split(",")[1]) for line in Path(f).read_text().split()[1:]] for f in files]
    options = [f"source=[{first},{second}]", f"test_source={third}"]
    build(tmp_path / "out", table_of([first, second]), *options)
    assert numbers(tmp_path / "out") == {"train": lines[0] + lines[1], "test": lines[2]}
    # In the order of a column, each split within itself.
    by_time = table_of([first, second], order_by=["-CAST(n AS BIGINT)"])
    build(tmp_path / "time", by_time, *options)
    assert numbers(tmp_path / "time") == {
        "train": list(range(59, -1, -1)),
        "test": list(range(70, 59, -1)),
    }
    # Of a fit that is applied to them, and of a query that says which files its rows are from.
    fit = ["mode=transform", f"fitted={tmp_path / 'out'}"]
    build(tmp_path / "next", table_of([first]), f"source={first}", f"test_source={second}", *fit)
    assert numbers(tmp_path / "next") == {"train": lines[0], "test": lines[1]}
    # The next day trains on the file that tested, and tests on another one.
    day = ["mode=extend", f"source={third}", f"test_source={first}", fit[1]]
    build(tmp_path / "day", table_of([third]), *day)
    assert numbers(tmp_path / "day") == {"train": lines[2], "test": lines[0]}
    with pytest.raises(Refused, match=f"{second} was read already by"):
        build(tmp_path / "no", table_of([second]), f"source={second}", *day[2:], day[0])
    joined = table_of(first, query="SELECT t.*, u.z FROM t JOIN u ON t.n = u.n")
    joined |= {"order_by": ["CAST(n AS BIGINT)"]}
    others = "\n".join(["n,z", *(f"{n},x" for n in range(71)), ""])
    (tmp_path / "others.csv").write_text(others)
    joined["sources"] = {"t": {"files": first}, "u": {"files": str(tmp_path / "others.csv")}}
    build(tmp_path / "query", joined, f"source={first}", f"test_source={third}")
    assert numbers(tmp_path / "query") == {"train": list(DAYS[0]), "test": list(DAYS[2])}
    # The files that tested are no part of how later rows are read.
    with open_transformed_rows(tmp_path / "query", [Path(second)], keep=["n"]) as rows:
        found = [int(n) for _, kept in rows for n in kept["n"].to_pylist()]
    assert found == list(DAYS[1])


def test_split_last_file_divides_the_last_file(tmp_path):
    files = list(map(str, write_days(tmp_path)))
    lines = [[int(line.split(",")[1]) for line in Path(f).read_text().split()[1:]] for f in files]
    build(tmp_path / "out", table_of(files), "split=last_file")
    wanted = {"train": lines[0] + lines[1], "test": lines[2][:5], "validation": lines[2][5:]}
    assert numbers(tmp_path / "out") == wanted
    by_time = table_of(files, order_by=["CAST(n AS BIGINT)"])
    build(tmp_path / "time", by_time, "split=last_file")
    assert numbers(tmp_path / "time") == {key: sorted(rows) for key, rows in wanted.items()} | {
        "test": list(range(60, 65)),
        "validation": list(range(65, 71)),
    }
    of_query = by_time | {"query": "SELECT y, n, file_ FROM t"}
    build(tmp_path / "query", of_query, "split=last_file")
    assert data_files(tmp_path / "query") == data_files(tmp_path / "time")
    build(tmp_path / "key", by_time | {"split": {"by": "last_file"}})
    assert data_files(tmp_path / "key") == data_files(tmp_path / "time")


@pytest.mark.parametrize("order_by", [[], ['CAST("time" AS BIGINT)']])
def test_histories_of_test_rows_see_training_rows_and_strictly_earlier_test_rows(
    tmp_path, order_by
):
    draw = random.Random(3)
    old = [Row(draw.choice("uv"), draw.choice("abc"), str(t // 2), "1", t % 2) for t in range(40)]
    new = [
        Row(draw.choice("uvw"), draw.choice("abd"), str(t // 3), "1", t % 2) for t in range(54, 84)
    ]
    table = with_history(write_rows(tmp_path / "old.csv", old)) | {"order_by": order_by}
    table.pop("split", None)
    options = (
        f"source={tmp_path / 'old.csv'}",
        f"test_source={write_rows(tmp_path / 'new.csv', new)}",
    )
    build(tmp_path / "out", table, *options)
    assert np.fromfile(tmp_path / "out/test/label.bin", "u1").tolist() == [r.label for r in new]
    check(tmp_path / "out", reference([*old, *new], 3), 3)


def test_what_divides_the_rows_twice_or_not_at_all_is_refused(tmp_path):
    first, second, third = map(str, write_days(tmp_path))
    by_random = table_of(first, split={"by": "random", "train": 0.5})
    of_query = {"query": "SELECT y, n FROM t", "order_by": ["CAST(n AS BIGINT)"]}
    two = {"sources": {"t": {"files": first}, "u": {"files": first}}}
    from_first = [f"source={first}", f"test_source={second}"]
    for table, options, message in (
        (
            by_random,
            from_first,
            r"test_source=.* and table.split={by: random} each divide the rows; .* table.split=null",
        ),
        (
            by_random,
            ["split=last_file"],
            r"split=last_file and table.split={by: random} each divide",
        ),
        (
            table_of(first),
            [*from_first, "split=last_file"],
            r"test_source=.* and split=last_file each",
        ),
        (
            table_of(first),
            [f"test_source={first}"],
            "source and test_source both name .*day_0.csv; test on",
        ),
        (table_of(first), [f"test_source={third}x"], "day_2.csvx: no such file; set test_source"),
        (
            table_of(first),
            ["split=last_file"],
            "for train of 40 by last_file, which wants two files",
        ),
        (
            table_of(first, split={"train": 0.5, "validation": 0.3}),
            [],
            "table.split: by: fraction does not read validation; drop it .*~table.split.KEY\\), or .* random train",
        ),
        (
            table_of([first, second], split={"by": "last_file", "train": 0.5, "expression": "y"}),
            [],
            "by: last_file does not read expression and train",
        ),
        (
            table_of(first) | of_query,
            from_first,
            "result of table.query has no column file_; select",
        ),
        (
            table_of(first) | of_query | two,
            from_first,
            "wants one source whose files .*, got 't', 'u';",
        ),
    ):
        with pytest.raises(Refused, match=message) as refused:
            build(tmp_path / "out", table, *options)
        assert refused.value.exit_code == 2
        assert not (tmp_path / "out").exists()
    # Unset by hand, the option divides.
    build(tmp_path / "out", by_random, *from_first, "table.split=null")
    assert {split: len(rows) for split, rows in numbers(tmp_path / "out").items()} == {
        "train": 40,
        "test": 20,
    }


REMEDY = (
    r"orders text, and text would put '10' before '9'; write CAST\({0} AS BIGINT\) or AS TIMESTAMP, or "
    r"text_order\({0}\) where the order of its bytes is right"
)


class Types:
    """The types of three tables, as an engine knows them."""

    def __init__(self):
        self._connection = duckdb.connect()
        self._connection.execute(
            "CREATE TABLE t (ts VARCHAR, n BIGINT, d DATE, l VARCHAR[]); CREATE TABLE u (ts VARCHAR, x VARCHAR);"
            "CREATE MACRO text_order(value) AS encode(value)"
        )

    def columns(self, query):
        try:
            described = self._connection.execute(f"DESCRIBE {query}").fetchall()
        except duckdb.Error as error:
            raise QueryError(str(error)) from None
        return [(name, kind) for name, kind, *_ in described]


@pytest.fixture(scope="module")
def types():
    return Types()


@pytest.mark.parametrize(
    ("sql", "text"),
    [
        ("CASE WHEN ts < '1600' THEN 'train' ELSE 'test' END", "ts"),
        ("ts BETWEEN '1' AND '5'", "ts"),
        ("'5' <= substr(ts, 2)", "substr\\(ts, 2\\)"),
        ("greatest(ts, '5')", "ts"),
        ("max_by(n, ts)", "ts"),
        ("max(ts) OVER (PARTITION BY n)", "ts"),
        ("row_number() OVER (PARTITION BY n ORDER BY d, ts DESC)", "ts"),
        ("list_sort(l)", "l"),
        ("l[1] > 'a'", "l\\[1\\]"),
        ("(SELECT min(x) FROM u)", "x"),
        ("CAST(n AS STRING) > '4'", "CAST\\(n AS STRING\\)"),
    ],
)
def test_an_expression_that_orders_text_is_refused(types, sql, text):
    with pytest.raises(ValueError, match=r"^here: .*" + REMEDY.format(text)):
        refuse_text_order(types, "here", sql, "SELECT * FROM t")


def test_expressions_that_order_other_values_are_not(types):
    for sql in (
        "CAST(ts AS BIGINT) < 1600 AND n < '5' AND d >= '2026-01-01'",
        "greatest(n, CAST(ts AS BIGINT)) + max_by(n, d) OVER (PARTITION BY ts)",
        "text_order(ts) < text_order('5')",
        "ts <> '5' OR ts IN ('a', 'b') OR replace(ts, '<', '>') = 'min(x)'",
        "row_number() OVER (PARTITION BY ts ORDER BY n, text_order(ts))",
        "what only another parser reads :: < `",
    ):
        refuse_text_order(types, "here", sql, "SELECT * FROM t")


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("SELECT * FROM t WHERE ts < '5'", "ts"),
        ("WITH q AS (SELECT max(ts) AS m FROM t) SELECT * FROM q", "ts"),
        ("WITH q AS (SELECT ts AS z FROM t) SELECT * FROM q WHERE z >= '7'", "z"),
        ("SELECT ts AS a FROM t ORDER BY a LIMIT 5", "ts"),
        ("SELECT n, ts FROM t ORDER BY n, 2 LIMIT 5", "ts"),
        ("SELECT n FROM t UNION ALL SELECT n FROM t WHERE ts > '4'", "ts"),
        ("SELECT n FROM t JOIN u ON t.ts = u.ts AND t.ts <= u.x", "t.ts"),
    ],
)
def test_a_query_that_orders_text_is_refused(types, query, text):
    with pytest.raises(ValueError, match=r"^here: .*" + REMEDY.format(text)):
        refuse_text_order(types, "here", query, None)


def test_types_of_both_engines():
    lists = 'array {"containsNull":true,"elementType":"string","type":"array"}'
    assert all(map(is_text, ("VARCHAR", "string", "VARCHAR[]", lists)))
    assert not any(
        map(is_text, ("BIGINT", "BLOB", "binary", "date", lists.replace("string", "long")))
    )


def test_a_text_column_orders_and_divides_rows_when_it_is_cast(tmp_path, monkeypatch):
    times = random.Random(0).sample(range(5, 105), 100)
    columns = {"y": [t % 2 for t in times], "ts": list(map(str, times))}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    lines = ["y,ts", *(f"{y},{ts}" for y, ts in zip(*columns.values(), strict=True))]
    (tmp_path / "t.csv").write_text("\n".join([*lines, ""]))

    def table(source="t.csv", **more):
        return {
            "sources": {"t": {"files": str(tmp_path / source)}},
            "label": {"name": "y"},
            "numerical": [{"name": "ts", "transforms": []}],
            "categorical": [{"name": "c", "expression": "ts", "buckets": 9}],
            "split": {"by": "fraction", "train": 0.8},
        } | more

    late = {"by": "column", "expression": "CASE WHEN ts < '90' THEN 'train' ELSE 'test' END"}
    query = {"query": "SELECT *, max(ts) OVER () AS last FROM t", "order_by": ["order_"]}
    for refused, where in (
        (table(order_by=["ts"]), r"table.order_by\[0\]: ts "),
        (table("t.parquet", order_by=["order_", "ts"]), r"table.order_by\[1\]: ts "),
        (table(split=late), r"table.split: \(ts < '90'\) "),
        (table(**query), r"table.query: max\(ts\) OVER \(\) "),
        (table(label={"name": "y", "expression": "ts > '5'"}), r"table.label: 'y': \(ts > '5'\) "),
    ):
        with pytest.raises(Refused, match=where + REMEDY.format("ts")):
            build(tmp_path / "x", refused)
    build(tmp_path / "cast", table(order_by=["CAST(ts AS BIGINT)"]))
    assert numbers(tmp_path / "cast") == {"train": list(range(5, 85)), "test": list(range(85, 105))}
    # Of later rows the query is checked too, unless it is that of the fit, as one of an earlier version may be.
    fitted = f"fitted={tmp_path / 'cast'}"
    for mode in ("extend", "transform"):
        with pytest.raises(
            Refused, match=r"table.query: max\(ts\) OVER \(\) " + REMEDY.format("ts")
        ):
            build(tmp_path / "x", table("t.parquet", **query), f"mode={mode}", fitted)
    with monkeypatch.context() as earlier:
        earlier.setattr("preproc.table.staging.refuse_text_order", lambda *_: None)
        build(tmp_path / "earlier", table(**query))
    build(tmp_path / "x", table(**query), "mode=transform", f"fitted={tmp_path / 'earlier'}")
    build(tmp_path / "text", table(order_by=["text_order(ts)"]))
    assert numbers(tmp_path / "text")["train"] == sorted(range(5, 105), key=str)[:80]


IS_FIRST = "CAST(x AS INTEGER) < 9"


@pytest.mark.parametrize(
    ("expression", "message", "times"),
    [
        (f"CASE WHEN {IS_FIRST} THEN 'train' ELSE 'tst' END", "got split 'tst'", 2),
        (f"CASE WHEN {IS_FIRST} THEN 'train' ELSE 'te' || chr(10) END", r"got split 'te\\n'", 2),
        (f"CASE WHEN {IS_FIRST} THEN 'train' ELSE s::INT::TEXT END", "string 's9' to INT32", 2),
        (f"CAST(if({IS_FIRST}, 'train', 'tst') AS {SPLIT_TYPE})", "string 'tst' to ENUM", 2),
        (f"CASE WHEN {IS_FIRST} THEN 'train' ELSE error('no') END", "no", 1),
    ],
)
def test_rows_are_staged_again_where_a_split_may_have_another_name(
    tmp_path, monkeypatch, expression, message, times
):
    rows = [f"{i % 2},{i},{i if i < 9 else f's{i}'}" for i in range(12)]
    (tmp_path / "t.csv").write_text("\n".join(["y,x,s", *rows]) + "\n")
    table = {
        "sources": {"t": {"files": str(tmp_path / "t.csv")}},
        "label": {"name": "y"},
        "categorical": ["x"],
        "split": {"by": "column", "expression": expression},
    }
    staged, stage = [], DuckDBEngine._stage
    monkeypatch.setattr(DuckDBEngine, "_stage", lambda *of: staged.append(of) or stage(*of))
    with pytest.raises(Refused, match=message):
        build(tmp_path / "out", table)
    assert len(staged) == times
