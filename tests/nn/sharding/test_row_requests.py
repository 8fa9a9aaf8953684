"""Rows that a rank asks of their owners: every distinct one once, and where each id finds its own."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from dataloading.dataset.batch_layout import NO_ID, IdCount
from nn.embedding.local_tables import LocalTable
from nn.embedding.lookups import Lookup
from nn.sharding.placement import ColumnShard, RequestedTables, RowShard
from nn.sharding.request_keys import RequestKeys, RowCapacity

BATCH_SIZE = 3
SHARDS = [
    [RowShard(0, 0, 0), RowShard(1, 4, 0), RowShard(2, 8, 0)],
    [RowShard(0, 0, 4), RowShard(1, 2, 4)],
]
ROWS_PER_SHARD = [4, 2]
IDS = {"pair": [[9, 1], [1, 4], [3, 9]], "one": [[1], [3], [1]], "list": [[1, 3], [], [8]]}
"""Of three rows. The table of 10 rows is looked up by `pair` and `list`, that of 4 rows by `one`."""
LOOKUPS = [("pair", 0), ("list", 0), ("one", 1)]


def keys_of(rank: int) -> RequestKeys:
    ten = ColumnShard((Lookup("pair", 2), Lookup("list", 0)), 0, 0, 8)
    four = ColumnShard((Lookup("one", 1),), 2, 0, 8)
    owned = [LocalTable((), torch.empty(0, 8), {})]
    names = ["ten", "four"]
    group = RequestedTables(
        names, [ten, four], SHARDS, ROWS_PER_SHARD, [6, 6, 2], owned, [4, 2], [0, 0]
    )
    counts = {"pair": IdCount(2, 6), "one": IdCount(1, 3), "list": IdCount(0, 5)}
    ranks = SimpleNamespace(rank=rank, world_size=3, device=torch.device("cpu"))
    tables = SimpleNamespace(counts=lambda _, __: counts, expansions={}, ranks=ranks)
    return RequestKeys(tables, group, BATCH_SIZE, 0)


def sent(ids: dict[str, list[list[int]]]) -> Tensor:
    """Return ids as a rank sends them: `list` is filled up to 5, and followed by its lengths."""
    flat = [row for name in ("pair", "one") for rows in ids[name] for row in rows]
    ragged = [row for rows in ids["list"] for row in rows]
    filled = ragged + [NO_ID] * (5 - len(ragged))
    return torch.tensor([*flat, *filled, *map(len, ids["list"])], dtype=torch.int32)


def owner_of(table: int, row: int) -> tuple[int, int]:
    """Return the rank of a row, and its number there."""
    shard = SHARDS[table][row // ROWS_PER_SHARD[table]]
    return shard.rank, shard.base + row - shard.first_row


@pytest.mark.parametrize(("rank", "num_valid"), [(0, None), (1, 5), (2, 6)])
def test_every_id_finds_its_row_among_those_asked_for(rank, num_valid):
    """Rank 1 has two valid rows and one of padding, which takes the ids of the first; rank 2 has no valid row."""
    keys = keys_of(rank)
    prepared = keys.prepare(sent(IDS), num_valid)
    rows = keys.distinct(prepared)
    wanted = {name: [list(ids) for ids in IDS[name]] for name in IDS}
    if num_valid == 5:
        wanted |= {name: [*wanted[name][:2], wanted[name][0]] for name in ("pair", "one")}
    elif num_valid == 6:
        wanted |= {"pair": [], "one": []}
    needed = {owner_of(t, row) for name, t in LOOKUPS for ids in wanted[name] for row in ids}
    assert rows.counts.tolist() == [sum(rank == owner for owner, _ in needed) for rank in range(3)]

    capacity = RowCapacity([5, 4, 3], torch.device("cpu"))
    asked, position = keys.requests(rows, capacity)
    by_owner = [set(part.tolist()) - {NO_ID} for part in asked.split([5, 4, 3])]
    assert by_owner == [{row for owner, row in needed if owner == rank} for rank in range(3)]
    assert position.tolist() == sorted(position.tolist())

    local = keys.with_row_positions(prepared, position, rows.order)
    for (name, table), block in zip(LOOKUPS, keys.blocks.values(), strict=True):
        found = local[block.first : block.first + block.count].tolist()
        ids = [row for rows in wanted[name] for row in rows]
        starts = [0, 5, 9]
        expected = [
            starts[owner] + asked.split([5, 4, 3])[owner].tolist().index(row)
            for owner, row in (owner_of(table, each) for each in ids)
        ]
        assert found == expected + [capacity.total] * (len(found) - len(expected)), name


def test_rows_without_room_are_left_out():
    keys = keys_of(0)
    rows = keys.distinct(keys.prepare(sent(IDS)))
    capacity = RowCapacity([2, 1, 2], torch.device("cpu"))
    asked, position = keys.requests(rows, capacity)
    assert rows.counts.tolist() == [3, 2, 2]
    # The first owner's rows are 1, 3 and 5, the second one's 0 and 5.
    assert asked.tolist() == [1, 3, 0, 0, 1]
    assert position.max() == capacity.total
