"""Look-ahead for tables on disk: the ids of a read-ahead group are known while the group before trains."""

from collections import deque
from collections.abc import Iterator

import torch

from dataloading.batch import Batch
from nn.tiers.read_ahead import READ_AHEAD_BATCHES, Need
from nn.training.step_runner import StepRunner

Ahead = tuple[Batch, Need | None]
"""A host batch, and the rows that it needs from disk."""


class LookAhead:
    """Iterator over batches that announces each two groups before it is returned; all ranks must iterate alike."""

    def __init__(self, batches: Iterator[Batch], runner: StepRunner, device: torch.device) -> None:
        self._batches = batches
        self._runner = runner
        self._device = device
        self._waiting: deque[Ahead] = deque()
        self._next_group: list[Need | None] = []

    def __iter__(self) -> "LookAhead":
        return self

    def __next__(self) -> Ahead:
        while len(self._waiting) < 2 * READ_AHEAD_BATCHES:
            batch = next(self._batches, None)
            if batch is not None:
                kept = self._kept(batch)
                need = self._runner.announce(kept.to(self._device))
                self._waiting.append((kept, need))
                self._next_group.append(need)
            if batch is None or len(self._next_group) == READ_AHEAD_BATCHES:
                needs, self._next_group = self._next_group, []
                self._runner.read_ahead(needs)
            if batch is None:
                break
        if not self._waiting:
            raise StopIteration
        return self._waiting.popleft()

    def _kept(self, batch: Batch) -> Batch:
        """Return a batch whose memory the loader does not reuse."""
        if self._device.type != "cuda":
            return batch
        return batch.at(torch.empty_like(batch.memory, pin_memory=True).copy_(batch.memory))
