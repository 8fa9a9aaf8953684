"""Kernels over all parameters of a layer or a model at once: the blocks of many tensors for one launch, and casts.

The 65,536 elements that torch's `foreach` gives a program leave most of a GPU idle.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nn.ops.addresses import elements_between

BLOCK = tl.constexpr(1024)
"""Elements per program."""
NUM_WARPS = 4
ALIGN = 16
ALIGNMENT = 128
"""Elements; matrix products are fastest where matrices begin at such offsets."""


class Blocks(NamedTuple):
    """Blocks of tensors, of which several columns belong together, such as weights and their gradients.

    `table`: per block the offset from the first tensor of each column, the number of elements, and the tensor n that begins
    there, or -1 - n of one that began before; int64 [columns + 2, blocks]. `num_aligned`: blocks whose offsets and sizes are
    multiples of `ALIGN`. They come first: a block that begins or ends between two vectors of a thread's registers is read
    number by number, and would slow down all others.
    """

    table: Tensor
    num_blocks: int
    num_aligned: int


def blocks_of(columns: Sequence[Sequence[Tensor]]) -> Blocks:
    """Return the blocks of contiguous tensors, a column per argument of the kernel; the n-th ones of all are equally long."""
    assert all(values.is_contiguous() for column in columns for values in column)
    sizes = [values.numel() for values in columns[0]]
    offsets = zip(
        *([elements_between(column[0], tensor) for tensor in column] for column in columns),
        strict=True,
    )
    most = BLOCK.value
    rows: list[tuple[int, ...]] = [
        (*(start + begin for start in starts), min(size - begin, most), ~index if begin else index)
        for index, (starts, size) in enumerate(zip(offsets, sizes, strict=True))
        for begin in range(0, size, most)
    ]
    rows.sort(key=lambda row: not _is_aligned(row))
    table = torch.tensor(rows, dtype=torch.int64).t().contiguous().to(columns[0][0].device)
    return Blocks(table, len(rows), sum(map(_is_aligned, rows)))


def _is_aligned(row: tuple[int, ...]) -> bool:
    """Return whether all offsets of a block, and its number of elements, are multiples of `ALIGN`."""
    return all(value % ALIGN == 0 for value in row[:-1])


_found: dict[tuple[tuple[int, int], ...], Blocks] = {}
"""Blocks of layers, by addresses and sizes of their parameters; a few KiB each. CUDA graphs hold their addresses."""


def cast_parameters(dtype: torch.dtype, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Cast the parameters, float32 or all of the dtype already, to another dtype."""
    if all(parameter.dtype is dtype for parameter in parameters):
        return list(parameters)
    parameters = [parameter.detach().contiguous() for parameter in parameters]
    sizes = [parameter.numel() for parameter in parameters]
    starts = list(accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))
    memory = torch.empty(starts[-1], dtype=dtype, device=parameters[0].device)
    copies = [
        memory[start : start + size].view(parameter.shape)
        for start, size, parameter in zip(starts, sizes, parameters, strict=False)
    ]
    key = tuple(zip((parameter.data_ptr() for parameter in parameters), sizes, strict=True))
    if key not in _found:
        _found[key] = blocks_of([parameters, copies])
    blocks = _found[key]
    tensors = parameters[0], memory
    _cast[(blocks.num_blocks,)](tensors, blocks, ALIGN=ALIGN, num_warps=NUM_WARPS)
    return copies


@triton.jit
def _cast(tensors, blocks, ALIGN: tl.constexpr):
    if tl.program_id(0) < blocks.num_aligned:
        _cast_block(tensors, blocks, ALIGN)
    else:
        _cast_block(tensors, blocks, 1)


@triton.jit
def _cast_block(tensors, blocks, ALIGN: tl.constexpr):
    inside = is_there(2, blocks, ALIGN)
    values = tl.load(block_of(tensors, 0, blocks, ALIGN), mask=inside, other=0.0)
    target_at = block_of(tensors, 1, blocks, ALIGN)
    tl.store(target_at, values.to(tensors[1].dtype.element_ty), mask=inside)


@triton.jit
def block_of(tensors, column: tl.constexpr, blocks, ALIGN: tl.constexpr):
    """Return where a program's block of a column lies; `tensors`: the first one of each column."""
    start = tl.load(blocks.table + tl.program_id(0) + column * blocks.num_blocks)
    return tensors[column] + tl.multiple_of(start, ALIGN) + tl.arange(0, BLOCK)


@triton.jit
def is_there(num_columns, blocks, ALIGN: tl.constexpr):
    """Return which elements a program's block of so many columns has."""
    count = tl.load(blocks.table + tl.program_id(0) + num_columns * blocks.num_blocks)
    return tl.arange(0, BLOCK) < tl.multiple_of(count, ALIGN)
