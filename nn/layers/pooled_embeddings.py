"""Pooled embeddings of a batch in the memory layout that the all-to-all produces.

Every rank sends the columns of its local tables, so the output of the all-to-all is one block per rank. The embeddings of
a sample are spread over all blocks. The interaction kernel reads the blocks directly; `matrix` copies them into a matrix. If
the lookup left columns for a prefix, it has filled the rest of a matrix already.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nn.layers.distinct_rows import DistinctRows
from nn.layers.sequence_events import SequenceEvents
from nn.ops.embedding_layout import EmbeddingLayout
from nn.ops.table_rows import TableRows

# B: samples, F: features, D: columns of an embedding


@dataclass(frozen=True, slots=True)
class PooledEmbeddings:
    """Embeddings of a batch in any layout, and the rows and sequences that tables hand out."""

    layout: EmbeddingLayout  # of the values in memory
    # returns the values as one flat tensor, once; given True, it is memory that the caller fills from `table_rows`
    take: Callable[[bool], Tensor]
    # the tables' rows, of which a kernel may take the vectors itself; without gradients it needs no memory for them
    table_rows: TableRows | None = None
    # returns the distinct rows of a table, with the positions of a feature's ids
    rows_of: Callable[[str, str], DistinctRows] | None = None
    # returns the events of a sequence group
    sequence_of: Callable[[str], SequenceEvents] | None = None
    # has an item when the columns before the values hold a prefix; another one takes a copy
    filled: list[bool] = field(default_factory=list)

    @classmethod
    def of(cls, matrix: Tensor, num_features: int) -> "PooledEmbeddings":
        """Wrap a contiguous matrix [B, F * D]."""
        widths = (matrix.shape[1] // num_features,) * num_features
        return cls(EmbeddingLayout.dense(widths, matrix.device), lambda _: matrix)

    def with_matrix(self, matrix: Tensor) -> "Tensor | PooledEmbeddings":
        """Return a matrix [B, T] in the place of the values, with the rows that tables hand out, if any do."""
        if self.rows_of is None or self.sequence_of is None:
            return matrix
        return PooledEmbeddings.with_rows(matrix, self.rows_of, self.sequence_of)

    @classmethod
    def with_rows(
        cls,
        matrix: Tensor,
        rows_of: Callable[[str, str], DistinctRows],
        sequence_of: Callable[[str], SequenceEvents],
    ) -> "PooledEmbeddings":
        """Wrap a matrix [B, T], as one vector, and rows that tables hand out."""
        layout = EmbeddingLayout.dense((matrix.shape[1],), matrix.device)
        return cls(layout, lambda _: matrix, rows_of=rows_of, sequence_of=sequence_of)

    def values(self) -> Tensor:
        """Return the values as one flat tensor, once they have arrived or are looked up."""
        return self.take(False)

    @torch.compiler.disable
    def distinct_rows(self, table: str, feature: str) -> DistinctRows:
        """Return the distinct rows of a table that hands them out: one without pooling that has a ragged feature."""
        assert self.rows_of is not None, "there is such a table"
        return self.rows_of(table, feature)

    @torch.compiler.disable
    def sequence(self, group: str) -> SequenceEvents:
        """Return the events of a sequence group; the tables of its features, or some of them, hand out their rows."""
        assert self.sequence_of is not None, "there is such a group"
        return self.sequence_of(group)

    @torch.compiler.disable
    def matrix(self, prefix: Tensor | None = None) -> Tensor:
        """Return the embeddings as one matrix [B, H + F * D], features in the model's order; differentiable.

        A prefix [B, H] comes before them and determines the dtype. It is a view of the values if their layout allows it.
        """
        values, layout = self.values(), self.layout
        first = 0 if prefix is None else prefix.shape[1]
        if layout.is_dense and layout.prefix_columns == first and not self.filled:
            matrix = values.view(-1, first + layout.width)
            if prefix is None:
                return matrix
            self.filled.append(True)
            # The cast matters on a CPU only: there embeddings stay float32 under bf16 autocast.
            return _FillPrefix.apply(prefix, matrix).to(prefix.dtype)
        return _Join.apply(prefix, values, layout)


def join(prefix: Tensor | None, embeddings: Tensor | PooledEmbeddings) -> Tensor:
    """Concatenate a prefix [B, H] (or None), which determines the dtype, and embeddings [B, F * D] in any layout."""
    if not isinstance(embeddings, Tensor):
        return embeddings.matrix(prefix)
    return embeddings if prefix is None else torch.cat([prefix, embeddings.to(prefix.dtype)], dim=1)


class _FillPrefix(torch.autograd.Function):
    """Write a prefix into the reserved columns of a matrix, in place."""

    @staticmethod
    def forward(ctx: Any, prefix: Tensor, matrix: Tensor) -> Tensor:
        ctx.prefix_columns = prefix.shape[1]
        filled = matrix.detach()
        filled[:, : ctx.prefix_columns] = prefix
        return filled

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad[:, : ctx.prefix_columns], grad.contiguous()


class _Join(torch.autograd.Function):
    """Copy prefix and segments into one matrix, and gradients back; one kernel per direction on a GPU."""

    @staticmethod
    def forward(ctx: Any, prefix: Tensor | None, values: Tensor, layout: EmbeddingLayout) -> Tensor:
        first = 0 if prefix is None else prefix.shape[1]
        ctx.layout, ctx.first = layout, first
        ctx.shape, ctx.dtype, ctx.has_prefix = values.shape, values.dtype, prefix is not None
        num_samples = values.numel() // layout.memory_columns
        like = values if prefix is None else prefix
        out = like.new_empty(num_samples, first + layout.width)
        if prefix is not None:
            out[:, :first] = prefix
        copy_columns(values, out[:, first:], layout, to_matrix=True)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, None]:
        # Columns left for a prefix have no gradient, and the check for overflows reads them.
        new = grad.new_zeros if ctx.layout.prefix_columns else grad.new_empty
        grad_values = new(ctx.shape, dtype=ctx.dtype)
        copy_columns(grad_values, grad[:, ctx.first :], ctx.layout, to_matrix=False)
        return grad[:, : ctx.first] if ctx.has_prefix else None, grad_values, None


def copy_columns(
    values: Tensor, matrix: Tensor, layout: EmbeddingLayout, *, to_matrix: bool
) -> None:
    """Copy the vectors that a layout has in `values` to their columns of a matrix [B, T], or back."""
    if values.is_cuda and layout.copied:
        # Only CUDA builds of torch include Triton.
        from nn.ops.triton.pooled_embeddings import copy_segments

        copy_segments(values, matrix, layout, to_matrix=to_matrix)
        return
    start = values.storage_offset()
    for block in layout.copied:
        in_values = torch.as_strided(
            values, (len(matrix), block.columns), (block.stride, 1), start + block.offset
        )
        in_matrix = matrix[:, block.first_column : block.first_column + block.columns]
        if to_matrix:
            in_matrix.copy_(in_values)
        else:
            in_values.copy_(in_matrix)
