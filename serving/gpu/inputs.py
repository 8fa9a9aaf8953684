"""Inputs of a batch as one block of int32: one copy to the device, at the same address for every batch of a size."""

from collections.abc import Sequence

import torch
from torch import Tensor

from serving.inference.model_rows import Rows
from serving.manifest import Manifest

# P: rows of a padded batch, N: numerical features, H: ids of a row in all features of fixed hotness


class InputLayout:
    """Positions in the block of a padded batch.

    They are, one after another: numerical [P, N], ids [P, H], keep rates [P], starts [P + 1] of each ragged feature, counted
    from the first of the ids of all ragged features, and those. P is `num_rows`.
    """

    def __init__(self, manifest: Manifest, num_rows: int) -> None:
        self.num_rows, self.num_ids = num_rows, manifest.id_columns
        self.num_numerical = len(manifest.numerical)
        self.has_keep_rates = manifest.keep_rate is not None
        self.ragged = [feature.name for feature in manifest.ragged]
        self.first_id = num_rows * self.num_numerical
        self.first_rate = self.first_id + num_rows * self.num_ids
        self._first_start = self.first_rate + num_rows * self.has_keep_rates
        # Of the ids of ragged features; also the size of the block without them.
        self.first_value = self._first_start + len(self.ragged) * (num_rows + 1)

    def first_start(self, feature: str) -> int:
        return self._first_start + self.ragged.index(feature) * (self.num_rows + 1)

    def numerical(self, block: Tensor) -> Tensor:
        """Return the numerical features, float32 [P, N]."""
        return block[: self.first_id].view(torch.float32).view(self.num_rows, self.num_numerical)

    def ids(self, block: Tensor) -> Tensor:
        """Return the ids of fixed hotness, int32 [P, H]."""
        return block[self.first_id : self.first_rate].view(self.num_rows, self.num_ids)

    def keep_rates(self, block: Tensor) -> Tensor | None:
        """Return the keep rates, float32 [P]; None if the model has none."""
        if not self.has_keep_rates:
            return None
        return block[self.first_rate : self.first_rate + self.num_rows].view(torch.float32)

    def fill(self, block: Tensor, parts: Sequence[Rows]) -> int:
        """Write at most P rows to a block, one part after another; return the number of its first elements to copy.

        Rows behind the last one look up id 0, so that they need no branch.
        """
        numerical, ids, rates = self.numerical(block), self.ids(block), self.keep_rates(block)
        first = 0
        for part in parts:
            last = first + len(part)
            numerical[first:last].copy_(part.numerical)
            ids[first:last].copy_(part.ids)
            if rates is not None and part.keep_rates is not None:
                rates[first:last].copy_(part.keep_rates)
            elif rates is not None:
                rates[first:last].fill_(1)
            first = last
        ids[first:].zero_()
        offset = 0
        for name in self.ragged:
            starts = block[self.first_start(name) :][: self.num_rows + 1]
            values = block[self.first_value :]
            starts[0] = offset
            row = 1
            for of_part in (part.ragged[name] for part in parts):
                count, size = len(of_part.lengths), len(of_part.values)
                starts[row : row + count].copy_(of_part.lengths.cumsum(0) + offset)
                values[offset : offset + size].copy_(of_part.values)
                row, offset = row + count, offset + size
            starts[row:].fill_(offset)
        return self.first_value + offset
