"""Adjacent tables in memory, joined into one: tables of one width have one memory, and so has `GradientBucket`.

Plain torch then makes one call for all of them. One call per table would take longer to launch than to run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from nn.embedding.local_tables import LocalTable, PlacedLookup
from nn.ops.addresses import are_adjacent, joined


@dataclass(frozen=True, slots=True)
class AdjacentTables:
    """Local tables `first` to before `end` of a group, adjacent in memory and with one lookup each of one kind, joined."""

    first: int
    end: int
    joined: LocalTable

    @property
    def num_tables(self) -> int:
        return self.end - self.first


def adjacent_tables(
    tables: Sequence[LocalTable], firsts: Sequence[PlacedLookup]
) -> list[AdjacentTables]:
    """Join the tables of a group, in its order, as far as memory and ids and columns of their first lookups allow."""

    def follows(position: int) -> bool:
        before, table = tables[position - 1], tables[position]
        last, first = firsts[position - 1], firsts[position]
        # 16-bit tables cannot be joined, since each has its own rounding.
        return (
            first.ids.first == last.ids.first + last.ids.count
            and first.first_column == last.first_column + before.num_columns
            and table.weight.dtype is torch.float32
            and not (before.is_bounded or table.is_bounded)
            and before.slots is table.slots is None
            and len(before.lookups) == len(table.lookups) == 1
            and table.lookups[0].hotness == before.lookups[0].hotness
            and table.lookups[0].pooling == before.lookups[0].pooling
            and table.weight.shape[1] == before.weight.shape[1]
            and are_adjacent(before.weight, table.weight)
            and all(are_adjacent(before.state[name], table.state[name]) for name in table.state)
        )

    starts = [position for position in range(len(tables)) if position == 0 or not follows(position)]
    return [
        AdjacentTables(first, end, _joined(tables[first:end]))
        for first, end in zip(starts, [*starts[1:], len(tables)], strict=False)
    ]


def _joined(tables: Sequence[LocalTable]) -> LocalTable:
    rows, first = sum(len(table.weight) for table in tables), tables[0]
    state = {name: joined(tensor, rows) for name, tensor in first.state.items()}
    return replace(first, weight=joined(first.weight, rows), state=state)
