"""Slots of the rows that an arena holds: which row is where, and which slot is taken next.

The first rows of every table, which occur most in a dataset of this project, have slots that never change. The other slots
are a ring: a row that is missing takes the next slot from which no live batch reads, and the row there leaves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from nn.distributed.errors import RankError

FIRST_REACH = 1024
"""Slots of the ring that a search for free ones looks at, beside twice those that are needed."""

# K: ids of a batch, R: rows, C: slots, S: slots of the ring


@dataclass(frozen=True, slots=True)
class Moves:
    """Rows that enter the arena, and changed ones that leave it; all int64, rows in ascending order."""

    fetched_rows: Tensor
    fetched_slots: Tensor
    returned_rows: Tensor
    returned_slots: Tensor


class DeviceMoves(NamedTuple):
    """The same where the host does not know how many rows move; all int32, and as long as the ids of a batch at least."""

    rows: Tensor  # that enter, in ascending order
    slots: Tensor  # of these
    returned: Tensor  # rows that leave these slots, -1 where the row has not changed
    # rows that enter, rows that return, ids whose row was missing, rows for which there is no free slot, ids that have a row
    # here, and zeros, [8]
    counts: Tensor


@dataclass(frozen=True, slots=True)
class TierIds:
    """Positions of the ids of one group of tables in the ids of a batch, [K] each; the rows are int32."""

    group: int  # position of the group
    positions: Tensor  # in the ids, int64
    first: Tensor  # first row of the table here
    end: Tensor  # row after the last one here
    offset: Tensor  # number of the table's row 0 in the group


class SlotMap:
    """Slots of the rows of tables, numbered table after table; the first rows are there, and at least `ring` slots change."""

    def __init__(
        self, rows: Sequence[int], slots: Sequence[int], ring: int, device: torch.device
    ) -> None:
        self.num_rows, num_slots = sum(rows), sum(slots)
        assert self.num_rows < 2**31 - 1, "the planner refuses more"
        assert ring <= num_slots, "the planner refuses smaller arenas"
        share = 1 - ring / max(num_slots, 1)
        fixed = [int(count * share) for count in slots]
        self.num_fixed = sum(fixed)  # slots whose rows never change, the first ones
        self.num_ring = num_slots - self.num_fixed  # S
        bases = list(accumulate(rows, initial=0))
        ends = list(zip(bases, fixed, slots, strict=False))
        rows_of_tables = [
            *(torch.arange(base, base + first) for base, first, _ in ends),
            *(torch.arange(base + first, base + end) for base, first, end in ends),
        ]
        rows_of_slots = torch.cat([*rows_of_tables, torch.tensor([self.num_rows])])
        # row in each slot, int32 [C + 1]; the last one is R, that of no row
        self.row_of_slot = rows_of_slots.int().to(device)
        # slot of each row, -1 without one, int32 [R + 1]; the last one is -1
        self.slot_of_row = torch.full((self.num_rows + 1,), -1, dtype=torch.int32, device=device)
        slots_of_rows = torch.arange(num_slots, dtype=torch.int32, device=device)
        self.slot_of_row[self.row_of_slot[:-1].long()] = slots_of_rows
        # Bits of the live batches that need each position of the ring, and whether its row has changed since it came. The last
        # entries stand for the slots that are not of the ring.
        self.pins = torch.zeros(self.num_ring + 1, dtype=torch.uint8, device=device)
        self.is_changed = torch.zeros(self.num_ring + 1, dtype=torch.uint8, device=device)
        self.are_fixed_changed = False  # whether any other row may have changed
        self._hand = 0

    def map(self, ids: Tensor, of_group: TierIds, pin: int) -> tuple[Moves | None, int, int]:
        """Turn ids into slots in place and keep their rows; return moves, ids that missed, and ids with a row here."""
        numbers = ids.index_select(0, of_group.positions)
        is_here = (numbers >= of_group.first) & (numbers < of_group.end)
        rows = torch.where(is_here, numbers + of_group.offset, self.num_rows)
        slots, moves, missing = self.assign(rows.int(), pin)
        ids.index_copy_(0, of_group.positions, slots.to(ids.dtype))
        return moves, missing, int(is_here.sum())

    def assign(self, rows: Tensor, pin: int) -> tuple[Tensor, Moves | None, int]:
        """Give a slot to every row of a batch, and keep it from other rows.

        `rows`, int32 [K], are R for an id without a row; `pin` is a bit that no other live batch has. Returns slots, int32 [K],
        -1 without a row; the moves that they need, if any; and the ids whose row was missing. Raises RankError: the live
        batches need more rows than the ring has slots.
        """
        slots = self.slot_of_row.index_select(0, rows)
        self._pin(slots, pin)
        missing = rows.index_select(0, ((slots < 0) & (rows < self.num_rows)).nonzero()[:, 0])
        if not len(missing):
            return slots, None, 0
        fetched = torch.unique(missing).long()
        positions = self._free(len(fetched))
        taken = positions + self.num_fixed
        leaving = self.row_of_slot.index_select(0, taken).long()
        self.slot_of_row.index_fill_(0, leaving, -1)
        self.slot_of_row.index_copy_(0, fetched, taken.int())
        self.row_of_slot.index_copy_(0, taken, fetched.int())
        changed = self.is_changed.index_select(0, positions).nonzero()[:, 0]
        self.is_changed.index_fill_(0, positions, 0)
        slots = self.slot_of_row.index_select(0, rows)
        self._pin(slots, pin)
        returned, order = leaving.index_select(0, changed).sort()
        from_slots = taken.index_select(0, changed).index_select(0, order)
        return slots, Moves(fetched, taken, returned, from_slots), len(missing)

    def release(self, released: int, trained: int) -> None:
        """Let the rows of the batches with these bits leave; those of batches that were trained have changed."""
        if trained:
            self.is_changed |= (self.pins & trained) != 0
            self.are_fixed_changed = True
        self.pins &= 255 - released

    def changed(self) -> tuple[Tensor, Tensor] | None:
        """Return rows and slots, int64, that differ from host memory, and count them as equal from now on."""
        slots = self.is_changed[:-1].nonzero()[:, 0] + self.num_fixed
        self.is_changed.zero_()
        if self.are_fixed_changed:
            slots = torch.cat([torch.arange(self.num_fixed, device=slots.device), slots])
        self.are_fixed_changed = False
        return (self.row_of_slot.index_select(0, slots).long(), slots) if len(slots) else None

    def kept_rows(self) -> Tensor:
        """Return the rows whose slots never change, ascending, int64 on the host."""
        return self.row_of_slot[: self.num_fixed].cpu().long().sort().values

    def changing_rows(self) -> Tensor:
        """Copy the rows of the other slots, in no order, int64 on the host; wait for the current stream."""
        return self.row_of_slot[self.num_fixed : -1].cpu().long()

    def resident(self) -> tuple[Tensor, Tensor]:
        """Return all rows of the arena and their slots, int64."""
        rows = self.row_of_slot[:-1].long()
        return rows, torch.arange(len(rows), device=rows.device)

    def _pin(self, slots: Tensor, pin: int) -> None:
        """Keep the rows of slots from leaving; slots that are not of the ring share the last entry."""
        positions = slots - self.num_fixed
        positions = torch.where(positions < 0, self.num_ring, positions)
        pins = self.pins.index_select(0, positions).bitwise_or_(pin)
        self.pins.index_copy_(0, positions.long(), pins)

    def _free(self, count: int) -> Tensor:
        """Return the next `count` positions of the ring that no live batch needs, int64."""
        reach = 2 * count + FIRST_REACH
        while True:
            reach = min(reach, self.num_ring)
            positions = torch.arange(self._hand, self._hand + reach, device=self.pins.device)
            positions %= max(self.num_ring, 1)
            found = (self.pins.index_select(0, positions) == 0).nonzero()[:count, 0]
            if len(found) >= count or reach == self.num_ring:
                break
            reach *= 4
        if len(found) < count:
            raise lacks_slots(count - len(found))
        # Those between the last one found and the last one looked at are looked at again.
        self._hand = (self._hand + int(found[-1]) + 1) % self.num_ring
        return positions.index_select(0, found)


def lacks_slots(count: int) -> RankError:
    """Return the error of live batches that need `count` rows more than there are slots for."""
    return RankError(
        f"the batches at work need {count:,} rows more than the device has room for, of tables with tier: host; raise cache of "
        "these tables in sharding.tables"
    )
