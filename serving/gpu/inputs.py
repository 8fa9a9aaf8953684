"""Inputs of a batch as one block of int32: one copy to the device, at the same address for every batch of a size."""

from dataclasses import dataclass

import torch
from torch import Tensor

from serving.inference.model_rows import Rows
from serving.manifest import Manifest

# P: rows of a padded batch, N: numerical features, H: ids of a row in all features of fixed hotness


@dataclass(frozen=True, slots=True)
class InputLayout:
    """Positions in the block of a padded batch.

    They are, one after another: numerical [P, N], ids [P, H], keep rates [P], starts [P + 1] of each ragged feature, counted
    from the first of the ids of all ragged features, and those.

    Attributes:
        num_rows: P.
        num_numerical: N.
        num_ids: H.
        has_keep_rates: whether rows may have one.
        ragged: names of the ragged features.
    """

    num_rows: int
    num_numerical: int
    num_ids: int
    has_keep_rates: bool
    ragged: tuple[str, ...]

    @classmethod
    def of(cls, manifest: Manifest, num_rows: int) -> "InputLayout":
        """Return the layout of a model."""
        return cls(
            num_rows,
            len(manifest.numerical),
            manifest.id_columns,
            manifest.keep_rate is not None,
            tuple(feature.name for feature in manifest.ragged),
        )

    @property
    def first_id(self) -> int:
        """Position of the ids of fixed hotness."""
        return self.num_rows * self.num_numerical

    @property
    def first_rate(self) -> int:
        """Position of the keep rates."""
        return self.first_id + self.num_rows * self.num_ids

    def first_start(self, feature: str) -> int:
        """Position of the starts of a ragged feature."""
        first = self.first_rate + self.num_rows * self.has_keep_rates
        return first + self.ragged.index(feature) * (self.num_rows + 1)

    @property
    def first_value(self) -> int:
        """Position of the ids of ragged features; also the size of the block without them."""
        first = self.first_rate + self.num_rows * self.has_keep_rates
        return first + len(self.ragged) * (self.num_rows + 1)

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

    def fill(self, block: Tensor, rows: Rows) -> int:
        """Write at most P rows to a block; return the number of its first elements to copy.

        Rows behind the last one look up id 0, so that they need no branch.
        """
        count = len(rows)
        self.numerical(block)[:count].copy_(rows.numerical)
        ids = self.ids(block)
        ids[:count].copy_(rows.ids)
        ids[count:].zero_()
        rates = self.keep_rates(block)
        if rates is not None:
            rates.fill_(1) if rows.keep_rates is None else rates[:count].copy_(rows.keep_rates)
        place = 0
        for name in self.ragged:
            ragged, first = rows.ragged[name], self.first_start(name)
            starts = block[first : first + self.num_rows + 1]
            starts[0] = place
            starts[1 : count + 1].copy_(ragged.lengths.cumsum(0) + place)
            size = len(ragged.values)
            starts[count + 1 :].fill_(place + size)
            value = self.first_value + place
            block[value : value + size].copy_(ragged.values)
            place += size
        return self.first_value + place
