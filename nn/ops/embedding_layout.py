"""Memory layout of the pooled embeddings of a batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import gcd

import torch
from torch import Tensor

# B: samples, F: features, D: columns of an embedding


@dataclass(frozen=True, slots=True)
class LayoutSegment:
    """Strided block of memory with some columns of one feature's embeddings, for all samples.

    Attributes:
        feature: position of the feature in the model's order.
        first_column: first column of the embedding in this segment.
        columns: number of columns.
        offset: start of the first sample in memory, in elements.
        stride: elements from one sample to the next.
    """

    feature: int
    first_column: int
    columns: int
    offset: int
    stride: int


class EmbeddingLayout:
    """Layout of the embeddings of all features.

    Args:
        segments: segments that cover every column of every feature exactly once.
        num_features: F.
        embedding_dim: D.
        device: device of the memory.
        prefix_columns: unused columns before the embeddings of every sample; the model writes its own columns there.

    Attributes:
        width: F * D.
    """

    def __init__(
        self,
        segments: Sequence[LayoutSegment],
        num_features: int,
        embedding_dim: int,
        device: torch.device,
        prefix_columns: int = 0,
    ) -> None:
        self.segments = sorted(
            segments, key=lambda segment: (segment.feature, segment.first_column)
        )
        self.num_features = num_features
        self.embedding_dim = embedding_dim
        self.device = device
        self.prefix_columns = prefix_columns
        self.width = num_features * embedding_dim
        covered = [segment.columns for segment in self.segments]
        assert sum(covered) == self.width, (covered, self.width)

    @staticmethod
    @cache
    def dense(num_features: int, embedding_dim: int, device: torch.device) -> "EmbeddingLayout":
        """Return the layout of a matrix [B, F * D].

        The result is cached, so that `table` exists before a CUDA graph is captured.
        """
        stride = num_features * embedding_dim
        segments = [
            LayoutSegment(feature, 0, embedding_dim, feature * embedding_dim, stride)
            for feature in range(num_features)
        ]
        return EmbeddingLayout(segments, num_features, embedding_dim, device)

    @property
    def is_dense(self) -> bool:
        """Return whether the memory is a matrix [B, prefix_columns + F * D]."""
        return all(
            (segment.stride, segment.offset)
            == (
                self.prefix_columns + self.width,
                self.prefix_columns + segment.feature * self.embedding_dim + segment.first_column,
            )
            for segment in self.segments
        )

    @property
    def has_column_shards(self) -> bool:
        """Return whether a feature is split by columns into several segments."""
        return len(self.segments) != self.num_features

    @property
    def alignment(self) -> int:
        """Largest divisor of all offsets, strides and column counts in elements, at most 16."""
        return gcd(
            16,
            *(
                number
                for segment in self.segments
                for number in (
                    segment.offset,
                    segment.stride,
                    segment.first_column,
                    segment.columns,
                )
            ),
        )

    @cached_property
    def table(self) -> Tensor:
        """Offset, stride, first column in [F * D] and number of columns of every segment, int64 [4, segments]."""
        rows = [
            (
                segment.offset,
                segment.stride,
                segment.feature * self.embedding_dim + segment.first_column,
                segment.columns,
            )
            for segment in self.segments
        ]
        return torch.tensor(rows, dtype=torch.int64, device=self.device).t().contiguous()
