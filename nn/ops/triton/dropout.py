"""Dropout on a GPU as one kernel that hashes counters instead of reading a mask; see `nn.ops.dropout_mask`."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nn.ops.dropout_mask import COLUMN_FACTOR, DropoutMask
from nn.ops.stochastic_rounding import ROW_FACTOR
from nn.ops.triton.stochastic_rounding import mix, step_bits

ROW: tl.constexpr = tl.constexpr(ROW_FACTOR)
COLUMN: tl.constexpr = tl.constexpr(COLUMN_FACTOR)
BLOCK_B, BLOCK_C = tl.constexpr(16), tl.constexpr(128)


class Counters(NamedTuple):
    """Numbers that the bits of a mask depend on, beside columns; without samples and offsets a position is a sample."""

    samples: Tensor | None  # of each position
    offsets: Tensor | None  # of each position in its sample
    step: Tensor
    first_row: Tensor


def apply_mask(
    x: Tensor, mask: DropoutMask, out: Tensor | None = None, at: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Compute `DropoutMask.apply` with the same bits.

    `x`: [B, ...], or [C, ...] with `at`. `out`: contiguous, receives the result; may be `x`. None allocates it.
    """
    x = x.contiguous()
    if out is None:
        out = torch.empty_like(x)
    rows = len(x)
    columns = x.numel() // max(rows, 1)
    if x.numel():
        grid = (triton.cdiv(rows, BLOCK_B), triton.cdiv(columns, BLOCK_C))
        of_mask = mask_arguments(mask, rows, at, x)
        _dropout[grid](x, out, **of_mask, rows=rows, columns=columns)
    return out


def mask_arguments(
    mask: DropoutMask | None, rows: int, at: tuple[Tensor, Tensor] | None, unused: Tensor
) -> dict[str, Any]:
    """Return what kernels take of the mask of `rows` positions that lie `at`; of none any tensor, which they do not read."""
    if mask is None:
        return {"at": Counters(*[unused] * 4), "key": 0, "threshold": 0, "scale": 1.0}
    samples, offsets = mask.shifted(rows, at) or (None, None)
    counters = Counters(samples, offsets, mask.step, mask.first_row)
    return {"at": counters, "key": mask.key, "threshold": mask.threshold, "scale": mask.scale}


@triton.jit
def row_bits(at, key, sample):
    """Hash of each sample of this rank's batch, uint32; `at`: `Counters`."""
    global_row = (tl.load(at.first_row) + sample).to(tl.uint32)
    return mix(step_bits(key, tl.load(at.step)) + global_row * ROW)


@triton.jit
def is_kept(of_row, column, threshold):
    """Return whether the elements at these columns of a sample are kept."""
    bits = mix(of_row + column.to(tl.uint32) * COLUMN)
    return (bits >> 1) >= threshold.to(tl.uint32)


@triton.jit(do_not_specialize=["key", "threshold"])
def _dropout(x, out, at, key, threshold, scale, rows, columns):
    row = tl.program_id(0).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    sample = row
    of_row = column[None, :]
    if at.samples is not None:
        sample = tl.load(at.samples + row, mask=row < rows, other=0).to(tl.int64)
        event = tl.load(at.offsets + row, mask=row < rows, other=0).to(tl.int32)
        of_row = of_row + event[:, None] * columns
    kept = is_kept(row_bits(at, key, sample)[:, None], of_row, threshold)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    offset = row[:, None] * columns + column[None, :]
    values = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32) * scale
    tl.store(out + offset, tl.where(kept, values, 0.0).to(out.dtype.element_ty), mask=inside)
