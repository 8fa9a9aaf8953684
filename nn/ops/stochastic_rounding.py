"""Weights of 16 bits: rounded up or down by chance, so that on average they are what float32 would hold.

Most updates are smaller than half the distance between two neighbouring 16-bit numbers. Rounded to the nearest they are lost,
and the weight never moves; rounded up with a chance that is the part of the way, they add up.

Chance is a hash of (seed, table, step, row, column). So it needs no state: a run repeats itself, goes on where it
stopped, and rounds alike however its tables are cut. `nn.ops.triton.stochastic_rounding` gives the same bits on a GPU.
"""

import hashlib

import torch
from torch import Tensor

# Two columns share 32 random bits. All of it is arithmetic modulo 2^32, here on int32, in Triton on uint32.
STEP_FACTOR = 0x9E3779B9
ROW_FACTOR = 0x85EBCA6B
PAIR_FACTOR = 0xC2B2AE35

# Of the bits of a float32 without its sign: its infinity, the largest finite numbers of the other two, fp16's smallest that
# is not subnormal.
INFINITY = 0x7F800000
LARGEST_BF16 = 0x7F7F0000
LARGEST_FP16 = 0x477FE000
NORMAL_FP16 = 0x38800000


def rounding_key(seed: int, table: str) -> int:
    """Return what tells a table's random bits from those of others: an int32."""
    digest = hashlib.blake2b(f"{seed}/{table}/rounding".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little", signed=True)


def random_bits(key: int, step: Tensor, rows: Tensor, first_column: int, columns: int) -> Tensor:
    """Return 16 random bits for each element of some rows.

    Args:
        key: of the table.
        step: updates before this one, integer [1].
        rows: integers [n].
        first_column: of the table, even.
        columns: how many from there on.

    Returns:
        int32 [n, columns], from 0 to 2^16 - 1.
    """
    column = torch.arange(
        first_column, first_column + columns, dtype=torch.int32, device=rows.device
    )
    of_step = _mix(step.to(torch.int32) * _int32(STEP_FACTOR) + key)
    word = of_step + rows.to(torch.int32)[:, None] * _int32(ROW_FACTOR)
    word = _mix(word + (column >> 1) * _int32(PAIR_FACTOR))
    return (word >> (column & 1) * 16) & 0xFFFF


def round_stochastically(values: Tensor, dtype: torch.dtype, bits: Tensor) -> Tensor:
    """Round float32 to one of its two neighbours in a dtype of 16 bits, each with the chance that makes the mean right.

    What the dtype can hold stays as it is, infinities and NaN included; a finite number beyond the dtype's largest becomes
    that. Between fp16's subnormal numbers the chance is cut to 16 bits: the mean is less than 2^-40 too near to zero.

    Args:
        values: float32.
        dtype: bfloat16 or float16.
        bits: of `values`' shape, from 0 to 2^16 - 1, all equally likely.
    """
    whole = values.contiguous().view(torch.int32)
    size = whole & 0x7FFFFFFF
    if dtype is torch.bfloat16:
        # The upper half of a float32 is a bf16: what is cut off makes it one more with the chance that it is of one.
        rounded = torch.where(size < LARGEST_BF16, size + bits, size) & 0x7FFF0000
    else:
        assert dtype is torch.float16
        cut = (size + (bits >> 3)) & 0x7FFFE000
        beyond = torch.where(size < INFINITY, LARGEST_FP16, size)
        rounded = torch.where(size < LARGEST_FP16, cut, beyond)
        # Subnormal numbers are multiples of 2^-24.
        small = size.view(torch.float32).clamp(max=2.0**-14)
        multiple = ((small * 2.0**40).to(torch.int32) + bits) >> 16
        subnormal = multiple.float() * 2.0**-24
        rounded = torch.where(size < NORMAL_FP16, subnormal.view(torch.int32), rounded)
    sign = whole & -0x80000000
    return (rounded | sign).view(torch.float32).to(dtype)


def _mix(bits: Tensor) -> Tensor:
    """Scatter int32 over all int32, one to one: xor-shift and multiplication, as Wellons' search found them (lowbias32)."""
    bits = bits ^ (bits >> 16 & 0xFFFF)
    bits = bits * _int32(0x7FEB352D)
    bits = bits ^ (bits >> 15 & 0x1FFFF)
    bits = bits * _int32(0x846CA68B)
    return bits ^ (bits >> 16 & 0xFFFF)


def _int32(value: int) -> int:
    """Return the int32 of the same 32 bits."""
    return value - 2**32 if value >= 2**31 else value
