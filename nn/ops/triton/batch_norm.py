"""Batch normalization on a GPU: each function of `nn.ops.batch_norm` as one kernel that reads its inputs once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

# R: rows, C: columns, P: programs along the rows

BLOCK_R, BLOCK_C, BLOCKS_OF_ROWS = tl.constexpr(32), tl.constexpr(128), tl.constexpr(8)
"""A program that sums processes so many blocks in sequence and accumulates in registers."""


def moments(x: Tensor, num_valid: Tensor) -> Tensor:
    """Return float64 [3, C]."""
    grid, sums = _partial_sums(x, 3, torch.float64)
    _moments[grid](x, num_valid, sums, x.shape[1])
    return sums.sum(0)


def normalise(
    x: Tensor, num_valid: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor
) -> Tensor:
    """Return [R, C] in the dtype of `x`."""
    out = torch.empty_like(x)
    _normalise[_grid(x)](x, out, num_valid, mean, rstd, weight, bias, *x.shape)
    return out


def gradient_sums(grad: Tensor, x: Tensor, num_valid: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    """Return float32 [2, C]."""
    grid, sums = _partial_sums(x, 2, torch.float32)
    _gradient_sums[grid](grad, x, num_valid, mean, rstd, sums, x.shape[1])
    return sums.sum(0)


def input_gradient(
    grad: Tensor,
    x: Tensor,
    num_valid: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    mean_sums: Tensor,
) -> Tensor:
    """Return [R, C] in the dtype of `x`."""
    out = torch.empty_like(x)
    _input_gradient[_grid(x)](grad, x, out, num_valid, mean, rstd, weight, mean_sums, *x.shape)
    return out


def _grid(x: Tensor) -> tuple[int, int]:
    rows, columns = x.shape
    return triton.cdiv(rows, BLOCK_R), triton.cdiv(columns, BLOCK_C)


def _partial_sums(x: Tensor, count: int, dtype: torch.dtype) -> tuple[tuple[int, int], Tensor]:
    """Return the grid of a kernel that sums, and its output [P, count, C]."""
    blocks, columns = _grid(x)
    programs = triton.cdiv(blocks, BLOCKS_OF_ROWS)
    return (programs, columns), x.new_empty(programs, count, x.shape[1], dtype=dtype)


@triton.jit
def _moments(x, num_valid, sums, columns):
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    valid = tl.load(num_valid)
    total = tl.zeros((BLOCK_C,), tl.float64)
    squares = tl.zeros((BLOCK_C,), tl.float64)
    of_means = tl.zeros((BLOCK_C,), tl.float64)
    for block in range(BLOCKS_OF_ROWS):
        first = (tl.program_id(0).to(tl.int64) * BLOCKS_OF_ROWS + block) * BLOCK_R
        row = first + tl.arange(0, BLOCK_R)
        inside = (row < valid)[:, None] & (column < columns)[None, :]
        offset = row[:, None] * columns + column[None, :]
        values = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32)
        count = tl.minimum(tl.maximum(valid - first, 0), BLOCK_R).to(tl.float32)
        mean = tl.sum(values, 0) / tl.maximum(count, 1.0)
        centred = tl.where(inside, values - mean[None, :], 0.0)
        squares += tl.sum(centred * centred, 0).to(tl.float64)
        wide = mean.to(tl.float64)
        total += wide * count.to(tl.float64)
        of_means += wide * wide * count.to(tl.float64)
    out = sums + tl.program_id(0) * 3 * columns + column
    tl.store(out, total, mask=column < columns)
    tl.store(out + columns, squares, mask=column < columns)
    tl.store(out + 2 * columns, of_means, mask=column < columns)


@triton.jit
def _normalise(x, out, num_valid, mean, rstd, weight, bias, rows, columns):
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_column = column < columns
    center = tl.load(mean + column, mask=is_column, other=0.0)
    factor = tl.load(rstd + column, mask=is_column, other=0.0)
    scale = tl.load(weight + column, mask=is_column, other=0.0)
    shift = tl.load(bias + column, mask=is_column, other=0.0)
    offset = row[:, None] * columns + column[None, :]
    is_valid = (row < tl.load(num_valid))[:, None] & is_column[None, :]
    values = tl.load(x + offset, mask=is_valid, other=0.0).to(tl.float32)
    normalised = tl.where(is_valid, (values - center[None, :]) * factor[None, :], 0.0)
    result = normalised * scale[None, :] + shift[None, :]
    inside = (row < rows)[:, None] & is_column[None, :]
    tl.store(out + offset, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gradient_sums(grad, x, num_valid, mean, rstd, sums, columns):
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    center = tl.load(mean + column, mask=column < columns, other=0.0)
    factor = tl.load(rstd + column, mask=column < columns, other=0.0)
    valid = tl.load(num_valid)
    of_bias = tl.zeros((BLOCK_C,), tl.float32)
    of_weight = tl.zeros((BLOCK_C,), tl.float32)
    for block in range(BLOCKS_OF_ROWS):
        first = (tl.program_id(0).to(tl.int64) * BLOCKS_OF_ROWS + block) * BLOCK_R
        row = first + tl.arange(0, BLOCK_R)
        inside = (row < valid)[:, None] & (column < columns)[None, :]
        offset = row[:, None] * columns + column[None, :]
        values = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32)
        grad_out = tl.load(grad + offset, mask=inside, other=0.0).to(tl.float32)
        normalised = tl.where(inside, (values - center[None, :]) * factor[None, :], 0.0)
        of_bias += tl.sum(grad_out, 0)
        of_weight += tl.sum(grad_out * normalised, 0)
    out = sums + tl.program_id(0) * 2 * columns + column
    tl.store(out, of_bias, mask=column < columns)
    tl.store(out + columns, of_weight, mask=column < columns)


@triton.jit
def _input_gradient(grad, x, out, num_valid, mean, rstd, weight, mean_sums, rows, columns):
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_column = column < columns
    center = tl.load(mean + column, mask=is_column, other=0.0)
    factor = tl.load(rstd + column, mask=is_column, other=0.0)
    scale = tl.load(weight + column, mask=is_column, other=0.0) * factor
    of_bias = tl.load(mean_sums + column, mask=is_column, other=0.0)
    of_weight = tl.load(mean_sums + columns + column, mask=is_column, other=0.0)
    offset = row[:, None] * columns + column[None, :]
    is_valid = (row < tl.load(num_valid))[:, None] & is_column[None, :]
    values = tl.load(x + offset, mask=is_valid, other=0.0).to(tl.float32)
    grad_out = tl.load(grad + offset, mask=is_valid, other=0.0).to(tl.float32)
    normalised = (values - center[None, :]) * factor[None, :]
    centred = grad_out - of_bias[None, :] - normalised * of_weight[None, :]
    result = tl.where(is_valid, centred * scale[None, :], 0.0)
    inside = (row < rows)[:, None] & is_column[None, :]
    tl.store(out + offset, result.to(out.dtype.element_ty), mask=inside)
