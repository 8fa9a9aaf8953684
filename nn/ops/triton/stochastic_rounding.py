"""Stochastic rounding inside Triton kernels, bit by bit equal to `nn.ops.stochastic_rounding`."""

import triton
import triton.language as tl

from nn.ops.stochastic_rounding import (
    INFINITY,
    LARGEST_BF16,
    LARGEST_FP16,
    NORMAL_FP16,
    PAIR_FACTOR,
    ROW_FACTOR,
    STEP_FACTOR,
)

STEP: tl.constexpr = tl.constexpr(STEP_FACTOR)
ROW: tl.constexpr = tl.constexpr(ROW_FACTOR)
PAIR: tl.constexpr = tl.constexpr(PAIR_FACTOR)
INF: tl.constexpr = tl.constexpr(INFINITY)
BF16_MAX: tl.constexpr = tl.constexpr(LARGEST_BF16)
FP16_MAX: tl.constexpr = tl.constexpr(LARGEST_FP16)
FP16_NORMAL: tl.constexpr = tl.constexpr(NORMAL_FP16)


@triton.jit
def mix(bits):
    """Hash uint32 to uint32, bijectively; `nn.ops.stochastic_rounding.mix`."""
    bits ^= bits >> 16
    bits *= 0x7FEB352D
    bits ^= bits >> 15
    bits *= 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def step_bits(key, step):
    """Hash of table and step that all elements share, uint32; `key` and `step` are int32."""
    return mix(step.to(tl.uint32) * STEP + key.to(tl.uint32))


@triton.jit
def random_bits(of_step, row, first_pair, column):
    """16 random bits for every element of a row, uint32; `column` counts from column 2 * `first_pair` of the table."""
    pair = (first_pair + (column >> 1)).to(tl.uint32) * PAIR
    word = mix(of_step + row.to(tl.uint32) * ROW + pair)
    return (word >> ((column & 1) * 16).to(tl.uint32)) & 0xFFFF


@triton.jit
def round_stochastically(values, bits, dtype: tl.constexpr):
    """Round float32 to bf16 or fp16."""
    signed = values.to(tl.uint32, bitcast=True)
    magnitude = signed & 0x7FFFFFFF
    # There is one return statement because Triton requires all of them to have the same type.
    if dtype == tl.bfloat16:
        rounded = signed + tl.where(magnitude < BF16_MAX, bits, 0)
        result = (rounded >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        truncated = (magnitude + (bits >> 3)) & 0x7FFFE000
        overflow = tl.where(magnitude < INF, FP16_MAX, magnitude)
        rounded = tl.where(magnitude < FP16_MAX, truncated, overflow)
        small = tl.minimum(magnitude.to(tl.float32, bitcast=True), 0.00006103515625)
        multiple = ((small * 1099511627776.0).to(tl.int32) + bits.to(tl.int32)) >> 16
        subnormal = multiple.to(tl.float32) * 5.960464477539063e-08
        rounded = tl.where(magnitude < FP16_NORMAL, subnormal.to(tl.uint32, bitcast=True), rounded)
        result = (rounded | (signed & 0x80000000)).to(tl.float32, bitcast=True).to(tl.float16)
    return result
