"""Copies of tensors to pinned memory of the host, without a wait for the device."""

import torch
from torch import Tensor


class HostCopy:
    """A tensor of the device, which the host reads later than it asks for it.

    Args:
        values: computed on the current stream.
    """

    def __init__(self, values: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if values.device.type != "cuda":
            self._values = values.clone()
            return
        self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._values.copy_(values, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def read(self) -> Tensor:
        """Return the values, once the device has computed them."""
        if self._event is not None:
            self._event.synchronize()
        return self._values
