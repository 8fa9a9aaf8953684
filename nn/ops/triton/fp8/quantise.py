"""Rounding to FP8 on a GPU: one read, and both layouts written; `nn.ops.fp8` is the same in plain torch.

The transposed copy is made of words of four rows: they are transposed in registers of 32 bits, and stored by as many.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nn.ops.fp8 import GRADIENT, INPUT, MULTIPLE, Fp8Matrix, Scale
from nn.ops.triton.column_sums import column_sums
from nn.ops.triton.layer_norm import load

# R: rows, C: columns, B: samples, T: tokens

WORD = 4
"""Rows of a word; `MULTIPLE` rows are whole words."""
BLOCK_R, BLOCK_C, BLOCKS_OF_ROWS = tl.constexpr(32), tl.constexpr(64), tl.constexpr(2)
"""A program processes `BLOCKS_OF_ROWS` blocks of `WORD` * `BLOCK_R` rows in sequence."""
NUM_WARPS = 8
OPTIONS = {"num_warps": NUM_WARPS, "maxnreg": 64}
"""More registers of a thread would let fewer warps wait for memory at a time: of these, four programs run at once."""
# Of GELU's gradient, transposed too or not.
GELU_GRADIENT = {True: {"num_warps": 4, "maxnreg": 128}, False: {"maxnreg": 80}}
ROWS_OF_PROGRAM = WORD * BLOCK_R * BLOCKS_OF_ROWS


def activate(
    hidden: Tensor, bias: Tensor, scale: Scale, *, transposed: bool
) -> tuple[Fp8Matrix, Tensor | None]:
    """Compute GELU(hidden + bias) in 8 bits, as `nn.ops.fp8.activate`."""
    wide = None if transposed else torch.empty_like(hidden)
    return quantise(hidden, INPUT, scale, transposed=transposed, bias=bias, wide=wide), wide


def quantise_gradient(
    grad: Tensor, activation: Tensor | None, bias: Tensor | None, scale: Scale, *, transposed: bool
) -> tuple[Fp8Matrix, Tensor | None, Tensor]:
    """Round the gradient of a linear layer's output to 8 bits, as `nn.ops.fp8.quantise_gradient`."""
    wide = None if transposed or activation is None else torch.empty_like(grad)
    programs, tokens = grid(grad)[1:]
    partial_sums = grad.new_empty(programs, tokens * grad.shape[-1], dtype=torch.float32)
    more = {"activation": activation, "bias": bias, "wide": wide, "partial_sums": partial_sums}
    matrix = quantise(grad, GRADIENT, scale, transposed=transposed, **more)
    if not transposed and wide is None:
        wide = grad
    return matrix, wide, column_sums(partial_sums)


def quantise(
    x: Tensor,
    dtype: torch.dtype,
    scale: Scale,
    *,
    transposed: bool,
    activation: Tensor | None = None,
    bias: Tensor | None = None,
    wide: Tensor | None = None,
    partial_sums: Tensor | None = None,
) -> Fp8Matrix:
    """Round x [R, C] or [T, R, C] to 8 bits, as `nn.ops.fp8.quantise`, or what `activate` and `quantise_gradient` return.

    `wide` and `partial_sums` receive what they return beside the matrix.
    """
    matrix, words = allocate(x, dtype, scale, transposed=transposed)
    tensors = x, activation, bias, matrix.rows, words, wide, partial_sums
    options = OPTIONS if activation is None or bias is None else OPTIONS | GELU_GRADIENT[transposed]
    _quantise[grid(x)](*tensors, (scale.factor, scale.latest), *x.shape[-2:], **options)
    return matrix


def allocate(
    x: Tensor, dtype: torch.dtype, scale: Scale, *, transposed: bool
) -> tuple[Fp8Matrix, Tensor | None]:
    """Return a matrix [R, C] without values for those of `x`, and its transposed copy as words [C, R / 4]; or of T tokens."""
    *tokens, num_rows, num_columns = x.shape
    assert x.is_contiguous()
    assert num_rows % MULTIPLE == num_columns % MULTIPLE == 0
    rows = torch.empty_like(x, dtype=dtype)
    columns = x.new_empty(*tokens, num_columns, num_rows, dtype=dtype) if transposed else None
    words = None if columns is None else columns.view(torch.int32)
    return Fp8Matrix(rows, scale.inverse, columns), words


def grid(x: Tensor) -> tuple[int, int, int]:
    """Return the programs of a matrix along its columns and rows, and the number of matrices."""
    num_rows, num_columns = x.shape[-2:]
    programs = triton.cdiv(num_columns, BLOCK_C), triton.cdiv(num_rows, ROWS_OF_PROGRAM)
    return *programs, x.shape[:-2].numel()


