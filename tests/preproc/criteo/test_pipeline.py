"""Preprocessing of Criteo logs, against a reference in plain Python."""

import gzip
import math
import random
import shutil
import struct
from collections import Counter
from itertools import islice
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pytest

from dataloading.dataset.binary import BinarySource
from dataloading.dataset.feature_spec import FeatureSpec
from tests.helpers.preproc_command import Refused, data_files, preproc, raw_line, write_lines

KAGGLE = Path(__file__).resolve().parents[4] / "shared" / "data" / "criteo_kaggle_137k.tsv.gz"


def reference(lines, num_train, frequency_limit, counted=None):
    """Return the .bin files of both splits, from the description of NVIDIA's preprocessing."""
    rows = [line.split("\t") for line in lines]
    splits = {"train": rows[:num_train], "test": rows[num_train:]}
    files = {}
    for split, part in splits.items():
        files[f"{split}/label.bin"] = bytes(int(row[0]) for row in part)
        x = [
            [math.log(int(v) + 3) if v and int(v) > -3 else 0.0 for v in row[1:14]] for row in part
        ]
        files[f"{split}/numerical.bin"] = np.array(x, np.float32).astype("<f2").tobytes()
    for column in range(14, 40):
        counts = Counter(row[column] for row in rows[: counted or num_train] if row[column])
        kept = sorted(v for v, n in counts.items() if n >= frequency_limit)
        ids = {v: i for i, v in enumerate(sorted(kept, key=lambda v: -counts[v]), start=1)}
        dtype = "<i1" if len(ids) + 1 < 127 else "<i2" if len(ids) + 1 < 32767 else "<i4"
        for split, part in splits.items():
            encoded = np.array([ids.get(row[column], 0) for row in part], dtype)
            files[f"{split}/cat_{column - 14}.bin"] = encoded.tobytes()
    return files


def random_lines(num_rows, seed=0):
    """Return lines with ties, rare values, missing fields and integers on both sides of -3."""
    draw = random.Random(seed)
    values = [f"{v:08x}" for v in range(12)] + ["NULL", '"', "#", "é", " a", "Z", "z"]
    return [
        "\t".join(
            [
                str(draw.randint(0, 1)),
                *[str(draw.choice(["", -4, -3, -2, 0, 7, 2**40])) for _ in range(13)],
                *[draw.choice(["", *values[: draw.randint(1, 19)]]) for _ in range(26)],
            ]
        )
        for _ in range(num_rows)
    ]


@pytest.fixture
def lines():
    return random_lines(300)


def test_six_rows_written_by_hand_give_these_bytes(tmp_path):
    source = write_lines(
        tmp_path / "raw.tsv",
        [
            raw_line(1, i1=0, i2=-2, c1="b", c2="x"),
            raw_line(0, i1=-3, i2=1, c1="a", c2="x"),
            raw_line(0, i1=5, c1="b", c2="y"),
            raw_line(1, c1="a"),
            raw_line(1, i1=1, c1="c", c2="x"),
            raw_line(0, i2=100, c1="b", c2="z"),
        ],
    )
    preproc(
        f"source={source}", f"output={tmp_path / 'out'}", "train_fraction=0.7", "frequency_limit=2"
    )
    files = data_files(tmp_path / "out")
    assert len(files) == 2 * 28
    assert files["train/label.bin"] == bytes([1, 0, 0, 1])
    assert files["test/label.bin"] == bytes([1, 0])
    # ln 3 = 1.0986, ln 1 = 0, ln 4 = 1.3863, ln 8 = 2.0794; x = -3 and missing are 0
    rest = [0.0] * 11
    train = [[1.0986, 0.0, *rest], [0.0, 1.3863, *rest], [2.0794, 0.0, *rest], [0.0, 0.0, *rest]]
    assert files["train/numerical.bin"] == b"".join(struct.pack("<13e", *row) for row in train)
    # ln 103 = 4.6347
    test = [[1.3863, 0.0, *rest], [0.0, 4.6347, *rest]]
    assert files["test/numerical.bin"] == b"".join(struct.pack("<13e", *row) for row in test)
    # a and b are both seen twice in training: ids by value; c is unseen there
    assert files["train/cat_0.bin"] == bytes([2, 1, 2, 1])
    assert files["test/cat_0.bin"] == bytes([0, 2])
    # y is rare, the fourth row has nothing, z is unseen
    assert files["train/cat_1.bin"] == bytes([1, 1, 0, 0])
    assert files["test/cat_1.bin"] == bytes([1, 0])
    assert files["train/cat_25.bin"] == bytes(4)
    spec = FeatureSpec.load(tmp_path / "out")
    assert [feature.cardinality for feature in spec.categorical] == [3, 2] + [1] * 24
    assert spec.metadata["frequency_limit"] == 2
    assert spec.metadata["vocabulary_rows"] == "train"


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """Return the directory of `raw.tsv`, the lines, and of `out`, the dataset that they become."""
    directory = tmp_path_factory.mktemp("written")
    source = write_lines(directory / "raw.tsv", random_lines(300))
    preproc(f"source={source}", f"output={directory / 'out'}")
    return directory


