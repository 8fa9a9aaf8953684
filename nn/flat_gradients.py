"""The dense half's gradients as one vector: cleared, checked and averaged over ranks in one operation each."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from nn.distributed import Ranks


class FlatGradients:
    """Owns the memory of all gradients; each `parameter.grad` is a view into it, so nobody may set it to None.

    Args:
        parameters: of the dense half, on one device, float32.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        parameters = list(parameters)
        sizes = [each.numel() for each in parameters]
        self.vector: Tensor = parameters[0].new_zeros(sum(sizes))
        for parameter, part in zip(parameters, self.vector.split(sizes), strict=True):
            parameter.grad = part.view_as(parameter)

    def clear(self) -> None:
        """Begin a new step."""
        self.vector.zero_()

    def average(self, ranks: Ranks) -> None:
        """Replace each rank's gradients by their mean over ranks."""
        if ranks.world_size > 1:
            ranks.all_reduce_sum(self.vector)
            self.vector.div_(ranks.world_size)

    def are_finite(self) -> Tensor:
        """Whether no gradient overflowed: a boolean on the device."""
        return torch.isfinite(self.vector).all()