@triton.jit
def _quantise(x, activation, bias, rows, words, wide, sums, scales, num_rows, num_columns):
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    first = tl.program_id(1).to(tl.int64) * BLOCKS_OF_ROWS * BLOCK_R
    matrix = tl.program_id(2).to(tl.int64)
    scale = tl.load(scales[0])
    if bias is not None:
        shift = load(bias, matrix * num_columns + column, column < num_columns)
    largest = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    total = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for block in range(BLOCKS_OF_ROWS):
        word = first + block * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
        inside = (word * 4 < num_rows) & (column < num_columns)
        packed = tl.zeros((BLOCK_R, BLOCK_C), tl.int32)
        for byte in tl.static_range(4):
            offset = (matrix * num_rows + word * 4 + byte) * num_columns + column
            if activation is None and bias is not None:
                # Far below 0, where GELU is 0, whatever the bias of rows that are not there.
                value = tl.load(x + offset, mask=inside, other=-1e4).to(tl.float32) + shift
                value = tl.maximum(value, 0.0) - tl.abs(value) * tail(value)
            else:
                value = load(x, offset, inside)
            if activation is not None:
                result = load(activation, offset, inside)
                if bias is None:
                    # Like torch, the kernel passes the gradient where the activation is NaN.
                    value = tl.where(result <= 0, 0.0, value)
                else:
                    result += shift
                    share = tail(result)
                    density = 0.3989422804014327 * tl.exp2(result * result * -0.7213475204444817)
                    value *= tl.where(result < 0, share, 1 - share) + result * density
            if sums is not None:
                total += value
            if wide is not None:
                tl.store(wide + offset, value.to(wide.dtype.element_ty), mask=inside)
            largest = tl.maximum(largest, tl.abs(value))
            packed |= store_rounded(value, rows + offset, inside, scale, byte)
        if words is not None:
            of_matrix = words + matrix * num_columns * (num_rows // 4)
            store_words(packed, of_matrix, first + block * BLOCK_R, num_rows, num_columns)
    if sums is not None:
        at = (tl.program_id(1) * tl.num_programs(2) + matrix) * num_columns + column
        tl.store(sums + at, tl.sum(total, 0)[None, :], mask=column < num_columns)
    if scales[1] is not None:
        tl.atomic_max(scales[1], tl.max(largest), sem="relaxed")


@triton.jit
def tail(x):
    """Return the normal distribution's share beyond |x|; it and |x| times it are exact to 1e-6.

    Its logarithm is near to a polynomial, whose coefficients are fitted to both. `tl.erf` and fractions have more
    instructions, which take longer than the memory's bytes.
    """
    x = tl.abs(x)
    slope = -0.0523880646 + x * (0.00730068004 + x * -0.000502870884)
    return tl.exp2(x * (-1.15107012 + x * (-0.459368169 + x * slope)) - 1)


@triton.jit
def store_rounded(value, rows, inside, scale, byte: tl.constexpr):
    """Store float32 values in 8 bits, and return them as bytes of words.

    A GPU rounds what is too large to the largest number, and NaN stays NaN.
    """
    small = (value * scale).to(rows.dtype.element_ty)
    tl.store(rows, small, mask=inside)
    return bits_of_word(small, byte)


@triton.jit
def bits_of_word(small, byte: tl.constexpr):
    """Return 8-bit values as byte number `byte` of words, int32.

    The bits are those of 16-bit floats, which hold them exactly: ptxas 12.8 crashes on bytes of vectors that are stored too.
    """
    bits = small.to(tl.float16)
    if small.dtype == tl.float8e5:
        bits = bits.to(tl.int16, bitcast=True)
    else:
        # The exponent's bias is 8 less, and its first bit, which is then 0, is shifted out behind the sign.
        bits = (bits * 0.00390625).to(tl.int16, bitcast=True)
        bits += bits & 0x7FFF
    bits = bits.to(tl.int32) & 0xFF00
    return bits >> 8 if byte == 0 else bits << (8 * byte - 8)


@triton.jit
def store_words(packed, words, first, num_rows, num_columns):
    """Store words [BLOCK_R, BLOCK_C] of four rows each transposed, from word `first` of each column; four by a thread."""
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)[:, None]
    word = first + tl.arange(0, BLOCK_R)[None, :]
    inside = (word < num_rows // 4) & (column < num_columns)
    tl.store(words + column.to(tl.int64) * (num_rows // 4) + word, tl.trans(packed), mask=inside)
