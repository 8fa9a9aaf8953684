"""Copies between the device and pinned memory of the host, without a wait for each other."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class HostCopy:
    """A tensor of the device, which the host reads later than it asks for it."""

    def __init__(self, values: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if values.device.type != "cuda":
            self._values = values.clone()
            return
        self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._values.copy_(values, non_blocking=True)
        self._event = torch.cuda.Event()
        # The current device of a thread may be another one.
        self._event.record(torch.cuda.current_stream(values.device))

    def is_there(self) -> bool:
        return self._event is None or self._event.query()

    def read(self) -> Tensor:
        """Return the values, once the device has computed them."""
        if self._event is not None:
            self._event.synchronize()
        return self._values


class DeviceValues:
    """Float32 numbers, and one integer behind them, that the host changes from step to step without a launch of its own.

    The host writes them to pinned memory, and a copy that is a part of the captured pass brings them to the device. The host may
    write again once the device has passed that copy.

    `device`: where they are read; on a CPU they are there as soon as they are written. `floats`: float32 [n], on the
    device. `integer`: int32 [1], on the device; 0 at first.
    """

    def __init__(self, values: Sequence[float], device: torch.device) -> None:
        words = torch.tensor([*values, 0.0], dtype=torch.float32).view(torch.int32)
        self._words = words.to(device)
        self._host = words.pin_memory() if device.type == "cuda" else self._words
        # A write by NumPy takes a tenth of the time of one by torch, and every step has some.
        self._host_words = self._host.numpy()
        self._host_floats = self._host_words[:-1].view(np.float32)
        self.floats, self.integer = self._words[:-1].view(torch.float32), self._words[-1:]

    def write_float(self, index: int, value: float) -> None:
        self._host_floats[index] = value

    def write_integer(self, value: int) -> None:
        self._host_words[-1] = value

    def load(self) -> None:
        if self._host is not self._words:
            self._words.copy_(self._host, non_blocking=True)

    def load_now(self) -> None:
        """Copy to the device before this returns, so that the host may write again at once."""
        if self._host is not self._words:
            self._words.copy_(self._host)
