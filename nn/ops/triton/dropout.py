"""Dropout on a GPU as one kernel that hashes counters instead of reading a mask; see `nn.ops.dropout_mask`."""

from typing import Any

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
    at = mask.shifted(rows, at)
    if x.numel():
        grid = (triton.cdiv(rows, BLOCK_B), triton.cdiv(columns, BLOCK_C))
        _dropout[grid](
            x,
            out,
            mask.step,
            mask.first_row,
            mask.key,
            mask.threshold,
            mask.scale,
            rows,
            columns,
            *((x, x) if at is None else at),
            HAS_OFFSETS=at is not None,
        )
    return out


def mask_arguments(
    mask: DropoutMask | None, rows: int, at: tuple[Tensor, Tensor] | None, unused: Tensor
) -> dict[str, Any]:
    """Return what kernels take of the mask of `rows` positions that lie `at`; of none any tensor, which they do not read."""
    if mask is None:
        return {"at": (unused,) * 4, "key": 0, "threshold": 0, "scale": 1.0}
    counters = (*(mask.shifted(rows, at) or (None, None)), mask.step, mask.first_row)
    return {"at": counters, "key": mask.key, "threshold": mask.threshold, "scale": mask.scale}


@triton.jit
def row_bits(step, first_row, key, sample):
    """Hash of each sample of this rank's batch, uint32."""
    global_row = (tl.load(first_row) + sample).to(tl.uint32)
    return mix(step_bits(key, tl.load(step)) + global_row * ROW)


@triton.jit
def is_kept(of_row, column, threshold):
    """Return whether the elements at these columns of a sample are kept."""
    bits = mix(of_row + column.to(tl.uint32) * COLUMN)
    return (bits >> 1) >= threshold.to(tl.uint32)


@triton.jit(do_not_specialize=["key", "threshold"])
def _dropout(
    x,
    out,
    step,
    first_row,
    key,
    threshold,
    scale,
    rows,
    columns,
    samples,
    offsets,
    HAS_OFFSETS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    sample = row
    of_row = column[None, :]
    if HAS_OFFSETS:
        sample = tl.load(samples + row, mask=row < rows, other=0).to(tl.int64)
        event = tl.load(offsets + row, mask=row < rows, other=0).to(tl.int32)
        of_row = of_row + event[:, None] * columns
    kept = is_kept(row_bits(step, first_row, key, sample)[:, None], of_row, threshold)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    offset = row[:, None] * columns + column[None, :]
    values = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32) * scale
    tl.store(out + offset, tl.where(kept, values, 0.0).to(out.dtype.element_ty), mask=inside)
