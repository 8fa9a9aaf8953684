"""Positions of the ids of features of fixed hotness."""

from collections.abc import Mapping

from dataloading.dataset.batch_layout import IdCount
from nn.embedding.id_blocks import IdBlock, id_blocks


def fixed_blocks(hotness: Mapping[str, int], num_samples: int) -> dict[str, IdBlock]:
    """Return the positions of features of fixed hotness, of one source."""
    counts = {name: IdCount(count, num_samples * count) for name, count in hotness.items()}
    return id_blocks(counts, 1, num_samples)
