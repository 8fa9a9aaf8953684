"""The distinct rows of tables that a rank's samples need: each is asked of its owner once.

Ids are skewed: of 65,536 ids drawn from millions by a power law, about a third are distinct. A key numbers a row over all owners
and tables, owner after owner, so that sorted keys are the rows of each owner, every one beside its repetitions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from dataloading.dataset.batch_layout import NO_ID, Doublings, first_ids
from nn.embedding.id_blocks import IdBlock
from nn.embedding.lookups import Lookup
from nn.layers.distinct_rows import DistinctRows
from nn.sharding.arrived_ids import ArrivedIds, features_of
from nn.sharding.merged_rows import distinct_keys
from nn.sharding.placement import RankTables, RequestedTables

# K: ids of all lookups of a rank's samples, W: owners


@dataclass(frozen=True, slots=True)
class SortedKeys:
    """The keys of a batch, sorted, and the distinct rows among them.

    Attributes:
        keys: sorted, [K].
        order: position of each key before sorting, [K].
        number: of the row among all distinct ones, [K]; not defined behind the last key of a row.
        first_number: number of each owner's first row, [W].
        counts: rows of each owner, [W].
    """

    keys: Tensor
    order: Tensor
    number: Tensor
    first_number: Tensor
    counts: Tensor


class RowCapacity:
    """Capacity for the rows that a rank asks for.

    `limits` are the rows of each owner, [W], `firsts` the rows of all owners before each, and `total` those of all.
    """

    def __init__(self, rows: Sequence[int], device: torch.device) -> None:
        self.total = sum(rows)
        self.limits = torch.tensor(list(rows), dtype=torch.int64, device=device)
        self.firsts = self.limits.cumsum(0) - self.limits


class RequestKeys:
    """Keys of a rank's ids, for batches of one size.

    `lookups` are those of all tables, each with the name of a block as its feature. `starts` has the key of each owner's first
    row, and behind them the number of keys, [W + 1].
    """

    def __init__(
        self, tables: RankTables, requested: RequestedTables, batch_size: int, doublings: Doublings
    ) -> None:
        counts = tables.counts(batch_size, doublings)
        device = tables.ranks.device
        features = features_of(requested.shards, counts)
        sizes = {name: count.sent_size(batch_size) for name, count in counts.items()}
        starts = first_ids(counts, batch_size)
        self._selected = torch.cat(
            [torch.arange(starts[name], starts[name] + sizes[name]) for name in features]
        ).to(device)
        self._batch_size, self._rank = batch_size, tables.ranks.rank
        self._prepare = ArrivedIds(tables, features, counts, 1, batch_size)
        self.lookups: list[tuple[Lookup, ...]] = []
        self.blocks: dict[str, IdBlock] = {}
        # Position of the ids of each lookup, and the table.
        self._sources: list[tuple[IdBlock, int]] = []
        # The block of a feature in the last table that looks it up.
        self.block_of: dict[str, str] = {}
        first = 0
        for position, shard in enumerate(requested.shards):
            for lookup in shard.lookups:
                block = self._prepare.blocks[lookup.feature]
                self._sources.append((block, position))
                self.block_of[lookup.feature] = str(len(self.blocks))
                self.blocks[self.block_of[lookup.feature]] = replace(block, first=first)
                first += block.size
            last = len(self.blocks)
            names = map(str, range(last - len(shard.lookups), last))
            self.lookups.append(
                tuple(
                    replace(lookup, feature=name)
                    for lookup, name in zip(shard.lookups, names, strict=True)
                )
            )
        self._set_shifts(requested, device)

    def _set_shifts(self, requested: RequestedTables, device: torch.device) -> None:
        """Store what turns an id into a key: the rows of a shard of its table, and the difference for every shard."""
        starts = list(accumulate(requested.rows_by_rank, initial=0))
        self._no_key = starts[-1]
        dtype = torch.int32 if self._no_key < 2**31 - 1 else torch.int64
        self.starts = torch.tensor(starts, dtype=dtype, device=device)
        most = max(len(shards) for shards in requested.shards_by_table)
        shifts = torch.zeros(len(requested.shards), most, dtype=dtype)
        for table, shards in enumerate(requested.shards_by_table):
            for number, shard in enumerate(shards):
                shifts[table, number] = starts[shard.rank] + shard.base - shard.first_row
        self._shifts = shifts.flatten().to(device)
        repeats = torch.tensor([block.count for block, _ in self._sources])
        tables = torch.tensor([table for _, table in self._sources])
        rows_per_shard = torch.tensor(requested.rows_per_shard)[tables]
        self._rows_per_shard = rows_per_shard.repeat_interleave(repeats).to(device, dtype)
        self._first_shift = (tables * most).repeat_interleave(repeats).to(device, torch.int32)

    def prepare(self, ids: Tensor, num_valid: int | None = None) -> Tensor:
        """Return the ids of the tables' features, expanded or with the positions of ragged ones.

        Where not all rows of the global batch are valid, padding rows get the ids of this rank's first row, or none where all
        are padding: so they ask for no row that the batch does not use.
        """
        prepared = self._prepare(ids.index_select(0, self._selected))
        if num_valid is None:
            return prepared
        valid = min(max(num_valid - self._rank * self._batch_size, 0), self._batch_size)
        for block in {id(block): block for block in self._prepare.blocks.values()}.values():
            if not block.is_ragged:
                rows = prepared.narrow(0, block.first, block.count).view(self._batch_size, -1)
                rows[valid:] = rows[0] if valid else NO_ID
        return prepared

    def distinct(self, prepared: Tensor) -> SortedKeys:
        """Sort the keys of prepared ids, and count the distinct ones of each owner; the sort is stable."""
        ids = torch.cat(
            [prepared.narrow(0, block.first, block.count) for block, _ in self._sources]
        ).to(self.starts.dtype)
        shard = torch.div(ids, self._rows_per_shard, rounding_mode="floor").clamp_(min=0)
        shift = self._shifts.index_select(0, shard.add_(self._first_shift))
        keys = torch.where(ids == NO_ID, self._no_key, ids + shift)
        keys, order, number = distinct_keys(keys, self._no_key)
        # Distinct rows before each owner's first one.
        edges = torch.searchsorted(keys, self.starts)
        before = torch.cat([number.new_zeros(1), number]).index_select(0, edges)
        return SortedKeys(keys, order, number - 1, before[:-1], before[1:] - before[:-1])

    def requests(self, rows: SortedKeys, capacity: RowCapacity) -> tuple[Tensor, Tensor]:
        """Return the rows to ask for, and the position of each key's row among them.

        The former are row numbers on the owner, `NO_ID` behind the last one of each, [`capacity.total`]; the latter are of sorted
        keys, [K], in ascending order, and `capacity.total` for a key without a row, or whose row does not fit.
        """
        owner = torch.bucketize(rows.keys, self.starts[1:-1], right=True)
        number = rows.number - rows.first_number.index_select(0, owner)
        fits = (rows.keys < self._no_key) & (number < capacity.limits.index_select(0, owner))
        position = torch.where(
            fits, number + capacity.firsts.index_select(0, owner), capacity.total
        )
        asked = torch.full(
            (capacity.total + 1,), NO_ID, dtype=rows.keys.dtype, device=rows.keys.device
        )
        # Repetitions of a row write the same number.
        asked.scatter_(0, position, rows.keys - self.starts.index_select(0, owner))
        return asked[: capacity.total], position

    def distinct_rows(self, rows: Tensor, local: Tensor, feature: str) -> DistinctRows:
        """Return rows with the positions of a feature's ids; `local` is the result of `with_row_positions`.

        Raises KeyError: none of the tables is looked up by it.
        """
        block = self.blocks[self.block_of[feature]]
        positions = local.narrow(0, block.first, block.count)
        hotness = 0 if block.is_ragged else block.count // block.num_samples
        if block.is_ragged:
            starts = local.narrow(0, block.first_start, block.num_samples)
            lengths = local.narrow(0, block.first_length, block.num_samples)
        else:
            starts = torch.arange(0, block.count, hotness, dtype=local.dtype, device=local.device)
            lengths = torch.full_like(starts, hotness)
        return DistinctRows(rows, positions, starts, lengths, hotness)

    def samples(self, local: Tensor, feature: str) -> Tensor:
        """Return the sample of each id of a ragged feature, [C]; any sample behind the last id."""
        block = self.blocks[self.block_of[feature]]
        return local.narrow(0, block.first_sample, block.count)

    def with_row_positions(self, prepared: Tensor, position: Tensor, order: Tensor) -> Tensor:
        """Return prepared ids as the lookups read them: ids replaced by the positions of their rows, in `blocks`.

        `position` is of sorted keys, [K]; `order` has the position of each before sorting.
        """
        unsorted = torch.empty_like(position).scatter_(0, order, position).to(prepared.dtype)
        if not any(block.is_ragged for block, _ in self._sources):
            return unsorted
        pieces, first = [], 0
        for block, _ in self._sources:
            pieces.append(unsorted[first : first + block.count])
            pieces.append(prepared[block.first + block.count : block.first + block.size])
            first += block.count
        return torch.cat(pieces)
