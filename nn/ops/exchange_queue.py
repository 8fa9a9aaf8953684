"""Order of the exchanges of rows on a GPU: on a stream of their own, so that a batch is mapped while the rows of others move.

Exchanges run in the order of their batches, one right behind the other. The lists of two of them exist at a time.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from nn.ops.stream_waits import stream_for


class ExchangeQueue:
    """Queue of exchanges; on a CPU they run at once.

    `stream`: on which rows move; None on a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        # Served before that of the step.
        on_gpu = device.type == "cuda"
        self.stream = stream_for("exchanges", device, priority=-1) if on_gpu else None
        # Of the two turns, on the stream: their lists are read.
        self._are_read = [torch.cuda.Event() for _ in range(2)] if self.stream else []
        self._turn = 0

    def next_turn(self) -> int:
        """Return the turn of the next batch, 0 or 1; the current stream then overwrites the lists of the last but one."""
        self._turn = 1 - self._turn
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_event(self._are_read[self._turn])
        return self._turn

    @contextmanager
    def behind_mapping(self) -> Iterator[None]:
        """Queue the exchange of the present turn while the context is open: behind what the current stream has so far."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            yield
            self._are_read[self._turn].record()

    def wait(self) -> None:
        """Let the current stream wait for all exchanges that are queued."""
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
