"""SQL that orders or compares text is refused with the cast to write, by one rule."""

import random

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from preproc.table.duckdb_engine import QueryError
from preproc.table.text_order import is_text, refuse_text_order
from tests.helpers.preproc_command import Refused
from tests.preproc.table.test_pipeline import build
from tests.preproc.table.test_splits import numbers

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


def test_a_text_column_orders_and_divides_rows_when_it_is_cast(tmp_path):
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
    build(tmp_path / "text", table(order_by=["text_order(ts)"]))
    assert numbers(tmp_path / "text")["train"] == sorted(range(5, 105), key=str)[:80]
