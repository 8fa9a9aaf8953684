"""NaN in a column of floats is a missing value, whatever the format, the transform or the expression."""

import json
import math

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from preproc.table.duckdb_engine import DuckDBEngine
from tests.helpers.preproc_command import Refused
from tests.preproc.table.test_pipeline import build, ids_of

ROWS = 400
X = np.where(np.arange(ROWS) % 4 == 1, np.nan, np.arange(ROWS) % 50.0)
MISSING = np.isnan(X)
FORMATS = ("float16", "float32", "float64", "csv", "tsv", "text in Parquet")


def write(path, kind, **columns):
    """Write `X` as column x beside a label and a category; pyarrow's statistics leave NaN out."""
    table = {"y": np.arange(ROWS) % 2, "c": np.arange(ROWS) % 3, "x": X} | columns
    if kind in ("csv", "tsv"):
        comma = "," if kind == "csv" else "\t"
        rows = zip(*(map(str, column) for column in table.values()), strict=True)
        lines = [comma.join(table), *map(comma.join, rows)]
        # Half of them as other programs write them.
        path.write_text("\n".join(lines).replace("nan\n", "NaN\n", ROWS // 8) + "\n")
    else:
        if kind.startswith("float"):
            table["x"] = table["x"].astype(kind)
        else:
            table["x"] = pa.array([str(value) for value in table["x"]])
        pq.write_table(pa.table(table), path)
    return path


def described(path, **more):
    kind = "tsv" if path.suffix == ".tsv" else None
    return {
        "sources": {"t": {"files": str(path), "format": kind}},
        "label": {"name": "y"},
        "categorical": ["c"],
        "split": {"train": 0.5},
    } | more


def numbers(files, width=1):
    both = files["train/numerical.bin"] + files["test/numerical.bin"]
    return np.frombuffer(both, "<f4").reshape(-1, width)


def missing_of(output):
    columns = json.loads((output / "report.json").read_text())["columns"]
    return {name: column["missing"] for name, column in columns.items()}


@pytest.mark.parametrize("kind", FORMATS)
def test_nan_is_missing_from_every_format_and_with_every_transform(tmp_path, kind):
    chains = {
        "none": ([], 0.0),
        "fill": ([{"fill": 7}], 7.0),
        "clip": ([{"clip": [0, 500]}], 0.0),
        "clip_below": ([{"clip": [3, 500]}, {"fill": -1}], -1.0),
        "log": ([{"log": 1}], 0.0),
        "minmax": (["minmax"], 0.0),
        "standardise": (["standardise"], 0.0),
    }
    numerical = [
        {"name": name, "expression": "x", "transforms": chain}
        for name, (chain, _) in chains.items()
    ]
    path = write(tmp_path / f"t.{kind[:3]}", kind)
    options = "numerical_dtype=float32"
    files = build(tmp_path / "out", described(path, numerical=numerical), options)
    got = numbers(files, len(chains))
    filled = [value for _, value in chains.values()]
    assert (got[MISSING] == np.float32(filled)).all()
    assert (got[~MISSING, 0] == X[~MISSING]).all()
    missing = missing_of(tmp_path / "out")
    assert all(missing[name] == 0.25 for name in chains)
    train = X[: ROWS // 2][~MISSING[: ROWS // 2]]
    fitted = json.loads((tmp_path / "out/preproc.json").read_text())["statistics"]
    assert fitted["minmax"][0] == [train.min(), train.max() - train.min()]
    assert fitted["standardise"][0] == pytest.approx([train.mean(), train.std()], rel=1e-9)


# Each over the column x of 25 % NaN: its value where x is NaN (None: missing), and elsewhere.
EXPRESSIONS = {
    "x": (None, lambda x: x),
    "x * 2 + 1": (None, lambda x: 2 * x + 1),
    "abs(x)": (None, lambda x: x),
    "coalesce(x, 9)": (9, lambda x: x),
    "CASE WHEN x IS NULL THEN 3 ELSE x END": (3, lambda x: x),
    "CASE WHEN x > 20 THEN 1 ELSE 0 END": (0, lambda x: float(x > 20)),
    "CASE WHEN x <= 500 THEN x END": (None, lambda x: x),
    "CAST(x AS FLOAT)": (None, lambda x: x),
    # An expression that calls isnan sees NaN.
    "CASE WHEN isnan(x) THEN NULL ELSE x END": (None, lambda x: x),
    "CASE WHEN isnan(x) THEN -1 ELSE x END": (-1, lambda x: x),
    "CASE WHEN IsNaN (x) THEN 1 ELSE 0 END": (1, lambda x: 0.0),
    "CASE WHEN NOT isnan(x) THEN x END": (None, lambda x: x),
    # NaN that an expression makes is missing too.
    "CASE WHEN x IS NULL THEN CAST('nan' AS DOUBLE) ELSE x END": (None, lambda x: x),
    "CAST('inf' AS DOUBLE) - CAST('inf' AS DOUBLE)": (None, lambda x: 0.0),
    "s.a": (None, lambda x: x),
    "l[1]": (None, lambda x: x),
    "least(s.a, 500)": (500, lambda x: x),
    "CASE WHEN s.b[1].q <= 500 THEN 1 ELSE 2 END": (2, lambda x: 1.0),
    "coalesce(m['k'], 4)": (4, lambda x: x),
    "CASE WHEN isnan(s.a) THEN 8 ELSE s.a END": (8, lambda x: x),
}


def test_nan_is_missing_for_every_expression(tmp_path):
    path = tmp_path / "t.parquet"
    structs = pa.array([{"a": value, "b": [{"q": value}], "Text": "t"} for value in X])
    maps = pa.array([[("k", value)] for value in X], pa.map_(pa.string(), pa.float64()))
    write(path, "float64", s=structs, l=pa.array([[value, 1.0] for value in X]), m=maps)
    numerical = [
        {"name": f"f{i}", "expression": expression, "transforms": []}
        for i, expression in enumerate(EXPRESSIONS)
    ]
    files = build(tmp_path / "out", described(path, numerical=numerical), "numerical_dtype=float32")
    got = numbers(files, len(EXPRESSIONS))
    missing = missing_of(tmp_path / "out")
    for i, (expression, (instead, value)) in enumerate(EXPRESSIONS.items()):
        wanted = [(instead or 0) if math.isnan(x) else value(x) for x in X]
        assert got[:, i].tolist() == wanted, expression
        if "inf" not in expression:
            assert missing[f"f{i}"] == (0.25 if instead is None else 0), expression


def test_nan_is_missing_in_categories_lists_crosses_labels_and_splits(tmp_path):
    lists = pa.array([[value, 1.0] for value in X], pa.list_(pa.float32()))
    fixed = pa.array([[value, 1.0] for value in X], pa.list_(pa.float64(), 2))
    nested = pa.array([[[value], [1.0]] for value in X])
    path = tmp_path / "t.parquet"
    write(path, "float32", l=lists, f=fixed, n=nested)
    table = described(
        path,
        categorical=[
            "x",
            {"name": "hashed", "expression": "x", "buckets": 7},
            {"name": "both", "cross": ["x", "y"]},
            {"name": "l", "list": True, "hotness": 2},
            {"name": "f", "list": True},
            {"name": "n", "list": True, "expression": "list_transform(n, lambda e: e[1])"},
        ],
    )
    files = build(tmp_path / "out", table, "vocabulary=all")
    for name in ("x", "hashed", "both"):
        ids = ids_of(files, f"train/{name}.bin") + ids_of(files, f"test/{name}.bin")
        assert [i == 0 for i in ids] == MISSING.tolist(), name
        assert missing_of(tmp_path / "out")[name] == 0.25
    for name in ("l", "f", "n"):
        values = duckdb.sql(f"SELECT value FROM '{tmp_path}/out/vocabulary/{name}.parquet'")
        assert "nan" not in {value for (value,) in values.fetchall()}
        ids = ids_of(files, f"train/{name}.bin")
        # An item that is missing is none: a list of fixed hotness ends with id 0, and a ragged one is shorter.
        missing = MISSING[: ROWS // 2]
        if name == "l":
            assert [row[1] == 0 for row in zip(*[iter(ids)] * 2, strict=True)] == missing.tolist()
            ids = [i for i in ids if i]
        else:
            ends = ids_of(files, f"train/{name}.offsets.bin", "<i8")
            assert np.diff(ends).tolist() == (2 - missing).tolist()
        assert 0 not in ids
        assert len(ids) == sum(2 - missing)
    column = {
        "by": "column",
        "expression": "CASE WHEN x > 25 THEN 'test' WHEN x <= 25 THEN 'train' END",
    }
    files = build(tmp_path / "split", described(path, split=column))
    assert len(files["train/label.bin"]) == (X <= 25).sum()
    assert len(files["test/label.bin"]) == (X > 25).sum()
    label = described(path, label={"name": "z", "expression": "x / x"})
    with pytest.raises(Refused, match="row 1: the label is missing"):
        build(tmp_path / "label", label)


def test_a_query_sees_null_for_nan_unless_it_calls_isnan(tmp_path):
    path = write(tmp_path / "t.parquet", "float64")

    def rows(where):
        query = f"SELECT * FROM t WHERE {where}"
        table = described(path, query=query, order_by=["order_"], numerical=["x"])
        files = build(tmp_path / "out", table, "numerical_dtype=float32", "overwrite=true")
        return numbers(files)[:, 0].tolist(), missing_of(tmp_path / "out")["x"]

    present, all_missing = X[~MISSING].tolist(), [0.0] * int(MISSING.sum())
    assert rows("x <= 500") == (present, 0)
    assert rows("x IS NULL") == (all_missing, 1)
    assert rows("isnan(x) AND x > 1000") == (all_missing, 1)


def test_duckdb_does_not_evaluate_the_barrier_from_statistics(tmp_path):
    """Fails when a version of DuckDB learns to: then `without_nan` needs another barrier."""
    write(tmp_path / "t.parquet", "float64")
    connection = duckdb.connect()
    read = f"FROM '{tmp_path}/t.parquet'"
    assert connection.sql(f"SELECT count(*) {read} WHERE isnan(x)").fetchall() == [(0,)]
    clean = DuckDBEngine.without_nan(None, "x", "double")
    kept = DuckDBEngine.without_nan(None, "x", "double", "'nan'")
    for value, condition in (
        (clean, "v IS NULL"),
        (clean, "NOT coalesce(v <= 500, false)"),
        (kept, "isnan(v)"),
        (kept, "v > 500"),
    ):
        query = f"SELECT count(*) FROM (SELECT {value} AS v {read}) WHERE {condition}"
        assert connection.sql(query).fetchall() == [(MISSING.sum(),)], query
        query = f"SELECT count(*) FILTER ({condition}) FROM (SELECT {value} AS v {read})"
        assert connection.sql(query).fetchall() == [(MISSING.sum(),)], query


def test_texts_can_be_named_missing(tmp_path):
    lines = ["1,NA,NA,a|NA", "0,b,2,NA", "1,null,null,a", "0,na,3,"] * 4
    source = tmp_path / "t.csv"
    source.write_text("\n".join(["y,c,x,t", *lines]))
    table = described(source, numerical=["x"], categorical=["c", {"name": "t", "separator": "|"}])
    with pytest.raises(Refused, match=r"row 1: x is NA, .*set table.missing: \['NA'\]"):
        build(tmp_path / "out", table)
    files = build(tmp_path / "out", table | {"missing": ["NA", "null"]})
    assert ids_of(files, "train/c.bin")[:4] == [0, 1, 0, 2]
    assert missing_of(tmp_path / "out") == {"x": 0.5, "c": 0.5, "t": 0.5}
    # Only a whole field is missing, not an item of it.
    assert ids_of(files, "train/t.bin")[:3] == [1, 2, 1]
    as_parquet = tmp_path / "t.parquet"
    duckdb.read_csv(str(source), all_varchar=True).write_parquet(str(as_parquet))
    again = table | {"missing": ["NA", "null"], "sources": {"t": {"files": str(as_parquet)}}}
    assert build(tmp_path / "again", again) == files
