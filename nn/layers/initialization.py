"""Initial weights that depend on the seed only: bitwise equal for any device, number of ranks and sharding.

Tables are filled by a counter-based hash, so that every rank can initialize its shard alone. The dense component is small
and replicated: it is drawn on the CPU from one generator and copied to the device.
"""

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

BLOCK_ELEMENTS = {"cpu": 2**16, "cuda": 2**23}
"""Elements per block, by device: the two int32 buffers fit into a core's cache, or occupy a GPU."""


def initialise_dense(module: nn.Module, seed: int) -> None:
    """Initialize all layers of a dense component, in the order of their registration.

    Layers are the modules with a method `initialise(generator)`. Parameters on the meta device are skipped, so call this
    after `to_empty`. The global random state is unchanged.

    `module`: `DLRM`, `DCNv2` or any module made of these layers. `seed`: seed; the same seed and module give bitwise equal
    weights on any device and rank.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    for block in module.modules():
        initialise = getattr(block, "initialise", None)
        if callable(initialise):
            initialise(generator)


@torch.no_grad()
def initialise_linear_(linear: nn.Linear, generator: torch.Generator) -> None:
    """Initialize a linear layer as NVIDIA's TensorFlow 2 recipe does (Keras' GlorotNormal kernel).

    The weight is normal, truncated at two standard deviations. Its standard deviation after truncation is
    sqrt(2 / (in + out)). The bias is normal with standard deviation sqrt(1 / out).
    """
    fan_out, fan_in = linear.weight.shape
    # The divisor is the standard deviation of a unit normal truncated at +-2.
    std = math.sqrt(2 / (fan_in + fan_out)) / 0.87962566103423978
    truncated_normal_(linear.weight, std, generator)
    bias = torch.empty(fan_out, device="cpu")
    linear.bias.copy_(bias.normal_(0, math.sqrt(1 / fan_out), generator=generator))


@torch.no_grad()
def initialise_without_bias_(linear: nn.Linear, generator: torch.Generator) -> None:
    """Initialize a linear layer by `normal_`, with a bias of 0."""
    normal_(linear.weight, generator)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)


@torch.no_grad()
def truncated_normal_(parameter: Tensor, std: float, generator: torch.Generator) -> None:
    """Fill with draws on the CPU from a normal truncated at two standard deviations (Keras' `truncated_normal`)."""
    if parameter.is_meta:
        return
    drawn = torch.empty(parameter.shape, device="cpu")
    nn.init.trunc_normal_(drawn, std=std, a=-2 * std, b=2 * std, generator=generator)
    parameter.copy_(drawn)


def truncated_glorot_(weight: Tensor, generator: torch.Generator) -> None:
    """Fill [..., in, out] by `truncated_normal_` with a variance of 2 / (in + out) before the truncation."""
    truncated_normal_(weight, math.sqrt(2 / sum(weight.shape[-2:])), generator)


@torch.no_grad()
def normal_(weight: Tensor, generator: torch.Generator) -> None:
    """Fill [out, in] with draws on the CPU from a normal of variance 2 / (in + out) (Glorot and Bengio, 2010)."""
    if not weight.is_meta:
        drawn = torch.empty(weight.shape, device="cpu")
        weight.copy_(nn.init.xavier_normal_(drawn, generator=generator))


@torch.no_grad()
def uniform_(parameter: Tensor, low: float, high: float, generator: torch.Generator) -> None:
    """Fill with draws on the CPU from a uniform distribution."""
    if not parameter.is_meta:
        drawn = torch.empty(parameter.shape, device="cpu")
        parameter.copy_(drawn.uniform_(low, high, generator=generator))


@torch.no_grad()
def fill_uniform_(
    out: Tensor, *, seed: int, table: str, row_offset: int = 0, col_offset: int = 0, bound: float
) -> None:
    """Fill one shard of a table with its initial weights.

    Element (r, c) of the table is a hash of (seed, table, r, c), truncated to 24 bits and scaled to [-bound, bound). Only
    integer operations and one multiplication are used, so CPU and CUDA give the same bits.

    The hash: SplitMix64's finalizer gives every row 64 bits and every column 32. The sum of the row's first half and the column's
    bits is mixed by xor-shift and multiplication, combined with the row's second half, and multiplied again. The upper 24 bits
    are the result. Two rows are equal only if all 64 bits are, so tables far beyond 2^32 elements do not repeat values.

    `out`: shard [rows, columns] on any device; may be a strided view. Float32, or a dtype that float32 is rounded to.
    `bound`: half the width of the distribution, usually 1/sqrt(rows of the table).
    """
    num_rows, num_columns = out.shape
    if out.numel() == 0:
        return
    row_key, column_key = _table_keys(seed, table)
    column_bits = _hash_indices(column_key, col_offset, num_columns, out.device)[:, 0]

    rows_at_once = max(1, BLOCK_ELEMENTS.get(out.device.type, BLOCK_ELEMENTS["cpu"]) // num_columns)
    shape = (min(rows_at_once, num_rows), num_columns)
    bits_buffer, shifted_buffer = torch.empty((2, *shape), dtype=torch.int32, device=out.device)
    for start in range(0, num_rows, rows_at_once):
        block = out[start : start + rows_at_once]
        bits, shifted = bits_buffer[: len(block)], shifted_buffer[: len(block)]
        row_bits = _hash_indices(row_key, row_offset + start, len(block), out.device)
        torch.add(row_bits[:, :1], column_bits, out=bits)
        _mix_(bits, row_bits, shifted)
        if block.dtype is torch.float32:
            block.copy_(bits)
            block.mul_(bound / 2**23)
        else:
            block.copy_(bits.float().mul_(bound / 2**23))


class KeyedWeights:
    """Initial weights of rows with raw keys: those that `fill_uniform_` gives to the row whose number is the key."""

    def __init__(
        self,
        tables: Sequence[tuple[str, int, float]],
        seed: int,
        num_columns: int,
        device: torch.device,
    ) -> None:
        keys = [_table_keys(seed, name) for name, _, _ in tables]
        self._row_keys = torch.tensor([row for row, _ in keys], device=device)
        self._column_bits = torch.stack(
            [
                _hash_indices(column, first, num_columns, device)[:, 0]
                for (_, column), (_, first, _) in zip(keys, tables, strict=True)
            ]
        )
        self._factors = torch.tensor([bound / 2**23 for *_, bound in tables], device=device)

    def __call__(self, keys: Tensor, tables: Tensor) -> Tensor:
        """Return the weights of keys (int64 [n]) of tables (int64 [n], their positions), float32 [n, columns]."""
        row_bits = _hashed(keys.mul(0x9E3779B97F4A7C15 - 2**64).add_(self._row_keys[tables]))
        bits = self._column_bits[tables].add_(row_bits[:, :1])
        _mix_(bits, row_bits, torch.empty_like(bits))
        return bits.float().mul_(self._factors[tables][:, None])


def _table_keys(seed: int, table: str) -> tuple[int, int]:
    """Return the numbers that the hashes of a table's rows and columns begin with."""
    digest = hashlib.blake2b(f"{seed}/{table}".encode(), digest_size=16).digest()
    row_key = int.from_bytes(digest[:8], "little", signed=True)
    return row_key, int.from_bytes(digest[8:], "little", signed=True)


def _mix_(bits: Tensor, row_bits: Tensor, shifted: Tensor) -> None:
    """Turn sums of row and column bits, int32 [n, columns], into signed 24-bit numbers, which are exact in float32."""
    _xor_shift_(bits, 16, shifted)
    bits.mul_(0x7FEB352D)
    _xor_shift_(bits, 15, shifted)
    bits.bitwise_xor_(row_bits[:, 1:])
    bits.mul_(0x846CA68B - 2**32)
    # The arithmetic shift gives a signed number.
    bits.bitwise_right_shift_(8)


def _hash_indices(key: int, start: int, count: int, device: torch.device) -> Tensor:
    """Hash every integer in [start, start + count) to 64 bits with SplitMix64; int32 [count, 2]."""
    bits = torch.arange(start, start + count, dtype=torch.int64, device=device)
    return _hashed(bits.mul_(0x9E3779B97F4A7C15 - 2**64).add_(key))


def _hashed(bits: Tensor) -> Tensor:
    """Mix int64 numbers [n] with SplitMix64's finalizer, in place; return them as int32 [n, 2]."""
    shifted = torch.empty_like(bits)
    _xor_shift_(bits, 30, shifted)
    bits.mul_(0xBF58476D1CE4E5B9 - 2**64)
    _xor_shift_(bits, 27, shifted)
    bits.mul_(0x94D049BB133111EB - 2**64)
    _xor_shift_(bits, 31, shifted)
    return bits.view(torch.int32).view(-1, 2)


def _xor_shift_(bits: Tensor, distance: int, scratch: Tensor) -> None:
    """Compute bits ^= bits >> distance with a logical shift; torch's own right shift is arithmetic."""
    width = 8 * bits.element_size()
    torch.bitwise_right_shift(bits, distance, out=scratch)
    scratch.bitwise_and_(2 ** (width - distance) - 1)
    bits.bitwise_xor_(scratch)
