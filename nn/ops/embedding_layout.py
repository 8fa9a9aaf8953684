"""Memory layout of the embeddings of a batch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate
from math import gcd

import torch
from torch import Tensor

# B: samples, T: columns of all vectors of a sample. A vector is the result of a lookup, or one of those of a lookup without
# pooling.


MOST_COPIED_COLUMNS = 128
"""Columns that one program of the copy kernel takes of a sample."""


@dataclass(frozen=True, slots=True)
class LayoutSegment:
    """Strided block of memory with some columns of one vector, for all samples."""

    vector: int  # position of the vector in the model's order
    first_column: int  # first column of the vector in this segment
    columns: int
    offset: int  # start of the first sample in memory, in elements
    stride: int  # elements from one sample to the next


@dataclass(frozen=True, slots=True)
class CopiedColumns:
    """Adjacent columns of a sample that are adjacent in memory too, whatever vectors they are of."""

    offset: int  # start of the first sample in memory, in elements
    stride: int  # elements from one sample to the next
    first_column: int  # first column in [B, T]
    columns: int


class EmbeddingLayout:
    """Layout of all vectors, or of some for a copy.

    `prefix_columns`: unused columns before the embeddings of every sample; the model writes its own columns there. T is
    `width`. `memory_columns`: columns per sample of the memory.
    """

    def __init__(
        self,
        segments: Sequence[LayoutSegment],
        widths: Sequence[int],
        device: torch.device,
        prefix_columns: int = 0,
        other_columns: int = 0,
    ) -> None:
        self.segments = sorted(segments, key=lambda segment: (segment.vector, segment.first_column))
        self.widths = tuple(widths)
        self.device = device
        self.prefix_columns = prefix_columns
        self._starts = list(accumulate(widths, initial=0))
        self.width = self._starts[-1]
        self.memory_columns = prefix_columns + self.width + other_columns

    @staticmethod
    @cache
    def dense(
        widths: tuple[int, ...], device: torch.device, prefix_columns: int = 0
    ) -> "EmbeddingLayout":
        """Return the layout of a matrix [B, prefix_columns + T].

        The result is cached, so that `table` exists before a CUDA graph is captured.
        """
        starts = list(accumulate(widths, initial=prefix_columns))
        segments = [
            LayoutSegment(vector, 0, width, starts[vector], starts[-1])
            for vector, width in enumerate(widths)
        ]
        return EmbeddingLayout(segments, widths, device, prefix_columns)

    @property
    def num_vectors(self) -> int:
        return len(self.widths)

    @property
    def embedding_dim(self) -> int:
        """Columns of every vector, of a model whose vectors are equally wide."""
        assert len(set(self.widths)) == 1, self.widths
        return self.widths[0]

    @property
    def is_dense(self) -> bool:
        """Return whether the memory is a matrix [B, prefix_columns + T]."""
        return all(
            (segment.stride, segment.offset)
            == (self.prefix_columns + self.width, self.prefix_columns + self._column_of(segment))
            for segment in self.segments
        )

    @property
    def has_column_shards(self) -> bool:
        """Return whether a vector is split by columns into several segments."""
        return len(self.segments) != self.num_vectors

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
        """Offset, stride, first column in [T] and number of columns of every segment, int64 [4, segments]."""
        rows = [
            (segment.offset, segment.stride, self._column_of(segment), segment.columns)
            for segment in self.segments
        ]
        return torch.tensor(rows, dtype=torch.int64, device=self.device).t().contiguous()

    @cached_property
    def copied(self) -> list[CopiedColumns]:
        """The layout as few blocks of adjacent columns."""
        blocks: list[CopiedColumns] = []
        for segment in self.segments:
            column = self._column_of(segment)
            last = blocks[-1] if blocks else None
            if last is not None and (
                last.stride == segment.stride
                and last.offset + last.columns == segment.offset
                and last.first_column + last.columns == column
            ):
                blocks[-1] = replace(last, columns=last.columns + segment.columns)
            else:
                blocks.append(
                    CopiedColumns(segment.offset, segment.stride, column, segment.columns)
                )
        return blocks

    @cached_property
    def copied_table(self) -> tuple[Tensor, int, int]:
        """`copied` in pieces of at most `MOST_COPIED_COLUMNS`, for the copy kernel.

        Returns offset, stride, first column and number of columns of every piece, int64 [4, pieces]; the largest number of
        columns; and the largest divisor of all numbers, at most 16.
        """
        rows = [
            (
                block.offset + start,
                block.stride,
                block.first_column + start,
                min(MOST_COPIED_COLUMNS, block.columns - start),
            )
            for block in self.copied
            for start in range(0, block.columns, MOST_COPIED_COLUMNS)
        ]
        table = torch.tensor(rows, dtype=torch.int64, device=self.device).t().contiguous()
        most = max((row[3] for row in rows), default=1)
        return table, most, gcd(16, *(number for row in rows for number in row))

    def _column_of(self, segment: LayoutSegment) -> int:
        """Return the segment's first column in [T]."""
        return self._starts[segment.vector] + segment.first_column
