"""Distances between tensors, by which a kernel finds many of them from the address of one."""

from torch import Tensor


def elements_between(first: Tensor, other: Tensor) -> int:
    """Return the elements from the beginning of a tensor to that of another of its dtype.

    They may be separate allocations, in any memory that the device reads.
    """
    distance, size = other.data_ptr() - first.data_ptr(), first.element_size()
    assert distance % size == 0
    return distance // size
