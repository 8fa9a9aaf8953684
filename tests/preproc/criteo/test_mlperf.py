"""Raw days to the multi-hot rows of MLPerf's DLRM-DCNv2, against its published procedure in plain NumPy."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from configs.schema import MultiHotConfig
from dataloading.dataset.binary import BinarySource
from dataloading.dataset.feature_spec import FeatureSpec
from nn.embedding.multi_hot import MultiHot, expand
from preproc.column_store import StoredColumn
from preproc.criteo import mlperf, mlperf_columns
from preproc.criteo.mlperf_columns import number_column
from tests.helpers.preproc_command import (
    Refused,
    compose_preproc,
    data_files,
    preproc,
    raw_line,
    write_lines,
)

DAY_ROWS = (70, 90, 61)
# Smaller than the values of most columns, so that the modulus matters; 300 is larger than all.
ROWS = [7, 300, 20, 3, *range(40, 61), 128]
HOTNESS = [3, 2, 1, 1, *[1] * 20, 5, 4]


def random_lines(num_rows: int, seed: int) -> list[str]:
    """Return lines with missing fields, negative integers, and each day's own least integer."""
    draw = random.Random(seed)
    # ffffffff is a value as any other, and short or upper-case texts are hexadecimal numbers too.
    values = ["", "ffffffff", "fffffffe", "AB", "00000000", *(f"{v:08x}" for v in range(90))]
    return [
        raw_line(
            draw.randint(0, 1),
            **{f"i{i}": draw.choice(["", -seed, 0, 5, 2**21, 2**27 + 1]) for i in range(1, 14)},
            **{f"c{i}": draw.choice(values) for i in range(1, 27)},
        )
        for _ in range(num_rows)
    ]


def published(days: list[list[str]]) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    """Follow MLPerf's programs, but for their shuffle; return labels, dense [rows, 13] and sparse [rows, 26] per day."""
    fields = [[line.split("\t") for line in day] for day in days]
    labels = [np.array([int(row[0] or "0") for row in day], np.int32) for day in fields]
    dense = []
    for day in fields:
        integers = np.array([[int(x or "0") for x in row[1:14]] for row in day], np.int32)
        integers -= integers.min() - 2
        dense.append(np.log(integers, dtype=np.float32))
    sparse = [np.array([[int(x or "0", 16) for x in row[14:]] for row in day]) for day in fields]
    for column in range(26):
        numbers: dict[int, int] = {}
        for day in sparse:
            for row in range(len(day)):
                value = int(day[row, column])
                day[row, column] = numbers.setdefault(value, len(numbers) + 2)
    # The shuffle of the training days keeps all columns in one float32 array.
    sparse[:-1] = [day.astype(np.float32).astype(np.int32) for day in sparse[:-1]]
    return labels, dense, sparse


def multi_hot_tables() -> list[np.ndarray]:
    """Draw the ids of every row of every table: int64 [rows, hotness], the row itself first."""
    np.random.seed(0)  # noqa: NPY002
    return [
        np.concatenate(
            [np.arange(rows)[:, None], np.random.randint(0, rows, size=(rows, hotness - 1))],  # noqa: NPY002
            axis=1,
        )
        for rows, hotness in zip(ROWS, HOTNESS, strict=True)
    ]


def write_days(root: Path) -> list[list[str]]:
    days = [random_lines(rows, seed) for seed, rows in enumerate(DAY_ROWS, start=1)]
    for number, day in enumerate(days):
        write_lines(root / f"day_{number}", day, compress=number == 1)
    return days


def command(root: Path, output: str, *overrides: str) -> Path:
    preproc(
        "dataset=criteo_mlperf",
        f"source={root}/day_*",
        f"output={root / output}",
        f"table_rows={ROWS}",
        *overrides,
    )
    return root / output


@pytest.fixture(scope="module")
def logs(tmp_path_factory) -> tuple[Path, list[list[str]]]:
    root = tmp_path_factory.mktemp("mlperf")
    return root, write_days(root)


