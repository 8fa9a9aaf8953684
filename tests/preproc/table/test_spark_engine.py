"""engine=spark writes what engine=duckdb writes, byte for byte. One Spark session with two workers serves all tests."""

import hashlib
import json
import random
import re
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from tests.helpers.command import ROOT
from tests.helpers.preproc_command import Refused, data_files, preproc, write_lines
from tests.preproc.criteo.test_pipeline import random_lines, reference
from tests.preproc.table import test_event_lists as event_lists
from tests.preproc.table import test_sequence as sequences
from tests.preproc.table.test_extension import table_of, write_day
from tests.preproc.table.test_history import described, random_rows, write_rows
from tests.preproc.table.test_pipeline import _hydra

# PySpark and Java are a part of `pytest -m doors`: without them these tests fail.
pytestmark = pytest.mark.doors

PARTS = slice(0, 40), slice(40, None)
PAGE = (ROOT / "docs/preprocessing.md").read_text()
FOR_GPUS = dict(re.findall(r"(?:--conf |-D)(spark\.[\w.]+)=([^\s\"]+)", PAGE))
"""The page's settings for GPUs."""


@pytest.fixture(scope="module")
def spark(tmp_path_factory):
    """Start the Spark session that the engine uses: two workers on loopback, with settings for small data.

    Each tells of a GPU that is not there, and has the page's settings for GPUs but the plug-in, so tasks run on CPUs.
    """
    from pyspark.sql import SparkSession

    script = tmp_path_factory.mktemp("gpu") / "script.sh"
    script.write_text('#!/bin/sh\necho \'{"name": "gpu", "addresses": ["5"]}\'\n')
    script.chmod(0o755)
    builder = SparkSession.builder.master("local-cluster[2,1,1024]")
    for name, value in FOR_GPUS.items():
        if name != "spark.plugins":
            builder.config(name, str(script) if name.endswith("discoveryScript") else value)
    session = (
        builder.config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.ui.enabled", "false")
        # Files are split every 2 kB, so that a small one already has several blocks.
        .config("spark.sql.files.maxPartitionBytes", "2048")
        .config("spark.sql.files.openCostInBytes", "0")
        .config("spark.driver.memory", "1g")
        # Compiling a query takes longer than running it on so few rows.
        .config("spark.sql.adaptive.enabled", "false")
        .config("spark.sql.codegen.wholeStage", "false")
        .config("spark.sql.codegen.factoryMode", "NO_CODEGEN")
        .config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
        .config("spark.executor.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
        .getOrCreate()
    )
    yield session
    session.stop()


@pytest.fixture
def large_files(spark):
    """Read files in blocks of a size as by default, so that each worker writes some."""
    spark.conf.set("spark.sql.files.maxPartitionBytes", str(4 << 20))
    yield
    spark.conf.set("spark.sql.files.maxPartitionBytes", "2048")


def test_the_settings_for_gpus_give_tasks_a_gpu(spark):
    from pyspark import TaskContext

    found = spark.sparkContext.parallelize([0], 1).map(lambda _: TaskContext.get().resources())
    assert found.first()["gpu"].addresses == ["5"]


def both(tmp_path, *overrides: str) -> dict[str, bytes]:
    """Run with each engine, compare all bytes but those of Parquet, and the specs, and return the bytes."""
    files = {}
    for engine in ("duckdb", "spark"):
        preproc(*overrides, f"engine={engine}", f"output={tmp_path / engine}")
        files[engine] = data_files(tmp_path / engine)
    assert files["spark"] == files["duckdb"]
    specs = [
        yaml.safe_load((tmp_path / engine / "feature_spec.yaml").read_text()) for engine in files
    ]
    for spec in specs:  # the engines word their reasons differently
        spec["metadata"]["files"].pop("bad_rows.tsv", None)
    if "dataset=any" not in overrides:
        # DuckDB's engine has a pipeline of its own for Criteo's logs, which counts less and writes Parquet itself.
        for name in [n for n in specs[0]["metadata"]["files"] if n.startswith("vocabulary/")]:
            tables = [pq.read_table(tmp_path / engine / name) for engine in files]
            assert tables[0].to_pydict() == tables[1].to_pydict()
            for spec in specs:
                del spec["metadata"]["files"][name]
        for spec in specs:
            del spec["metadata"]["files"]["report.json"]
    assert specs[0] == specs[1]
    return files["spark"]


def test_a_table_with_everything_in_it(tmp_path, spark):
    draw = random.Random(0)
    rows = [
        (
            draw.randint(0, 1),
            draw.choice(["", "1.5", "-2", "1e3", "0.1"]),
            draw.choice(["", "a", "é", "Z", "a b", '"q, r"', "10", "9"]),
            "|".join(draw.choices(["x", "y", "z.*", "w", ""], k=draw.randint(0, 4))),
        )
        for _ in range(160)
    ]
    head, tail = (
        write_lines(tmp_path / name, ["y,n,c,tags", *(",".join(map(str, row)) for row in part)])
        for name, part in (("one.csv", rows[:100]), ("two.csv", rows[100:]))
    )
    write_lines(tmp_path / "names.csv", ["c,long", "a,Anna", "Z,Zoe"])
    table = {
        "sources": {
            "t": {"files": [str(head), str(tail)]},
            "names": {"files": str(tmp_path / "names.csv")},
        },
        "query": "SELECT t.*, CAST(nullif(n, '') AS DOUBLE) AS number, DATE '2026-11-22' AS day, "
        'l."long" FROM t LEFT JOIN (SELECT c, "long" FROM names) AS l ON t.c = l.c',
        "order_by": ["text_order(n)", "file_", "order_"],
        "label": {"name": "y"},
        "numerical": [
            {"name": "log", "expression": "n", "transforms": [{"log": 3}, {"fill": 0}]},
            {"name": "mm", "expression": "n", "transforms": [{"clip": [-1, 5]}, "minmax"]},
            {"name": "sd", "expression": "n", "transforms": [{"fill": 0.1}, "standardise"]},
        ],
        "categorical": [
            "c",
            {"name": "long"},
            {"name": "tags", "separator": "|"},
            {"name": "three", "expression": "tags", "separator": "|", "hotness": 3}
            | {"take": "last", "length": True},
            {"name": "both", "cross": ["c", "long"], "max_size": 2},
            {"name": "hashed", "expression": "c", "buckets": 4},
            {"name": "key", "expression": "tags", "separator": "|"}
            | {"vocabulary": "dynamic", "capacity": 9},
            {"name": "again", "expression": 'coalesce(c, "long")', "vocabulary_of": "tags"},
        ],
        "split": {"by": "random", "train": 0.7, "validation": 0.1},
        # The spec has the checksums of the kept columns too.
        "keep": ["long", "n", "number", "day"],
    }
    files = both(
        tmp_path, "dataset=any", f"table={_hydra(table)}", "shuffle=true", "frequency_limit=2"
    )
    assert len(np.frombuffer(files["train/label.bin"], "u1")) > 80


def test_missing_texts_go_by_the_columns_of_the_fit(tmp_path, spark):
    columns = {
        "y": [i % 2 for i in range(24)],
        "code": [[-1, 5, 7][i % 3] for i in range(24)],
        "price": [[-1, 2, 0][i % 3] for i in range(24)],
        "x": [[-1.0, 2.5, 0.25][i % 3] for i in range(24)],
        "city": [["NA", "Rome", "-1"][i % 3] for i in range(24)],
    }
    prices = pa.array(columns["price"], pa.decimal128(9, 2))
    pq.write_table(pa.table(columns | {"price": prices}), tmp_path / "t.parquet")
    lines = [",".join(map(str, row)) for row in zip(*columns.values(), strict=True)]
    write_lines(tmp_path / "t.csv", [",".join(columns), *lines])
    rest = {
        "missing": ["-1", "-1.0", "NA"],
        "label": {"name": "y"},
        "numerical": ["x", "price"],
        "categorical": [{"name": name, "buckets": 9} for name in ("code", "city")],
        "split": {"train": 0.5},
    }
    tables = {
        kind: f"table={_hydra({'sources': {'t': {'files': str(tmp_path / f't.{kind}')}}, **rest})}"
        for kind in ("csv", "parquet")
    }
    options = ["dataset=any", "numerical_dtype=float32", "overwrite=true"]
    for kind, other in (("csv", "parquet"), ("parquet", "csv")):
        both(tmp_path, *options, tables[kind])
        shutil.copytree(tmp_path / "duckdb", tmp_path / f"fit_{kind}")
        fit = ["mode=transform", f"fitted={tmp_path / f'fit_{kind}'}", "split_name=null"]
        same = both(tmp_path, *options, tables[kind], *fit)
        files = both(tmp_path, *options, tables[other], *fit)
        for name in ("numerical", "code", "city"):
            assert files[f"test/{name}.bin"] == same[f"test/{name}.bin"]
        ids = np.frombuffer(files["test/code.bin"], np.int8)
        assert (ids == 0).any() == (kind == "csv")


def test_histories(tmp_path, spark):
    rows = random_rows(20, 120)
    table = described(write_rows(tmp_path / "t.csv", rows), split={"by": "random", "train": 0.6})
    table["categorical"].append({"name": "hashed", "expression": "item", "buckets": 3})
    table["history"].append(
        table["history"][0]
        | {"name": "liked", "of": "hashed", "rows": "train", "filter": "CAST(rating AS DOUBLE) > 3"}
        | {"order_by": 'CAST("time" AS DOUBLE)'}
    )
    files = both(tmp_path, "dataset=any", f"table={_hydra(table)}", "shuffle=true")
    assert np.frombuffer(files["train/past.bin"], "i1").any()
    assert np.frombuffer(files["test/liked.bin"], "i1").any()


def test_sequences_of_two_days(tmp_path, spark):
    fit = ["dataset=any", "frequency_limit=3"]
    for day in range(2):
        times = range(100 * day, 100 * day + 20)
        path = sequences.write_rows(tmp_path / f"{day}.csv", sequences.random_rows(day, 120, times))
        table = sequences.described(path, split={"by": "random", "train": 0.6})
        table["categorical"].append({"name": "hashed", "expression": "item", "buckets": 3})
        views = {"of": ["hashed", "item"], "source": "views", "filter": "shop = '1'"}
        views |= {
            "name": "viewed",
            "order_by": "TIMESTAMP '1970-01-01' + INTERVAL '1' SECOND * CAST(\"time\" AS INT)",
        }
        table["sequence"].append(table["sequence"][0] | views)
        rows = sequences.random_rows(day + 9, 120, times)
        views_in = sequences.write_rows(tmp_path / f"v{day}.csv", rows)
        table["sources"]["views"] = {"files": str(views_in)}
        table |= {"query": "SELECT *, order_ AS place FROM t", "order_by": ["place"]}
        both(tmp_path, *fit, f"table={_hydra(table)}", "shuffle=true")
        latest = [
            pq.read_table(tmp_path / e / "latest/viewed.parquet") for e in ("duckdb", "spark")
        ]
        assert latest[0].equals(latest[1])
        shutil.move(tmp_path / "duckdb", tmp_path / f"fit{day}")
        shutil.rmtree(tmp_path / "spark")
        fit = ["dataset=any", "mode=extend", f"fitted={tmp_path / f'fit{day}'}"]
    assert (tmp_path / "fit1/events/viewed_item.bin").stat().st_size > 20


@pytest.mark.parametrize("is_text", [True, False])
def test_lists_of_events(tmp_path, spark, is_text):
    path = event_lists.write(tmp_path, event_lists.random_rows(3), is_text=is_text)
    table = event_lists.described(path, is_text=is_text)
    files = both(tmp_path, "dataset=any", f"table={_hydra(table)}", "shuffle=true")
    assert np.frombuffer(files["train/times.bin"], "<i8").all()


def test_rows_of_a_file_in_many_blocks_keep_their_order(tmp_path, spark):
    for part in range(2):
        lines = ["y,n", *(f"{i % 2},{i:06}" for i in range(600 * part, 600 * part + 600))]
        write_lines(tmp_path / f"{part}.csv", lines)
    table = {
        "sources": {"t": {"files": f"{tmp_path}/*.csv"}},
        "label": {"name": "y"},
        "categorical": ["n"],
        "split": {"by": "last_file"},
    }
    files = both(tmp_path, "dataset=any", f"table={_hydra(table)}", "vocabulary=all")
    # Each number is there once, so ids follow their order.
    assert np.frombuffer(files["train/n.bin"], "<i2").tolist() == list(range(1, 601))
    assert np.frombuffer(files["test/n.bin"], "<i2").tolist() == list(range(601, 901))


def test_nan_of_parquet_and_texts_that_are_missing(tmp_path, spark):
    x = np.where(np.arange(60) % 4 == 1, np.nan, np.arange(60) % 7)
    rows = {
        "y": np.arange(60) % 2,
        "x": x.astype("float32"),
        "l": pa.array([[value, 1.5] for value in x]),
        "s": pa.array([{"a": value, "B c": [{"d": value}]} for value in x]),
        "m": pa.array([[("k", value)] for value in x], pa.map_(pa.string(), pa.float64())),
        "t": ["NA", "-nan", "3"] * 20,
    }
    head, tail = (pa.table({k: v[part] for k, v in rows.items()}) for part in PARTS)
    pq.write_table(head, tmp_path / "0.parquet")
    # Columns are joined by their names.
    pq.write_table(tail.select(["t", "m", "l", "s", "x", "y"]), tmp_path / "1.parquet")
    table = {
        "sources": {"t": {"files": f"{tmp_path}/*.parquet"}},
        "missing": ["NA"],
        "label": {"name": "y"},
        "numerical": [
            {"name": "x", "transforms": [{"clip": [0, 500]}]},
            {"name": "seen", "expression": "CASE WHEN isnan(x) THEN -1 ELSE x END"},
            {"name": "t"},
            {"name": "s", "expression": "coalesce(s.a, 9)"},
        ],
        "categorical": [
            {"name": "cx", "expression": "x", "buckets": 9},
            {"name": "l", "list": True, "hotness": 2},
        ],
        "split": {"train": 0.5},
    }
    files = both(tmp_path, "dataset=any", f"table={_hydra(table)}")
    got = np.frombuffer(files["train/numerical.bin"], "<f2").reshape(-1, 4)
    missing = np.isnan(x[:30])
    assert (got[missing][:, [0, 1, 3]] == [0, -1, 9]).all()
    assert (got[~missing, 0] == x[:30][~missing]).all()
    assert got[:6, 2].tolist() == [0, 0, 3] * 2
    reports = (json.loads((tmp_path / e / "report.json").read_text()) for e in ("duckdb", "spark"))
    assert next(reports) == next(reports)


def test_raw_criteo_logs(tmp_path, spark, monkeypatch):
    # Two of the 26 categories, since every category takes the same dozen queries.
    monkeypatch.setattr("preproc.criteo.as_table.CATEGORICAL", ("cat_0", "cat_25"))
    lines = random_lines(200)
    source = write_lines(tmp_path / "raw.tsv", lines)
    preproc(f"source={source}", f"output={tmp_path / 'out'}", "engine=spark", "frequency_limit=2")
    found, wanted = data_files(tmp_path / "out"), reference(lines, 180, 2)
    assert found == {name: wanted[name] for name in found}
    assert len(found) == 2 * (1 + 1 + 2)


def test_a_bad_row_is_reported(tmp_path, spark):
    source = write_lines(tmp_path / "t.csv", ["y,c", "1,a", "0,b", "x,c"])
    table = {
        "sources": {"t": {"files": str(source)}},
        "label": {"name": "y"},
        "categorical": ["c"],
    }
    with pytest.raises(Refused, match="row 3: the label is x, wanted 0 or 1"):
        preproc("dataset=any", f"table={_hydra(table)}", f"output={tmp_path / 'o'}", "engine=spark")


def test_a_failing_cast_is_no_row_to_skip(tmp_path, spark):
    source = write_lines(tmp_path / "t.csv", ["y,c", "1,3", "0,x"])
    table = {
        "sources": {"t": {"files": str(source)}},
        "label": {"name": "y"},
        "categorical": [{"name": "c", "expression": "CAST(c AS INT)"}],
    }
    options = ["dataset=any", f"output={tmp_path / 'o'}", "engine=spark", "on_bad=skip"]
    with pytest.raises(Refused, match=r"'c': .*CAST_INVALID.* by DuckDB .*try_cast gives null"):
        preproc(*options, f"table={_hydra(table)}")
    table["categorical"][0]["expression"] = "try_cast(c AS INT)"
    preproc(*options, f"table={_hydra(table)}")


def test_a_type_that_spark_does_not_read_is_reported(tmp_path, spark):
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"y": [0, 1], "c": np.array([1, 2], np.float16)}), path)
    table = {"sources": {"t": {"files": str(path)}}, "label": {"name": "y"}, "categorical": ["c"]}
    with pytest.raises(Refused, match=r"t\.parquet: Spark: .*FLOAT16.*or set engine=duckdb"):
        preproc("dataset=any", f"table={_hydra(table)}", f"output={tmp_path / 'o'}", "engine=spark")


