"""A closed run leaves nothing to Python's collector.

It frees threads, communicators, pinned memory and mapped files in cycles at any allocation: in a process that was forked since,
or while a CUDA graph is captured.
"""

import gc
from pathlib import Path

import pytest

from dataloading.dataset.feature_spec import CategoricalFeature
from nn.library.options import options
from nn.library.own_training import Training
from tests.helpers import sequence_models
from tests.helpers.composed import TINY
from tests.helpers.distributed import run_distributed
from tests.helpers.gpus import ON_GPU, worlds
from tests.nn.test_raw_keys import CAPACITY, SMALL, drawn, write

STEPS = ["train.max_steps=4", "log.every=2", "log.loggers=[]", "log.pictures=false"]
TIERS = "{cat_0: {tier: host, cache: 0.8}, cat_4: {type: row_wise, tier: disk, cache: 0.8}}"
OWN = {"nn", "dataloading", "configs"}
OF_LIBRARIES = {"TableSharder"}
"""In a cycle of TorchRec's planner."""


def left_behind(overrides: list[str], run_dir: Path) -> list[str]:
    """Train, and return the types of the project's objects, threads and tensors that a closed run leaves in cycles."""
    train(overrides, run_dir / "first")  # what imports leave
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        train(overrides, run_dir / "second")
        gc.collect()
        types = {type(found) for found in gc.garbage}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    heavy = {of for of in types if of.__module__.split(".")[0] in OWN}
    heavy |= {of for of in types if of.__name__ in ("Thread", "mmap", "Tensor", "CUDAGraph")}
    return sorted(of.__name__ for of in heavy if of.__name__ not in OF_LIBRARIES)


def train(overrides: list[str], run_dir: Path) -> None:
    with Training(options("dlrm", *overrides, *STEPS, f"run_dir={run_dir}"), quiet=True) as run:
        while run.num_steps < run.last_step:
            run.step()
        run.evaluate()
        run.finish()


def case(name: str, root: Path) -> list[str]:
    if name == "keys":
        features = (
            CategoricalFeature.of_keys("user", CAPACITY),
            CategoricalFeature.of_keys("past", CAPACITY, None, "user"),
        )
        path = write(root / "data", {split: drawn(split) for split in ("train", "test")}, *features)
        return [*SMALL, f"data.path={path}", "checkpoint.delta_every=2"]
    if name == "events":
        return sequence_models.overrides("sasrec", sequence_models.write_sequences(root / "data"))
    further = {
        "tiers": [
            f"sharding.tables={TIERS}",
            f"sharding.disk_path={root}",
            "data.synthetic.cardinalities=[4000,40,7,300,4000]",
        ]
    }
    return [*TINY, "model.dropout=0.1", "train.ema_decay=0.9", *further.get(name, [])]


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", ["tables", "tiers", "keys", "events"])
def test_a_closed_run_leaves_nothing_to_collect(name, num_ranks, tmp_path):
    overrides = case(name, tmp_path)
    assert run_distributed(left_behind, num_ranks, overrides, tmp_path) == [[]] * num_ranks


@pytest.mark.parametrize("num_ranks", worlds(1, 2))
@pytest.mark.parametrize("name", ["tables", "tiers", "keys", "events"])
def test_a_closed_run_on_gpus_leaves_nothing_to_collect(name, num_ranks, tmp_path):
    """Neither the graph of the step nor pinned memory."""
    overrides = [*case(name, tmp_path), *ON_GPU]
    assert run_distributed(left_behind, num_ranks, overrides, tmp_path) == [[]] * num_ranks
