"""The looked-up embeddings of a batch, left in memory as the all-to-all brought them.

Every rank sends the columns of its own tables, so what has arrived is one block a rank, and a sample's embeddings are
spread over all of them. The interaction kernel reads them there; whatever wants a matrix calls `matrix`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nn.ops.embedding_layout import EmbeddingLayout

# B: samples, F: features, D: columns of an embedding


@dataclass(frozen=True, slots=True)
class PooledEmbeddings:
    """Embeddings [B, F, D] in some layout.

    Attributes:
        layout: where what lies.
        arrive: returns the memory, flat; waits until they are there, since they may be on their way.
    """

    layout: EmbeddingLayout
    arrive: Callable[[], Tensor]

    @classmethod
    def of(cls, matrix: Tensor, num_features: int) -> "PooledEmbeddings":
        """Wrap a contiguous [B, F * D]."""
        dim = matrix.shape[1] // num_features
        return cls(EmbeddingLayout.dense(num_features, dim, matrix.device), lambda: matrix)

    @torch.compiler.disable
    def matrix(self, head: Tensor | None = None) -> Tensor:
        """Return them as one matrix, differentiable.

        Args:
            head: [B, H], put before them; gives the result its dtype.

        Returns:
            [B, H + F * D], features in the model's order; the memory itself where it is that already.
        """
        values, layout = self.arrive(), self.layout
        if layout.is_dense and layout.prefix_columns == (0 if head is None else head.shape[1]):
            matrix = values.view(-1, layout.prefix_columns + layout.width)
            if head is None:
                return matrix
            # Elsewhere the memory has the head's dtype already; on a CPU embeddings stay float32 under bf16.
            return _FillRoom.apply(head, matrix).to(head.dtype)
        return _Join.apply(head, values, layout)


def join(head: Tensor | None, embeddings: Tensor | PooledEmbeddings) -> Tensor:
    """Put a head [B, H] (or None) before embeddings, [B, F*D] or where they lie: [B, H + F*D], of the head's dtype."""
    if not isinstance(embeddings, Tensor):
        return embeddings.matrix(head)
    return embeddings if head is None else torch.cat([head, embeddings.to(head.dtype)], dim=1)


class _FillRoom(torch.autograd.Function):
    """Put a head into the columns that were left free for it; the embeddings stay where they are."""

    @staticmethod
    def forward(ctx: Any, head: Tensor, matrix: Tensor) -> Tensor:
        ctx.prefix_columns = head.shape[1]
        filled = matrix.detach()
        filled[:, : ctx.prefix_columns] = head
        return filled

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad[:, : ctx.prefix_columns], grad.contiguous()


class _Join(torch.autograd.Function):
    """Copy head and pieces together, and their gradients apart: one kernel each way for the pieces on a GPU."""

    @staticmethod
    def forward(ctx: Any, head: Tensor | None, values: Tensor, layout: EmbeddingLayout) -> Tensor:
        first = 0 if head is None else head.shape[1]
        ctx.layout, ctx.first = layout, first
        ctx.shape, ctx.dtype, ctx.has_head = values.shape, values.dtype, head is not None
        num_samples = values.numel() // (layout.prefix_columns + layout.width)
        like = values if head is None else head
        out = like.new_empty(num_samples, first + layout.width)
        if head is not None:
            out[:, :first] = head
        _copy_pieces(values, out[:, first:], layout, together=True)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, None]:
        apart = grad.new_empty(ctx.shape, dtype=ctx.dtype)
        _copy_pieces(apart, grad[:, ctx.first :], ctx.layout, together=False)
        return grad[:, : ctx.first] if ctx.has_head else None, apart, None


def _copy_pieces(apart: Tensor, matrix: Tensor, layout: EmbeddingLayout, *, together: bool) -> None:
    if apart.is_cuda:
        # Triton comes with torch's CUDA builds only.
        from nn.ops.triton.pooled_embeddings import copy_pieces

        copy_pieces(apart, matrix, layout, together=together)
        return
    start = apart.storage_offset()
    for piece in layout.pieces:
        there = torch.as_strided(
            apart, (len(matrix), piece.columns), (piece.stride, 1), start + piece.offset
        )
        first = piece.feature * layout.embedding_dim + piece.first_column
        here = matrix[:, first : first + piece.columns]
        if together:
            here.copy_(there)
        else:
            there.copy_(here)
