"""Distances between tensors, by which a kernel finds many of them from the address of one."""

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
