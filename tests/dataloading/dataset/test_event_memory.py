"""An event log of 10 million events, 120 MB, is read in order and at random by a process that may take 16 MiB more memory."""

import multiprocessing as mp
import re
import resource
from pathlib import Path

import numpy as np
import pytest

from dataloading.dataset.dataset_directory import write_dataset
from dataloading.dataset.feature_spec import CategoricalFeature, FeatureSpec
from dataloading.dataset.open_dataset import open_dataset
from dataloading.dataset.sequences import EventColumn, SequenceGroup

EVENTS, ROWS, LENGTH, BATCH = 10_000_000, 400_000, 50, 1024
LIMIT = 16 << 20
"""Bytes beside the heap as it is, and the pages of the files, which the kernel takes back when it needs them."""

pytestmark = pytest.mark.doors


def stops() -> np.ndarray:
    """Return where the events of each row end: they overlap, and lie everywhere."""
    return np.linspace(LENGTH, EVENTS, ROWS).astype(np.int64)


def read_all(root: Path) -> None:
    """Read all rows of the log batch by batch, in order and then at random, and compare them."""
    source = open_dataset(FeatureSpec.load(root))
    source.read("train", np.array([[0, 2]]))
    ends, orders = stops(), (np.arange(ROWS), np.random.default_rng(1).permutation(ROWS))
    (now,) = re.findall(r"^VmData:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    resource.setrlimit(resource.RLIMIT_DATA, (1024 * int(now) + LIMIT,) * 2)
    with pytest.raises(MemoryError):
        np.ones(EVENTS, np.int64)
    for order in orders:
        for rows in np.array_split(order, ROWS // BATCH):
            columns = source.read("train", np.stack([rows, rows + 1], axis=1))
            wanted = ends[rows][:, None] + np.arange(-LENGTH, 0)
            np.testing.assert_array_equal(columns.ids[0], wanted.ravel() % 997)
            np.testing.assert_array_equal(
                columns.events[0], np.tile(np.arange(LENGTH, 0, -1), len(rows))
            )


def test_a_log_of_ten_million_events_is_read_within_few_megabytes(tmp_path):
    group = SequenceGroup(
        "history", ("hist",), LENGTH, (EventColumn("time", np.dtype(np.int64)),), "time"
    )
    with write_dataset(
        tmp_path / "data",
        categorical=(CategoricalFeature.of("hist", 997, None),),
        sequences=(group,),
    ) as dataset:
        positions = np.arange(EVENTS)
        dataset.append_events(ids={"hist": positions % 997}, events={"time": positions})
        for split in ("train", "test"):
            ends = stops()
            dataset[split].append(
                labels=np.zeros(ROWS),
                slices={"history": np.stack([ends - LENGTH, ends], axis=1)},
                moments={"history": ends},
            )
    reader = mp.get_context("fork").Process(target=read_all, args=(tmp_path / "data",))
    reader.start()
    reader.join(300)
    assert reader.exitcode == 0
