"""Dot interaction: dot products of all pairs of feature vectors (DLRM, arXiv:1906.00091, section 2)."""

from typing import Any

import torch
from torch import Tensor, nn

from nn.layers.mlp import round_up
from nn.layers.pooled_embeddings import PooledEmbeddings

# B: samples, F: embeddings of a sample, D: columns of an embedding, V: vectors that interact (F, or F + 1 with bottom),
# P: pairs of distinct vectors, V (V - 1) / 2

# The fused kernel keeps a sample in registers.
MAX_FUSED_VECTORS = 64
MAX_FUSED_DIM = 256


class DotInteraction(nn.Module):
    """Concatenation of the bottom vector and the dot products of all pairs of distinct vectors.

    The vectors are the bottom MLP's output, if there is one, followed by the embeddings. Their products form a symmetric
    [V, V] matrix. The output contains its strictly lower triangle row by row: (1,0), (2,0), (2,1), (3,0), ... The output is
    padded with zeros to a multiple of 8 columns, as the top MLP requires.

    `num_embeddings`: F, embeddings per sample. `embedding_dim`: D, columns of every vector. `has_bottom`: whether there is
    a bottom vector; False for data without numerical features. P is `num_pairs`. `num_outputs`: columns of the output,
    including padding.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, *, has_bottom: bool = True) -> None:
        super().__init__()
        self.num_embeddings = num_embeddings
        num_vectors = num_embeddings + has_bottom
        rows, columns = torch.tril_indices(num_vectors, num_vectors, offset=-1)
        num_pairs = self.num_pairs = len(rows)
        self.register_buffer("pairs", rows * num_vectors + columns, persistent=False)
        # Per element of [V, V] the index of its pair; the diagonal has index P, a column of zeros.
        pair_index = torch.full((num_vectors, num_vectors), num_pairs, device=rows.device)
        pair_index[rows, columns] = pair_index[columns, rows] = torch.arange(
            num_pairs, device=rows.device
        )
        self.register_buffer("pair_index", pair_index.flatten(), persistent=False)
        used = has_bottom * embedding_dim + num_pairs
        self.num_outputs = round_up(used)
        self.padding = self.num_outputs - used
        self.is_fusible = num_vectors <= MAX_FUSED_VECTORS and embedding_dim <= MAX_FUSED_DIM

    def forward(self, bottom: Tensor | None, embeddings: Tensor | PooledEmbeddings) -> Tensor:
        """Map bottom [B, D] (or None) and embeddings, [B, F*D] or in any layout, to [B, num_outputs]."""
        device = embeddings.device if isinstance(embeddings, Tensor) else embeddings.layout.device
        if self.is_fusible and device.type == "cuda":
            if isinstance(embeddings, Tensor):
                embeddings = PooledEmbeddings.of(embeddings, self.num_embeddings)
            return _fused(bottom, embeddings, self.num_outputs)
        if isinstance(embeddings, Tensor):
            return self.forward_plain(bottom, embeddings)
        return self.forward_plain(bottom, embeddings.matrix())

    def forward_plain(self, bottom: Tensor | None, embeddings: Tensor) -> Tensor:
        """Compute `forward` with unfused PyTorch operations on any device, with embeddings [B, F*D]."""
        embeddings = embeddings.unflatten(1, (self.num_embeddings, -1))
        if bottom is None:
            parts = [_PairProducts.apply(embeddings, self.pairs, self.pair_index)]
        else:
            vectors = torch.cat([bottom.unsqueeze(1), embeddings.to(bottom.dtype)], dim=1)
            parts = [bottom, _PairProducts.apply(vectors, self.pairs, self.pair_index)]
        if self.padding:
            parts.append(parts[-1].new_zeros(embeddings.shape[0], self.padding))
        return torch.cat(parts, dim=1)


@torch.compiler.disable
def _fused(bottom: Tensor | None, embeddings: PooledEmbeddings, num_outputs: int) -> Tensor:
    # Only CUDA builds of torch include Triton.
    from nn.ops.triton.dot_interaction import dot_interaction_of_rows, fused_dot_interaction

    rows, layout = embeddings.table_rows, embeddings.layout
    if rows is not None and bottom is not None:
        if not torch.is_grad_enabled():
            return dot_interaction_of_rows(bottom, rows, num_outputs)
        return fused_dot_interaction(bottom, embeddings.take(True), layout, num_outputs, rows)
    if layout.has_column_shards:
        embeddings = PooledEmbeddings.of(embeddings.matrix(), layout.num_vectors)
    return fused_dot_interaction(bottom, embeddings.values(), embeddings.layout, num_outputs)


class _PairProducts(torch.autograd.Function):
    """Map vectors [B, V, D] to the products of their pairs [B, P].

    Let dZ be the gradient of the products as a symmetric [V, V] matrix. The gradient of the vectors is dZ X: one gather and
    one matrix product. Autograd would scatter and multiply twice: forward and backward take 4.5 instead of 2.8 ms on an
    H200 (65,536 samples of 27 vectors of 128, bf16).
    """

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, pairs: Tensor, pair_index: Tensor) -> Tensor:
        ctx.save_for_backward(vectors, pair_index)
        return torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1).index_select(1, pairs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        vectors, pair_index = ctx.saved_tensors
        num_vectors = vectors.shape[1]
        grad = nn.functional.pad(grad, (0, 1)).index_select(1, pair_index)
        grad = grad.view(-1, num_vectors, num_vectors)
        # Under autocast the products may have a narrower dtype than the vectors.
        return torch.bmm(grad, vectors.to(grad.dtype)).to(vectors.dtype), None, None
