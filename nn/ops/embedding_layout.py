"""Where the looked-up embeddings of a batch lie in memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import gcd

import torch
from torch import Tensor

# B: samples, F: features, D: columns of an embedding


@dataclass(frozen=True, slots=True)
class LayoutSegment:
    """Some columns of one feature's embeddings, for all samples.

    Attributes:
        feature: position of the feature in the model's order.
        first_column: of the embedding.
        columns: how many.
        offset: where they start in memory, in elements.
        stride: elements from a sample to the next.
    """

    feature: int
    first_column: int
    columns: int
    offset: int
    stride: int


class EmbeddingLayout:
    """Where the pieces of all features lie.

    Args:
        pieces: that cover every column of every feature once.
        num_features: F.
        embedding_dim: D.
        device: of the memory.
        prefix_columns: columns before each sample's embeddings that are left free for what the model puts there.

    Attributes:
        width: F * D.
    """

    def __init__(
        self,
        pieces: Sequence[LayoutSegment],
        num_features: int,
        embedding_dim: int,
        device: torch.device,
        prefix_columns: int = 0,
    ) -> None:
        self.pieces = sorted(pieces, key=lambda piece: (piece.feature, piece.first_column))
        self.num_features = num_features
        self.embedding_dim = embedding_dim
        self.device = device
        self.prefix_columns = prefix_columns
        self.width = num_features * embedding_dim
        covered = [piece.columns for piece in self.pieces]
        assert sum(covered) == self.width, (covered, self.width)

    @staticmethod
    @cache
    def dense(num_features: int, embedding_dim: int, device: torch.device) -> "EmbeddingLayout":
        """Lay out a plain [B, F * D]; always the same object, so that a recording finds its `table` made."""
        stride = num_features * embedding_dim
        pieces = [
            LayoutSegment(feature, 0, embedding_dim, feature * embedding_dim, stride)
            for feature in range(num_features)
        ]
        return EmbeddingLayout(pieces, num_features, embedding_dim, device)

    @property
    def is_dense(self) -> bool:
        """Whether the memory is a plain [B, room + F * D]."""
        return all(
            (piece.stride, piece.offset)
            == (
                self.prefix_columns + self.width,
                self.prefix_columns + piece.feature * self.embedding_dim + piece.first_column,
            )
            for piece in self.pieces
        )

    @property
    def has_whole_features(self) -> bool:
        """Whether no feature is cut by columns."""
        return len(self.pieces) == self.num_features

    @property
    def alignment(self) -> int:
        """Elements that every place in the memory is a multiple of, 16 at most."""
        return gcd(
            16,
            *(
                number
                for piece in self.pieces
                for number in (piece.offset, piece.stride, piece.first_column, piece.columns)
            ),
        )

    @cached_property
    def table(self) -> Tensor:
        """Offset, stride, position in [F * D] and columns of each piece, int64 [4, pieces]."""
        rows = [
            (
                piece.offset,
                piece.stride,
                piece.feature * self.embedding_dim + piece.first_column,
                piece.columns,
            )
            for piece in self.pieces
        ]
        return torch.tensor(rows, dtype=torch.int64, device=self.device).t().contiguous()
