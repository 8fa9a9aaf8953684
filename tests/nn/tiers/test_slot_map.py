"""The slot map: every row of a live batch keeps its slot, rows leave in turn, and too little room is refused."""

import pytest
import torch

from nn.distributed.errors import RankError
from nn.tiers.slot_map import SlotMap

ROWS, SLOTS, RING = [1000, 50, 3000], [60, 50, 90], 150


def test_no_row_of_a_live_batch_is_missing_or_moved():
    generator = torch.Generator().manual_seed(1)
    slot_map = SlotMap(ROWS, SLOTS, RING, torch.device("cpu"))
    held = {int(row): int(slot) for row, slot in zip(*slot_map.resident(), strict=True)}
    # The first rows of every table are there at once.
    assert held.keys() == {*range(60), *range(1000, 1050), *range(1050, 1140)}
    # Rows in host memory that were changed since they came; those of live batches by their pin.
    changed: set[int] = set()
    live: list[tuple[int, torch.Tensor, torch.Tensor]] = []
    for number in range(300):
        if len(live) == 3:
            pin, rows, _ = live.pop(0)
            is_trained = number % 3 > 0
            slot_map.release(pin, pin * is_trained)
            changed |= set(rows.tolist()) if is_trained else set()
        pin = 1 << number % 8
        rows = torch.randint(sum(ROWS), (35,), generator=generator, dtype=torch.int32)
        rows = torch.where(rows % 2 == 0, rows, rows // 40)
        slots, moves, missing = slot_map.assign(rows, pin)
        assert missing == sum(int(row) not in held for row in rows)
        if moves is not None:
            before = {slot: row for row, slot in held.items()}
            leaving = [before[int(slot)] for slot in moves.fetched_slots]
            returned = set(moves.returned_rows.tolist())
            assert returned >= {row for row in leaving if row in changed}
            assert moves.returned_rows.tolist() == sorted(returned)
            assert [held[int(row)] for row in moves.returned_rows] == moves.returned_slots.tolist()
            for row in leaving:
                del held[row]
                changed.discard(row)
            held |= dict(
                zip(moves.fetched_rows.tolist(), moves.fetched_slots.tolist(), strict=True)
            )
        assert slots.tolist() == [held[int(row)] for row in rows]
        live.append((pin, rows, slots))
        # Every live batch still has its rows where it found them.
        for _, of_batch, where in live:
            assert torch.equal(slot_map.row_of_slot[where.long()], of_batch)


def test_ids_without_a_row_have_no_slot():
    slot_map = SlotMap(ROWS, SLOTS, RING, torch.device("cpu"))
    slots, moves, missing = slot_map.assign(torch.tensor([sum(ROWS), 3], dtype=torch.int32), 1)
    assert slots.tolist() == [-1, slot_map.row_of_slot.tolist().index(3)]
    assert (moves, missing) == (None, 0)


def test_a_window_larger_than_the_ring_is_refused():
    slot_map = SlotMap([1000], [40], 20, torch.device("cpu"))
    slot_map.assign(torch.arange(500, 515, dtype=torch.int32), 1)
    with pytest.raises(RankError, match="need 10 rows more than the device has room for"):
        slot_map.assign(torch.arange(600, 615, dtype=torch.int32), 2)
    slot_map.release(1, 1)
    _, moves, _ = slot_map.assign(torch.arange(600, 615, dtype=torch.int32), 2)
    assert moves.returned_rows.tolist() == list(range(500, 510))
