"""Numbers in device memory that the host changes from step to step without a launch of its own."""

from collections.abc import Sequence

import torch


class StagedValues:
    """Float32 numbers, and one integer behind them.

    The host writes them to pinned memory, and a copy that is a part of the captured pass brings them to the device. The host may
    write again once the device has passed that copy.

    Args:
        values: the first numbers.
        device: where they are read; on a CPU they are there as soon as they are written.

    Attributes:
        floats: float32 [n], on the device.
        integer: int32 [1], on the device; 0 at first.
    """

    def __init__(self, values: Sequence[float], device: torch.device) -> None:
        words = torch.tensor([*values, 0.0], dtype=torch.float32).view(torch.int32)
        self._words = words.to(device)
        self._staged = words.pin_memory() if device.type == "cuda" else self._words
        self._staged_floats = self._staged[:-1].view(torch.float32)
        self.floats, self.integer = self._words[:-1].view(torch.float32), self._words[-1:]

    def stage_float(self, index: int, value: float) -> None:
        """Write a number, for the next `load`."""
        self._staged_floats[index] = value

    def stage_integer(self, value: int) -> None:
        """Write the integer, for the next `load`."""
        self._staged[-1] = value

    def load(self) -> None:
        """Queue the copy to the device."""
        if self._staged is not self._words:
            self._words.copy_(self._staged, non_blocking=True)

    def load_now(self) -> None:
        """Copy to the device before this returns, so that the host may write again at once."""
        if self._staged is not self._words:
            self._words.copy_(self._staged)
