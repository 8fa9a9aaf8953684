"""Lookup and update of the local tables that are looked up for the same samples.

All shapes are known beforehand, those of ragged features by their capacity (`nn.embedding.id_blocks`). The host therefore
reads nothing back, and everything can be captured in a CUDA graph. GPUs use Triton kernels, CPUs plain torch.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from math import gcd

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from configs.schema import OptimizerConfig
from nn.embedding.adjacent_tables import AdjacentTables, adjacent_tables
from nn.embedding.id_blocks import IdBlock
from nn.embedding.key_sources import KeySources
from nn.embedding.local_tables import (
    LocalTable,
    PlacedLookup,
    SortedIds,
    UpdateScalars,
    key_bases,
    place_lookups,
    row_bases,
)
from nn.embedding.lookups import Lookup, Pooling
from nn.embedding.torch_optimizer import update_rows
from nn.embedding.touched_rows import TouchedRows
from nn.ops.addresses import elements_between
from nn.ops.table_rows import TableRows

# G: samples, H: hotness of a lookup, N: total number of ids and of the positions of ragged ones, K: number of keys, D: columns of
# a table, T: columns of all lookups, V: vectors of a lookup, S: number of adjacent tables

# From this number on, torch uses a radix sort for integers on a CPU: 32,768 take an eighth of the time of 26,624.
RADIX_SORT_IDS = 2**15
# Up to this number, a comparison sort is faster than a radix sort of `RADIX_SORT_IDS`.
COMPARED_IDS = 2**12


class LocalEmbeddingBags:
    """Local tables that are looked up and updated together.

    Tables are in the order of their columns in the embeddings of `num_samples` (G), unless lookups have a `column`; every lookup
    is of a feature of `blocks`. `touched` collects the rows of updates, if anybody asks for them.
    """

    touched: TouchedRows | None = None

    def __init__(
        self,
        tables: Sequence[LocalTable],
        blocks: Mapping[str, IdBlock],
        num_samples: int,
        config: OptimizerConfig,
        scalars: UpdateScalars,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.tables = list(tables)
        self.num_samples = num_samples
        self.num_ids = sum(block.size for block in blocks.values())
        self.num_columns = sum(table.num_columns for table in self.tables)
        self.dtype = dtype
        self._config = config
        self._scalars = scalars
        self._device = device
        self._lookups = place_lookups(self.tables, blocks)
        self._counts = [
            sum(placed.ids.count for placed in self._lookups if placed.table == position)
            for position in range(len(self.tables))
        ]
        self._first_keys = list(accumulate(self._counts, initial=0))
        self._key_bases = key_bases(self.tables)
        self._is_bounded = any(table.is_bounded for table in self.tables)
        self._has_slots = any(table.slots is not None for table in self.tables)
        has_several = any(
            len(table.lookups) > 1 or table.lookups[0].is_ragged for table in self.tables
        )
        self._sources = KeySources(self._lookups, num_samples, device) if has_several else None
        self._kernels = None
        if device.type == "cuda" and self.tables:
            # Triton comes with torch's CUDA builds only.
            from nn.embedding.triton_launcher import TritonLauncher

            self._kernels = TritonLauncher(
                self.tables, self._lookups, self._key_bases, self._sources, num_samples, config
            )

    def _of_keys(self, values: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """Return the values of tables as those of their keys, [K]."""
        if dtype is None:
            dtype = torch.int32 if self._key_bases[-1] < 2**31 else torch.int64
        counts = torch.tensor(self._counts, dtype=torch.int64)
        return torch.tensor(values, dtype=dtype).repeat_interleave(counts).to(self._device)

    @cached_property
    def _base_of_key(self) -> Tensor:
        """Keys of all tables before the table of each key; built on first use, since evaluation on a GPU does not use it."""
        return self._of_keys(self._key_bases[:-1])

    @cached_property
    def _rows_of_key(self) -> tuple[Tensor, Tensor]:
        """First row here, and number of rows here, of the table of each key."""
        return (
            self._of_keys([table.first_row or 0 for table in self.tables]),
            self._of_keys([len(table.weight) for table in self.tables]),
        )

    def _keys(self, ids: Tensor) -> Tensor:
        """Return the keys [K] of ids [N]: an id has one per lookup of its feature."""
        rows = ids
        in_place = all(placed.ids.first == placed.first_key for placed in self._lookups)
        if not in_place or len(ids) != len(self._base_of_key):
            parts = [ids.narrow(0, placed.ids.first, placed.ids.count) for placed in self._lookups]
            rows = torch.cat(parts)
        if self._is_bounded:
            first_row, num_rows = self._rows_of_key
            rows = rows - first_row
            rows = torch.where((rows >= 0) & (rows < num_rows), rows, num_rows)
        return rows + self._base_of_key

    def look_up(self, ids: Tensor, out: Tensor) -> None:
        """Look up the rows of each sample's ids, and pool them as each lookup does.

        `ids` [N] are in the order of the features, each [G, H]; `out` [G, T] may have any row stride, and is overwritten. A
        lookup without pooling has H vectors of D columns.
        """
        if self._kernels is not None:
            self._kernels.look_up(ids, out)
            return
        for adjacent in self._adjacent:
            lookups = self._lookups_of(adjacent)
            if adjacent.joined.is_bounded:
                for placed in lookups:
                    vectors = _looked_up_bounded(adjacent.joined, placed, ids, self.num_samples)
                    out.narrow(1, placed.first_column, vectors.shape[1]).copy_(vectors)
                continue
            for placed in lookups[:1] if adjacent.num_tables > 1 else lookups:
                lookup, count = placed.lookup, placed.ids.count
                rows = ids.narrow(0, placed.ids.first, count * adjacent.num_tables)
                if adjacent.num_tables > 1:
                    # The first row of each table in the joined table, for each of its ids.
                    first = self._first_keys[adjacent.first]
                    bases = self._base_of_key[first : first + count * adjacent.num_tables]
                    rows = rows + (bases - self._key_bases[adjacent.first])
                vectors = _looked_up(adjacent.joined, lookup, rows)
                vectors = vectors.view(adjacent.num_tables, self.num_samples, -1)
                self._columns_of(out, placed, adjacent).copy_(vectors)

    def table_rows(self, ids: Tensor) -> TableRows | None:
        """Return the rows of ids [N] for a kernel on a GPU that looks them up itself; None if a vector is not just one row."""
        if self._row_offsets is None:
            return None
        return TableRows(self.tables[0].weight, ids, *self._row_offsets)

    @cached_property
    def _row_offsets(self) -> tuple[Tensor, int] | None:
        widths = {placed.width for placed in self._lookups}
        are_rows = all(placed.lookup.hotness == 1 for placed in self._lookups)
        if self._kernels is None or self._is_bounded or len(widths) > 1 or not are_rows:
            return None
        first = self.tables[0].weight
        weights = [self.tables[placed.table].weight for placed in self._lookups]
        distances = [elements_between(first, weight) for weight in weights]
        first_ids = [placed.ids.first for placed in self._lookups]
        offsets = torch.tensor([distances, first_ids], dtype=torch.int64, device=self._device)
        return offsets, gcd(16, *distances, *widths)

    def sort(self, ids: Tensor) -> SortedIds:
        """Sort the keys of ids [N] for `update`, stably; slots by the rows in them: sums do not depend on who has which slot."""
        keys = self._keys(ids)
        if self._sources is not None:
            self._sources.set(ids)
        if not self._has_slots:
            keys, order = self._sorted(keys, self._key_bases[-1])
            return SortedIds(keys, order, keys)
        row_keys, order = self._sorted(self._row_keys(keys), self._row_bases[-1])
        return SortedIds(keys.index_select(0, order), order, row_keys)

    def _sorted(self, keys: Tensor, end: int) -> tuple[Tensor, Tensor]:
        num_keys = len(keys)
        if self._device.type == "cpu" and COMPARED_IDS < num_keys < RADIX_SORT_IDS:
            padding = keys.new_full((RADIX_SORT_IDS - num_keys,), end)
            keys, order = torch.sort(torch.cat([keys, padding]), stable=True)
            return keys[:num_keys], order[:num_keys]
        return torch.sort(keys, stable=True)

    @cached_property
    def _row_bases(self) -> list[int]:
        return row_bases(self.tables)

    @cached_property
    def _shift_of_key(self) -> Tensor:
        """Difference between row key and key where a table has no slots."""
        shifts = [row - key for row, key in zip(self._row_bases, self._key_bases, strict=True)]
        is_wide = max(self._row_bases[-1], self._key_bases[-1]) >= 2**31
        return self._of_keys(shifts[:-1], torch.int64 if is_wide else torch.int32)

    def _row_keys(self, keys: Tensor) -> Tensor:
        """Return the keys that the rows would have without slots, [K]."""
        row_keys = keys + self._shift_of_key
        for position, table in enumerate(self.tables):
            if table.slots is None:
                continue
            where = slice(self._first_keys[position], self._first_keys[position + 1])
            slots = keys[where] - self._key_bases[position]
            rows = table.slots.rows_here(slots)
            row_keys[where] = rows.to(row_keys.dtype) + self._row_bases[position]
        return row_keys

    def take_sorted(self, ids: Tensor, keys: Tensor, order: Tensor) -> SortedIds:
        """Return what `sort` returns of ids [N] whose keys [K] are sorted already, stably."""
        if self._sources is not None:
            self._sources.set(ids)
        return SortedIds(keys, order, keys)

    def update(self, ids: SortedIds, gradients: Tensor, is_good: Tensor) -> None:
        """Update every looked-up row once, by the sum of gradients [G, T], any row stride, unless `is_good`, int32 [1], is 0."""
        if self._kernels is not None:
            mask = None if self.touched is None else self.touched.mask
            self._kernels.update(ids, gradients, self._scalars, is_good, mask)
            return
        if not (self.tables and is_good.item()):
            return
        lr, _, _, scale, *_ = self._scalars.values.tolist()
        for adjacent in self._adjacent:
            where = slice(self._first_keys[adjacent.first], self._first_keys[adjacent.end])
            keys, order = ids.keys[where], ids.order[where]
            base, table = self._key_bases[adjacent.first], adjacent.joined
            if table.is_bounded:
                # Keys without a row here are the last ones.
                num_valid = int((keys < base + len(table.weight)).sum())
                keys, order = keys[:num_valid], order[:num_valid]
            keys, counts = torch.unique_consecutive(keys, return_counts=True)
            first_ids = counts.cumsum(0) - counts
            if self.touched is not None:
                self.touched.add(ids.row_keys[where][first_ids])
            vectors, sources = self._gradients_of(adjacent, gradients, scale, order)
            # A row's gradients are summed as a lookup sums a sample's rows: in order.
            total = embedding_bag(sources, vectors, first_ids, mode="sum")
            update_rows(
                table, keys.long() - base, total, self._config, lr=lr, step=self._scalars.step
            )

    def _gradients_of(
        self, adjacent: AdjacentTables, gradients: Tensor, scale: float, order: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return gradients of vectors, float32 [vectors, D], and which of them each key in `order` has."""
        lookups, width = self._lookups_of(adjacent), adjacent.joined.weight.shape[1]
        first = lookups[0].lookup
        if len(adjacent.joined.lookups) == 1 and not first.is_ragged:
            columns = self._columns_of(gradients, lookups[0], adjacent)
            vectors = (columns.float() * (scale * first.factor)).reshape(-1, width)
            return vectors, (order - self._first_keys[adjacent.first]) // first.ids_per_vector
        assert self._sources is not None, "there is a table of this kind"
        rows, columns = self._sources.rows[order].long(), self._sources.columns[order].long()
        positions = columns.unsqueeze(1) + torch.arange(width)
        factors = self._sources.factors[order].unsqueeze(1) * scale
        return gradients[rows.unsqueeze(1), positions].float() * factors, torch.arange(len(order))

    @cached_property
    def _adjacent(self) -> list[AdjacentTables]:
        firsts = [
            next(placed for placed in self._lookups if placed.table == position)
            for position in range(len(self.tables))
        ]
        return adjacent_tables(self.tables, firsts)

    def _lookups_of(self, adjacent: AdjacentTables) -> list[PlacedLookup]:
        return [placed for placed in self._lookups if adjacent.first <= placed.table < adjacent.end]

    def _columns_of(self, matrix: Tensor, placed: PlacedLookup, adjacent: AdjacentTables) -> Tensor:
        """Return the columns of a lookup in a matrix [G, T], and those of the adjacent tables after it: [S, G, V * D]."""
        width = placed.lookup.num_vectors * adjacent.joined.weight.shape[1]
        columns = matrix.narrow(1, placed.first_column, width * adjacent.num_tables)
        return columns.unflatten(1, (adjacent.num_tables, -1)).transpose(0, 1)


