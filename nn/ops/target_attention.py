"""Limits of the kernels of DIN's and AutoInt's attention (`nn.ops.triton.target_attention`), also for machines without Triton."""

from collections.abc import Sequence

MOST_COLUMNS, MOST_HIDDEN = 32, (128, 64)
"""Widest vectors and layers that fit into registers."""
PROGRAMS = 264
"""Each takes every 264th block, and has one partial sum of the parameters' gradients, float32."""


def fits(columns: int, hidden: Sequence[int]) -> bool:
    """Return whether vectors and hidden layers, which must be two, fit into registers."""
    narrow = len(hidden) == 2 and all(map(int.__le__, hidden, MOST_HIDDEN))
    return narrow and columns <= MOST_COLUMNS


def fields_fit(features: int, head_dim: int) -> bool:
    """Return whether the vectors of a sample fit into registers, with AutoInt's heads of so many columns."""
    return features <= 64 and head_dim <= MOST_COLUMNS
