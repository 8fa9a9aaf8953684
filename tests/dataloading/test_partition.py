"""Rows of a rank at a step: over ranks and steps every row is read exactly once, for any shape.

pytest tests/dataloading/test_partition.py
"""

import subprocess
import sys

import numpy as np
import pytest

from dataloading.partition import (
    MAX_BLOCKS,
    RankRows,
    Shuffle,
    balanced,
    block_order,
    num_steps,
    rows_at,
)

SHAPES = [
    (rows, batch, world)
    for rows in (1, 2, 7, 8, 9, 63, 64, 65, 100)
    for batch in (1, 2, 4, 8, 24, 120)
    for world in (1, 2, 3, 4, 8)
    if batch % world == 0
]


def numbers(rows: RankRows) -> list[int]:
    return [row for first, last in rows.runs.tolist() for row in range(first, last)]


def epoch(num_rows: int, batch: int, world: int, shuffle: Shuffle | None) -> list[int]:
    """Return all rows in the order of step, then rank."""
    return [
        row
        for step in range(num_steps(num_rows, batch))
        for rank in range(world)
        for row in numbers(
            rows_at(
                step,
                num_rows=num_rows,
                batch_size=batch,
                rank=rank,
                world_size=world,
                shuffle=shuffle,
            )
        )
    ]


@pytest.mark.parametrize(("num_rows", "batch", "world"), SHAPES)
def test_every_row_comes_exactly_once(num_rows, batch, world):
    assert epoch(num_rows, batch, world, None) == list(range(num_rows))
    for block in (1, 3, 16, 1000):
        shuffled = epoch(num_rows, batch, world, Shuffle(seed=1, epoch=0, block=block))
        assert sorted(shuffled) == list(range(num_rows))


