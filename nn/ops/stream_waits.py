"""Time for which a stream of a GPU waits for another."""

import torch


class StreamWaits:
    """Waits of the current stream, timed on the device.

    Args:
        device: a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ends: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def wait_for(self, stream: torch.cuda.Stream) -> None:
        """Let the current stream wait for what is queued on another."""
        current = torch.cuda.current_stream(self._device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(current)
        current.wait_stream(stream)
        end.record(current)
        self._ends.append((start, end))

    def take_ms(self) -> float:
        """Return the ms of the waits that have ended, since the last call; the host waits for nothing."""
        count = next(
            (i for i, (_, end) in enumerate(self._ends) if not end.query()), len(self._ends)
        )
        ended, self._ends = self._ends[:count], self._ends[count:]
        return sum(start.elapsed_time(end) for start, end in ended)