def test_hand_made_rows_match_the_reference(written, lines):
    assert data_files(written / "out") == reference(lines, 270, 0)


def test_a_limit_of_one_keeps_every_value(written, tmp_path, lines):
    preproc(f"source={written / 'raw.tsv'}", f"output={tmp_path / 'out'}", "frequency_limit=1")
    assert data_files(tmp_path / "out") == reference(lines, 270, 1)


@pytest.mark.skipif(not KAGGLE.exists(), reason=f"{KAGGLE} is not here")
def test_real_logs_match_the_reference(tmp_path):
    with gzip.open(KAGGLE, "rt") as stream:
        lines = [line.rstrip("\n") for line in islice(stream, 5000)]
    source, output = write_lines(tmp_path / "raw.tsv", lines), tmp_path / "out"
    preproc(f"source={source}", f"output={output}", "frequency_limit=3")
    assert data_files(output) == reference(lines, 4500, 3)


def test_two_runs_on_one_and_two_threads_write_the_same_bytes(tmp_path, lines, monkeypatch):
    monkeypatch.setattr("preproc.criteo.parse.BLOCK_BYTES", 10_000)
    source = write_lines(tmp_path / "raw.tsv", lines * 2)
    for threads in (1, 2):
        preproc(f"source={source}", f"output={tmp_path / str(threads)}", f"threads={threads}")
    one, two = (
        {
            p.relative_to(tmp_path / n): p.read_bytes()
            for p in (tmp_path / n).rglob("*")
            if p.is_file()
        }
        for n in "12"
    )
    assert len(one) == 2 * 28 + 26 + 3
    assert one == two


def test_many_files_packed_or_not_are_read_in_natural_order(tmp_path, lines):
    for part, name in enumerate(["day_0", "day_2", "day_10"]):
        write_lines(tmp_path / name, lines[100 * part : 100 * part + 100], compress=part == 1)
    zstandard = pa.compress((tmp_path / "day_10").read_bytes(), "zstd", asbytes=True)
    assert zstandard[:4] == b"\x28\xb5\x2f\xfd"
    (tmp_path / "day_10").write_bytes(zstandard)
    output = tmp_path / "out"
    preproc(f"source={tmp_path}/day_*", f"output={output}")
    assert data_files(output) == reference(lines, 270, 0)


def test_a_list_of_files_keeps_its_order_and_a_test_file_tests(tmp_path, lines):
    first = write_lines(tmp_path / "z", lines[:100])
    second = write_lines(tmp_path / "a", lines[100:200])
    test = write_lines(tmp_path / "test.tsv", lines[200:])
    output = tmp_path / "out"
    preproc(f"source=[{first},{second}]", f"test_source={test}", f"output={output}")
    assert data_files(output) == reference(lines, 200, 0)