def _looked_up_bounded(
    table: LocalTable, placed: PlacedLookup, ids: Tensor, num_samples: int
) -> Tensor:
    """Return the vectors of one lookup, float32 [G, V * D], where ids may have no row here."""
    lookup, block = placed.lookup, placed.ids
    rows = ids.narrow(0, block.first, block.count) - (table.first_row or 0)
    if lookup.is_ragged:
        vectors = ids.narrow(0, block.first_sample, block.count).long()
    else:
        vectors = torch.arange(block.count) // lookup.ids_per_vector
    is_here = (rows >= 0) & (rows < len(table.weight))
    out = torch.zeros(num_samples * lookup.num_vectors, placed.width)
    out.index_add_(0, vectors[is_here], table.weight[rows[is_here]].float())
    if lookup.pooling is Pooling.mean and lookup.is_ragged:
        lengths = ids.narrow(0, block.first_length, num_samples).clamp(min=1)
        out /= lengths.unsqueeze(1)
    elif lookup.pooling is Pooling.mean:
        out *= lookup.factor
    return out.view(num_samples, -1)


def _looked_up(table: LocalTable, lookup: Lookup, rows: Tensor) -> Tensor:
    """Return the vectors of rows [samples * H], float32 [samples, V * D], without a copy of all rows if possible."""
    width = table.weight.shape[1]
    if lookup.ids_per_vector == 1:
        return table.weight.index_select(0, rows).float().view(-1, lookup.num_vectors * width)
    if table.weight.dtype is torch.float32:
        pooled = embedding_bag(rows.view(-1, lookup.hotness), table.weight, mode="sum")
    else:
        looked_up = table.weight.index_select(0, rows).float()
        pooled = looked_up.view(-1, lookup.hotness, width).sum(1)
    return pooled * lookup.factor if lookup.pooling is Pooling.mean else pooled