def read(output: Path, split: str) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Return labels, numericals and multi-hot ids [rows, hotness] per feature, as a training sees them."""
    spec = FeatureSpec.load(output)
    expansion = MultiHot(spec, MultiHotConfig(hotness=HOTNESS))
    columns = BinarySource(spec).read(split, np.array([[0, spec.rows_of(split)]]))
    ids = []
    for feature, stored in zip(spec.categorical, columns.ids, strict=True):
        values = torch.from_numpy(np.asarray(stored).reshape(-1).astype(np.int64))
        if feature.name in expansion.hotness:
            table = expansion.lookup_table(feature.name, torch.device("cpu"))
            ids.append(expand(values, table).numpy())
        else:
            ids.append(values[:, None].numpy())
    return columns.labels.reshape(-1), columns.numerical, ids


@pytest.fixture(scope="module")
def ordered(logs) -> Path:
    return command(logs[0], "ordered", "shuffle=false")


@pytest.fixture(scope="module")
def shuffled(logs) -> Path:
    return command(logs[0], "shuffled", "seed=5")


def test_raw_days_become_the_published_multi_hot_rows(logs, ordered):
    _, days = logs
    labels, dense, sparse = published(days)
    tables, half = multi_hot_tables(), 31
    wanted = {
        "train": [np.concatenate(parts[:-1]) for parts in (labels, dense, sparse)],
        "test": [parts[-1][:half] for parts in (labels, dense, sparse)],
        "validation": [parts[-1][half:] for parts in (labels, dense, sparse)],
    }
    for split, (label, numerical, ids) in wanted.items():
        got_label, got_numerical, got_ids = read(ordered, split)
        assert np.array_equal(got_label, label)
        assert np.array_equal(got_numerical, numerical)
        for column, table in enumerate(tables):
            expanded = table[ids[:, column] % ROWS[column]]
            assert np.array_equal(got_ids[column], expanded), (split, column)
    assert [f.cardinality for f in FeatureSpec.load(ordered).categorical] == ROWS


def test_the_shuffle_permutes_training_rows_alone(logs, ordered, shuffled):
    other = command(logs[0], "other", "seed=6")
    assert data_files(shuffled) != data_files(other)
    for split in ("test", "validation"):
        for name in ("label", "numerical", "cat_0"):
            part = f"{split}/{name}.bin"
            assert (shuffled / part).read_bytes() == (ordered / part).read_bytes()
    before, after = (np.column_stack(flat(read(path, "train"))) for path in (ordered, shuffled))
    assert not np.array_equal(before, after)
    assert np.array_equal(*(rows[np.lexsort(rows.T)] for rows in (before, after)))


def flat(columns: tuple[np.ndarray, np.ndarray, list[np.ndarray]]) -> list[np.ndarray]:
    labels, numerical, ids = columns
    return [labels, numerical, *ids]


def test_training_ids_above_24_bits_are_rounded_as_by_the_published_shuffle(tmp_path, monkeypatch):
    monkeypatch.setattr(mlperf_columns, "FIRST_ID", 2**24 - 1)
    codes = np.array([9, 8, 7, 6, 9, 7], np.uint32)
    codes.tofile(tmp_path / "codes")
    source, output = StoredColumn(tmp_path / "codes", "<u4"), StoredColumn(tmp_path / "ids", "<i4")
    assert number_column(source, output, 2**25, 4, 6, {1: 6}) == 3
    # 2**24 + 1 has no float32; the rows after the fourth are tested on and keep their ids.
    assert (output.read(0, 6) - 2**24).tolist() == [-1, 0, 0, 0, -1, 1]


def test_a_run_that_ends_early_resumes_and_writes_the_same(logs, shuffled, monkeypatch):
    root, _ = logs

    def fail(*arguments: object) -> None:
        raise ValueError("stopped")

    with monkeypatch.context() as patched:
        patched.setattr(mlperf, "_write", fail)
        with pytest.raises(Refused, match="stopped"):
            command(root, "resumed", "seed=5")
    assert not (root / "resumed").exists()
    # What was done is not repeated.
    monkeypatch.setattr(mlperf, "number_column", fail)
    assert data_files(command(root, "resumed", "seed=5")) == data_files(shuffled)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"c3": "xyz"}, r"row 1 has 'xyz' in cat_2; MLPerf's procedure reads categories as hex"),
        ({"i1": 2**40}, r"the integer 1099511627776 of a line is beyond int32"),
    ],
)
def test_what_the_procedure_cannot_read_is_refused(tmp_path, field, message):
    write_lines(tmp_path / "day_0", [raw_line(0), raw_line(1, **field)])
    write_lines(tmp_path / "day_1", [raw_line(1)])
    with pytest.raises(Refused, match=message):
        command(tmp_path, "out")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["frequency_limit=3"], "knows no frequency_limit=3"),
        (["vocabulary=all"], "knows no vocabulary=all"),
        (["table_rows=[3]"], "needs table_rows, a positive number per category"),
    ],
)
def test_options_that_the_procedure_lacks_are_refused(tmp_path, options, message):
    with pytest.raises(Refused, match=message):
        preproc("dataset=criteo_mlperf", "source=x", f"output={tmp_path / 'out'}", *options)


def test_the_tables_are_those_that_the_recipe_trains():
    composed = compose_preproc("dataset=criteo_mlperf", "source=x", "output=y")
    trained = OmegaConf.load(Path(__file__).parents[3] / "configs/data/criteo_mlperf.yaml")
    assert composed.table_rows == trained.synthetic.cardinalities
