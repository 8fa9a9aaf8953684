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
from nn.ops.triton.rankmixer import gelu, gelu_slope

# R: rows, C: columns, B: samples, T: tokens

WORD = 4
"""Rows of a word; `MULTIPLE` rows are whole words."""
BLOCK_R, BLOCK_C = tl.constexpr(32), tl.constexpr(64)
"""Words of a column and columns of a program."""
OPTIONS = {"num_warps": 8, "maxnreg": 64}
"""More registers of a thread would let fewer warps wait for memory at a time: of these, four programs run at once."""
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Triton's interpreter knows no assembly."""
TO_WORD = """{{ .reg .b16 low, high;
cvt.rn.satfinite.{0}x2.f32 low, $2, $1;
cvt.rn.satfinite.{0}x2.f32 high, $4, $3;
mov.b32 $0, {{low, high}}; }}"""
TO_E4M3, TO_E5M2 = (tl.constexpr(TO_WORD.format(name)) for name in ("e4m3", "e5m2"))
"""Rounds four values to a word; by Triton's own conversions each value would be taken out of its pair again."""
BYTES_OF_WORDS = tl.constexpr("""{ .reg .b32 a, b, c, d;
prmt.b32 a, $4, $5, 0x5140;
prmt.b32 b, $6, $7, 0x5140;
prmt.b32 c, $4, $5, 0x7362;
prmt.b32 d, $6, $7, 0x7362;
prmt.b32 $0, a, b, 0x5410;
prmt.b32 $1, a, b, 0x7632;
prmt.b32 $2, c, d, 0x5410;
prmt.b32 $3, c, d, 0x7632; }""")
"""Takes four words of neighbouring columns apart into their bytes 0, 1, 2 and 3."""


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
    _quantise[grid(x)](*tensors, (scale.factor, scale.latest), *x.shape[-2:], **OPTIONS)
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
    programs = triton.cdiv(num_columns, BLOCK_C), triton.cdiv(num_rows, WORD * BLOCK_R)
    return *programs, x.shape[:-2].numel()


@triton.jit
def _quantise(x, activation, bias, rows, words, wide, sums, scales, num_rows, num_columns):
    column, word, inside = place(num_rows, num_columns)
    matrix = tl.program_id(2).to(tl.int64)
    scale = tl.load(scales[0])
    if bias is not None:
        shift = load(bias, matrix * num_columns + column, column < num_columns)
    largest = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    total = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    values = ()
    at = (matrix * num_rows + word * 4) * num_columns + column
    for byte in tl.static_range(4):
        offset = at + byte * num_columns
        if activation is None and bias is not None:
            # Far below 0, where GELU is 0, whatever the bias of rows that are not there.
            value = tl.load(x + offset, mask=inside, other=-1e4).to(tl.float32) + shift
            value = gelu(value, EXACT=False)
        else:
            value = load(x, offset, inside)
        if activation is not None:
            result = load(activation, offset, inside)
            if bias is None:
                # Like torch, the kernel passes the gradient where the activation is NaN.
                value = tl.where(result <= 0, 0.0, value)
            else:
                value *= gelu_slope(result + shift, EXACT=False)
        if sums is not None:
            total += value
        if wide is not None:
            tl.store(wide + offset, value.to(wide.dtype.element_ty), mask=inside)
        largest = tl.maximum(largest, tl.abs(value))
        values += (value,)
    packed = store_rounded(values, rows + at, num_columns, inside, scale)
    if words is not None:
        of_matrix = words + matrix * num_columns * (num_rows // 4)
        store_words(packed, of_matrix, num_rows, num_columns)
    if sums is not None:
        at = (tl.program_id(1) * tl.num_programs(2) + matrix) * num_columns + column
        tl.store(sums + at, tl.sum(total, 0)[None, :], mask=column < num_columns)
    if scales[1] is not None:
        tl.atomic_max(scales[1], tl.max(largest), sem="relaxed")


@triton.jit
def place(num_rows, num_columns):
    """Return a program's columns, its words of four rows, and which of these are there."""
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    word = tl.program_id(1).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    return column, word, (word * 4 < num_rows) & (column < num_columns)


@triton.jit
def store_rounded(values, rows, num_columns, inside, scale):
    """Store float32 values of four rows in 8 bits, and return them as words, int32: a row's byte is number 0 to 3.

    `rows`: where those of the first row lie. What is too large becomes the largest number, and NaN stays NaN.
    """
    small = ()
    for byte in tl.static_range(4):
        small += (values[byte] * scale,)
    if INTERPRETED:
        words = tl.zeros_like(inside).to(tl.int32)
        parts = ()
        for byte in tl.static_range(4):
            bits = small[byte].to(rows.dtype.element_ty).to(tl.uint8, bitcast=True)
            parts += (bits,)
            words |= bits.to(tl.int32) << (8 * byte)
    else:
        asm: tl.constexpr = TO_E4M3 if rows.dtype.element_ty == tl.float8e4nv else TO_E5M2
        words = tl.inline_asm_elementwise(
            asm, "=r,f,f,f,f", small, dtype=tl.int32, is_pure=True, pack=1
        )
        parts = tl.inline_asm_elementwise(
            BYTES_OF_WORDS,
            "=r,=r,=r,=r,r,r,r,r",
            [words],
            dtype=(tl.int8,) * 4,
            is_pure=True,
            pack=4,
        )
    for byte in tl.static_range(4):
        part = parts[byte].to(rows.dtype.element_ty, bitcast=True)
        tl.store(rows + byte * num_columns, part, mask=inside)
    return words


@triton.jit
def store_words(packed, words, num_rows, num_columns):
    """Store a program's words [BLOCK_R, BLOCK_C] of four rows each transposed; four by a thread."""
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)[:, None]
    word = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)[None, :]
    inside = (word < num_rows // 4) & (column < num_columns)
    tl.store(words + column.to(tl.int64) * (num_rows // 4) + word, tl.trans(packed), mask=inside)
