"""Initial weights as a function of the seed alone: the same bits on any device, number of ranks and sharding.

Tables are filled by a counter-based hash, so that a rank writes its shard without knowing the rest. The dense half is
small and replicated: it is drawn on the CPU from one generator and copied to where it lives.
"""

import hashlib
import math

import torch
from torch import Tensor, nn

CHUNK = {"cpu": 2**16, "cuda": 2**23}
"""Elements filled at a time: two int32 buffers that stay in the cache of a core, or keep a GPU busy."""


def initialise_dense(module: nn.Module, seed: int) -> None:
    """Draw every block of a dense half anew, in the order the blocks were registered.

    Leaves the global random state alone. Blocks are the modules that have `initialise(generator)`; on the meta device
    nothing happens, so call it after the parameters have memory.

    Args:
        module: `DLRM`, `DCNv2` or anything made of their blocks.
        seed: with the same seed and module the weights are the same bits on any device and rank.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    for block in module.modules():
        initialise = getattr(block, "initialise", None)
        if callable(initialise):
            initialise(generator)


@torch.no_grad()
def initialise_linear_(linear: nn.Linear, generator: torch.Generator) -> None:
    """Draw one layer of an MLP as NVIDIA's TensorFlow 2 recipe does (Keras' GlorotNormal kernel).

    The kernel is a normal cut at two of its deviations, widened so that sqrt(2 / (in + out)) is its deviation after
    the cut; the bias is normal with deviation sqrt(1 / out).
    """
    fan_out, fan_in = linear.weight.shape
    # a unit normal cut at +-2 keeps this deviation
    std = math.sqrt(2 / (fan_in + fan_out)) / 0.87962566103423978
    truncated_normal_(linear.weight, std, generator)
    bias = torch.empty(fan_out, device="cpu")
    linear.bias.copy_(bias.normal_(0, math.sqrt(1 / fan_out), generator=generator))


@torch.no_grad()
def truncated_normal_(parameter: Tensor, std: float, generator: torch.Generator) -> None:
    """Draw from a normal cut at two standard deviations (Keras' `truncated_normal`), on the CPU."""
    if parameter.is_meta:
        return
    drawn = torch.empty(parameter.shape, device="cpu")
    nn.init.trunc_normal_(drawn, std=std, a=-2 * std, b=2 * std, generator=generator)
    parameter.copy_(drawn)


@torch.no_grad()
def fill_uniform_(
    out: Tensor,
    *,
    seed: int,
    table: str,
    row_offset: int = 0,
    col_offset: int = 0,
    bound: float,
) -> None:
    """Fill one shard of a table with its part of the whole table's initial weights.

    Element (r, c) of the whole table is a hash of (seed, table, r, c), cut to 24 bits and scaled to [-bound, bound).
    Only integer operations and one multiplication are used, so CPU and CUDA give the same bits.

    The hash: SplitMix64's finaliser gives each row 64 bits and each column 32. An element mixes the sum of the row's
    first half and the column's bits by xor-shift and multiplication, takes in the row's second half, and multiplies
    again; the upper 24 bits are the result. Two rows are alike only if all 64 bits are, so tables far beyond 2^32
    elements repeat nothing.

    Args:
        out: shard [rows, columns], on any device; may be a strided view. Float32, or what that is rounded to.
        seed: any integer.
        table: name of the table.
        row_offset: global index of the shard's first row.
        col_offset: global index of the shard's first column.
        bound: half the width of the distribution; 1/sqrt(rows of the whole table) for a whole table's shards.
    """
    num_rows, num_columns = out.shape
    if out.numel() == 0:
        return
    digest = hashlib.blake2b(f"{seed}/{table}".encode(), digest_size=16).digest()
    row_key = int.from_bytes(digest[:8], "little", signed=True)
    column_key = int.from_bytes(digest[8:], "little", signed=True)
    column_bits = _hash_indices(column_key, col_offset, num_columns, out.device)[:, 0]

    rows_at_once = max(1, CHUNK.get(out.device.type, CHUNK["cpu"]) // num_columns)
    shape = (min(rows_at_once, num_rows), num_columns)
    bits_buffer, shifted_buffer = torch.empty((2, *shape), dtype=torch.int32, device=out.device)
    for start in range(0, num_rows, rows_at_once):
        chunk = out[start : start + rows_at_once]
        bits, shifted = bits_buffer[: len(chunk)], shifted_buffer[: len(chunk)]
        row_bits = _hash_indices(row_key, row_offset + start, len(chunk), out.device)
        torch.add(row_bits[:, :1], column_bits, out=bits)
        _xor_shift_(bits, 16, shifted)
        bits.mul_(0x7FEB352D)
        _xor_shift_(bits, 15, shifted)
        bits.bitwise_xor_(row_bits[:, 1:])
        bits.mul_(0x846CA68B - 2**32)
        bits.bitwise_right_shift_(8)  # arithmetic: a signed number of 24 bits, exact in float32
        if chunk.dtype is torch.float32:
            chunk.copy_(bits)
            chunk.mul_(bound / 2**23)
        else:
            chunk.copy_(bits.float().mul_(bound / 2**23))


def _hash_indices(key: int, start: int, count: int, device: torch.device) -> Tensor:
    """Hash the integers [start, start + count) to 64 bits each: int32 [count, 2] (SplitMix64)."""
    bits = torch.arange(start, start + count, dtype=torch.int64, device=device)
    bits.mul_(0x9E3779B97F4A7C15 - 2**64).add_(key)
    shifted = torch.empty_like(bits)
    _xor_shift_(bits, 30, shifted)
    bits.mul_(0xBF58476D1CE4E5B9 - 2**64)
    _xor_shift_(bits, 27, shifted)
    bits.mul_(0x94D049BB133111EB - 2**64)
    _xor_shift_(bits, 31, shifted)
    return bits.view(torch.int32).view(count, 2)


def _xor_shift_(bits: Tensor, distance: int, scratch: Tensor) -> None:
    """Compute bits ^= bits >> distance on the unsigned value; torch's own shift keeps the sign."""
    width = 8 * bits.element_size()
    torch.bitwise_right_shift(bits, distance, out=scratch)
    scratch.bitwise_and_(2 ** (width - distance) - 1)
    bits.bitwise_xor_(scratch)
