"""Host memory of a batch: its own, or a slot that a reader process fills and that is reused."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dataloading.batch import Batch, aligned
from dataloading.reader_processes import shared_memory


class BatchMemory:
    """Allocator of tensors as numpy arrays; `tensor` returns the tensor, which knows if it is pinned."""

    def __init__(self) -> None:
        self._tensors: dict[int, tuple[np.ndarray, Tensor]] = {}

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return memory for a column, not zeroed."""
        tensor = self._make(shape, getattr(torch, np.dtype(dtype).name))
        array = tensor.numpy()
        self._tensors[id(array)] = (array, tensor)
        return array

    def tensor(self, array: np.ndarray) -> Tensor:
        """Return the tensor of an array that `allocate` returned."""
        return self._tensors[id(array)][1]

    def _make(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        raise NotImplementedError


class OwnMemory(BatchMemory):
    """New memory for every column, freed with its last reference."""

    def __init__(self, *, pin: bool) -> None:
        super().__init__()
        self._pin = pin

    def _make(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=self._pin)


class SlotFullError(Exception):
    """A slot has no room for a column."""


class Slot(BatchMemory):
    """Columns one after another in a block of memory: the same columns have the same offsets in every process.

    `allocate` raises `SlotFullError` if a column does not fit, which only ragged features may cause.
    """

    def __init__(self, memory: Tensor) -> None:
        super().__init__()
        self._memory = memory
        self._taken = 0

    @property
    def taken(self) -> Tensor:
        """The bytes of all columns so far."""
        return self._memory[: self._taken]

    def _make(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        if self._taken + num_bytes > len(self._memory):
            raise SlotFullError
        piece = self._memory[self._taken : self._taken + num_bytes]
        self._taken += aligned(num_bytes)
        return piece.view(dtype).view(shape)


class Slots:
    """Memory that reader processes fill, and CUDA events of the copies from it to the device."""

    def __init__(self, num_slots: int, num_bytes: int) -> None:
        self._memories = [
            torch.frombuffer(shared_memory(num_bytes), dtype=torch.uint8) for _ in range(num_slots)
        ]
        self._copied: list[torch.cuda.Event] = []
        # per slot, its batches by their sizes; a batch of the same sizes always has the same memory
        self.batches: list[dict[tuple[int, int, int], Batch]] = [{} for _ in range(num_slots)]

    def __len__(self) -> int:
        return len(self._memories)

    def memory(self, slot: int) -> Slot:
        """Return the memory of a slot, with no column allocated yet."""
        return Slot(self._memories[slot])

    def pin(self) -> None:
        """Pin the memory for the current GPU, once; call it after the processes are forked."""
        if self._copied:
            return
        for memory in self._memories:
            torch.cuda.check_error(_cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
            self._copied.append(torch.cuda.Event())

    def unpin(self) -> None:
        """Wait for all copies, then unpin whatever `pin` has pinned."""
        if self._copied:
            torch.cuda.synchronize()
        for memory, _ in zip(self._memories, self._copied, strict=False):
            torch.cuda.check_error(_cudart().cudaHostUnregister(memory.data_ptr()))
        self._copied = []

    def are_copied(self, slot: int) -> None:
        """Record an event on the current stream, after the copies from the slot."""
        if self._copied:
            self._copied[slot].record()

    def wait_for_copies(self, slot: int) -> None:
        """Wait until the copies from a slot are done."""
        if self._copied:
            self._copied[slot].synchronize()


def _cudart() -> Any:
    return torch.cuda.cudart()
