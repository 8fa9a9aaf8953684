"""Prefetch of one batch: while a batch trains, the next one is copied to the device and its ids are exchanged.

A batch lies in one memory and takes one copy, to one of two buffers that batches take in turns: a step then allocates nothing,
and makes no objects.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import repeat

import torch
from torch import Tensor

from dataloading.batch import Batch
from nn.observability.annotations import annotate
from nn.observability.trace_breakdown import DATA_WAIT
from nn.ops.stream_waits import stream_for
from nn.sharding.batch_rows import BatchRows
from nn.training.look_ahead import LookAhead
from nn.training.step_runner import StepRunner


@dataclass(slots=True)
class DataWait:
    """The time of waits for the loader."""

    ms: float = 0.0


class Prefetcher:
    """Iterator over (batch on the device, its rows); no batch is repeated or lost.

    Work that is queued before the `next()` after its own may read a batch; then its buffer is filled again. Call `start_next`
    once per batch, when the host has just queued work for the device: the prefetch then runs beside that work, on its own
    stream. All ranks must iterate alike, since each call takes part in collectives.

    `loading` returns the context of a wait for the loader. Such waits have taken `data_wait.ms` since that was last set to 0;
    those for ids that other ranks need from disk are not among them.
    """

    def __init__(
        self,
        batches: Iterator[Batch],
        runner: StepRunner,
        device: torch.device,
        loading: Callable[[], AbstractContextManager] = nullcontext,
    ) -> None:
        self.data_wait = DataWait()
        loaded = _loaded(batches, loading, self.data_wait)
        self._batches = (
            LookAhead(loaded, runner, device)
            if runner.tables.has_disk_tables
            else zip(loaded, repeat(None), strict=False)
        )
        self._runner = runner
        self._device = device
        # The next step waits for the kernels that map ids to slots; beside this step's they are served first.
        priority = 0 if runner.tables.tier is None else -1
        on_gpu = device.type == "cuda"
        self._stream = stream_for("prefetch", device, priority) if on_gpu else None
        self._buffers: _Buffers | None = None
        # Of each batch 0 or 1, also of one that has a memory of its own, perhaps on this rank alone: ranks must agree.
        self._turn = 1
        self._next: tuple[Batch, BatchRows] | None = None
        self._is_started = False
        self.start_next()

    def start_next(self) -> None:
        """Fetch the next batch from the loader, and start its copy and its id exchange; do nothing at the end.

        Raises RuntimeError: the batch before was not taken yet.
        """
        if self._next is not None:
            raise RuntimeError(
                "start_next() was called twice, which would lose a batch; take the waiting batch with next() first"
            )
        # Entered in C++; `torch.cuda.stream` asks in Python for device and stream, which takes longer than a small launch.
        with self._stream or nullcontext():
            # On the stream that copies: the loader reuses a batch's memory when this stream has reached this point.
            found = next(self._batches, None)
            if found is not None:
                host_batch, need = found
                self._turn = 1 - self._turn
                self._next = self._runner.start(self._on_device(host_batch), need, self._turn)
        self._is_started = True

    def __iter__(self) -> "Prefetcher":
        return self

    def __next__(self) -> tuple[Batch, BatchRows]:
        if not self._is_started:
            raise RuntimeError(
                "no batch was started since the last one was taken; call start_next() once per batch"
            )
        if self._next is None:
            raise StopIteration
        (batch, rows), self._next, self._is_started = self._next, None, False
        if self._stream is not None:
            # Before the wait for this batch, for whose rows the next one's copy and mapping need not wait.
            if self._buffers is not None:
                self._buffers.previous_is_used()
            self._runner.wait_for(self._stream)
            rows.record_stream()
            if batch.layout.doublings:
                batch.memory.record_stream(torch.cuda.current_stream(self._device))
        return batch, rows

    def _on_device(self, batch: Batch) -> Batch:
        """Return a copy on the device, on the current stream."""
        # Batches beyond the capacity are rare, and may be so large that no buffer should keep their size.
        if self._stream is None or batch.layout.doublings:
            return batch.to(self._device)
        if self._buffers is None or not self._buffers.fit(batch.memory):
            self._buffers = _Buffers(batch.memory, self._device)
        return self._buffers.copied(batch, self._turn)


def _loaded(
    batches: Iterator[Batch], loading: Callable[[], AbstractContextManager], wait: DataWait
) -> Iterator[Batch]:
    """Yield the batches, and add up the waits for them.

    It refers to no prefetcher, which would be a cycle. Python may collect cycles while a thread starts; `batches` that end
    there would wait for their threads without end.
    """
    while True:
        start = time.perf_counter()
        with annotate(DATA_WAIT), loading():
            batch = next(batches, None)
        wait.ms += (time.perf_counter() - start) * 1e3
        if batch is None:
            return
        yield batch


class _Buffers:
    """Two blocks of memory of the device, for the turns 0 and 1 of batches of the same size.

    A batch must have been taken before the one after the next is copied.

    `memory` is that of such a batch, on the host.
    """

    def __init__(self, memory: Tensor, device: torch.device) -> None:
        self._blocks = [torch.empty_like(memory, device=device) for _ in range(2)]
        for block in self._blocks:
            # When it is freed, the allocator waits for the stream that has read it.
            block.record_stream(torch.cuda.default_stream(device))
        self._batches: list[dict[tuple[int, ...], Batch]] = [{}, {}]
        # On the stream that trains, behind the last use of the batch before the latest.
        self._is_used = torch.Event(device)

    def fit(self, memory: Tensor) -> bool:
        return memory.nbytes <= self._blocks[0].nbytes

    def copied(self, batch: Batch, turn: int) -> Batch:
        """Copy a batch behind the last use of the one that it replaces, and return it; always the same object of a buffer."""
        self._is_used.wait()
        block, batches = self._blocks[turn], self._batches[turn]
        key = (batch.layout.rows, batch.num_valid, batch.global_valid)
        if key not in batches:
            batches[key] = batch.at(block[: len(batch.memory)])
        found = batches[key]
        found.memory.copy_(batch.memory, non_blocking=True)
        return found

    def previous_is_used(self) -> None:
        """Note that all uses of the batch before the one that is taken now are queued on the current stream."""
        self._is_used.record()
