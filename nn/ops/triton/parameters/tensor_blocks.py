"""Blocks of many tensors for one launch of a kernel; the 65,536 elements of torch's `foreach` are too many for small models."""

from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK = 4096
"""Elements per program."""
NUM_WARPS = 8
ALIGN = 16


class TensorBlocks:
    """Blocks of tensors, of which several columns belong together, such as weights and their gradients.

    Args:
        columns: tensors per argument of the kernel, contiguous; the n-th ones of all columns have the same number of elements.

    Attributes:
        groups: alignment, and per block the offset from the first tensor of each column, the number of elements, and the tensor
            that begins there or -1; int64 [columns + 2, blocks].
    """

    def __init__(self, columns: Sequence[Sequence[Tensor]]) -> None:
        assert all(values.is_contiguous() for column in columns for values in column)
        sizes = [values.numel() for values in columns[0]]
        offsets = zip(*map(_offsets, columns), strict=True)
        rows = [
            (*(place + begin for place in places), min(size - begin, BLOCK), -1 if begin else index)
            for index, (places, size) in enumerate(zip(offsets, sizes, strict=True))
            for begin in range(0, size, BLOCK)
        ]
        device = columns[0][0].device
        # A block that begins or ends between two vectors of a thread's registers would slow down all others.
        self.groups = [
            (align, torch.tensor(group, dtype=torch.int64).t().contiguous().to(device))
            for align in (ALIGN, 1)
            if (group := [row for row in rows if _is_aligned(row) == (align == ALIGN)])
        ]


def _offsets(tensors: Sequence[Tensor]) -> list[int]:
    """Return the distance of each tensor from the first, in elements; they may be separate allocations."""
    first, size = tensors[0].data_ptr(), tensors[0].element_size()
    assert all((tensor.data_ptr() - first) % size == 0 for tensor in tensors)
    return [(tensor.data_ptr() - first) // size for tensor in tensors]


def _is_aligned(row: tuple[int, ...]) -> bool:
    """Return whether all places of a block, and its number of elements, are multiples of `ALIGN`."""
    return all(value % ALIGN == 0 for value in row[:-1])
