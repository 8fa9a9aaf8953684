"""Batches whose rows must stay in the arena: from the mapping of their ids until their pass has run."""

import sys
from collections.abc import Callable

import torch

MOST_BATCHES = 8
"""Batches between mapping and the end of their pass; the slot map has a bit for each."""


class LiveBatches:
    """The batches at work, with a bit for each."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free_pins = [1 << bit for bit in range(MOST_BATCHES)]
        self._ended: list[tuple[int, bool, torch.cuda.Event | None]] = []

    def begin(self) -> "Hold":
        return Hold(self, self._free_pins.pop())

    def end(self, pin: int, *, is_trained: bool) -> None:
        """Note that the pass of a batch is queued on the current stream."""
        event = None
        if self._device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
        self._ended.append((pin, is_trained, event))

    def take_ended(self, *, all_but: int) -> tuple[int, int]:
        """Wait on the current stream for all queued passes but the latest; return the bits of batches, and of trained ones."""
        released = trained = 0
        count = max(len(self._ended) - all_but, 0)
        for pin, is_trained, event in self._ended[:count]:
            if event is not None:
                event.wait()
            released |= pin
            trained |= pin * is_trained
            self._free_pins.append(pin)
        del self._ended[:count]
        return released, trained


def _nothing() -> None:
    """Neither to check nor to wait for."""


class Hold:
    """The rows that a batch keeps in the arena until nothing refers to it; `pin` is its bit, 0 once they are released."""

    def __init__(self, batches: LiveBatches, pin: int) -> None:
        self._batches, self.pin = batches, pin
        self._check: Callable[[], None] = _nothing
        self._arrive: Callable[[], None] = _nothing

    def expect(self, check: Callable[[], None], arrive: Callable[[], None]) -> None:
        self._check, self._arrive = check, arrive

    def check(self) -> None:
        """Make sure, before the pass is queued, that all rows have slots; waits for the mapping. RankError: too few slots."""
        check, self._check = self._check, _nothing
        check()

    def arrive(self) -> None:
        """Let the current stream wait for the rows, before it reads them."""
        arrive, self._arrive = self._arrive, _nothing
        arrive()

    def release(self, *, is_trained: bool) -> None:
        """Release the rows; the pass is queued on the current stream."""
        if self.pin:
            self._batches.end(self.pin, is_trained=is_trained)
        self.pin = 0

    def __del__(self) -> None:
        # A batch that was prefetched and never trained.
        if not sys.is_finalizing():
            self.release(is_trained=False)
