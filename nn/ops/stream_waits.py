"""Streams of a GPU, one of a process for each purpose, and the time for which one waits for another."""

from collections import deque
from functools import cache

import torch

MOST_WAITS = 256
"""Waits whose events are kept before they are added up."""


@cache
def stream_for(purpose: str, device: torch.device, priority: int = 0) -> torch.cuda.Stream:
    """Return the process's stream for a purpose: the allocator keeps freed memory for the stream that used it.

    Torch has 32 streams, and then gives out the first ones again.
    """
    return torch.cuda.Stream(device, priority=priority)


class StreamWaits:
    """Waits of the current stream, timed on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._waits: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._ms = 0.0

    def wait_for(self, stream: torch.cuda.Stream) -> None:
        """Let the current stream wait for what is queued on another."""
        current = torch.cuda.current_stream(self._device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(current)
        current.wait_stream(stream)
        end.record(current)
        self._waits.append((start, end))
        if len(self._waits) > MOST_WAITS:
            self._add_ended()

    def take_ms(self) -> float:
        """Return the ms of the waits that have ended, since the last call; the host waits for nothing."""
        self._add_ended()
        ms, self._ms = self._ms, 0.0
        return ms

    def _add_ended(self) -> None:
        while self._waits and self._waits[0][1].query():
            start, end = self._waits.popleft()
            self._ms += start.elapsed_time(end)
