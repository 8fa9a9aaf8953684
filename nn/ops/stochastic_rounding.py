"""Stochastic rounding of 16-bit weights: unbiased, so that the expected weight equals the float32 result.

Most updates are smaller than half the distance between two adjacent 16-bit numbers. Rounding to nearest would drop them.
Stochastic rounding rounds up with a probability equal to the fraction of that distance, so small updates accumulate.

The random bits are a hash of (seed, table, step, row, column), so rounding needs no state. A run is reproducible, resumes
exactly, and rounds the same way for every sharding. `nn.ops.triton.stochastic_rounding` computes the same bits on a GPU.
"""

import hashlib

import torch
from torch import Tensor

# Two columns share 32 random bits. The arithmetic is modulo 2^32: on int32 here, on uint32 in Triton.
STEP_FACTOR = 0x9E3779B9
ROW_FACTOR = 0x85EBCA6B
PAIR_FACTOR = 0xC2B2AE35

# Bits of float32 numbers without the sign: infinity, the largest finite bf16 and fp16 numbers, the smallest normal fp16 number.
INFINITY = 0x7F800000
LARGEST_BF16 = 0x7F7F0000
LARGEST_FP16 = 0x477FE000
NORMAL_FP16 = 0x38800000


def rounding_key(seed: int, table: str) -> int:
    """Return the key of a table's random bits, an int32 hash of seed and table name."""
    digest = hashlib.blake2b(f"{seed}/{table}/rounding".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little", signed=True)


def random_bits(key: int, step: Tensor, rows: Tensor, first_column: int, columns: int) -> Tensor:
    """Return 16 random bits for every element of some rows.

    `step`: number of earlier updates, integer [1]. `rows`: row numbers, integers [n]. `first_column`: first column in the
    table; even. Returns int32 [n, columns], from 0 to 2^16 - 1.
    """
    column = torch.arange(
        first_column, first_column + columns, dtype=torch.int32, device=rows.device
    )
    step_bits = mix(step.to(torch.int32) * as_int32(STEP_FACTOR) + key)
    word = step_bits + rows.to(torch.int32)[:, None] * as_int32(ROW_FACTOR)
    word = mix(word + (column >> 1) * as_int32(PAIR_FACTOR))
    return (word >> (column & 1) * 16) & 0xFFFF


def round_stochastically(values: Tensor, dtype: torch.dtype, bits: Tensor) -> Tensor:
    """Round float32 to one of the two adjacent numbers of a 16-bit dtype, without bias.

    Numbers that the dtype can represent are unchanged, including infinities and NaN. Finite numbers beyond the dtype's largest
    become the largest. Between fp16's subnormal numbers the probability has 16 bits; the bias towards zero is below 2^-40.

    `values`: float32. `dtype`: bfloat16 or float16. `bits`: random bits in the shape of `values`, uniform from 0 to 2^16 - 1.
    """
    signed = values.contiguous().view(torch.int32)
    magnitude = signed & 0x7FFFFFFF
    if dtype is torch.bfloat16:
        # The upper half of a float32 is a bf16. Adding random bits carries into it with the probability of rounding up.
        rounded = torch.where(magnitude < LARGEST_BF16, magnitude + bits, magnitude) & 0x7FFF0000
    else:
        assert dtype is torch.float16
        truncated = (magnitude + (bits >> 3)) & 0x7FFFE000
        overflow = torch.where(magnitude < INFINITY, LARGEST_FP16, magnitude)
        rounded = torch.where(magnitude < LARGEST_FP16, truncated, overflow)
        # Subnormal numbers are multiples of 2^-24.
        small = magnitude.view(torch.float32).clamp(max=2.0**-14)
        multiple = ((small * 2.0**40).to(torch.int32) + bits) >> 16
        subnormal = multiple.float() * 2.0**-24
        rounded = torch.where(magnitude < NORMAL_FP16, subnormal.view(torch.int32), rounded)
    sign = signed & -0x80000000
    return (rounded | sign).view(torch.float32).to(dtype)


def mix(bits: Tensor) -> Tensor:
    """Hash int32 to int32, bijectively: Wellons' lowbias32, xor-shift and multiplication."""
    bits = bits ^ (bits >> 16 & 0xFFFF)
    bits = bits * as_int32(0x7FEB352D)
    bits = bits ^ (bits >> 15 & 0x1FFFF)
    bits = bits * as_int32(0x846CA68B)
    return bits ^ (bits >> 16 & 0xFFFF)


def as_int32(value: int) -> int:
    """Return the int32 of the same 32 bits."""
    return value - 2**32 if value >= 2**31 else value
