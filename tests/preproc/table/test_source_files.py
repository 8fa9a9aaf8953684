"""Files of a source: formats by their first bytes, headers, and what one clear line says of the others."""

import gzip
import json
import math
import os
import re

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from configs.table_schema import Source, TableConfig
from preproc.table.line_formats import line_columns
from preproc.table.source_files import find_source, read_columns
from tests.helpers.preproc_command import Refused
from tests.preproc.table.test_pipeline import build

ROWS = "y,c,x\n1,a,2\n0,b,3\n1,a,4\n0,b,5\n"


def parquet_bytes(names=("y", "c", "x"), rows=4):
    columns = [pa.array([1, 0] * (rows // 2), pa.int64()), pa.array(["a", "b"] * (rows // 2))]
    columns += [pa.array(np.arange(2.0, 2 + rows))] * (len(names) - 2)
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_arrays(columns, names=list(names)), sink)
    return sink.getvalue().to_pybytes()


def read(tmp_path, contents, **options):
    """Write the contents as files and return what a source of them is."""
    paths = []
    for i, content in enumerate(contents):
        paths.append(tmp_path / f"{i}")
        paths[-1].write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_columns(*find_source("t", Source(files=list(map(str, paths)), **options)))


@pytest.mark.parametrize(
    ("content", "options", "columns"),
    [
        (ROWS, {}, ["y", "c", "x"]),
        ("\ufeff" + ROWS, {}, ["y", "c", "x"]),
        (ROWS.replace("\n", "\r\n"), {}, ["y", "c", "x"]),
        (gzip.compress(ROWS.encode(), mtime=0), {}, ["y", "c", "x"]),
        (parquet_bytes(), {}, ["y", "c", "x"]),
        (parquet_bytes(), {"format": "parquet"}, ["y", "c", "x"]),
        # pandas writes its index without a name.
        ("," + ROWS, {}, ["unnamed_1", "y", "c", "x"]),
        ('y,"c\nd",x\n1,a,2\n', {}, ["y", "c\nd", "x"]),
        (ROWS.replace(",", "||"), {"delimiter": "||"}, ["y", "c", "x"]),
        ("y\tc\n1\ta\n", {"format": "tsv"}, ["y", "c"]),
        ("1,a\n", {"header": False, "columns": ["y", "c"]}, ["y", "c"]),
        ("y,y\n1,a\n", {"columns": ["y", "c"]}, ["y", "c"]),
        ("y,file_row_number\n1,a\n", {}, ["y", "file_row_number"]),
    ],
)
def test_columns_are_named(tmp_path, content, options, columns):
    files = read(tmp_path, [content], **options)
    assert files.columns == columns
    assert files.source.format in ("csv", "tsv", "parquet")


@pytest.mark.parametrize(
    ("contents", "options", "message"),
    [
        (["y,c,c\n"], {}, "columns 2 and 3 are both called 'c' .*rename one, or set"),
        (["y,c,C\n"], {}, "columns 2 and 3 are both called 'C'"),
        ([parquet_bytes(("y", "c", "x", "x"))], {}, "columns 3 and 4 are both called 'x'"),
        (["y,file_\n"], {}, "column 2 is called 'file_', a name that preprocessing itself uses"),
        ([parquet_bytes(("y", "file_row_number"))], {}, "column 2 is called 'file_row_number'"),
        (["\n" + ROWS], {}, "line 1: blank, want the names of the columns"),
        (["y,c\0\n"], {}, "line 1: a null character"),
        ([b"y,\xff\n"], {}, "line 1: not UTF-8 text"),
        (["y," + "c" * 200_000 + "\n"], {}, r"line 1: no header line \(field larger"),
        ([parquet_bytes()], {"format": "csv"}, "set table.sources.t.format to parquet"),
        (
            [ROWS],
            {"format": "parquet"},
            "text, not Parquet; set table.sources.t.format to that of the text",
        ),
        (
            [gzip.compress(b"y,c", mtime=0)],
            {"format": "parquet"},
            "those of gzip data, not Parquet",
        ),
        ([ROWS, parquet_bytes()], {}, "1: a Parquet file, and .*0 is none"),
        ([gzip.compress(parquet_bytes(), mtime=0)], {}, "gzip data that holds Parquet"),
        ([parquet_bytes()[:-5]], {}, "no end marker, so the file was cut short"),
        ([ROWS.encode("utf-16")], {}, "text in UTF-16"),
        ([b"\x93NUMPY\x01\0"], {}, "a NumPy file; write it as UTF-8 text or as Parquet"),
        (["y,c\n", "y,d\n"], {}, "1: no column 'c', which .*0 has"),
        (["y,c\n", "y,c,d\n"], {}, "0: no column 'd', which .*1 has"),
        (["y,c,d\n", "y,c\n"], {}, "1: no column 'd', which .*0 has"),
    ],
)
def test_files_that_are_no_source_are_refused_in_one_line(tmp_path, contents, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        read(tmp_path, contents, **options)
    assert str(caught.value).isprintable()
    assert str(caught.value).startswith(str(tmp_path))


def test_a_damaged_parquet_file_is_named(tmp_path):
    content = parquet_bytes(rows=2000)
    footer = int.from_bytes(content[-8:-4], "little")
    with pytest.raises(ValueError, match="0: damaged Parquet data"):
        read(tmp_path, [content[: -8 - footer] + b"\xff" * footer + content[-8:]])
    damaged = tmp_path / "0"
    damaged.write_bytes(content[:4] + b"\xff" * 60 + content[64:])
    table = described(damaged)
    with pytest.raises(Refused, match="0: damaged Parquet data"):
        build(tmp_path / "out", table)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (gzip.compress(ROWS.encode(), mtime=0) + bytes(99), "Input is not a GZIP stream"),
        (ROWS.replace("a", "a" * 40_000_000, 1).encode(), "a line of many million bytes"),
    ],
    ids=["zeros", "line"],
)
def test_text_that_cannot_be_read_is_named_by_its_file(tmp_path, content, reason):
    (tmp_path / "a.csv").write_text(ROWS)
    (tmp_path / "b.csv").write_bytes(content)
    files = [tmp_path / "a.csv", tmp_path / "b.csv"]
    with pytest.raises(
        Refused, match=f"error: {files[1]}: {reason}; correct it, or write it again"
    ):
        build(tmp_path / "out", described(files))


def test_blanks_of_a_header_are_seen_in_the_message(tmp_path):
    (tmp_path / "a.csv").write_text("y, c,x 1\n0,a,1\n1,b,2\n")
    with pytest.raises(
        Refused, match=r"'c': got column 'c': no column \"c\"; .* are y, ' c', 'x 1'$"
    ):
        build(tmp_path / "out", described(tmp_path / "a.csv", numerical=[]))


@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_only_regular_files_are_sources(tmp_path, kind):
    path = tmp_path / "fifo"
    os.mkfifo(path)
    path = path if kind == "fifo" else "/dev/zero"
    with pytest.raises(ValueError, match=f"{path}: a FIFO, a device or a socket"):
        find_source("t", Source(files=str(path)))


def described(path, **more):
    return {
        "sources": {
            "t": {"files": [str(p) for p in path] if isinstance(path, list) else str(path)}
        },
        "label": {"name": "y"},
        "categorical": ["c"],
        "numerical": ["x"],
        "split": {"train": 0.5},
    } | more


def test_files_whose_columns_are_in_another_order_are_one_table(tmp_path):
    (tmp_path / "a.csv").write_text(ROWS)
    (tmp_path / "b.csv").write_text("x,Y,c\n2,1,a\n3,0,b\n4,1,a\n5,0,b\n")
    (tmp_path / "c.csv").write_text(ROWS + ROWS.partition("\n")[2])
    paths = [tmp_path / "a.csv", tmp_path / "b.csv"]
    wanted = build(tmp_path / "wanted", described(tmp_path / "c.csv"))
    assert build(tmp_path / "out", described(paths)) == wanted
    for path in paths:
        duckdb.read_csv(str(path)).write_parquet(str(path.with_suffix(".parquet")))
    parquet = described([path.with_suffix(".parquet") for path in paths])
    assert build(tmp_path / "again", parquet) == wanted


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"numerical": [{"name": "x", "expression": "a + 1"}]},
            "table.numerical: 'x': got expression 'a . 1': no column \"a\"; correct it; the columns are y, c, x",
        ),
        (
            {"numerical": [{"name": "x", "expression": "x +"}]},
            "table.numerical: 'x': got expression 'x .': syntax error .*",
        ),
        (
            {"numerical": [{"name": "x", "expression": "x) , (c"}]},
            "table.numerical: 'x': got expression 'x\\) , \\(c': not one expression.*",
        ),
        (
            {"categorical": [{"name": "c", "expression": "CAST(c AS INTEGER)"}]},
            "table.categorical: 'c': got expression 'CAST\\(c AS INTEGER\\)': Could not convert string 'a' .*",
        ),
        (
            {"categorical": [{"name": "d", "cross": ["c", "e"]}]},
            "table.categorical: 'd': got cross \\['c', 'e'\\]: no column \"e\".*",
        ),
        (
            {"categorical": [{"name": "c", "list": True}]},
            "table.categorical: 'c': list is set, but a value is varchar, no list.*",
        ),
        ({"label": {"name": "z"}}, "table.label: 'z': got column 'z': no column \"z\".*"),
        # To DuckDB and Spark a value, where no column has the name.
        (
            {"categorical": ["c", "user"]},
            "table.categorical: 'user': got column 'user': no column \"user\".*",
        ),
        (
            {"split": {"by": "column", "expression": "z"}},
            "table.split: got expression 'z': no column \"z\".*",
        ),
        ({"query": "SELECT z FROM t", "order_by": ["z"]}, "table.query: Referenced column .*"),
        (
            {"query": "SELECT * FROM t", "order_by": "z"},
            "table.order_by\\[0\\]: got expression 'z': no column \"z\".*",
        ),
        (
            {"sources": {"t": {"files": "t.tsv"}}},
            ".*the header 'y\\\\tc\\\\tx' is one column, so set the source's format: tsv",
        ),
        (
            {"label": {"name": "y", "expression": "'\x1b[31m\nerror: ' || y"}},
            ".*, row 1: the label is .*x1b.*error: 1, wanted 0 or 1.*",
        ),
        (
            {"label": {"name": "c"}, "categorical": ["x"], "numerical": []},
            ".*, row 1: the label is a, wanted 0 or 1; .*table.label.expression, such as CASE \"c\" WHEN 'yes'.*",
        ),
        (
            {"label": {"name": "z", "kind": "regression", "expression": "c"}},
            ".*, row 1: the label is a, wanted a finite number; correct or remove it, or set on_bad=quarantine",
        ),
    ],
)
def test_what_is_wrong_with_an_expression_is_said_in_one_line(
    tmp_path, monkeypatch, change, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.csv").write_text(ROWS)
    (tmp_path / "t.tsv").write_text(ROWS.replace(",", "\t"))
    with pytest.raises(Refused) as caught:
        build(tmp_path / "out", described(tmp_path / "t.csv") | change)
    assert re.fullmatch(f"error: {message}", caught.value.message), caught.value.message
    assert caught.value.exit_code == 2
    assert caught.value.message.isprintable()


@pytest.mark.parametrize(
    ("value", "options", "message"),
    [
        (
            "1e300",
            ["numerical_dtype=float32"],
            "row 3: numerical feature 'x' is 1e\\+300, inf after",
        ),
        ("-70000", [], "row 3: numerical feature 'x' is -70000.0, .*want at most 65504, .*float32"),
        ("70000", ["on_bad=skip"], "row 3: numerical feature 'x' is 70000.0"),
    ],
)
@pytest.mark.parametrize("by", ["fraction", "random"])
def test_a_number_too_large_to_store_is_named_by_file_and_row(
    tmp_path, value, options, message, by
):
    rows = ["y,c,x", "1,a,2", "0,b,2" if "on_bad=skip" not in options else "q,b,2", f"1,a,{value}"]
    source = tmp_path / "t.csv"
    source.write_text("\n".join(rows + ["1,a,2", "0,b,3"] * 10) + "\n")
    table = described(source, split={"by": by, "train": 0.5})
    with pytest.raises(Refused, match=f"{source}, {message}"):
        build(tmp_path / "out", table, *options)


def test_a_range_that_no_double_holds_is_refused(tmp_path):
    (tmp_path / "t.csv").write_text("y,c,x\n" + "1,a,-1.7e308\n0,b,1.7e308\n" * 4)
    table = described(tmp_path / "t.csv", numerical=[{"name": "x", "transforms": ["minmax"]}])
    with pytest.raises(Refused, match=r"values from -1.7e[+]308 .*clip them before minmax"):
        build(tmp_path / "out", table)


BAD = [float("nan"), float("inf"), 1.5, True, -1, "5", [], {}, 10**400]
NO_NUMBER = [*BAD[:2], True, *BAD[5:]]
CLIPS = [[5, 1], [float("nan"), 1], [None, 1], [True, 2], [10**400, 1]]
NO_NAME = ["label", "numerical", "a/b", "", ".a", "q" * 201]


def categorical(key):
    return lambda value: {"categorical": [{"name": "c", "expression": "c", key: value}]}


def separated(key):
    return lambda value: {"categorical": [{"name": "c", "separator": "|", key: value}]}


def transform(make):
    return lambda value: {"numerical": [{"name": "x", "transforms": [make(value)]}]}


def split(key):
    return lambda value: {"split": {"by": "random", key: value}}


def source(key):
    return lambda value: {"sources": {"t": {"files": "t.csv"} | {key: value}}}


def option(key, **more):
    return lambda value: {key: value} | more


@pytest.mark.parametrize(
    ("change", "values"),
    [
        *[(separated(key), BAD) for key in ("buckets", "max_size", "hotness", "frequency_limit")],
        *[(categorical(key), [1.5, True, [], {}]) for key in ("expression", "separator", "name")],
        (categorical("name"), NO_NAME),
        (separated("list"), [True, 3]),
        (transform(lambda value: {"fill": value}), NO_NUMBER),
        (transform(lambda value: {"log": value}), NO_NUMBER),
        (transform(lambda value: value), NO_NUMBER),
        (transform(lambda value: {"clip": value}), CLIPS),
        *[(split(key), [*BAD[:2], *BAD[3:]]) for key in ("train", "validation")],
        *[(source(key), [1.5, "maybe", {}]) for key in ("header", "format", "columns")],
        (source("delimiter"), ["", '"', "\n", 3, "five!"]),
        (source("files"), [None, 3, [], [None], {"a": 1}, ""]),
        (option("missing"), ["NA", [None], [False], [1]]),
        (option("query", order_by=["y"]), [3, ["q"], True]),
        (option("order_by"), [3, [3], {"a": 1}]),
        (option("categorical"), ["c", {"name": "c"}, [3], [[]]]),
        (option("categorical"), [[{"name": "c", "separator": "|"}, "c.offsets"]]),
    ],
)
def test_an_option_of_the_wrong_kind_is_refused_in_one_line(change, values):
    for value in values:
        with pytest.raises(ValueError, match=r"^table") as caught:
            TableConfig.of(described("t.csv") | change(value))
        assert len(str(caught.value)) < 400
        assert str(caught.value).isprintable()


def test_bounds_of_clip_may_be_infinite():
    transforms = [{"clip": [-math.inf, 5]}, {"clip": [0, math.inf]}]
    TableConfig.of(described("t.csv", numerical=[{"name": "x", "transforms": transforms}]))


def test_lists_of_json_lines_are_found_in_all_lines_of_the_columns_that_may_be_some(tmp_path):
    first = {"plain": 1, "tags": [1], "mixed": [2], "late": None, "never": None}
    last = {"plain": [1], "tags": None, "mixed": 3, "late": ["x"]}
    lines = [json.dumps(first)] * 3000 + [json.dumps(last)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "flat.jsonl").write_text('{"x": 1, "y": "b"}\n' * 3000)
    queries = []

    class Connection:
        def execute(self, query):
            queries.append(query)
            return duckdb.execute(query)

    def lists_of(name: str) -> set[str]:
        queries.clear()
        lists: set[str] = set()
        source, (file,) = find_source("t", Source(files=str(tmp_path / name), format="jsonl"))
        line_columns(Connection(), source, file, lists)
        return lists

    assert lists_of("a.jsonl") == {"tags", "late"}
    assert "plain" not in queries[-1]
    assert lists_of("flat.jsonl") == set()
    assert len(queries) == 2
    assert "LIMIT" in queries[-1]


def test_names_of_json_lines_that_differ_by_case_alone_are_refused(tmp_path):
    def columns_of(name: str, line: str) -> list[str]:
        (tmp_path / name).write_text(f"{line}\n" * 3)
        source, files = find_source("t", Source(files=str(tmp_path / name), format="jsonl"))
        return read_columns(source, files).columns

    # DuckDB calls the second one A_1, and would find no value of that name.
    with pytest.raises(ValueError, match=r"twins.jsonl: two columns are called 'A' \(SQL ignores"):
        columns_of("twins.jsonl", '{"a": 1, "A": 2}')
    assert columns_of("own.jsonl", '{"a": 1, "A_1": null}') == ["a", "A_1"]
