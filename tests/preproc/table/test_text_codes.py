"""Codes in place of texts: the same dataset as from texts, from CSV and from dictionaries of Parquet, in order."""

import gc
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from time import sleep

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from configs.preproc_schema import PreprocConfig
from preproc.column_store import size_and_crc32
from preproc.table import duckdb_engine, output_files, text_codes
from preproc.table.duckdb_engine import DuckDBEngine
from preproc.table.expressions import CODED_FILE, RELATION_FILE
from preproc.table.parquet_texts import dictionary_columns
from preproc.table.pipeline import build as pipeline
from preproc.transformed_rows import open_transformed_rows
from preproc.work_directory import Work
from tests.helpers.preproc_command import Refused
from tests.preproc.table.test_pipeline import _hydra, build

ROWS = 30_000


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Return the directory of a table of two files, in both formats; Parquet in row groups of 2,000 rows."""
    directory = tmp_path_factory.mktemp("sources")
    draw = np.random.default_rng(0)
    cities = pa.array(["Rome", "", None, "Oslo", "Köln", *(f"city {i}" for i in range(300))])
    lists = ["|".join(f"tag{i}" for i in draw.integers(0, 9, n)) or None for n in range(5)]
    table = pa.table(
        {
            "y": draw.integers(0, 2, ROWS),
            "city": cities.take(pa.array(draw.integers(0, len(cities), ROWS))),
            "user": pa.array([f"user {i:032}" for i in draw.integers(0, ROWS, ROWS)]),
            "tags": pa.array(lists).take(pa.array(draw.integers(0, 5, ROWS))),
            "age": draw.integers(0, 99, ROWS),
        }
    )
    for part in range(2):
        rows = table.slice(part * ROWS // 2, ROWS // 2)
        pq.write_table(rows, directory / f"part_{part}.parquet", row_group_size=2_000)
        pyarrow.csv.write_csv(rows, directory / f"part_{part}.csv")
    return directory


def described(files: str, **more) -> dict:
    return {
        "sources": {"t": {"files": files}},
        "label": {"name": "y"},
        "numerical": [{"name": "age", "expression": "CAST(age AS DOUBLE)"}],
        "categorical": [
            "city",
            {"name": "hashed", "expression": "city", "buckets": 50},
            {"name": "user", "frequency_limit": 2},
            {"name": "other_user", "expression": "user", "vocabulary_of": "user"},
            {"name": "tags", "separator": "|"},
            {"name": "two_tags", "expression": "tags", "separator": "|", "hotness": 2},
            {"name": "crossed", "cross": ["user", "city", "city"]},
            {"name": "decade", "expression": "CAST(age AS INTEGER) // 10"},
        ],
        "split": {"by": "random", "train": 0.8},
    } | more


class TextEngine(DuckDBEngine):
    """DuckDB as Spark works: texts stay texts."""

    codes_texts = False

    def stage(self, rows, path):
        self.number(rows.query, rows.order_by, path)

    def exploded(self, column):
        return (
            f"SELECT row_, CAST(generate_subscripts({column}, 1) - 1 AS INTEGER) AS position_, "
            f"nullif(CAST(unnest({column}) AS STRING), '') AS value FROM rows_"
        )


def test_texts_and_codes_give_one_dataset(tmp_path, sources, monkeypatch):
    parquet, csv = (described(f"{sources}/*.{kind}") for kind in ("parquet", "csv"))
    wanted = build(tmp_path / "out", csv)
    assert build(tmp_path / "out", parquet, "overwrite=true") == wanted
    # Every text was in a dictionary but those of the users, of which most rows have one of their own.
    paths = sorted(sources.glob("*.parquet"))
    assert [*dictionary_columns(paths, {"c0": "CITY", "c1": "user"})] == ["c0"]
    monkeypatch.setattr(pipeline.DuckDBEngine, "_keeps_order", lambda self, query: False)
    assert build(tmp_path / "out", parquet, "overwrite=true") == wanted
    monkeypatch.setattr(pipeline, "DuckDBEngine", TextEngine)
    assert build(tmp_path / "out", parquet, "overwrite=true") == wanted


def test_rows_keep_their_order_where_a_condition_is_a_join(tmp_path, sources):
    # DuckDB joins a long list, and a join does not keep the order of rows.
    few = ", ".join(f"'city {i}'" for i in range(40))
    feature = {"name": "few", "expression": f"CASE WHEN city IN ({few}) THEN city END"}
    table = described(f"{sources}/*.parquet", categorical=["city", feature])
    table["split"] = {"train": 0.5}
    files = build(tmp_path / "out", table)
    parts = [pq.read_table(path) for path in sorted(sources.glob("*.parquet"))]
    ages = np.concatenate([np.asarray(part["age"]) for part in parts])
    stored = files["train/numerical.bin"] + files["test/numerical.bin"]
    assert np.array_equal(np.frombuffer(stored, "<f2"), ages)
    with open_transformed_rows(tmp_path / "out", [sources / "*.parquet"]) as rows:
        batches = [np.asarray(features.column("age")) for features, _ in rows]
    assert np.array_equal(np.concatenate(batches), ages)


def test_a_dictionary_larger_than_a_batch_gives_no_more_codes_than_rows(tmp_path, monkeypatch):
    numbers = np.random.default_rng(0).integers(0, 20_000, 60_000)
    texts = pa.array([f"{number:x}" for number in numbers])
    table = pa.table({"y": numbers % 2, "c": texts})
    pq.write_table(table, tmp_path / "a.parquet", dictionary_pagesize_limit=1 << 26)
    pyarrow.csv.write_csv(table, tmp_path / "a.csv")
    coded = []
    writer = text_codes._Writer
    append_texts = writer._append_texts
    monkeypatch.setattr(
        writer,
        "_append_texts",
        lambda self, name, found: coded.append(len(found.texts)) or append_texts(self, name, found),
    )
    monkeypatch.setattr(duckdb_engine, "is_small", lambda config: True)  # small batches
    built = {}
    for kind in ("parquet", "csv"):
        described = {
            "sources": {"t": {"files": str(tmp_path / f"a.{kind}")}},
            "label": {"name": "y"},
            "categorical": ["c"],
            "split": {"train": 0.5},
        }
        coded.clear()
        built[kind] = build(tmp_path / kind, described)
        assert 20_000 <= sum(coded) <= 60_000
    assert built["parquet"] == built["csv"]


def test_a_missing_text_is_not_counted(tmp_path):
    codes = pa.array([None, 7, 9, 7, None, 8], pa.int32())
    pq.write_table(pa.table({"c0": codes}), tmp_path / RELATION_FILE)
    counts = np.zeros(11, np.int64)
    text_codes.count_codes(tmp_path, "c0", range(6), counts)
    assert counts.tolist() == [0, 0, 0, 0, 0, 0, 0, 2, 1, 1, 0]
    text_codes.count_codes(tmp_path, "c0", range(1), counts)
    assert counts.sum() == 4


def test_every_thread_queries_the_mapped_rows(tmp_path):
    columns = {
        "c0": ["a", None, "", "b"],
        "c1": [["a", ""], None, [], ["b"]],
        "c2": [7, None, 7, 8],
    }
    batch = pa.record_batch(columns)
    text_codes.write_coded(iter([(batch, {})]), batch.schema, [*columns], tmp_path, 1, {})
    with closing(DuckDBEngine(PreprocConfig(source="a", output="b"), tmp_path)) as engine:
        engine.view("rows_", tmp_path)
        engine.view("texts_c2", tmp_path / "texts_c2")
        query = "SELECT c0, c1, value FROM rows_ LEFT JOIN texts_c2 ON c2 = code ORDER BY row_"
        with ThreadPoolExecutor(1) as pool:
            found = [engine.rows(query), pool.submit(engine.rows, query).result()]
    wanted = [(0, [0, None], "7"), (None, None, None), (None, [], "7"), (2, [2], "8")]
    assert found == [wanted, wanted]


def test_files_of_staged_rows_take_few_bytes_and_have_the_checksums_of_their_bytes(tmp_path):
    rows = 10_000
    columns = {"file_": pa.array(np.zeros(rows, np.int32)), "bad_": pa.nulls(rows, pa.string())}
    batch = pa.record_batch(columns | {"c0": pa.array(["a", "b"] * (rows // 2))})
    found = text_codes.write_coded(iter([(batch, {})] * 2), batch.schema, ["c0"], tmp_path, 1, {})
    assert found.keys() == {CODED_FILE, f"texts_c0/{CODED_FILE}"}
    recorded = Work(tmp_path, tmp_path, {}).synced_records(tmp_path, found)
    assert recorded == {name: [list(size_and_crc32(tmp_path / name))] for name in found}
    read = Work(tmp_path, tmp_path, {}).synced_records(tmp_path)
    assert read == recorded
    assert found[CODED_FILE]["bytes"] < 2 * rows * (8 + 4 + 1)  # of the row's number and the code
    with closing(DuckDBEngine(PreprocConfig(source="a", output="b"), tmp_path)) as engine:
        engine.view("rows_", tmp_path)
        counted = engine.rows("SELECT file_, count(*), count(bad_) FROM rows_ GROUP BY file_")
    assert counted == [(0, 2 * rows, 0)]


@pytest.mark.parametrize(("value", "message"), [(-1, "is -1, wanted 0 or 1"), (None, "is missing")])
def test_a_label_of_whole_numbers_is_0_or_1(tmp_path, value, message):
    pq.write_table(pa.table({"y": [0, 1, value], "c": [1, 2, 3]}), tmp_path / "a.parquet")
    table = described(f"{tmp_path}/a.parquet", numerical=[], categorical=["c"])
    with pytest.raises(Refused, match=f"a.parquet, row 3: the label {message}"):
        build(tmp_path / "out", table)


def test_text_of_parquet_that_is_not_utf8_is_refused(tmp_path):
    raw = pa.array([b"ok" if i % 7 else b"\xff\xfe" for i in range(300)])
    texts = pa.StringArray.from_buffers(300, *raw.buffers()[1:])
    pq.write_table(pa.table({"y": np.arange(300) % 2, "c": texts}), tmp_path / "bad.parquet")
    table = {
        "sources": {"t": {"files": str(tmp_path / "bad.parquet")}},
        "label": {"name": "y"},
        "categorical": ["c"],
    }
    with pytest.raises(Refused, match=r"bad.parquet.*not valid UTF") as refused:
        build(tmp_path / "out", table)
    assert refused.value.exit_code == 2


def test_a_full_disk_is_an_error_where_ids_are_mapped(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(output_files.os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"No space left on device: .*ids.bin"):
        output_files.allocate(tmp_path / "ids.bin", 100)
    monkeypatch.undo()
    output_files.allocate(tmp_path / "ids.bin", 100)
    assert (tmp_path / "ids.bin").stat().st_size == 100


def test_files_are_on_the_disk_at_the_end_of_their_block(tmp_path, monkeypatch):
    synced = []

    def write(sync):
        monkeypatch.setattr(output_files, "sync_named", sync)
        work = Work(tmp_path, tmp_path, {})
        with output_files.TableFiles(work, "rows_", {}) as files:
            for name in ("train/a.bin", "test/a.bin"):
                with files.file(name) as file:
                    file.append(np.arange(3))
                assert (tmp_path / name).stat().st_size == 24  # others read it at once

    def failing(path):
        raise OSError(5, "Input/output error", str(path))

    write(lambda path: sleep(0.1) or synced.append(path))
    assert synced == [tmp_path / "train/a.bin", tmp_path / "test/a.bin"]
    with pytest.raises(OSError, match=r"Input/output error: .*train/a.bin"):
        write(failing)


def test_a_vocabulary_has_the_same_bytes_from_any_number_of_files(tmp_path, monkeypatch):
    """An engine may write a relation as several files, of any number of rows in any order."""
    monkeypatch.setattr(output_files, "GROUP_ROWS", 4096)
    ids = np.arange(1, 10_001)
    rows = pa.table({"value": [f"v{i:05}" for i in ids], "id": ids, "count": ids[::-1]})
    written = []
    for name, starts in (("one", [0]), ("three", [3001, 0, 7000])):
        (tmp_path / name / "counts").mkdir(parents=True)
        (tmp_path / name / "vocabulary").mkdir()
        ends = {start: end for start, end in pairwise([*sorted(starts), len(ids)])}
        for part, start in enumerate(starts):
            file = RELATION_FILE if name == "one" else f"part-{part}.parquet"
            pq.write_table(rows[start : ends[start]], tmp_path / name / "counts" / file)
        work = Work(tmp_path / name, tmp_path / name, {})
        with output_files.TableFiles(work, "rows_", {}) as files:
            files.write_vocabulary("counts", "c")
        written.append(tmp_path / name / "vocabulary" / "c.parquet")
    assert pq.read_table(written[1]) == rows
    assert pq.ParquetFile(written[1]).metadata.num_row_groups == 3
    assert written[0].read_bytes() == written[1].read_bytes()


def test_a_column_with_the_path_of_a_field_is_no_dictionary(tmp_path):
    columns = {"a.b": ["x", "y"] * 50, "a": [{"b": "z"}] * 100}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    assert dictionary_columns([tmp_path / "a.parquet"], {"c0": "a.b"}) == {}


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("file", ["0.arrow", "texts_c/0.arrow"])
@pytest.mark.parametrize("at", ["write", "close"])
def test_a_full_disk_leaves_no_writer_that_fails_at_its_end(tmp_path, file, at, monkeypatch):
    """A small file is all buffered, which fails when it is closed."""
    of_file = getattr(text_codes.RecordedFile, at)

    def full(self, *data):
        if self.path == tmp_path / file:
            raise OSError(28, "No space left on device")
        return of_file(self, *data)

    monkeypatch.setattr(text_codes.RecordedFile, at, full)
    batch = pa.record_batch({"c": pa.array(["a"])})
    with pytest.raises(OSError, match="No space left"):
        text_codes.write_coded(iter([(batch, {})]), batch.schema, ["c"], tmp_path, 1, {})
    gc.collect()


def test_a_cross_of_features_has_a_text_per_pair_of_theirs(tmp_path, sources, monkeypatch):
    made, queries = [], []
    crossed_codes, stream = text_codes.crossed_codes, DuckDBEngine.stream
    monkeypatch.setattr(
        text_codes,
        "crossed_codes",
        lambda parts: made.append((parts, crossed_codes(parts))) or made[-1][1],
    )
    monkeypatch.setattr(
        DuckDBEngine,
        "stream",
        lambda self, sql, rows: queries.append(sql) or stream(self, sql, rows),
    )
    crosses = [
        {"name": "known", "cross": ["city", "tags"]},
        {"name": "other", "cross": ["city", "age"]},
    ]
    table = described(f"{sources}/*.parquet", categorical=["city", "tags", *crosses])
    build(tmp_path / "out", table)
    # DuckDB makes the texts of the other cross, since an age is no feature.
    assert queries[0].startswith("SELECT * EXCLUDE (c0, c1, c2) FROM")
    values = []
    for parts, cross in made:
        texts = [np.asarray(of.texts.take(of.codes), object) for of in (*parts, cross)]
        for city, tags, both in zip(*texts, strict=True):
            assert both == (None if city is None or tags is None else f"{city}\x1f{tags}")
            values.append(both)
    assert len(values) == ROWS
    assert len({*values}) > 600
    assert None in values


@pytest.mark.parametrize("empty", ["", "x"])
def test_a_cross_of_columns_without_a_text_has_none(empty):
    none = text_codes.coded_texts(pa.array([None, "", None], pa.string()))
    other = text_codes.coded_texts(pa.array([empty, "y", None], pa.string()))
    for parts in ([none, other], [other, none]):
        assert text_codes.crossed_codes(parts).codes.null_count == 3


def test_pandas_is_not_imported(tmp_path, sources):
    """It would take a third of a second, and Arrow imports it for a single number of Python."""
    command = (
        "import atexit, runpy, sys; atexit.register(lambda: print('pandas' in sys.modules)); "
        "runpy.run_module('preproc', run_name='__main__')"
    )
    table = f"table={_hydra(described(f'{sources}/*.parquet'))}"
    done = subprocess.run(
        [sys.executable, "-c", command, "dataset=any", table, f"output={tmp_path / 'out'}"],
        cwd=Path(__file__).resolve().parents[3],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("False\n"), done.stdout
