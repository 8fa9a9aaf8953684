"""Rows of tables that get another key: the weights that the seed gives to the key, and no optimizer state.

Tables of one width lie one after the other in one memory, so the rows of all of them are written at once. It happens in the order
of the main stream: behind the update of the step before, and before the lookup of the first batch that has the keys. That batch
has also brought the rows of tables in host memory or on disk to their slots.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dataloading.keys.rekeyed import LEFT, Rekeyed
from nn.layers.initialization import KeyedWeights
from nn.ops.addresses import are_adjacent, joined


@dataclass(frozen=True, slots=True)
class KeyedShard:
    """A shard of a table for raw keys on this rank, or its replica; the key and the table's name give a row's weights.

    `weight` [R, D] and `states` are its rows or, if `slots` has the slot of each row, int32 [R], the arena that holds some.
    """

    table: str
    keys_of: str
    weight: Tensor
    states: Sequence[Tensor]
    row_offset: int
    column_offset: int
    bound: float
    slots: Tensor | None = None

    @property
    def num_rows(self) -> int:
        return len(self.weight if self.slots is None else self.slots)


class RowResets:
    def __init__(self, shards: Sequence[KeyedShard], seed: int) -> None:
        groups: list[list[KeyedShard]] = []
        for shard in shards:
            if groups and _adjoin(groups[-1][-1], shard):
                groups[-1].append(shard)
            else:
                groups.append([shard])
        self._groups = [_Group(group, seed) for group in groups]

    def write(self, rekeyed: Mapping[str, Rekeyed]) -> None:
        for group in self._groups:
            group.write(rekeyed)


def _adjoin(shard: KeyedShard, other: KeyedShard) -> bool:
    """Return whether `other` lies behind a shard in one memory, all rows of both."""
    tensors = (shard.weight, *shard.states), (other.weight, *other.states)
    return shard.slots is other.slots is None and all(
        one.dtype == two.dtype and one.shape[1:] == two.shape[1:] and are_adjacent(one, two)
        for one, two in zip(*tensors, strict=True)
    )


class _Group:
    """Shards that lie one after the other in one memory."""

    def __init__(self, shards: Sequence[KeyedShard], seed: int) -> None:
        self._shards = shards
        counts = [shard.num_rows for shard in shards]
        self._firsts = [sum(counts[:index]) for index in range(len(counts))]
        first = shards[0]
        self._slots = first.slots
        count = sum(len(shard.weight) for shard in shards)
        self._weight = joined(first.weight, count)
        self._states = [joined(state, count) for state in first.states]
        self._weights = KeyedWeights(
            [(shard.table, shard.column_offset, shard.bound) for shard in shards],
            seed,
            first.weight.shape[1],
            first.weight.device,
        )

    @torch.no_grad()
    def write(self, rekeyed: Mapping[str, Rekeyed]) -> None:
        parts = []
        for index, (shard, first) in enumerate(zip(self._shards, self._firsts, strict=True)):
            new = rekeyed.get(shard.keys_of)
            if new is None:
                continue
            rows = new.rows - shard.row_offset
            # A row whose key left keeps its weights until another key gets it.
            mine = (rows >= 0) & (rows < shard.num_rows) & (new.keys != LEFT)
            rows = rows[mine] + first
            parts.append(np.stack([rows, new.keys[mine], np.full(len(rows), index)]))
        if not sum(part.shape[1] for part in parts):
            return
        columns = torch.from_numpy(np.concatenate(parts, axis=1))
        device = self._weight.device
        if device.type == "cuda":
            # The host would wait for a copy from other memory.
            columns = columns.pin_memory()
        at, keys, members = columns.to(device, non_blocking=True)
        weights = self._weights(keys, members)
        if self._slots is not None:
            at = self._slots.index_select(0, at).long()
        self._weight.index_copy_(0, at, weights.to(self._weight.dtype))
        for state in self._states:
            state.index_fill_(0, at, 0)
