"""Slots of host memory that reader processes fill with batches, and that are used again."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dataloading.batch import Batch
from dataloading.reader_processes import shared_memory


class Slots:
    """Memory that reader processes fill, and CUDA events of the copies from it to the device.

    `num_ragged`: ragged features of a batch, at least 1.
    """

    def __init__(self, num_slots: int, num_bytes: int, num_ragged: int) -> None:
        self._memories = [
            torch.frombuffer(shared_memory(num_bytes), dtype=torch.uint8) for _ in range(num_slots)
        ]
        # Of the layout of each slot's batch; the processes write it.
        memory = np.frombuffer(shared_memory(num_slots * num_ragged), np.int8)
        self.doublings = memory.reshape(num_slots, num_ragged)
        self._copied: list[torch.Event] = []
        # per slot, its usual batches by their sizes; such a batch always has the same memory
        self.batches: list[dict[tuple[int, ...], Batch]] = [{} for _ in range(num_slots)]

    def __len__(self) -> int:
        return len(self._memories)

    def memory(self, slot: int) -> Tensor:
        return self._memories[slot]

    def pin(self) -> None:
        """Pin the memory for the current GPU, once; call it after the processes are forked."""
        if self._copied:
            return
        for memory in self._memories:
            torch.cuda.check_error(_cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
            self._copied.append(torch.Event("cuda"))

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
        if self._copied:
            self._copied[slot].synchronize()


def _cudart() -> Any:
    return torch.cuda.cudart()