def test_lines_with_other_columns_or_no_utf8_are_quarantined(tmp_path, spark):
    # No query reads the second column, but it must exist.
    good = [f"{row % 2},x,{row % 5}".encode() for row in range(300)]
    bad = {10: b"1,x", 150: b"1,x,2,3", 290: b"1,x,\xff"}
    lines = [bad.get(row, line) for row, line in enumerate(good)]
    (tmp_path / "t.csv").write_bytes(b"\n".join([b"y,b,c", *lines, b""]))
    table = {
        "sources": {"t": {"files": str(tmp_path / "t.csv")}},
        "label": {"name": "y"},
        "categorical": ["c"],
    }
    options = ["dataset=any", f"table={_hydra(table)}"]
    both(tmp_path, *options, "on_bad=quarantine")
    kept = (
        [
            line.split("\t")[:2]
            for line in (tmp_path / engine / "bad_rows.tsv").read_text().splitlines()
        ]
        for engine in ("duckdb", "spark")
    )
    assert next(kept) == next(kept) == [[str(tmp_path / "t.csv"), str(row + 2)] for row in bad]
    with pytest.raises(Refused, match=r"t.csv, line 12: not 3 columns; correct or remove it"):
        preproc(*options, f"output={tmp_path / 'o'}", "engine=spark")


