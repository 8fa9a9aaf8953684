"""Tables that lie one after the other in memory, seen as one: FBGEMM holds its tables so, `GradientBucket` its vector.

Plain torch then makes one call for all, where the calls for one each would take longer to begin than to run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nn.embedding.local_tables import LocalTable


@dataclass(frozen=True, slots=True)
class AdjacentTables:
    """Parts of one width and hotness whose rows are those of one table.

    Attributes:
        first: position of the first part in its group.
        end: position after the last one.
        table: all of their rows; bears the first one's feature.
    """

    first: int
    end: int
    table: LocalTable

    @property
    def num_parts(self) -> int:
        """How many they are."""
        return self.end - self.first


def adjacent_tables(parts: Sequence[LocalTable]) -> list[AdjacentTables]:
    """Cut a group of parts into as few spans as its memory allows, in the order of the group."""
    starts = [
        place
        for place, part in enumerate(parts)
        if place == 0 or not _follows(parts[place - 1], part)
    ]
    return [
        AdjacentTables(first, end, _joined(parts[first:end]))
        for first, end in zip(starts, [*starts[1:], len(parts)], strict=False)
    ]


def _follows(before: LocalTable, part: LocalTable) -> bool:
    """Whether a part can be of the same span as the one before it; 16-bit ones cannot: each has its own rounding."""
    return (
        part.weight.dtype is torch.float32
        and part.hotness == before.hotness
        and part.weight.shape[1] == before.weight.shape[1]
        and _adjoin(before.weight, part.weight)
        and all(_adjoin(before.state[name], part.state[name]) for name in part.state)
    )


def _adjoin(before: Tensor, after: Tensor) -> bool:
    is_one_memory = before.untyped_storage().data_ptr() == after.untyped_storage().data_ptr()
    return is_one_memory and before.storage_offset() + before.numel() == after.storage_offset()


def _joined(parts: Sequence[LocalTable]) -> LocalTable:
    rows = sum(len(part.weight) for part in parts)

    def tall(first: Tensor) -> Tensor:
        return first.as_strided((rows, *first.shape[1:]), first.stride())

    first = parts[0]
    state = {name: tall(each) for name, each in first.state.items()}
    return replace(first, weight=tall(first.weight), state=state)
