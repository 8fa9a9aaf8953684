"""Ids of tables in host memory, which become slots: each table has a copy of its own, behind all other ids.

Behind these are the rows that ranks ask of such tables.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from nn.embedding.id_blocks import IdBlock
from nn.embedding.local_tables import LocalTable, SlotRows
from nn.tiers.slot_map import TierIds


class SlotIds:
    """Copies of the ids of tables in host memory: a feature may be looked up in several tables, each with other slots.

    `asked` are tables in host memory whose rows are asked for, and the rows for which there is room. `blocks` and `tables` are
    those given, with the copies as features `feature/table`; `num_ids` counts the copies too. `tier_ids` are the positions of
    the ids that become slots, per group of tables.
    """

    def __init__(
        self,
        tables: Sequence[LocalTable],
        blocks: Mapping[str, IdBlock],
        device: torch.device,
        asked: Sequence[tuple[SlotRows, int]] = (),
    ) -> None:
        self.blocks, self.tables = dict(blocks), list(tables)
        end = sum(block.size for block in blocks.values())
        positions = []
        for number, table in enumerate(tables):
            if table.slots is None:
                continue
            own = [replace(x, feature=f"{x.feature}/{number}") for x in table.lookups]
            self.tables[number] = replace(table, lookups=tuple(own))
            for lookup, copied in zip(table.lookups, own, strict=True):
                block = blocks[lookup.feature]
                self.blocks[copied.feature] = replace(block, first=end)
                positions.append(torch.arange(block.first, block.first + block.size))
                end += block.size
        self._copied = torch.cat(positions).to(device) if positions else None
        self.num_ids = end
        self._asked_sizes = [room for _, room in asked]
        firsts = accumulate(self._asked_sizes, initial=end)
        of_asked = [
            (slots, IdBlock(first, room, room))
            for (slots, room), first in zip(asked, firsts, strict=False)
        ]
        self.tier_ids = _tier_ids(self.tables, self.blocks, of_asked, device)

    def __call__(self, ids: Tensor, asked: Sequence[Tensor] = ()) -> Tensor:
        """Return the ids with the copies, and behind them the rows that are asked for."""
        copies = [] if self._copied is None else [ids.index_select(0, self._copied)]
        further = copies + [rows.to(ids.dtype) for rows in asked]
        return torch.cat([ids, *further]) if further else ids

    def asked(self, ids: Tensor) -> list[Tensor]:
        """View the slots of the rows that are asked for, in the order of the tables."""
        return list(ids[self.num_ids :].split(self._asked_sizes))


def _tier_ids(
    tables: Sequence[LocalTable],
    blocks: Mapping[str, IdBlock],
    asked: Sequence[tuple[SlotRows, IdBlock]],
    device: torch.device,
) -> list[TierIds]:
    """Return the positions of the ids that become slots: of lookups, and of rows that are asked for."""
    looked_up = [
        (table.slots, blocks[lookup.feature])
        for table in tables
        if table.slots is not None
        for lookup in table.lookups
    ]
    parts: dict[int, list[tuple[SlotRows, IdBlock]]] = {}
    for slots, block in (*looked_up, *asked):
        parts.setdefault(slots.group, []).append((slots, block))

    def of_ids(values: Sequence[int], counts: Sequence[int]) -> Tensor:
        repeats = torch.tensor(counts)
        return torch.tensor(values, dtype=torch.int32).repeat_interleave(repeats).to(device)

    found = []
    for group, members in parts.items():
        counts = [block.count for _, block in members]
        positions = [torch.arange(block.first, block.first + block.count) for _, block in members]
        firsts = [slots.first_row for slots, _ in members]
        ends = [slots.first_row + slots.num_rows for slots, _ in members]
        offsets = [slots.offset for slots, _ in members]
        bounds = (of_ids(values, counts) for values in (firsts, ends, offsets))
        found.append(TierIds(group, torch.cat(positions).to(device), *bounds))
    return found