def test_a_later_day(tmp_path, spark):
    for day in range(3):
        write_day(tmp_path / f"day_{day}.csv", day)
    described_days = [f"table={_hydra(table_of(tmp_path / f'day_{day}.csv'))}" for day in range(3)]
    fit, first, second = (["dataset=any", text] for text in described_days)
    preproc(*fit, f"output={tmp_path / 'fit'}", "frequency_limit=3", "rare_counts=true")
    # The first day comes from DuckDB, which was fitted by it too; the specs list the checksums of vocabularies and counts.
    day = f"fitted={tmp_path / 'day_1'}"
    preproc(*first, f"output={tmp_path / 'day_1'}", "mode=extend", f"fitted={tmp_path / 'fit'}")
    files = both(tmp_path, *second, "mode=extend", day, "retire_after=1")
    assert np.frombuffer(files["train/user.bin"], "i1").any()


def test_two_workers_on_a_table_whose_second_half_is_larger(tmp_path, spark, large_files):
    workers = spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size() - 1
    assert workers == 2
    # Spark reads the larger file of a relation first, so its rows come first in the names of what it writes then.
    texts = (hashlib.sha512(str(row).encode()).hexdigest() for row in range(120_000))
    lines = (
        f"{row * 7 % 10 < 3:d},{'a' if row < 60_000 else text},{'|'.join(text[: row % 4])}"
        for row, text in enumerate(texts)
    )
    source = write_lines(tmp_path / "t.csv", ["y,c,tags", *lines])
    table = {
        "sources": {"t": {"files": str(source)}},
        "label": {"name": "y"},
        "categorical": ["c", {"name": "tags", "separator": "|"}],
        "split": {"train": 0.8},
        "keep": ["c"],
    }
    files = both(tmp_path, "dataset=any", f"table={_hydra(table)}")
    assert np.frombuffer(files["train/c.bin"], "<i4").tolist()[:60_000] == [1] * 60_000
    stored = pq.read_table(tmp_path / "spark/kept/test.parquet")["c"].to_pylist()
    assert stored == [line.split(",")[1] for line in source.read_text().split()[96_001:]]


