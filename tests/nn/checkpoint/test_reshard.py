"""A checkpoint resumes on any number of ranks with any sharding, with the state of every optimizer.

One model has a table per pair of shardings, so that one restore covers every pair.
"""

import os
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from nn.checkpoint import state as checkpoint
from nn.checkpoint.tensor_index import read_index
from nn.distributed.process_group import process_group, ranks_from_environment
from tests.helpers.checkpoints import save as save_checkpoint
from tests.helpers.composed import TINY, build, compose_config
from tests.helpers.distributed import run_distributed
from tests.helpers.gpus import needs_gpus

RATES = {"sgd": 0.5, "adagrad": 0.05, "rowwise_adagrad": 0.05, "adam": 0.005}
LAYOUTS = {
    # Row-wise tables require the dynamic step; the other shardings use the static one.
    "rows": ["table_wise", "column_wise", "row_wise", "data_parallel"],
    "whole": ["table_wise", "column_wise", "data_parallel"],
}
WORLDS = [1, 2, 4]
MOVES = list(product(WORLDS, WORLDS))
KINDS = [*product(["rows"], RATES), ("whole", "adam")]
SAVED_AT, STEPS = 2, 3
# A third of the moves for each kind: each kind is saved and restored on every number of ranks, and rows make each move.
KINDS_AND_MOVES = [
    (kind, move)
    for index, kind in enumerate(KINDS)
    for move in MOVES
    if (index + sum(map(WORLDS.index, move))) % 3 == 0
]
# Gradients over ranks and losses of a batch are summed in another order.
CPU_TOLERANCE, GPU_TOLERANCE = 1e-6, 2e-5
# The last table has fewer rows than ranks.
ROWS = [500, 40, 7, 300, 60, 90, 33, 12, 250, 5, 77, 21, 160, 9, 45, 3]


def layouts_of(way: str, rule: str) -> list[tuple[str, str]]:
    """Return the pairs (sharding when saved, sharding when restored), one per table."""
    known = [
        layout for layout in LAYOUTS[way] if (rule, layout) != ("rowwise_adagrad", "column_wise")
    ]
    return list(product(known, known))


def overrides(way: str, rule: str, *, restored: bool, device: str) -> list[str]:
    pairs = layouts_of(way, rule)
    tables = ",".join(f"cat_{index}:{pair[restored]}" for index, pair in enumerate(pairs))
    return [
        *(
            option
            for option in TINY
            if not option.startswith(("data.synthetic.cardinalities", "device"))
        ),
        f"data.synthetic.cardinalities={ROWS[-len(pairs) :]}",
        f"optimizer.name={rule}",
        f"optimizer.lr={RATES[rule]}",
        "optimizer.eps=0.01",
        f"sharding.tables={{{tables}}}",
        f"device={device}",
        "train.tf32=false",
    ]


def in_world(world_size: int, function, *args):
    """Run `function` on the first `world_size` ranks of a pool as a job; the others do nothing."""
    if int(os.environ["RANK"]) >= world_size:
        return None
    os.environ |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    return function(world_size, *args)


def save_all(world_size: int, directory: Path, kinds: list[tuple], device: str) -> dict:
    """Train and save each kind, and return the losses after the save."""
    losses = {}
    with process_group(ranks_from_environment(device)):
        for kind in kinds:
            built = build(compose_config(*overrides(*kind, restored=False, device=device)))
            built.train(0, SAVED_AT)
            target = directory / "-".join(kind) / f"on_{world_size}"
            save_checkpoint(target, built.step, SAVED_AT, built.source.spec, built.ranks)
            losses[kind] = built.train(SAVED_AT, STEPS)
            built.step.close()
    return losses


def restore_all(world_size: int, directory: Path, origins: list[tuple], device: str) -> dict:
    """Restore kinds with other shardings, save them again, and return the losses after the save."""
    losses = {}
    with process_group(ranks_from_environment(device)):
        for kind, origin in origins:
            built = build(compose_config(*overrides(*kind, restored=True, device=device)))
            source = directory / "-".join(kind) / f"on_{origin}" / f"step_{SAVED_AT}"
            checkpoint.restore(source, built.step, with_optimizer=True)
            target = directory / "-".join(kind) / f"from_{origin}_to_{world_size}"
            save_checkpoint(target, built.step, SAVED_AT, built.source.spec, built.ranks)
            losses[kind, origin] = built.train(SAVED_AT, STEPS)
            built.step.close()
    return losses


def move_all(directory: Path, worlds: list[int], moves: list[tuple], device: str):
    """Return the losses after a save by (world, kind), and after each restore by (from, to, kind)."""
    stayed, moved = {}, {}
    most = max(worlds)
    kinds = list(dict.fromkeys(kind for kind, _ in moves))
    for world in worlds:
        losses = run_distributed(in_world, most, world, save_all, directory, kinds, device)[0]
        stayed |= {(world, kind): values for kind, values in losses.items()}
    for world in worlds:
        origins = [(kind, origin) for kind, (origin, target) in moves if target == world]
        losses = run_distributed(in_world, most, world, restore_all, directory, origins, device)[0]
        moved |= {(origin, world, kind): values for (kind, origin), values in losses.items()}
    return directory, stayed, moved


def contents(path: Path, step: int = SAVED_AT) -> dict[str, np.ndarray]:
    """Return all tensors of a checkpoint."""
    return {
        name: np.concatenate(list(tensor.blocks()))
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


each_kind_and_move = pytest.mark.parametrize(
    ("kind", "move"),
    KINDS_AND_MOVES,
    ids=["-".join(map(str, [*kind, *move])) for kind, move in KINDS_AND_MOVES],
)


@pytest.fixture(scope="module")
def moved(tmp_path_factory):
    return move_all(tmp_path_factory.mktemp("moved"), WORLDS, KINDS_AND_MOVES, "cpu")


@each_kind_and_move
def test_every_weight_and_state_is_restored_bit_by_bit(moved, kind, move):
    assert_all_moved(moved[0], kind, *move)


@each_kind_and_move
def test_a_restored_run_trains_as_the_uninterrupted_one(moved, kind, move):
    _, stayed, losses = moved
    origin, world = move
    assert losses[origin, world, kind] == pytest.approx(stayed[origin, kind], rel=CPU_TOLERANCE)


GPU_KINDS = [*KINDS, ("whole", "adagrad")]
GPU_MOVES = [(2, 1), (1, 2), (2, 4), (4, 1)]


@pytest.fixture(scope="module")
def moved_on_gpus(tmp_path_factory):
    count = torch.cuda.device_count()
    worlds = [world for world in WORLDS if world <= count]
    moves = [move for move in GPU_MOVES if max(move) <= count]
    return move_all(
        tmp_path_factory.mktemp("moved"), worlds, list(product(GPU_KINDS, moves)), "cuda"
    )


@pytest.mark.parametrize("kind", GPU_KINDS, ids="-".join)
@pytest.mark.parametrize(
    ("origin", "world"), [pytest.param(*move, marks=needs_gpus(max(move))) for move in GPU_MOVES]
)
def test_gpus_resume_a_run_of_other_gpus(moved_on_gpus, kind, origin, world):
    directory, stayed, losses = moved_on_gpus
    assert_all_moved(directory, kind, origin, world)
    assert losses[origin, world, kind] == pytest.approx(stayed[origin, kind], rel=GPU_TOLERANCE)
