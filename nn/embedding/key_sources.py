"""The gradient of each key: its sample, its first column and its factor, where tables have several or ragged lookups."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from nn.embedding.local_tables import PlacedLookup
from nn.embedding.lookups import Pooling

# K: number of keys, G: samples


@dataclass(eq=False)
class KeySources:
    """Sources of all keys in memory allocated on first use; those of ragged features change with every batch."""

    lookups: Sequence[PlacedLookup]
    num_samples: int
    device: torch.device

    @cached_property
    def rows(self) -> Tensor:
        """Sample of each key, int32 [K]."""
        samples = torch.arange(self.num_samples, dtype=torch.int32)
        return self._joined(
            torch.zeros(placed.ids.count, dtype=torch.int32)
            if placed.lookup.is_ragged
            else samples.repeat_interleave(placed.lookup.hotness)
            for placed in self.lookups
        )

    @cached_property
    def columns(self) -> Tensor:
        """First column of the vector of each key, int32 [K]."""
        return self._joined(map(self._columns_of, self.lookups))

    @cached_property
    def factors(self) -> Tensor:
        """Number by which the gradient of each key is multiplied, float32 [K]."""
        return self._joined(
            torch.full((placed.ids.count,), placed.lookup.factor) for placed in self.lookups
        )

    def _columns_of(self, placed: PlacedLookup) -> Tensor:
        lookup = placed.lookup
        if lookup.is_ragged:
            return torch.full((placed.ids.count,), placed.first_column, dtype=torch.int32)
        vector = torch.arange(lookup.hotness, dtype=torch.int32) // lookup.ids_per_vector
        return (placed.first_column + vector * placed.width).repeat(self.num_samples)

    def _joined(self, parts: Iterable[Tensor]) -> Tensor:
        return torch.cat(list(parts)).to(self.device)

    def set(self, ids: Tensor) -> None:
        """Take samples and lengths of ragged features from a batch's ids [N]."""
        for placed in self.lookups:
            if not placed.lookup.is_ragged:
                continue
            block, keys = placed.ids, slice(placed.first_key, placed.first_key + placed.ids.count)
            samples = ids.narrow(0, block.first_sample, block.count)
            self.rows[keys].copy_(samples)
            if placed.lookup.pooling is Pooling.mean:
                lengths = ids.narrow(0, block.first_length, block.num_samples)
                self.factors[keys].copy_(
                    lengths.index_select(0, samples).clamp(min=1).float().reciprocal()
                )
