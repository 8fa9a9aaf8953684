"""The copy of a step's loss to the host, and of whether everything is finite."""

import torch
from torch import Tensor


class LossReadback:
    """Copies two numbers to the host as soon as they are known, while the device continues."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._values = torch.zeros(2, pin_memory=on_gpu)
        # External: recorded inside a graph, waited for outside of it.
        self._event = torch.cuda.Event(external=True) if on_gpu else None

    def record(self, loss: Tensor, is_good: Tensor) -> None:
        """Queue the copy of a loss, and of whether it is good (not 0), so that the step may be applied."""
        values = torch.stack([loss.float().view(()), is_good.float().view(())])
        self._values.copy_(values, non_blocking=True)
        if self._event is not None:
            self._event.record()

    def wait(self) -> tuple[float, bool]:
        if self._event is not None:
            self._event.synchronize()
        loss, is_good = self._values.tolist()
        return loss, bool(is_good)
