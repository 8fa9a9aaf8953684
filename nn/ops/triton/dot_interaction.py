"""Dot interaction as one Triton kernel per direction; the PyTorch version is in `nn.layers.dot_interaction`.

One program processes one sample, whose vectors fit into registers. It reads the embeddings once, in their layout, and
the bottom vector from another tensor, and writes the padded input of the top MLP once. PyTorch concatenates the vectors,
multiplies, gathers the triangle and copies again.
"""

from math import gcd
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nn.ops.embedding_layout import EmbeddingLayout
from nn.ops.table_rows import TableRows

# B: samples, F: embeddings of a sample, D: columns of a vector, V: vectors that interact (F, or F + 1 with bottom)

# Higher occupancy hides more memory latency: 0.27 instead of 0.30 ms for 65,536 samples of 27 vectors of 128 on an H200.
FEWER_REGISTERS = {"maxnreg": 160}


class Shape(NamedTuple):
    V: int
    D: int
    HAS_BOTTOM: bool
    ALIGN: int
    BLOCK_V: int
    BLOCK_D: int
    PRECISION: str


def fused_dot_interaction(
    bottom: Tensor | None,
    values: Tensor,
    layout: EmbeddingLayout,
    num_outputs: int,
    rows: TableRows | None = None,
) -> Tensor:
    """Map bottom [B, D] (or None) and embeddings to [B, num_outputs], as `nn.layers.dot_interaction.DotInteraction`.

    Sums are accumulated in float32. The result has the dtype of the bottom vector, or of the embeddings without one.

    `values`: embeddings in `layout`; their gradient has the same layout. `layout`: layout of `values`, without column
    shards. `rows`: rows of the batch, if there is a bottom vector: the forward pass looks them up itself, and writes the
    embeddings to `values`, where the backward pass reads them.
    """
    assert not layout.has_column_shards
    return _FusedDotInteraction.apply(bottom, values, layout, num_outputs, rows)


def dot_interaction_of_rows(
    bottom: Tensor,
    rows: TableRows,
    num_outputs: int,
    kept: Tensor | None = None,
    layout: EmbeddingLayout | None = None,
) -> Tensor:
    """Map bottom [B, D] and the rows of a batch to [B, num_outputs]; there is no backward pass.

    The result is that of `fused_dot_interaction` on vectors that were looked up in the dtype of the bottom vector.

    `kept`: memory in which the vectors are written too, in `layout`; None for none.
    """
    bottom = bottom.contiguous()
    out = bottom.new_empty(len(bottom), num_outputs)
    columns, num_features = rows.weights.shape[1], rows.offsets.shape[1]
    alignment = rows.alignment if layout is None else gcd(rows.alignment, layout.alignment)
    shape = _shape(num_features + 1, columns, has_bottom=True, alignment=alignment)
    _dot_forward_of_rows[(len(bottom),)](
        bottom,
        rows.weights,
        rows.ids,
        rows.offsets,
        bottom if kept is None else kept,
        rows.offsets if layout is None else layout.table,
        out,
        num_outputs,
        KEEPS=kept is not None,
        **shape,
        **(FEWER_REGISTERS if shape["num_warps"] == 1 else {}),
    )
    return out


class _FusedDotInteraction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        bottom: Tensor | None,
        values: Tensor,
        layout: EmbeddingLayout,
        num_outputs: int,
        rows: TableRows | None,
    ) -> Tensor:
        values = values.contiguous()
        narrow = values if bottom is None else bottom.contiguous()
        num_samples = values.numel() // layout.memory_columns
        if rows is None:
            out = narrow.new_empty(num_samples, num_outputs)
            _dot_forward[(num_samples,)](
                narrow, values, layout.table, out, num_outputs, **_shape_of(bottom, layout)
            )
        else:
            assert bottom is not None
            out = dot_interaction_of_rows(bottom, rows, num_outputs, values, layout)
        ctx.save_for_backward(bottom, values)
        ctx.layout = layout
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        bottom, values = ctx.saved_tensors
        narrow = values if bottom is None else bottom.contiguous()
        grad_values = torch.empty_like(values)
        grad_bottom = grad_values if bottom is None else torch.empty_like(narrow)
        _dot_backward[(len(grad),)](
            narrow,
            values,
            ctx.layout.table,
            grad.contiguous(),
            grad_bottom,
            grad_values,
            grad.shape[1],
            **_shape_of(bottom, ctx.layout),
            **(FEWER_REGISTERS if values.element_size() == 2 else {}),
        )
        return None if bottom is None else grad_bottom, grad_values, None, None, None


