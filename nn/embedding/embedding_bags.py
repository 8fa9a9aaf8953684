"""Tables that are looked up for the same samples: pooled lookup, and the update by the gradients of what was looked up.

Every feature has the same number of ids in every sample, so all shapes are known beforehand, nothing is read back by the
host and all of it can be recorded in a CUDA graph: Triton kernels on a GPU, plain torch elsewhere.
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
from nn.embedding.optimizer import update_rows

# P: parts, G: samples, H: hotness of a part, N: ids in all (sum of G * H), D: columns of a part, T: columns of all parts
# S: parts of a span

# From here on torch sorts integers on a CPU by their digits: 32,768 in an eighth of the time that 26,624 take before.
RADIX_SORT_IDS = 2**15
# Fewer are compared before so many could be sorted.
COMPARED_IDS = 2**12


class LocalEmbeddingBags:
    """Parts of tables and how they are looked up and updated together.

    Args:
        parts: in the order of their ids and of their columns in what is looked up.
        num_samples: G.
        config: optimizer of the tables.
        scalars: of the update.
        dtype: of what is looked up and of its gradients.
        device: of the parts.

    Attributes:
        num_ids: N.
        num_columns: T.
    """

    def __init__(
        self,
        parts: Sequence[LocalTable],
        num_samples: int,
        config: OptimizerConfig,
        scalars: UpdateScalars,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.parts = list(parts)
        self.num_samples = num_samples
        self.dtype = dtype
        self._config = config
        self._scalars = scalars
        counts = [num_samples * part.hotness for part in self.parts]
        rows = [len(part.weight) for part in self.parts]
        widths = [part.weight.shape[1] for part in self.parts]
        self._id_starts = list(accumulate(counts, initial=0))
        self._columns = list(accumulate(widths, initial=0))
        self._key_bases = list(accumulate(rows, initial=0))
        self.num_ids, self.num_columns = self._id_starts[-1], self._columns[-1]
        self._counts, self._device = counts, device
        self._kernels = None
        if device.type == "cuda" and self.parts:
            # Triton comes with torch's CUDA builds only.
            from nn.embedding.triton_launcher import TritonLauncher

            self._kernels = TritonLauncher(
                self.parts,
                num_samples=num_samples,
                id_starts=self._id_starts,
                columns=self._columns,
                key_bases=self._key_bases,
                config=config,
            )

    @cached_property
    def _base_of_id(self) -> Tensor:
        """Rows of all parts before that of each id; made when first asked for, as evaluation on a GPU never does."""
        key_dtype = torch.int32 if self._key_bases[-1] < 2**31 else torch.int64
        bases = torch.tensor(self._key_bases[:-1], dtype=key_dtype)
        counts = torch.tensor(self._counts, dtype=torch.int64)
        return bases.repeat_interleave(counts).to(self._device)

    def look_up(self, ids: Tensor, out: Tensor) -> None:
        """Sum the rows of each sample's ids.

        Args:
            ids: [N], part after part, each [G, H].
            out: [G, T], rows at any distance; overwritten.
        """
        if self._kernels is not None:
            self._kernels.look_up(ids, out)
            return
        if not self.parts:
            return
        keys = ids + self._base_of_id
        for span in self._spans:
            rows = keys[self._ids_of(span)] - self._key_bases[span.first]
            pooled = _pooled(span.table, rows).view(span.num_parts, self.num_samples, -1)
            self._vectors(out, span).copy_(pooled)

    def sort(self, ids: Tensor) -> SortedIds:
        """Sort ids [N] for `update`; equal ones keep their order, so that sums have one order too."""
        keys = ids + self._base_of_id
        if self._device.type == "cpu" and COMPARED_IDS < self.num_ids < RADIX_SORT_IDS:
            filling = keys.new_full((RADIX_SORT_IDS - self.num_ids,), self._key_bases[-1])
            keys, order = torch.sort(torch.cat([keys, filling]), stable=True)
            return SortedIds(keys[: self.num_ids], order[: self.num_ids])
        keys, order = torch.sort(keys, stable=True)
        return SortedIds(keys, order)

    def update(self, ids: SortedIds, gradients: Tensor, is_good: Tensor) -> None:
        """Update every row that was looked up, once, by the sum of its gradients.

        Args:
            ids: as sorted.
            gradients: of what was looked up, [G, T], rows at any distance.
            is_good: int32 [1]; with 0 nothing is changed.
        """
        if self._kernels is not None:
            self._kernels.update(ids, gradients, self._scalars, is_good)
            return
        if not (self.parts and is_good.item()):
            return
        lr, _, _, scale = self._scalars.values.tolist()
        for span in self._spans:
            mine = self._ids_of(span)
            keys, counts = torch.unique_consecutive(ids.keys[mine], return_counts=True)
            of_samples = (self._vectors(gradients, span).float() * scale).flatten(0, 1)
            samples = (ids.order[mine] - mine.start) // span.table.hotness
            # As a lookup sums the rows of a sample: those of a row, one after the other.
            total = embedding_bag(samples, of_samples, counts.cumsum(0) - counts, mode="sum")
            rows = keys.long() - self._key_bases[span.first]
            update_rows(span.table, rows, total, self._config, lr=lr, step=self._scalars.step)

    @cached_property
    def _spans(self) -> list[AdjacentTables]:
        return adjacent_tables(self.parts)

    def _ids_of(self, span: AdjacentTables) -> slice:
        return slice(self._id_starts[span.first], self._id_starts[span.end])

    def _vectors(self, matrix: Tensor, span: AdjacentTables) -> Tensor:
        """The columns of a span in a matrix [G, T], in the order of its ids: [S, G, D]."""
        columns = matrix[:, self._columns[span.first] : self._columns[span.end]]
        return columns.unflatten(1, (span.num_parts, -1)).transpose(0, 1)


def _pooled(table: LocalTable, rows: Tensor) -> Tensor:
    """Sum the rows of each sample, float32 [samples, D], without memory for all of them where that can be."""
    if table.hotness == 1:
        return table.weight.index_select(0, rows).float()
    if table.weight.dtype is torch.float32:
        return embedding_bag(rows.view(-1, table.hotness), table.weight, mode="sum")
    found = table.weight.index_select(0, rows).float()
    return found.view(-1, table.hotness, table.weight.shape[1]).sum(1)
