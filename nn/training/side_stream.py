"""The tables' CUDA stream beside the main one; on a CPU the same calls run one after the other."""

from contextlib import AbstractContextManager, nullcontext

import torch

from nn.ops.stream_waits import stream_for


class SideStream:
    """Stream of lookups, sorts, exchanges and updates of tables."""

    def __init__(self, device: torch.device) -> None:
        self._stream = stream_for("tables", device) if device.type == "cuda" else None

    def wait_for_main(self) -> None:
        """Let the tables' stream wait for what the current stream has queued so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())

    def launches(self) -> AbstractContextManager:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def mark(self) -> torch.cuda.Event | None:
        """Return an event behind what the current stream has queued so far."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def main_waits_for(self, event: torch.cuda.Event | None) -> None:
        """Let the current stream wait for an event of the tables' stream."""
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    def main_waits(self) -> None:
        """Let the current stream wait for all that the tables' stream has queued."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
