"""The dot interaction as one Triton kernel each way, for GPUs; `nn.interaction` has it in plain torch.

One program a sample: its vectors fit into registers, so the embeddings are read once where they lie, behind the bottom
vector that another tensor holds, and the padded input of the top MLP is written once. In plain torch the same work
copies the vectors together, multiplies, gathers the triangle and copies again.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# B: samples, F: embeddings of a sample, D: columns of a vector, V: vectors that interact (F, or F + 1 with bottom)


def fused_dot_interaction(bottom: Tensor | None, embeddings: Tensor, num_outputs: int) -> Tensor:
    """Map bottom [B, D] (or None) and embeddings [B, F, D] to [B, num_outputs], as `nn.interaction.DotInteraction`.

    Sums are taken in float32; the result has the bottom vector's dtype, or that of the embeddings without one.
    """
    return _FusedDotInteraction.apply(bottom, embeddings, num_outputs)


class _FusedDotInteraction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bottom: Tensor | None, embeddings: Tensor, num_outputs: int) -> Tensor:
        embeddings = embeddings.contiguous()
        narrow = embeddings if bottom is None else bottom.contiguous()
        out = narrow.new_empty(len(embeddings), num_outputs)
        _forward[(len(embeddings),)](
            narrow, embeddings, out, num_outputs, **_shape(bottom, embeddings, num_outputs)
        )
        ctx.save_for_backward(bottom, embeddings)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, None]:
        bottom, embeddings = ctx.saved_tensors
        narrow = embeddings if bottom is None else bottom.contiguous()
        grad_embeddings = torch.empty_like(embeddings)
        grad_bottom = grad_embeddings if bottom is None else torch.empty_like(narrow)
        num_outputs = grad.shape[1]
        _backward[(len(embeddings),)](
            narrow,
            embeddings,
            grad.contiguous(),
            grad_bottom,
            grad_embeddings,
            num_outputs,
            **_shape(bottom, embeddings, num_outputs),
        )
        return None if bottom is None else grad_bottom, grad_embeddings, None


def _shape(bottom: Tensor | None, embeddings: Tensor, num_outputs: int) -> dict[str, Any]:
    num_vectors = embeddings.shape[1] + (bottom is not None)
    columns = embeddings.shape[2]
    block_v = max(triton.next_power_of_2(num_vectors), 16)
    block_d = max(triton.next_power_of_2(columns), 16)
    return {
        "V": num_vectors,
        "D": columns,
        "HAS_BOTTOM": bottom is not None,
        "BLOCK_V": block_v,
        "BLOCK_D": block_d,
        "PRECISION": "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
        # A warp holds 32 vectors of 128 columns without spilling; larger samples take more.
        "num_warps": max(1, block_v * block_d // 4096),
    }


@triton.jit
def _load_vectors(
    bottom,
    embeddings,
    sample,
    V: tl.constexpr,
    D: tl.constexpr,
    HAS_BOTTOM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """[BLOCK_V, BLOCK_D]: the bottom vector, if any, then the embeddings, then zeros."""
    row = tl.arange(0, BLOCK_V)[:, None]
    column = tl.arange(0, BLOCK_D)[None, :]
    first = 1 if HAS_BOTTOM else 0
    inside = (row >= first) & (row < V) & (column < D)
    place = embeddings + sample * (V - first) * D + (row - first) * D + column
    vectors = tl.load(place, mask=inside, other=0.0).to(bottom.dtype.element_ty)
    if HAS_BOTTOM:
        head = tl.load(bottom + sample * D + column, mask=column < D, other=0.0)
        vectors = tl.where(row == 0, head, vectors)
    return vectors


@triton.jit
def _forward(
    bottom,
    embeddings,
    out,
    num_outputs,
    V: tl.constexpr,
    D: tl.constexpr,
    HAS_BOTTOM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    sample = tl.program_id(0).to(tl.int64)
    vectors = _load_vectors(bottom, embeddings, sample, V, D, HAS_BOTTOM, BLOCK_V, BLOCK_D)
    products = tl.dot(vectors, tl.trans(vectors), input_precision=PRECISION)
    pairs = out + sample * num_outputs
    if HAS_BOTTOM:
        column = tl.arange(0, BLOCK_D)
        head = tl.load(bottom + sample * D + column, mask=column < D, other=0.0)
        tl.store(pairs + column, head, mask=column < D)
        pairs += D
    i = tl.arange(0, BLOCK_V)[:, None]
    j = tl.arange(0, BLOCK_V)[None, :]
    tl.store(
        pairs + i * (i - 1) // 2 + j,
        products.to(out.dtype.element_ty),
        mask=(j < i) & (i < V),
    )
    end = V * (V - 1) // 2
    padding = end + tl.arange(0, 8)
    width = num_outputs - (D if HAS_BOTTOM else 0)
    tl.store(pairs + padding, tl.zeros((8,), out.dtype.element_ty), mask=padding < width)


@triton.jit
def _backward(
    bottom,
    embeddings,
    grad,
    grad_bottom,
    grad_embeddings,
    num_outputs,
    V: tl.constexpr,
    D: tl.constexpr,
    HAS_BOTTOM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    sample = tl.program_id(0).to(tl.int64)
    vectors = _load_vectors(bottom, embeddings, sample, V, D, HAS_BOTTOM, BLOCK_V, BLOCK_D)
    i = tl.arange(0, BLOCK_V)[:, None]
    j = tl.arange(0, BLOCK_V)[None, :]
    high = tl.maximum(i, j)
    low = tl.minimum(i, j)
    first = 1 if HAS_BOTTOM else 0
    pairs = grad + sample * num_outputs + first * D
    # The product of vectors i and j is one output, so its gradient stands at (i, j) and at (j, i).
    symmetric = tl.load(
        pairs + high * (high - 1) // 2 + low, mask=(low < high) & (high < V), other=0.0
    )
    grad_vectors = tl.dot(symmetric.to(vectors.dtype), vectors, input_precision=PRECISION)
    row = i
    column = tl.arange(0, BLOCK_D)[None, :]
    tl.store(
        grad_embeddings + sample * (V - first) * D + (row - first) * D + column,
        grad_vectors.to(grad_embeddings.dtype.element_ty),
        mask=(row >= first) & (row < V) & (column < D),
    )
    if HAS_BOTTOM:
        column = tl.arange(0, BLOCK_D)
        through = tl.sum(tl.where(row == 0, grad_vectors, 0.0), 0)
        past = tl.load(grad + sample * num_outputs + column, mask=column < D, other=0.0)
        tl.store(
            grad_bottom + sample * D + column,
            (through + past.to(tl.float32)).to(grad_bottom.dtype.element_ty),
            mask=column < D,
        )
