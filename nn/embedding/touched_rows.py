"""Rows that updates have changed since they were last taken: a byte per row, on the device of the tables.

Every rule updates a row only if a batch looks it up, weight decay and L2 included, so the ids of the updates are the rows
that changed. A byte is set where an update runs, also inside a captured step: on a GPU by the kernel of the update itself.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from nn.embedding.local_tables import LocalTable, row_bases
from nn.ops.addresses import join_adjacent


class TouchedRows:
    """Marks of the rows of local tables: `mask`, uint8 by row keys of `LocalEmbeddingBags`, is 1 of rows that have changed."""

    def __init__(self, tables: Sequence[LocalTable], device: torch.device) -> None:
        self._bases = row_bases(tables)
        self._rows = [table.num_rows for table in tables]
        self.mask = torch.zeros(self._bases[-1], dtype=torch.uint8, device=device)

    def add(self, keys: Tensor) -> None:
        """Mark the rows of row keys [n] of `LocalEmbeddingBags`."""
        self.mask.index_fill_(0, keys.long(), 1)

    def of_table(self, position: int) -> Tensor:
        """Return the mask of a table, uint8 [rows], a view."""
        return self.mask.narrow(0, self._bases[position], self._rows[position])

    def clear(self) -> None:
        self.mask.zero_()


class TouchedReplicas:
    """Marks of the rows of replicated tables, whose gradients are dense: a row changes where its gradient is not zero."""

    def __init__(self, rows: Sequence[int], device: torch.device) -> None:
        self._rows = list(rows)
        self._mask = torch.zeros(sum(rows), dtype=torch.uint8, device=device)

    def add(self, gradients: Sequence[Tensor]) -> None:
        """Mark the rows with a gradient; call it with the gradients [rows, D] of all ranks, before an update changes them."""
        first = 0
        for gradient in join_adjacent(gradients):
            mask = self._mask.narrow(0, first, len(gradient))
            mask |= gradient.ne(0).any(dim=1)
            first += len(gradient)

    def of_table(self, position: int) -> Tensor:
        """Return the mask of a table, uint8 [rows], a view."""
        return self._mask.split(self._rows)[position]

    def clear(self) -> None:
        self._mask.zero_()
