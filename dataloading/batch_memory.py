"""Host memory of a batch: its own, or a slot that a reader process fills and that is reused."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dataloading.batch import Batch
from dataloading.reader_processes import shared_memory

ALIGNMENT = 256
"""Every column begins at a multiple of so many bytes."""


class BatchMemory:
    """Hands tensors out as arrays, and finds them again: whether memory is pinned only the tensor itself knows."""

    def __init__(self) -> None:
        self._tensors: dict[int, tuple[np.ndarray, Tensor]] = {}

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return memory for a column, not zeroed."""
        tensor = self._make(shape, getattr(torch, np.dtype(dtype).name))
        array = tensor.numpy()
        self._tensors[id(array)] = (array, tensor)
        return array

    def tensor(self, array: np.ndarray) -> Tensor:
        """Return the tensor behind an array that came from here."""
        return self._tensors[id(array)][1]

    def _make(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        raise NotImplementedError


class OwnMemory(BatchMemory):
    """New memory for each column, which lives as long as somebody has it."""

    def __init__(self, *, pin: bool) -> None:
        super().__init__()
        self._pin = pin

    def _make(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=self._pin)


class Slot(BatchMemory):
    """A piece of memory, one column behind the other: at the same places for the same columns, in every process."""

    def __init__(self, memory: Tensor) -> None:
        super().__init__()
        self._memory = memory
        self._taken = 0

    def _make(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        piece = self._memory[self._taken : self._taken + num_bytes]
        self._taken += aligned(num_bytes)
        return piece.view(dtype).view(shape)


class Slots:
    """Memory that reader processes fill, and how far the device is with copying it.

    Attributes:
        batches: of memory slot, the batches that have been in it, by their sizes: their memory is always the same.
    """

    def __init__(self, num_slots: int, num_bytes: int) -> None:
        self._memories = [
            torch.frombuffer(shared_memory(num_bytes), dtype=torch.uint8) for _ in range(num_slots)
        ]
        self._copied: list[torch.cuda.Event] = []
        self.batches: list[dict[tuple[int, int, int], Batch]] = [{} for _ in range(num_slots)]

    def __len__(self) -> int:
        return len(self._memories)

    def memory(self, slot: int) -> Slot:
        """Return the memory of a slot, nothing of it handed out."""
        return Slot(self._memories[slot])

    def pin(self) -> None:
        """Let the current GPU copy from here by itself; once, and after the processes were forked."""
        if self._copied:
            return
        for memory in self._memories:
            torch.cuda.check_error(_cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
            self._copied.append(torch.cuda.Event())

    def unpin(self) -> None:
        """Undo `pin`, as far as it came, when all copies are done."""
        if self._copied:
            torch.cuda.synchronize()
        for memory, _ in zip(self._memories, self._copied, strict=False):
            torch.cuda.check_error(_cudart().cudaHostUnregister(memory.data_ptr()))
        self._copied = []

    def are_copied(self, slot: int) -> None:
        """Note that the slot is free again when the current stream has come here."""
        if self._copied:
            self._copied[slot].record()

    def wait_for_copies(self, slot: int) -> None:
        """Wait until a slot is free again."""
        if self._copied:
            self._copied[slot].synchronize()


def aligned(num_bytes: int) -> int:
    """Return the room that a column takes in a slot."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _cudart() -> Any:
    return torch.cuda.cudart()
