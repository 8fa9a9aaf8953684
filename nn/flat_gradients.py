"""The dense half's gradients as one vector: cleared, checked and summed over ranks in one operation each."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from nn.distributed import Ranks


class FlatGradients:
    """Owns the memory of all gradients; each `parameter.grad` is a view into it, so nobody may set it to None.

    Args:
        parameters: of the dense half, on one device, float32.
        further: shapes of further gradients that are summed over ranks with them.

    Attributes:
        vector: all of them, and one number more that whoever sums them may use.
        further: views, of the shapes asked for.
        signal: view of that number, [].
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], further: Sequence[torch.Size] = ()
    ) -> None:
        parameters = list(parameters)
        shapes = [each.shape for each in parameters] + list(further) + [torch.Size(())]
        sizes = [shape.numel() for shape in shapes]
        self.vector: Tensor = parameters[0].new_zeros(sum(sizes))
        views = [
            part.view(shape) for part, shape in zip(self.vector.split(sizes), shapes, strict=True)
        ]
        for parameter, view in zip(parameters, views, strict=False):
            parameter.grad = view
        self.further = views[len(parameters) : -1]
        self.signal = views[-1]

    def clear(self) -> None:
        """Begin a new step."""
        self.vector.zero_()

    def sum(self, ranks: Ranks) -> None:
        """Replace each rank's gradients by their sum over ranks."""
        if ranks.world_size > 1:
            ranks.all_reduce_sum(self.vector)

    def are_finite(self) -> Tensor:
        """Whether no gradient overflowed: a boolean on the device."""
        return torch.isfinite(self.vector).all()
