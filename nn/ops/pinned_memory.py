"""Pinned host memory of any size, which kernels and copy engines of a GPU read and write."""

import mmap
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch
from torch import Tensor

REGISTERED_BYTES = 2**24
"""Tensors of at least this size lie in mmapped pages, which are pinned in place."""
TOUCHING_THREADS = 8


def pinned_memory(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Allocate pinned host memory; it needs a CUDA device.

    Raises:
        RuntimeError: the system has too little memory, or does not allow as much to be pinned.
    """
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    if num_bytes < REGISTERED_BYTES:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)
    # torch rounds pinned memory up to a power of two, which may double it. Pinning huge pages takes half the time.
    pages = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Kernels without huge pages refuse the advice.
    with suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=dtype).view(tuple(shape))
    with ThreadPoolExecutor(TOUCHING_THREADS) as pool:
        list(pool.map(Tensor.zero_, memory.view(-1).chunk(TOUCHING_THREADS)))
    cudart, address = torch.cuda.cudart(), memory.data_ptr()
    torch.cuda.check_error(int(cudart.cudaHostRegister(address, memory.nbytes, 0)))
    # The pages are unregistered when the tensor is freed; the end of the process does it by itself.
    weakref.finalize(memory, cudart.cudaHostUnregister, address).atexit = False
    return memory