def test_two_workers_on_histories_in_the_order_of_time_and_test_source(
    tmp_path, spark, large_files
):
    draw = random.Random(4)
    head = "y,user,item,time,rating"
    for name, first, count in (("old", 0, 30_000), ("new", 20_000, 10_000)):
        rows = (
            f"{draw.randint(0, 1)},u{draw.randrange(900)},i{draw.randrange(300) ** 2 // 300},"
            f"{draw.randrange(first, first + count)},{draw.randint(1, 5)}"
            for _ in range(count)
        )
        write_lines(tmp_path / f"{name}.csv", [head, *rows])
    table = described(tmp_path / "old.csv", filter="CAST(rating AS DOUBLE) >= 3", length=20)
    table |= {"order_by": ["CAST(time AS BIGINT)"], "split": None}
    options = ["dataset=any", f"table={_hydra(table)}", f"source={tmp_path / 'old.csv'}"]
    files = both(tmp_path, *options, f"test_source={tmp_path / 'new.csv'}", "frequency_limit=2")
    assert len(files["train/label.bin"]) == 30_000
    assert len(files["test/label.bin"]) == 10_000
    assert np.frombuffer(files["test/past.bin"], "<i2").reshape(-1, 20)[:, 19].any()


def test_two_workers_on_logs_like_criteos(tmp_path, spark, large_files):
    draw = random.Random(5)
    hexes = [[f"{draw.getrandbits(32):08x}" for _ in range(10 << n // 3)] for n in range(26)]

    def line(row):
        # The first half has many missing values, so that the second is larger.
        known = 0.3 if row < 20_000 else 0.95
        numbers = (str(draw.randint(-3, 900)) if draw.random() < known else "" for _ in range(13))
        values = (draw.choice(of) if draw.random() < known else "" for of in hexes)
        return "\t".join([str(int(draw.random() < 0.25)), *numbers, *values])

    source = write_lines(tmp_path / "raw.tsv", list(map(line, range(40_000))))
    both(tmp_path, f"source={source}", "frequency_limit=15")
