"""Look-ahead for tables on disk: the ids of a pass are known while the pass before trains."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from dataloading.batch import Batch
from nn.tiers.stager import PASS_BATCHES, Need

Ahead = tuple[Batch, Need | None]
"""A host batch, and the rows that it needs from disk."""


class Announcer(Protocol):
    """Sends ids to the ranks of their tables, ahead of the batches' turn."""

    def announce(self, batch: Batch) -> Need | None:
        """Return the rows on disk that this rank needs for a batch on the device."""

    def start_pass(self, needs: Sequence[Need | None]) -> None:
        """Start to read the rows of a pass."""


class LookAhead:
    """Iterator over batches that announces each two passes before it is returned; all ranks must iterate alike."""

    def __init__(self, batches: Iterator[Batch], path: Announcer, device: torch.device) -> None:
        self._batches = batches
        self._path = path
        self._device = device
        self._waiting: deque[Ahead] = deque()
        self._next_pass: list[Need | None] = []

    def __iter__(self) -> "LookAhead":
        return self

    def __next__(self) -> Ahead:
        while len(self._waiting) < 2 * PASS_BATCHES:
            batch = next(self._batches, None)
            if batch is None:
                break
            kept = self._kept(batch)
            need = self._path.announce(kept.to(self._device))
            self._waiting.append((kept, need))
            self._next_pass.append(need)
            if len(self._next_pass) == PASS_BATCHES:
                self._start_pass()
        else:
            return self._waiting.popleft()
        self._start_pass()
        if not self._waiting:
            raise StopIteration
        return self._waiting.popleft()

    def _start_pass(self) -> None:
        needs, self._next_pass = self._next_pass, []
        self._path.start_pass(needs)

    def _kept(self, batch: Batch) -> Batch:
        """Return a batch whose memory the loader does not reuse."""
        if self._device.type != "cuda":
            return batch
        if batch.memory is None:
            return batch.pin_memory()
        return batch.at(torch.empty_like(batch.memory, pin_memory=True).copy_(batch.memory))
