"""Rounding to FP8 on a GPU: one read, and both layouts written; `nn.ops.fp8` is the same in plain torch.

The transposed copy is made of words of four rows: they are transposed in registers of 32 bits, and stored by as many.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nn.ops.fp8 import GRADIENT, LARGEST, MULTIPLE, Fp8Matrix, Scale
from nn.ops.triton.column_sums import column_sums

# R: rows, C: columns, B: samples

WORD = 4
"""Rows of a word; `MULTIPLE` rows are whole words."""
BLOCK_R, BLOCK_C, BLOCKS_OF_ROWS = tl.constexpr(32), tl.constexpr(64), tl.constexpr(2)
"""A program processes `BLOCKS_OF_ROWS` blocks of `WORD` * `BLOCK_R` rows in sequence."""
NUM_WARPS = 8
"""More registers per thread than these leave would let fewer warps wait for memory at a time."""
ROWS_OF_PROGRAM = WORD * BLOCK_R * BLOCKS_OF_ROWS


def quantise(x: Tensor, dtype: torch.dtype, scale: Scale, *, transposed: bool) -> Fp8Matrix:
    """Round x [R, C] to 8 bits, as `nn.ops.fp8.quantise`."""
    return _rounded(x, dtype, scale, transposed=transposed)


def quantise_gradient(
    grad: Tensor, activation: Tensor | None, scale: Scale, *, transposed: bool
) -> tuple[Fp8Matrix, Tensor | None, Tensor]:
    """Round the gradient of a linear layer's output [B, C] to 8 bits, as `nn.ops.fp8.quantise_gradient`."""
    wide = None if transposed or activation is None else torch.empty_like(grad)
    partial_sums = grad.new_empty(grid(grad)[1], grad.shape[1], dtype=torch.float32)
    matrix = _rounded(
        grad,
        GRADIENT,
        scale,
        transposed=transposed,
        activation=activation,
        wide=wide,
        partial_sums=partial_sums,
    )
    if not transposed and wide is None:
        wide = grad
    return matrix, wide, column_sums(partial_sums)


def _rounded(
    x: Tensor,
    dtype: torch.dtype,
    scale: Scale,
    *,
    transposed: bool,
    activation: Tensor | None = None,
    wide: Tensor | None = None,
    partial_sums: Tensor | None = None,
) -> Fp8Matrix:
    """Launch the kernel; `wide` and `partial_sums` receive what `quantise_gradient` returns beside the matrix."""
    matrix, words = allocate(x, dtype, scale, transposed=transposed)
    _quantise[grid(x)](
        x,
        activation,
        matrix.rows,
        words,
        wide,
        partial_sums,
        scale.factor,
        scale.latest,
        *x.shape,
        LIMIT=LARGEST[dtype],
        num_warps=NUM_WARPS,
    )
    return matrix


def allocate(
    x: Tensor, dtype: torch.dtype, scale: Scale, *, transposed: bool
) -> tuple[Fp8Matrix, Tensor | None]:
    """Return a matrix [R, C] without values for those of `x`, and its transposed copy as words [C, R / 4]."""
    num_rows, num_columns = x.shape
    assert x.is_contiguous()
    assert num_rows % MULTIPLE == num_columns % MULTIPLE == 0
    rows = torch.empty_like(x, dtype=dtype)
    columns = x.new_empty(num_columns, num_rows, dtype=dtype) if transposed else None
    words = None if columns is None else columns.view(torch.int32)
    return Fp8Matrix(rows, scale.inverse, columns), words


def grid(x: Tensor) -> tuple[int, int]:
    num_rows, num_columns = x.shape
    return triton.cdiv(num_columns, BLOCK_C), triton.cdiv(num_rows, ROWS_OF_PROGRAM)


@triton.jit
def _quantise(
    x,
    activation,
    rows,
    words,
    wide,
    partial_sums,
    factor,
    latest,
    num_rows,
    num_columns,
    LIMIT: tl.constexpr,
):
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    first = tl.program_id(1).to(tl.int64) * BLOCKS_OF_ROWS * BLOCK_R
    scale = tl.load(factor)
    largest = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    total = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for block in range(BLOCKS_OF_ROWS):
        word = first + block * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
        inside = (word * 4 < num_rows) & (column < num_columns)
        packed = tl.zeros((BLOCK_R, BLOCK_C), tl.int32)
        for byte in tl.static_range(4):
            offset = (word * 4 + byte) * num_columns + column
            value = tl.load(x + offset, mask=inside, other=0.0)
            if activation is not None:
                # Like torch, the kernel passes the gradient where the activation is NaN.
                result = tl.load(activation + offset, mask=inside, other=0.0)
                value = tl.where(result <= 0, 0.0, value)
            if wide is not None:
                tl.store(wide + offset, value, mask=inside)
            value = value.to(tl.float32)
            if partial_sums is not None:
                total += value
            largest, packed = store_rounded(
                value, largest, packed, rows, offset, inside, scale, LIMIT, byte
            )
        if words is not None:
            store_words(packed, words, word, column, num_rows, inside)
    if partial_sums is not None:
        partial_sum = partial_sums + tl.program_id(1) * num_columns + column
        tl.store(partial_sum, tl.sum(total, 0)[None, :], mask=column < num_columns)
    if latest is not None:
        tl.atomic_max(latest, tl.max(largest), sem="relaxed")


@triton.jit
def store_rounded(
    value, largest, packed, rows, offset, inside, scale, LIMIT: tl.constexpr, byte: tl.constexpr
):
    """Store float32 values in 8 bits; return the largest absolute values and the words with these values too."""
    scaled = tl.clamp(value * scale, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    small = scaled.to(rows.dtype.element_ty)
    tl.store(rows + offset, small, mask=inside)
    return tl.maximum(largest, tl.abs(value)), packed | bits_of_word(small, byte)


@triton.jit
def bits_of_word(small, byte: tl.constexpr):
    """Return 8-bit values as byte number `byte` of words, int32.

    The bits are those of 16-bit floats, which hold them exactly: ptxas 12.8 crashes on bytes of vectors that are stored too.
    """
    half = small.to(tl.float16)
    if small.dtype == tl.float8e5:
        bits = half.to(tl.int16, bitcast=True).to(tl.int32) >> 8
    else:
        # The exponent's bias is 8 less.
        half = half * 0.00390625
        bits = half.to(tl.int16, bitcast=True).to(tl.int32)
        bits = ((bits >> 8) & 0x80) | ((bits >> 7) & 0x7F)
    return (bits & 0xFF) << (8 * byte)


@triton.jit
def store_words(packed, words, word, column, num_rows, inside):
    """Store words [BLOCK_R, BLOCK_C] of four rows each transposed."""
    offset = column.to(tl.int64) * (num_rows // 4) + word
    tl.store(words + tl.trans(offset), tl.trans(packed), mask=tl.trans(inside))
