"""Scores of models of a sequence group: `mode=predict` and `Run.predict` give those of training, and refuse bad events."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from nn.library.loaded_run import Run
from nn.library.own_training import named_tensors
from tests.helpers.command import run_command
from tests.helpers.sequence_models import HISTORY, LONGEST, ROWS, overrides, write_sequences

NAMES = ("din", "sasrec", "bst", "hstu")
EVENTS = {
    "hist_item": [1, 2],
    "hist_genre": [3, 4],
    "hist_time": [10, 20],
    "hist_rating": [0.5, 1.0],
    "history": 100,
}


@dataclass(frozen=True, slots=True)
class Trained:
    """Run directories of models by name, their dataset and its rows of the test split."""

    runs: dict[str, Path]
    data: Path
    table: pa.Table

    def load(self, name: str) -> Run:
        return Run.load(self.runs[name])


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Trained:
    root = tmp_path_factory.mktemp("sequences")
    data = write_sequences(root / "data")
    runs = {name: root / name for name in NAMES}
    for name, run_dir in runs.items():
        ended = run_command(*overrides(name, data), f"run_dir={run_dir}")
        assert ended.err == "", name
    (path,) = (data / "test").glob("*.parquet")
    return Trained(runs, data, pq.read_table(path).drop_columns(["label"]))


def of_ages(table: pa.Table) -> pa.Table:
    """Return the rows with the ages of their events in place of times and moments."""
    rows = zip(table["history"].to_pylist(), table["hist_time"].to_pylist(), strict=True)
    ages = [[float(moment - time) for time in times] for moment, times in rows]
    table = table.drop_columns(["history", "hist_time"])
    return table.append_column("hist_time", pa.array(ages, pa.list_(pa.float64())))


@pytest.mark.parametrize("name", NAMES)
def test_all_ways_give_the_scores_of_the_step(name, trained, tmp_path):
    run, table = trained.load(name), trained.table
    output = tmp_path / "scores.parquet"
    restore = ["mode=predict", f"checkpoint.restore={run.checkpoint}", f"output={output}"]
    ended = run_command(*overrides(name, trained.data), *restore)
    assert ended.exit_code == 0, ended.err
    wanted = pq.read_table(output)["score"].to_numpy()
    assert len(np.unique(wanted.round(6))) > ROWS["test"] // 2
    frame = table.to_pandas()
    # The first row has no events.
    for rows, size in ((table, 7), (frame, 100), (of_ages(table), 100), (frame[:1], 1)):
        got = np.array(run.predict(rows, batch_size=size)["score"])
        np.testing.assert_allclose(got, wanted[: len(got)], rtol=0, atol=1e-6)


def with_events(table: pa.Table, **columns: Any) -> pa.Table:
    """Return the first row with other events."""
    row = table.slice(0, 1)
    for name, value in columns.items():
        index = row.column_names.index(name)
        row = row.set_column(index, name, pa.array([value], row.schema.field(name).type))
    return row


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"hist_genre": [1]},
            "feature 'hist_genre': 1 events at row 0 of the table, and 'hist_item' has 2; want equally many in all columns of "
            "group 'history'",
        ),
        (
            {name: [1] * (LONGEST + 1) for name in HISTORY.columns},
            "feature 'hist_item': 7 events at row 0 of the table; want at most max_length=6",
        ),
        (
            {"hist_time": [10, 100]},
            "'hist_time': an event of time 100 at row 0 of the table, whose moment is 100; want only events before the moment "
            "of their row",
        ),
    ],
)
def test_bad_events_are_refused(columns, message, trained):
    row = with_events(trained.table, **EVENTS | columns)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        trained.load("din").predict(row)


@pytest.mark.parametrize(
    ("moment", "message"),
    [
        (
            15,
            "'hist_time': an event of age -5.0 at row 0 of the table; want only events before the moment of their row",
        ),
        (
            -10,
            "'hist_time': an event of age 40.0 after one of 30.0 at row 0 of the table; want the oldest event first",
        ),
    ],
)
def test_bad_ages_are_refused(moment, message, trained):
    times = [10, 20] if moment > 0 else [-40, -50]
    row = of_ages(with_events(trained.table, **EVENTS | {"history": moment, "hist_time": times}))
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        trained.load("din").predict(row)


def test_named_tensors_have_the_numbers_of_events(trained):
    run = trained.load("din")
    (batch,) = run._batches(trained.table, ROWS["test"])
    ratings = named_tensors(batch, run.spec)["hist_rating"].to_dense()
    wanted = trained.table["hist_rating"].to_pylist()
    for got, row in zip(ratings, wanted, strict=True):
        torch.testing.assert_close(got, torch.tensor(row, dtype=torch.float32))
