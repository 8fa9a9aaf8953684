"""Expansion of one-hot ids to multi-hot ids (`nn.embedding.multi_hot`) before the lookup."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from nn.embedding.multi_hot import expand


class IdExpansion:
    """Expansion of the ids of some features, stored so often per sample, by `tables`, int32 [num_embeddings, hotness - 1]."""

    def __init__(
        self,
        features: Sequence[str],
        num_samples: int,
        stored: Mapping[str, int],
        tables: Mapping[str, Tensor],
    ) -> None:
        self._is_needed = any(feature in tables for feature in features)
        self._sizes = [num_samples * stored[feature] for feature in features]
        self._tables = [tables.get(feature) for feature in features]
        self._launch = None
        if self._is_needed and next(iter(tables.values())).is_cuda:
            # Triton comes with torch's CUDA builds only.
            from nn.ops.triton.id_expansion import IdExpansionKernel

            self._launch = IdExpansionKernel(
                self._tables, [stored[feature] for feature in features], num_samples
            )

    def __call__(self, ids: Tensor) -> Tensor:
        """Expand ids; input and output have one block per feature, [G, stored] and [G, hotness]."""
        if not self._is_needed:
            return ids
        if self._launch is not None:
            return self._launch(ids)
        expanded = [
            stored if table is None else expand(stored, table).flatten()
            for stored, table in zip(ids.split(self._sizes), self._tables, strict=True)
        ]
        return torch.cat([values.to(ids.dtype) for values in expanded])
