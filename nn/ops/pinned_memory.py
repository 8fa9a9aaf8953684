"""Pinned host memory of any size, which kernels and copy engines of a GPU read and write."""

import mmap
import os
import weakref
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch
from torch import Tensor

from nn.ops.numa_node import cpus_near, pci_address

REGISTERED_BYTES = 2**24
"""Tensors of at least this size lie in mmapped pages, which are pinned in place."""
TOUCHING_THREADS = 8


def pinned_memory(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Allocate zeros in pinned host memory, on the NUMA node of the current CUDA device, if they are large.

    Raises RuntimeError: the system has too little memory, or does not allow as much to be pinned.
    """
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    if num_bytes < REGISTERED_BYTES:
        return torch.zeros(tuple(shape), dtype=dtype, pin_memory=True)
    # torch rounds pinned memory up to a power of two, which may double it. Pinning huge pages takes half the time.
    pages = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Kernels without huge pages refuse the advice.
    with suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=dtype).view(tuple(shape))
    with touching_threads(cpus_near(pci_address(torch.cuda.current_device()))) as pool:
        list(pool.map(Tensor.zero_, memory.view(-1).chunk(TOUCHING_THREADS)))
    cudart, address = torch.cuda.cudart(), memory.data_ptr()
    torch.cuda.check_error(int(cudart.cudaHostRegister(address, memory.nbytes, 0)))
    # The pages are unregistered when the tensor is freed; the end of the process does it by itself.
    weakref.finalize(memory, cudart.cudaHostUnregister, address).atexit = False
    return memory


def touching_threads(cpus: Collection[int]) -> ThreadPoolExecutor:
    """Return threads that stay on some CPUs, on whose node memory is that they touch first; without any, they run anywhere."""
    stay = (lambda: os.sched_setaffinity(0, cpus)) if cpus else None
    return ThreadPoolExecutor(TOUCHING_THREADS, initializer=stay)