def _shape_of(bottom: Tensor | None, layout: EmbeddingLayout) -> dict[str, Any]:
    has_bottom = bottom is not None
    num_vectors, columns = layout.num_vectors + has_bottom, layout.embedding_dim
    return _shape(num_vectors, columns, has_bottom=has_bottom, alignment=layout.alignment)


def _shape(num_vectors: int, columns: int, *, has_bottom: bool, alignment: int) -> dict[str, Any]:
    block_v = max(triton.next_power_of_2(num_vectors), 16)
    block_d = max(triton.next_power_of_2(columns), 16)
    precision = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    shape = Shape(num_vectors, columns, has_bottom, alignment, block_v, block_d, precision)
    # One warp holds 32 vectors of 128 columns without spilling registers; larger samples need more warps.
    return {"S": shape, "num_warps": max(1, block_v * block_d // 4096)}


@triton.jit
def _vector_offsets(table, sample, feature, S: tl.constexpr):
    """Offsets of the features' vectors of a sample, from the first two rows of `EmbeddingLayout.table`."""
    F: tl.constexpr = S.V - (1 if S.HAS_BOTTOM else 0)
    ALIGN: tl.constexpr = S.ALIGN
    inside = (feature >= 0) & (feature < F)
    offset = tl.multiple_of(tl.load(table + feature, mask=inside, other=0), [ALIGN, ALIGN])
    stride = tl.multiple_of(tl.load(table + F + feature, mask=inside, other=0), [ALIGN, ALIGN])
    return offset + sample * stride


@triton.jit
def _load_vectors(bottom, embeddings, table, sample, S: tl.constexpr):
    """Load [BLOCK_V, BLOCK_D]: the bottom vector if there is one, the embeddings, zeros."""
    row = tl.arange(0, S.BLOCK_V)[:, None]
    column = tl.arange(0, S.BLOCK_D)[None, :]
    first = 1 if S.HAS_BOTTOM else 0
    inside = (row >= first) & (row < S.V) & (column < S.D)
    pointers = embeddings + _vector_offsets(table, sample, row - first, S) + column
    vectors = tl.load(pointers, mask=inside, other=0.0).to(bottom.dtype.element_ty)
    if S.HAS_BOTTOM:
        bottom_vector = tl.load(bottom + sample * S.D + column, mask=column < S.D, other=0.0)
        vectors = tl.where(row == 0, bottom_vector, vectors)
    return vectors


@triton.jit
def _dot_forward(bottom, embeddings, table, out, num_outputs, S: tl.constexpr):
    sample = tl.program_id(0).to(tl.int64)
    vectors = _load_vectors(bottom, embeddings, table, sample, S)
    _store_products(vectors, bottom, out, sample, num_outputs, S)


@triton.jit
def _dot_forward_of_rows(
    bottom,
    weights,
    ids,
    offsets,
    kept,
    layout_table,
    out,
    num_outputs,
    KEEPS: tl.constexpr,
    S: tl.constexpr,
):
    sample = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, S.BLOCK_V)
    column = tl.arange(0, S.BLOCK_D)[None, :]
    inside = (row >= 1) & (row < S.V)
    table = tl.load(offsets + row - 1, mask=inside, other=0)
    first_id = tl.load(offsets + S.V - 1 + row - 1, mask=inside, other=0)
    table_row = tl.load(ids + first_id + sample, mask=inside, other=0).to(tl.int64)
    start = tl.multiple_of((table + table_row * S.D)[:, None], [1, tl.constexpr(S.ALIGN)])
    in_row = inside[:, None] & (column < S.D)
    vectors = tl.load(weights + start + column, mask=in_row, other=0.0).to(kept.dtype.element_ty)
    if KEEPS:
        feature = row[:, None] - 1
        target = kept + _vector_offsets(layout_table, sample, feature, S) + column
        tl.store(target, vectors, mask=in_row)
    vectors = vectors.to(bottom.dtype.element_ty)
    bottom_vector = tl.load(bottom + sample * S.D + column, mask=column < S.D, other=0.0)
    vectors = tl.where(row[:, None] == 0, bottom_vector, vectors)
    _store_products(vectors, bottom, out, sample, num_outputs, S)


@triton.jit
def _store_products(vectors, bottom, out, sample, num_outputs, S: tl.constexpr):
    """Store the output of a sample: the bottom vector if there is one, the products of all pairs, zeros."""
    products = tl.dot(vectors, tl.trans(vectors), input_precision=S.PRECISION)
    pairs = out + sample * num_outputs
    if S.HAS_BOTTOM:
        column = tl.arange(0, S.BLOCK_D)
        bottom_vector = tl.load(bottom + sample * S.D + column, mask=column < S.D, other=0.0)
        tl.store(pairs + column, bottom_vector, mask=column < S.D)
        pairs += S.D
    i = tl.arange(0, S.BLOCK_V)[:, None]
    j = tl.arange(0, S.BLOCK_V)[None, :]
    tl.store(
        pairs + i * (i - 1) // 2 + j, products.to(out.dtype.element_ty), mask=(j < i) & (i < S.V)
    )
    end = S.V * (S.V - 1) // 2
    padding = end + tl.arange(0, 8)
    width = num_outputs - (S.D if S.HAS_BOTTOM else 0)
    tl.store(pairs + padding, tl.zeros((8,), out.dtype.element_ty), mask=padding < width)


@triton.jit
def _dot_backward(
    bottom, embeddings, table, grad, grad_bottom, grad_embeddings, num_outputs, S: tl.constexpr
):
    sample = tl.program_id(0).to(tl.int64)
    vectors = _load_vectors(bottom, embeddings, table, sample, S)
    i = tl.arange(0, S.BLOCK_V)[:, None]
    j = tl.arange(0, S.BLOCK_V)[None, :]
    high = tl.maximum(i, j)
    low = tl.minimum(i, j)
    first = 1 if S.HAS_BOTTOM else 0
    pairs = grad + sample * num_outputs + first * S.D
    # The product of vectors i and j is one output, so its gradient appears at (i, j) and (j, i).
    symmetric = tl.load(
        pairs + high * (high - 1) // 2 + low, mask=(low < high) & (high < S.V), other=0.0
    )
    grad_vectors = tl.dot(symmetric.to(vectors.dtype), vectors, input_precision=S.PRECISION)
    row = i
    column = tl.arange(0, S.BLOCK_D)[None, :]
    tl.store(
        grad_embeddings + _vector_offsets(table, sample, row - first, S) + column,
        grad_vectors.to(grad_embeddings.dtype.element_ty),
        mask=(row >= first) & (row < S.V) & (column < S.D),
    )
    if S.HAS_BOTTOM:
        column = tl.arange(0, S.BLOCK_D)
        from_products = tl.sum(tl.where(row == 0, grad_vectors, 0.0), 0)
        from_copy = tl.load(grad + sample * num_outputs + column, mask=column < S.D, other=0.0)
        tl.store(
            grad_bottom + sample * S.D + column,
            (from_products + from_copy.to(tl.float32)).to(grad_bottom.dtype.element_ty),
            mask=column < S.D,
        )
