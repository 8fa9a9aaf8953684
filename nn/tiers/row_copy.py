"""Copies of some rows between memory of the device and registered memory of the host."""

import triton
import triton.language as tl
from torch import Tensor

from nn.tiers.slot_map import DeviceMoves

BLOCKS = 12
"""Programs of a launch: large ones, so that few multiprocessors are taken from the step beside it."""
ELEMENTS_PER_PROGRAM = 16_384
"""Elements that a program copies at once."""
WARPS = 32


@triton.jit
def _copy_rows(
    source,
    source_rows,
    source_stride,
    target,
    target_rows,
    target_stride,
    count,
    width,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    column = tl.arange(0, BLOCK_D)[None, :]
    for start in range(tl.program_id(0) * ROWS, count, tl.num_programs(0) * ROWS):
        index = start + tl.arange(0, ROWS)
        exists = index < count
        from_row = tl.load(source_rows + index, mask=exists, other=0).to(tl.int64)
        to_row = tl.load(target_rows + index, mask=exists, other=0).to(tl.int64)
        mask = exists[:, None] & (column < width)
        values = tl.load(source + from_row[:, None] * source_stride + column, mask=mask)
        tl.store(target + to_row[:, None] * target_stride + column, values, mask=mask)


def copy_rows(source: Tensor, source_rows: Tensor, target: Tensor, target_rows: Tensor) -> None:
    """Copy rows of a matrix [., D] to distinct rows, int64 [n], of another; either is on the device or in registered memory."""
    width, count = source.shape[1], len(source_rows)
    if count:
        of_source = source, source_rows, source.stride(0)
        of_target = target, target_rows, target.stride(0)
        grid, sizes = _programs(width, count)
        _copy_rows[grid](*of_source, *of_target, count, width, **sizes)


def _programs(width: int, most: int) -> tuple[tuple[int], dict[str, int]]:
    """Return grid and constants of a kernel that copies at most so many rows."""
    block_d = triton.next_power_of_2(width)
    rows = max(1, ELEMENTS_PER_PROGRAM // block_d)
    sizes = {"ROWS": rows, "BLOCK_D": block_d, "num_warps": WARPS}
    return (min(BLOCKS, triton.cdiv(most, rows)),), sizes


@triton.jit
def _exchange_rows(
    host, host_stride, arena, arena_stride, moves, width, ROWS: tl.constexpr, BLOCK_D: tl.constexpr
):
    column = tl.arange(0, BLOCK_D)[None, :]
    # The first of the counts.
    count = tl.load(moves.counts)
    for start in range(tl.program_id(0) * ROWS, count, tl.num_programs(0) * ROWS):
        index = start + tl.arange(0, ROWS)
        exists = index < count
        slot = tl.load(moves.slots + index, mask=exists, other=0).to(tl.int64)
        entering = tl.load(moves.rows + index, mask=exists, other=0).to(tl.int64)
        leaving = tl.load(moves.returned + index, mask=exists, other=-1).to(tl.int64)
        enters = exists[:, None] & (column < width)
        returns = enters & (leaving >= 0)[:, None]
        in_arena = arena + slot[:, None] * arena_stride + column
        # Both ways of the link at once.
        old = tl.load(in_arena, mask=returns)
        new = tl.load(host + entering[:, None] * host_stride + column, mask=enters)
        # All threads have read the slots that they overwrite.
        tl.debug_barrier()
        tl.store(host + leaving[:, None] * host_stride + column, old, mask=returns)
        tl.store(in_arena, new, mask=enters)


def exchange_rows(host: Tensor, arena: Tensor, moves: DeviceMoves) -> None:
    """Swap rows of an arena [., D] with others of registered host memory, of any row stride; no row both enters and returns."""
    width = host.shape[1]
    matrices = host, host.stride(0), arena, arena.stride(0)
    grid, sizes = _programs(width, len(moves.rows))
    _exchange_rows[grid](*matrices, moves, width, **sizes)