def test_windows_line_ends_and_blank_lines_change_nothing_and_the_fraction_is_as_written(
    tmp_path, lines
):
    source = tmp_path / "raw.tsv"
    # And no last line end. Floating point would give 28 rows.
    source.write_bytes("\r\n".join([*lines[:50], "", *lines[50:100]]).encode())
    preproc(f"source={source}", f"output={tmp_path / 'out'}", "train_fraction=0.29")
    assert data_files(tmp_path / "out") == reference(lines[:100], 29, 0)


def test_criteo_1tb_halves_its_last_day_and_gives_validation_the_odd_row(tmp_path, lines):
    for day in range(3):
        write_lines(tmp_path / f"day_{day}", lines[101 * day : 101 * day + 101 - 4 * (day == 2)])
    output = tmp_path / "out"
    preproc("dataset=criteo_1tb", f"source={tmp_path}/day_*", f"output={output}")
    files, wanted = data_files(output), reference(lines[:299], 202, 0)
    spec = FeatureSpec.load(output)
    assert {name: split.num_rows for name, split in spec.splits.items()} == {
        "train": 202,
        "test": 48,
        "validation": 49,
    }
    for name, content in wanted.items():
        split, file = name.split("/")
        assert content == files[name] + (files[f"validation/{file}"] if split == "test" else b"")


def test_the_vocabulary_can_count_all_rows_as_nvidias_does(tmp_path, lines):
    source = write_lines(tmp_path / "raw.tsv", lines)
    preproc(f"source={source}", f"output={tmp_path / 'out'}", "vocabulary=all", "frequency_limit=4")
    assert data_files(tmp_path / "out") == reference(lines, 270, 4, counted=300)


def test_the_vocabulary_is_saved_and_numericals_can_be_float32(tmp_path):
    rows = [raw_line(0, i1=4, c3=value) for value in ["b", "a", "c", "a", "b", "b", "a", "d"]]
    options = ["frequency_limit=2", "numerical_dtype=float32"]
    preproc(
        f"source={write_lines(tmp_path / 'raw.tsv', rows)}", f"output={tmp_path / 'out'}", *options
    )
    saved = duckdb.sql(f"FROM '{tmp_path / 'out' / 'vocabulary' / 'cat_2.parquet'}'")
    assert saved.columns == ["value", "id", "count"]
    assert saved.fetchall() == [("a", 1, 3), ("b", 2, 3)]
    numerical = np.fromfile(tmp_path / "out" / "test" / "numerical.bin", "<f4")
    assert numerical.tolist() == [np.float32(math.log(7))] + [0.0] * 12


def test_the_reader_reads_the_written_dataset(written, lines):
    columns = BinarySource(FeatureSpec.load(written / "out")).read("train", np.array([[5, 9]]))
    assert columns.labels.tolist() == [float(line[0]) for line in lines[5:9]]
    wanted = np.frombuffer(reference(lines, 270, 0)["train/cat_0.bin"], "<i1")[5:9]
    assert columns.ids[0].tolist() == wanted.tolist()


def test_a_data_set_is_replaced_only_when_asked_for(written, tmp_path, lines):
    shutil.copytree(written, tmp_path, dirs_exist_ok=True)
    source, output = tmp_path / "raw.tsv", tmp_path / "out"
    before = data_files(output)
    with pytest.raises(Refused, match="holds a dataset already; set overwrite=true to replace it"):
        preproc(f"source={source}", f"output={output}", "frequency_limit=10")
    assert data_files(output) == before
    preproc(f"source={source}", f"output={output}", "frequency_limit=10", "overwrite=true")
    assert data_files(output) == reference(lines, 270, 10)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "raw.tsv"]


def test_little_memory_is_enough(tmp_path, lines):
    source, output = write_lines(tmp_path / "raw.tsv", lines * 100), tmp_path / "out"
    preproc(f"source={source}", f"output={output}", "memory_limit=60MB", "threads=1")
    # The reference of all rows takes longer than the run: 90 times the lines train, 10 times test.
    wanted = {
        f"{split}/{Path(name).name}": content * times
        for name, content in reference(lines, 300, 0).items()
        if name.startswith("train")
        for split, times in (("train", 90), ("test", 10))
    }
    assert data_files(output) == wanted
