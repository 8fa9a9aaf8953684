"""Pooled lookup and update of the local tables that are looked up for the same samples.

Hotness is fixed. All shapes are therefore known beforehand, the host reads nothing back, and everything can be captured in a
CUDA graph. GPUs use Triton kernels, CPUs plain torch.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from configs.schema import OptimizerConfig
from nn.embedding.adjacent_tables import AdjacentTables, adjacent_tables
from nn.embedding.local_tables import LocalTable, SortedIds, UpdateScalars
from nn.embedding.torch_optimizer import update_rows

# G: samples, H: hotness of a table, N: total number of ids (sum of G * H), D: columns of a table, T: columns of all tables
# S: number of adjacent tables

# From this number on, torch uses a radix sort for integers on a CPU: 32,768 take an eighth of the time of 26,624.
RADIX_SORT_IDS = 2**15
# Up to this number, a comparison sort is faster than a radix sort of `RADIX_SORT_IDS`.
COMPARED_IDS = 2**12


class LocalEmbeddingBags:
    """Local tables that are looked up and updated together.

    Args:
        tables: in the order of their ids and of their columns in the pooled embeddings.
        num_samples: G.
        config: optimizer of the tables.
        scalars: of the update.
        dtype: of the pooled embeddings and their gradients.
        device: of the tables.

    Attributes:
        num_ids: N.
        num_columns: T.
    """

    def __init__(
        self,
        tables: Sequence[LocalTable],
        num_samples: int,
        config: OptimizerConfig,
        scalars: UpdateScalars,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.tables = list(tables)
        self.num_samples = num_samples
        self.dtype = dtype
        self._config = config
        self._scalars = scalars
        counts = [num_samples * table.hotness for table in self.tables]
        rows = [len(table.weight) for table in self.tables]
        widths = [table.weight.shape[1] for table in self.tables]
        self._id_starts = list(accumulate(counts, initial=0))
        self._columns = list(accumulate(widths, initial=0))
        self._key_bases = list(accumulate(rows, initial=0))
        self.num_ids, self.num_columns = self._id_starts[-1], self._columns[-1]
        self._counts, self._device = counts, device
        self._kernels = None
        if device.type == "cuda" and self.tables:
            # Triton comes with torch's CUDA builds only.
            from nn.embedding.triton_launcher import TritonLauncher

            self._kernels = TritonLauncher(
                self.tables,
                num_samples=num_samples,
                id_starts=self._id_starts,
                columns=self._columns,
                key_bases=self._key_bases,
                config=config,
            )

    @cached_property
    def _base_of_id(self) -> Tensor:
        """Rows of all tables before the table of each id; built on first use, since evaluation on a GPU does not use it."""
        key_dtype = torch.int32 if self._key_bases[-1] < 2**31 else torch.int64
        bases = torch.tensor(self._key_bases[:-1], dtype=key_dtype)
        counts = torch.tensor(self._counts, dtype=torch.int64)
        return bases.repeat_interleave(counts).to(self._device)

    def look_up(self, ids: Tensor, out: Tensor) -> None:
        """Sum the rows of each sample's ids.

        Args:
            ids: [N], table after table, each [G, H].
            out: [G, T], any row stride; overwritten.
        """
        if self._kernels is not None:
            self._kernels.look_up(ids, out)
            return
        if not self.tables:
            return
        keys = ids + self._base_of_id
        for adjacent in self._adjacent:
            rows = keys[self._ids_of(adjacent)] - self._key_bases[adjacent.first]
            pooled = _pooled(adjacent.joined, rows).view(adjacent.num_tables, self.num_samples, -1)
            self._columns_of(out, adjacent).copy_(pooled)

    def sort(self, ids: Tensor) -> SortedIds:
        """Sort ids [N] for `update`; the sort is stable, so that sums have one order too."""
        keys = ids + self._base_of_id
        if self._device.type == "cpu" and COMPARED_IDS < self.num_ids < RADIX_SORT_IDS:
            padding = keys.new_full((RADIX_SORT_IDS - self.num_ids,), self._key_bases[-1])
            keys, order = torch.sort(torch.cat([keys, padding]), stable=True)
            return SortedIds(keys[: self.num_ids], order[: self.num_ids])
        keys, order = torch.sort(keys, stable=True)
        return SortedIds(keys, order)

    def update(self, ids: SortedIds, gradients: Tensor, is_good: Tensor) -> None:
        """Update every row that was looked up, once, by the sum of its gradients.

        Args:
            ids: result of `sort`.
            gradients: of the pooled embeddings, [G, T], any row stride.
            is_good: int32 [1]; 0 leaves everything unchanged.
        """
        if self._kernels is not None:
            self._kernels.update(ids, gradients, self._scalars, is_good)
            return
        if not (self.tables and is_good.item()):
            return
        lr, _, _, scale, *_ = self._scalars.values.tolist()
        for adjacent in self._adjacent:
            where = self._ids_of(adjacent)
            keys, counts = torch.unique_consecutive(ids.keys[where], return_counts=True)
            sample_gradients = (self._columns_of(gradients, adjacent).float() * scale).flatten(0, 1)
            samples = (ids.order[where] - where.start) // adjacent.joined.hotness
            # A row's gradients are summed as a lookup sums a sample's rows: in order.
            total = embedding_bag(samples, sample_gradients, counts.cumsum(0) - counts, mode="sum")
            rows = keys.long() - self._key_bases[adjacent.first]
            update_rows(adjacent.joined, rows, total, self._config, lr=lr, step=self._scalars.step)

    @cached_property
    def _adjacent(self) -> list[AdjacentTables]:
        return adjacent_tables(self.tables)

    def _ids_of(self, adjacent: AdjacentTables) -> slice:
        return slice(self._id_starts[adjacent.first], self._id_starts[adjacent.end])

    def _columns_of(self, matrix: Tensor, adjacent: AdjacentTables) -> Tensor:
        """Return the columns of adjacent tables in a matrix [G, T], in the order of their ids: [S, G, D]."""
        columns = matrix[:, self._columns[adjacent.first] : self._columns[adjacent.end]]
        return columns.unflatten(1, (adjacent.num_tables, -1)).transpose(0, 1)


def _pooled(table: LocalTable, rows: Tensor) -> Tensor:
    """Sum the rows of each sample, float32 [samples, D], without a copy of all rows if possible."""
    if table.hotness == 1:
        return table.weight.index_select(0, rows).float()
    if table.weight.dtype is torch.float32:
        return embedding_bag(rows.view(-1, table.hotness), table.weight, mode="sum")
    looked_up = table.weight.index_select(0, rows).float()
    return looked_up.view(-1, table.hotness, table.weight.shape[1]).sum(1)
