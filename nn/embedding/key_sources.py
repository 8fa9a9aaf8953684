"""The gradient of each key: its sample, its first column and its factor, where tables have several or ragged lookups."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nn.embedding.local_tables import PlacedLookup
from nn.embedding.lookups import Pooling

# K: number of keys, G: samples


class KeySources:
    """Sources of all keys; those of ragged features change with every batch, in the same memory.

    Args:
        lookups: of all tables, in the order of their keys.
        num_samples: G.
        device: of the ids.

    Attributes:
        rows: sample of each key, int32 [K].
        columns: first column of its vector, int32 [K].
        factors: number by which the gradient is multiplied, float32 [K].
    """

    def __init__(
        self, lookups: Sequence[PlacedLookup], num_samples: int, device: torch.device
    ) -> None:
        rows, columns, factors = [], [], []
        for placed in lookups:
            lookup, count = placed.lookup, placed.ids.count
            hotness = lookup.hotness or 1
            sample = torch.arange(num_samples, dtype=torch.int32).repeat_interleave(hotness)
            vector = torch.arange(hotness, dtype=torch.int32) // (lookup.ids_per_vector or 1)
            column = (placed.first_column + vector * placed.width).repeat(num_samples)
            if lookup.is_ragged:
                sample = torch.zeros(count, dtype=torch.int32)
                column = torch.full((count,), placed.first_column, dtype=torch.int32)
            rows.append(sample)
            columns.append(column)
            factors.append(torch.full((count,), lookup.factor))
        self.rows = torch.cat(rows).to(device)
        self.columns = torch.cat(columns).to(device)
        self.factors = torch.cat(factors).to(device)
        self._ragged = [placed for placed in lookups if placed.lookup.is_ragged]

    def set(self, ids: Tensor) -> None:
        """Take samples and lengths of ragged features from a batch's ids [N]."""
        for placed in self._ragged:
            block, keys = placed.ids, slice(placed.first_key, placed.first_key + placed.ids.count)
            samples = ids.narrow(0, block.first_sample, block.count)
            self.rows[keys].copy_(samples)
            if placed.lookup.pooling is Pooling.mean:
                lengths = ids.narrow(0, block.first_length, block.num_samples)
                self.factors[keys].copy_(
                    lengths.index_select(0, samples).clamp(min=1).float().reciprocal()
                )
