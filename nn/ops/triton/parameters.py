"""Kernels over all parameters of a layer or a model at once: the blocks of many tensors for one launch, and casts.

The 65,536 elements that torch's `foreach` gives a program leave most of a GPU idle.
"""

from collections.abc import Sequence
from itertools import accumulate

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


class TensorBlocks:
    """Blocks of tensors, of which several columns belong together, such as weights and their gradients.

    `columns`: tensors per argument of the kernel, contiguous; the n-th ones of all columns have the same number of
    elements. `table`: per block the offset from the first tensor of each column, the number of elements, and the tensor
    n that begins there, or -1 - n of one that began before; int64 [columns + 2, blocks]. `num_aligned`: blocks whose offsets
    and sizes are multiples of `ALIGN`. They come first: a block that begins or ends between two vectors of a thread's
    registers is read number by number, and would slow down all others.
    """

    def __init__(self, columns: Sequence[Sequence[Tensor]]) -> None:
        assert all(values.is_contiguous() for column in columns for values in column)
        sizes = [values.numel() for values in columns[0]]
        offsets = zip(
            *([elements_between(column[0], tensor) for tensor in column] for column in columns),
            strict=True,
        )
        most = BLOCK.value
        rows: list[tuple[int, ...]] = [
            (
                *(start + begin for start in starts),
                min(size - begin, most),
                ~index if begin else index,
            )
            for index, (starts, size) in enumerate(zip(offsets, sizes, strict=True))
            for begin in range(0, size, most)
        ]
        rows.sort(key=lambda row: not _is_aligned(row))
        self.table = torch.tensor(rows, dtype=torch.int64).t().contiguous().to(columns[0][0].device)
        self.num_aligned = sum(map(_is_aligned, rows))


def _is_aligned(row: tuple[int, ...]) -> bool:
    """Return whether all offsets of a block, and its number of elements, are multiples of `ALIGN`."""
    return all(value % ALIGN == 0 for value in row[:-1])


_found: dict[tuple[tuple[int, int], ...], TensorBlocks] = {}
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
        _found[key] = TensorBlocks([parameters, copies])
    blocks = _found[key]
    num_blocks = blocks.table.shape[1]
    listed = blocks.table, num_blocks, blocks.num_aligned
    _cast[(num_blocks,)](parameters[0], memory, *listed, ALIGN=ALIGN, num_warps=NUM_WARPS)
    return copies


@triton.jit
def _cast(source, target, blocks, num_blocks, num_aligned, ALIGN: tl.constexpr):
    if tl.program_id(0) < num_aligned:
        _cast_block(source, target, blocks, num_blocks, ALIGN)
    else:
        _cast_block(source, target, blocks, num_blocks, 1)


@triton.jit
def _cast_block(source, target, blocks, num_blocks, ALIGN: tl.constexpr):
    inside = is_there(2, blocks, num_blocks, ALIGN)
    values = tl.load(block_of(source, 0, blocks, num_blocks, ALIGN), mask=inside, other=0.0)
    target_at = block_of(target, 1, blocks, num_blocks, ALIGN)
    tl.store(target_at, values.to(target.dtype.element_ty), mask=inside)


@triton.jit
def block_of(first, column, blocks, num_blocks, ALIGN: tl.constexpr):
    """Return where a program's block of a column of `TensorBlocks` lies, whose first tensor is `first`."""
    start = tl.load(blocks + tl.program_id(0) + column * num_blocks)
    return first + tl.multiple_of(start, ALIGN) + tl.arange(0, BLOCK)


@triton.jit
def is_there(num_columns, blocks, num_blocks, ALIGN: tl.constexpr):
    """Return which elements a program's block of so many columns has."""
    count = tl.load(blocks + tl.program_id(0) + num_columns * num_blocks)
    return tl.arange(0, BLOCK) < tl.multiple_of(count, ALIGN)
