"""A checkpoint of any number of ranks and any layout goes on under any other, each update rule's state included.

One model has a table for each pair of layouts, so that a run's restore moves a table in every direction at once.
"""

import os
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from nn.checkpoint import state as checkpoint
from nn.checkpoint.tensor_index import blocks, read_index
from nn.distributed.process_group import process_group, ranks_from_environment
from tests.helpers.composed import TINY, build, compose_config
from tests.helpers.distributed import run_distributed
from tests.helpers.gpus import needs_gpus

RATES = {"sgd": 0.5, "adagrad": 0.05, "rowwise_adagrad": 0.05, "adam": 0.005}
LAYOUTS = {
    # Row-wise tables make every batch take TorchRec's way, and all others the static one.
    "dynamic": ["table_wise", "column_wise", "row_wise", "data_parallel"],
    "static": ["table_wise", "column_wise", "data_parallel"],
}
WORLDS = [1, 2, 4]
KINDS = [*product(["dynamic"], RATES), ("static", "adagrad"), ("static", "adam")]
SAVED_AT, STEPS = 2, 3
# Sums in another order: of gradients over ranks, of a batch's losses.
CPU_TOLERANCE, GPU_TOLERANCE = 1e-6, 2e-5
# The last one has fewer rows than there are ranks.
ROWS = [500, 40, 7, 300, 60, 90, 33, 12, 250, 5, 77, 21, 160, 9, 45, 3]


def layouts_of(way: str, rule: str) -> list[tuple[str, str]]:
    """Pairs (when saved, when restored), one a table."""
    known = [each for each in LAYOUTS[way] if (rule, each) != ("rowwise_adagrad", "column_wise")]
    return list(product(known, known))


def overrides(way: str, rule: str, *, restored: bool, device: str) -> list[str]:
    pairs = layouts_of(way, rule)
    tables = ",".join(f"cat_{index}:{pair[restored]}" for index, pair in enumerate(pairs))
    return [
        *(each for each in TINY if not each.startswith(("data.synthetic.cardinalities", "device"))),
        f"data.synthetic.cardinalities={ROWS[-len(pairs) :]}",
        f"optimizer.name={rule}",
        f"optimizer.lr={RATES[rule]}",
        "optimizer.eps=0.01",
        f"sharding.tables={{{tables}}}",
        f"device={device}",
        "train.tf32=false",
    ]


def in_world(world_size: int, function, *args):
    """Run `function` on the first ranks of a pool, as a world of their own; the others do nothing."""
    if int(os.environ["RANK"]) >= world_size:
        return None
    os.environ |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    return function(world_size, *args)


def save_all(world_size: int, directory: Path, device: str) -> dict:
    """Train each kind, save in between, and return the losses after that."""
    losses = {}
    with process_group(ranks_from_environment(device)):
        for kind in KINDS:
            built = build(compose_config(*overrides(*kind, restored=False, device=device)))
            built.train(0, SAVED_AT)
            target = directory / "-".join(kind) / f"on_{world_size}"
            checkpoint.save(target, built.step, SAVED_AT, built.source.spec, built.ranks)
            losses[kind] = built.train(SAVED_AT, STEPS)
            built.step.close()
    return losses


def restore_all(world_size: int, directory: Path, origins: list[int], device: str) -> dict:
    """Restore each kind under the other layouts, save again, and return the losses after that."""
    losses = {}
    with process_group(ranks_from_environment(device)):
        for kind, origin in product(KINDS, origins):
            built = build(compose_config(*overrides(*kind, restored=True, device=device)))
            source = directory / "-".join(kind) / f"on_{origin}" / f"step_{SAVED_AT}"
            checkpoint.restore(source, built.step, with_optimizer=True)
            target = directory / "-".join(kind) / f"from_{origin}_to_{world_size}"
            checkpoint.save(target, built.step, SAVED_AT, built.source.spec, built.ranks)
            losses[kind, origin] = built.train(SAVED_AT, STEPS)
            built.step.close()
    return losses


def move_all(directory: Path, worlds: list[int], moves: list[tuple[int, int]], device: str):
    """Losses after a save, by (world, kind), and after each move, by (from, to, kind)."""
    stayed, moved = {}, {}
    most = max(worlds)
    for world in worlds:
        losses = run_distributed(in_world, most, world, save_all, directory, device)[0]
        stayed |= {(world, kind): each for kind, each in losses.items()}
    for world in worlds:
        origins = [origin for origin, target in moves if target == world]
        losses = run_distributed(in_world, most, world, restore_all, directory, origins, device)[0]
        moved |= {(origin, world, kind): each for (kind, origin), each in losses.items()}
    return directory, stayed, moved


def contents(path: Path, step: int = SAVED_AT) -> dict[str, np.ndarray]:
    """All tensors of a checkpoint, whole."""
    return {
        name: np.concatenate(list(blocks(tensor)))
        for name, tensor in read_index(path / f"step_{step}").tensors.items()
    }


def assert_all_moved(directory: Path, kind: tuple[str, str], origin: int, world: int) -> None:
    before = contents(directory / "-".join(kind) / f"on_{origin}")
    after = contents(directory / "-".join(kind) / f"from_{origin}_to_{world}")
    assert before.keys() == after.keys()
    changed = [name for name, value in before.items() if not np.array_equal(value, after[name])]
    assert changed == []
    state = [name for name in before if name.startswith("tables.cat_0.mom")]
    assert len(state) == {"sgd": 0, "adam": 2}.get(kind[1], 1)
    assert all(before[name].any() for name in state)


@pytest.fixture(scope="module")
def moved(tmp_path_factory):
    return move_all(tmp_path_factory.mktemp("moved"), WORLDS, list(product(WORLDS, WORLDS)), "cpu")


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
@pytest.mark.parametrize(("origin", "world"), list(product(WORLDS, WORLDS)))
def test_every_weight_and_state_moves_bit_by_bit(moved, kind, origin, world):
    assert_all_moved(moved[0], kind, origin, world)


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
@pytest.mark.parametrize(("origin", "world"), list(product(WORLDS, WORLDS)))
def test_a_moved_run_learns_as_if_it_had_stayed(moved, kind, origin, world):
    _, stayed, losses = moved
    assert losses[origin, world, kind] == pytest.approx(stayed[origin, kind], rel=CPU_TOLERANCE)


GPU_MOVES = [(2, 1), (1, 2), (2, 4)]


@pytest.fixture(scope="module")
def moved_on_gpus(tmp_path_factory):
    count = torch.cuda.device_count()
    worlds = [each for each in WORLDS if each <= count]
    moves = [each for each in GPU_MOVES if max(each) <= count]
    return move_all(tmp_path_factory.mktemp("moved"), worlds, moves, "cuda")


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
@pytest.mark.parametrize(
    ("origin", "world"), [pytest.param(*move, marks=needs_gpus(max(move))) for move in GPU_MOVES]
)
def test_gpus_go_on_where_others_stopped(moved_on_gpus, kind, origin, world):
    directory, stayed, losses = moved_on_gpus
    assert_all_moved(directory, kind, origin, world)
    assert losses[origin, world, kind] == pytest.approx(stayed[origin, kind], rel=GPU_TOLERANCE)
