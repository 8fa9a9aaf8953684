"""Prefetch of one batch: while a batch trains, the next one is copied to the device and its ids are exchanged."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

from dataloading.batch import Batch
from nn.observability.annotations import annotate
from nn.observability.trace_breakdown import DATA_WAIT
from nn.training.static_path import StaticPath


class Prefetcher:
    """Iterator over (batch on the device, exchanged ids); no batch is repeated or lost.

    Call `start_next` once per batch, when the host has just queued work for the device: the prefetch then runs beside
    that work, on its own stream. All ranks must iterate alike, since each call takes part in collectives.

    Args:
        batches: host batches of this rank.
        path: exchanges the ids.
        device: where the step runs.

    Attributes:
        data_wait_ms: time spent waiting for the loader since it was last set to 0.
    """

    def __init__(self, batches: Iterator[Batch], path: StaticPath, device: torch.device) -> None:
        self._batches = batches
        self._path = path
        self._device = device
        self._stream = _side_stream(device) if device.type == "cuda" else None
        self._next: tuple[Batch, Any] | None = None
        self._is_started = False
        self.data_wait_ms = 0.0
        self.start_next()

    def start_next(self) -> None:
        """Fetch the next batch from the loader, and start its copy and its id exchange; do nothing at the end.

        Raises:
            RuntimeError: the batch before was not taken yet.
        """
        if self._next is not None:
            raise RuntimeError(
                "start_next() was called twice, which would lose a batch; take the waiting batch with next() first"
            )
        with self._on_stream():
            # On the stream that copies: the loader reuses a batch's memory when this stream has reached this point.
            start = time.perf_counter()
            with annotate(DATA_WAIT):
                host_batch = next(self._batches, None)
            self.data_wait_ms += (time.perf_counter() - start) * 1e3
            if host_batch is not None:
                batch = host_batch.to(self._device, non_blocking=True)
                self._next = batch, self._path.start(batch)
        self._is_started = True

    def __iter__(self) -> "Prefetcher":
        return self

    def __next__(self) -> tuple[Batch, Any]:
        if not self._is_started:
            raise RuntimeError(
                "no batch was started since the last one was taken; call start_next() once per batch"
            )
        if self._next is None:
            raise StopIteration
        (batch, ids), self._next, self._is_started = self._next, None, False
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            batch.record_stream(current)
            ids.record_stream(current)
        return batch, ids

    def _on_stream(self) -> AbstractContextManager:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of all prefetchers of a process: the allocator keeps freed memory for the stream that used it."""
    return torch.cuda.Stream(device)
