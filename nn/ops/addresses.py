"""Distances between tensors, by which a kernel finds many of them from the address of one."""

from collections.abc import Iterable

from torch import Tensor


def elements_between(first: Tensor, other: Tensor) -> int:
    """Return the elements from the beginning of a tensor to that of another of its dtype.

    They may be separate allocations, in any memory that the device reads.
    """
    distance, size = other.data_ptr() - first.data_ptr(), first.element_size()
    assert distance % size == 0
    return distance // size


def are_adjacent(before: Tensor, after: Tensor) -> bool:
    """Return whether a tensor follows another one in the same memory."""
    is_one_memory = before.untyped_storage().data_ptr() == after.untyped_storage().data_ptr()
    return is_one_memory and before.storage_offset() + before.numel() == after.storage_offset()


def joined(first: Tensor, rows: int) -> Tensor:
    """View a tensor [n, ...] and those that follow it in its memory as one, with `rows` rows."""
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def join_adjacent(matrices: Iterable[Tensor]) -> list[Tensor]:
    """Join matrices [rows, columns] of one width that are adjacent in memory, so that they take one launch."""
    groups: list[Tensor] = []
    for matrix in matrices:
        last = groups[-1] if groups else None
        has_width = last is not None and last.shape[1] == matrix.shape[1]
        if last is not None and has_width and are_adjacent(last, matrix):
            groups[-1] = joined(last, len(last) + len(matrix))
        else:
            groups.append(matrix)
    return groups
