"""Lookup and update of the local tables that are looked up for the same samples.

Hotness is fixed. All shapes are therefore known beforehand, the host reads nothing back, and everything can be captured in a
CUDA graph. GPUs use Triton kernels, CPUs plain torch.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from configs.schema import OptimizerConfig
from nn.embedding.adjacent_tables import AdjacentTables, adjacent_tables
from nn.embedding.local_tables import (
    LocalTable,
    PlacedLookup,
    SortedIds,
    UpdateScalars,
    place_lookups,
)
from nn.embedding.lookups import Lookup, Pooling
from nn.embedding.torch_optimizer import update_rows

# G: samples, H: hotness of a lookup, N: total number of ids (sum of G * H over features), K: number of keys (sum of G * H
# over lookups), D: columns of a table, T: columns of all lookups, V: vectors of a lookup, S: number of adjacent tables

# From this number on, torch uses a radix sort for integers on a CPU: 32,768 take an eighth of the time of 26,624.
RADIX_SORT_IDS = 2**15
# Up to this number, a comparison sort is faster than a radix sort of `RADIX_SORT_IDS`.
COMPARED_IDS = 2**12


class LocalEmbeddingBags:
    """Local tables that are looked up and updated together.

    Args:
        tables: in the order of their columns in the embeddings.
        hotness: feature -> ids per sample, in the order of the ids; every lookup is of one of these features.
        num_samples: G.
        config: optimizer of the tables.
        scalars: of the update.
        dtype: of the embeddings and their gradients.
        device: of the tables.

    Attributes:
        num_ids: N.
        num_columns: T.
    """

    def __init__(
        self,
        tables: Sequence[LocalTable],
        hotness: Mapping[str, int],
        num_samples: int,
        config: OptimizerConfig,
        scalars: UpdateScalars,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.tables = list(tables)
        self.num_samples = num_samples
        self.num_ids = num_samples * sum(hotness.values())
        self.num_columns = sum(table.num_columns for table in self.tables)
        self.dtype = dtype
        self._config = config
        self._scalars = scalars
        self._device = device
        self._lookups = place_lookups(self.tables, hotness, num_samples)
        self._counts = [num_samples * table.ids_per_sample for table in self.tables]
        self._first_keys = list(accumulate(self._counts, initial=0))
        self._key_bases = list(accumulate((len(table.weight) for table in self.tables), initial=0))
        self._kernels = None
        if device.type == "cuda" and self.tables:
            # Triton comes with torch's CUDA builds only.
            from nn.embedding.triton_launcher import TritonLauncher

            self._kernels = TritonLauncher(self.tables, self._lookups, num_samples, config)

    @cached_property
    def _base_of_key(self) -> Tensor:
        """Rows of all tables before the table of each key; built on first use, since evaluation on a GPU does not use it."""
        key_dtype = torch.int32 if self._key_bases[-1] < 2**31 else torch.int64
        bases = torch.tensor(self._key_bases[:-1], dtype=key_dtype)
        counts = torch.tensor(self._counts, dtype=torch.int64)
        return bases.repeat_interleave(counts).to(self._device)

    def _keys(self, ids: Tensor) -> Tensor:
        """Return the keys [K] of ids [N]: an id has one per lookup of its feature."""
        if all(placed.first_id == placed.first_key for placed in self._lookups):
            return ids + self._base_of_key
        blocks = [
            ids.narrow(0, placed.first_id, self.num_samples * placed.lookup.hotness)
            for placed in self._lookups
        ]
        return torch.cat(blocks) + self._base_of_key

    def look_up(self, ids: Tensor, out: Tensor) -> None:
        """Look up the rows of each sample's ids, and pool them as each lookup does.

        Args:
            ids: [N], feature after feature, each [G, H].
            out: [G, T], any row stride; overwritten. A lookup without pooling has H vectors of D columns.
        """
        if self._kernels is not None:
            self._kernels.look_up(ids, out)
            return
        for adjacent in self._adjacent:
            lookups = self._lookups_of(adjacent)
            for placed in lookups[:1] if adjacent.num_tables > 1 else lookups:
                lookup = placed.lookup
                count = self.num_samples * lookup.hotness
                rows = ids[placed.first_id : placed.first_id + count * adjacent.num_tables]
                if adjacent.num_tables > 1:
                    rows = rows + self._row_of_adjacent(adjacent, count)
                vectors = _looked_up(adjacent.joined, lookup, rows)
                vectors = vectors.view(adjacent.num_tables, self.num_samples, -1)
                self._columns_of(out, placed, adjacent).copy_(vectors)

    def sort(self, ids: Tensor) -> SortedIds:
        """Sort the keys of ids [N] for `update`; the sort is stable, so that sums have one order too."""
        keys = self._keys(ids)
        num_keys = len(keys)
        if self._device.type == "cpu" and COMPARED_IDS < num_keys < RADIX_SORT_IDS:
            padding = keys.new_full((RADIX_SORT_IDS - num_keys,), self._key_bases[-1])
            keys, order = torch.sort(torch.cat([keys, padding]), stable=True)
            return SortedIds(keys[:num_keys], order[:num_keys])
        keys, order = torch.sort(keys, stable=True)
        return SortedIds(keys, order)

    def update(self, ids: SortedIds, gradients: Tensor, is_good: Tensor) -> None:
        """Update every row that was looked up, once, by the sum of its gradients.

        Args:
            ids: result of `sort`.
            gradients: of the embeddings, [G, T], any row stride.
            is_good: int32 [1]; 0 leaves everything unchanged.
        """
        if self._kernels is not None:
            self._kernels.update(ids, gradients, self._scalars, is_good)
            return
        if not (self.tables and is_good.item()):
            return
        lr, _, _, scale, *_ = self._scalars.values.tolist()
        for adjacent in self._adjacent:
            where = slice(self._first_keys[adjacent.first], self._first_keys[adjacent.end])
            keys, counts = torch.unique_consecutive(ids.keys[where], return_counts=True)
            vectors, sources = self._gradients_of(adjacent, gradients, scale)
            positions = ids.order[where] - where.start
            if len(adjacent.joined.lookups) == 1:
                sources = positions // adjacent.joined.lookups[0].ids_per_vector
            else:
                sources = sources[positions]
            # A row's gradients are summed as a lookup sums a sample's rows: in order.
            total = embedding_bag(sources, vectors, counts.cumsum(0) - counts, mode="sum")
            rows = keys.long() - self._key_bases[adjacent.first]
            update_rows(adjacent.joined, rows, total, self._config, lr=lr, step=self._scalars.step)

    def _gradients_of(
        self, adjacent: AdjacentTables, gradients: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of all vectors of adjacent tables, float32 [vectors, D], and the vector of each key."""
        width = adjacent.joined.weight.shape[1]
        lookups = self._lookups_of(adjacent)
        if adjacent.num_tables > 1:
            lookups = lookups[:1]
        blocks, sources, num_vectors = [], [], 0
        for placed in lookups:
            lookup = placed.lookup
            columns = self._columns_of(gradients, placed, adjacent)
            block = (columns.float() * (scale * lookup.factor)).reshape(-1, width)
            blocks.append(block)
            if len(lookups) > 1:
                source = torch.arange(len(block)).repeat_interleave(lookup.ids_per_vector)
                sources.append(source + num_vectors)
            num_vectors += len(block)
        return (
            blocks[0] if len(blocks) == 1 else torch.cat(blocks),
            torch.cat(sources) if sources else torch.empty(0),
        )

    @cached_property
    def _adjacent(self) -> list[AdjacentTables]:
        first_ids = [
            next(placed.first_id for placed in self._lookups if placed.table == position)
            for position in range(len(self.tables))
        ]
        return adjacent_tables(self.tables, first_ids, self.num_samples)

    def _lookups_of(self, adjacent: AdjacentTables) -> list[PlacedLookup]:
        return [placed for placed in self._lookups if adjacent.first <= placed.table < adjacent.end]

    def _row_of_adjacent(self, adjacent: AdjacentTables, count: int) -> Tensor:
        """Return the first row of each table in the joined table, for each of its `count` ids."""
        first = self._first_keys[adjacent.first]
        bases = self._base_of_key[first : first + count * adjacent.num_tables]
        return bases - self._key_bases[adjacent.first]

    def _columns_of(self, matrix: Tensor, placed: PlacedLookup, adjacent: AdjacentTables) -> Tensor:
        """Return the columns of a lookup in a matrix [G, T], and those of the adjacent tables after it: [S, G, V * D]."""
        width = placed.lookup.num_vectors * adjacent.joined.weight.shape[1]
        columns = matrix.narrow(1, placed.first_column, width * adjacent.num_tables)
        return columns.unflatten(1, (adjacent.num_tables, -1)).transpose(0, 1)


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