@pytest.mark.parametrize(("num_rows", "batch", "world"), SHAPES)
def test_ranks_agree_on_the_shape_of_a_batch(num_rows, batch, world):
    for step in range(num_steps(num_rows, batch)):
        ranks = [
            rows_at(
                step, num_rows=num_rows, batch_size=batch, rank=rank, world_size=world, shuffle=None
            )
            for rank in range(world)
        ]
        valid = [of_rank.num_valid for of_rank in ranks]
        assert {(of_rank.padded_to, of_rank.global_valid) for of_rank in ranks} == {
            (-(-sum(valid) // world), sum(valid))
        }
        assert valid == sorted(valid, reverse=True)
        assert [len(numbers(of_rank)) for of_rank in ranks] == valid
        assert sum(valid) == min(batch, num_rows - step * batch)


def test_the_last_batch_is_divided_as_documented():
    tail = [
        rows_at(2, num_rows=19, batch_size=8, rank=rank, world_size=2, shuffle=None)
        for rank in (0, 1)
    ]
    assert [(numbers(of_rank), of_rank.padded_to, of_rank.global_valid) for of_rank in tail] == [
        ([16, 17], 2, 3),
        ([18], 2, 3),
    ]


def test_a_rank_without_rows_still_has_a_padded_batch():
    last = rows_at(0, num_rows=2, batch_size=4, rank=3, world_size=4, shuffle=None)
    assert (last.runs.shape, last.num_valid, last.padded_to, last.global_valid) == ((0, 2), 0, 1, 2)


def test_the_rows_of_the_world_do_not_depend_on_its_size():
    shuffle = Shuffle(seed=3, epoch=1, block=4)
    assert epoch(100, 24, 1, shuffle) == epoch(100, 24, 2, shuffle) == epoch(100, 24, 8, shuffle)


def test_a_shuffle_keeps_blocks_and_leaves_the_partial_one_last():
    order = epoch(42, 7, 1, Shuffle(seed=5, epoch=0, block=8))
    blocks = [order[start : start + 8] for start in range(0, 42, 8)]
    assert all(block == list(range(block[0], block[0] + len(block))) for block in blocks)
    assert all(block[0] % 8 == 0 for block in blocks)
    assert blocks[-1] == [40, 41]
    assert order != list(range(42))


def test_each_epoch_and_each_seed_has_its_own_order():
    orders = {
        tuple(epoch(64, 8, 1, Shuffle(seed, number, 1))) for seed in (0, 1) for number in (0, 1, 2)
    }
    assert len(orders) == 6


def test_blocks_are_moved_anywhere():
    """Each of 6 blocks comes first in about a sixth of 600 epochs."""
    first = np.bincount([int(block_order(6, 0, epoch)[0]) for epoch in range(600)], minlength=6)
    assert first.min() > 60
    assert first.max() < 140


def test_neighbouring_blocks_are_one_run():
    neighbours = {
        seed: np.count_nonzero(np.diff(block_order(32, seed, 0)) == 1) for seed in range(20)
    }
    seed = max(neighbours, key=neighbours.get)
    assert neighbours[seed] > 1
    shuffle = Shuffle(seed, epoch=0, block=2)
    rows = rows_at(0, num_rows=64, batch_size=64, rank=0, world_size=1, shuffle=shuffle)
    assert len(rows.runs) == 32 - neighbours[seed]


def test_another_process_computes_the_same_order():
    code = "from dataloading.partition import block_order; print(block_order(50, 7, 3).tolist())"
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert printed.strip() == str(block_order(50, 7, 3).tolist())


def test_a_permutation_cannot_be_changed_by_its_readers():
    with pytest.raises(ValueError, match="read-only"):
        block_order(4, 0, 0)[0] = 1


@pytest.mark.parametrize(("batch", "world", "fitting"), [(10, 4, 8), (3, 4, 4), (0, 2, 2)])
def test_a_batch_that_does_not_divide_is_named(batch, world, fitting):
    with pytest.raises(
        ValueError,
        match=f"batch_size={batch} does not divide .* {world} ranks; .* such as {fitting}$",
    ):
        rows_at(0, num_rows=100, batch_size=batch, rank=0, world_size=world, shuffle=None)


def test_too_many_blocks_are_refused_with_a_block_that_works():
    message = r"shuffling 268435457 blocks needs 2\.0 GiB per reader process, .* make the shuffle block 3 times as long"
    with pytest.raises(ValueError, match=message):
        block_order(2 * MAX_BLOCKS + 1, 0, 0)


@pytest.mark.parametrize("wrong", [{"seed": -1}, {"epoch": -1}, {"block": 0}])
def test_an_invalid_shuffle_is_refused(wrong):
    with pytest.raises(
        ValueError, match="want seed and epoch of at least 0 and block of at least 1"
    ):
        Shuffle(**({"seed": 0, "epoch": 0, "block": 1} | wrong))


@pytest.mark.parametrize(("world", "rows", "together"), [(1, 6, 1), (2, 256, 1), (8, 512, 8)])
def test_ranks_get_equally_many_rows_of_about_equal_costs_and_squares(world, rows, together):
    """Against consecutive rows, of which a rank has a fifth more events than the mean, and twice the squares."""
    random = np.random.default_rng(1)
    costs = (random.exponential(200, world * rows) * np.linspace(0.5, 1.5, world * rows)).astype(
        int
    )
    found = balanced(costs, world, together)
    assert found.shape == (world, rows)
    assert sorted(found.flatten().tolist()) == list(range(world * rows))
    starts = found[:, ::together]
    assert (np.diff(found.reshape(-1, together), axis=1) == 1).all()
    assert (starts % together == 0).all()
    assert (np.diff(starts, axis=1) > 0).all()
    for power, near in ((1, 1.01), (2, 1.1)):
        of_ranks = (costs[found].astype(float) ** power).sum(axis=1)
        assert of_ranks.max() <= near * of_ranks.mean()


def test_rows_of_equal_costs_are_dealt_in_their_order():
    assert balanced(np.array([3, 3, 3, 3, 9, 1]), 2).tolist() == [[2, 4, 5], [0, 1, 3]]
    assert balanced(np.zeros(6, np.int64), 3).tolist() == [[0, 3], [1, 4], [2, 5]]
