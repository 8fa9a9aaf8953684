"""The dense half's gradients as one vector: cleared, checked and summed over ranks in one operation each."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from nn.distributed.process_group import Ranks


class GradientBucket:
    """Owns the memory of all gradients; once they are summed, each `parameter.grad` is a view into it.

    Args:
        parameters: of the dense half, on one device, float32.
        further: shapes of further gradients that are summed over ranks with them.

    Attributes:
        vector: all of them, and one number more, for the caller that sums them.
        further: views, of the shapes asked for.
        signal: view of that number, [].
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], further: Sequence[torch.Size] = ()
    ) -> None:
        parameters = list(parameters)
        shapes = [parameter.shape for parameter in parameters] + list(further) + [torch.Size(())]
        sizes = [shape.numel() for shape in shapes]
        self.vector: Tensor = parameters[0].new_zeros(sum(sizes))
        views = [
            part.view(shape) for part, shape in zip(self.vector.split(sizes), shapes, strict=True)
        ]
        self._parameters = parameters
        self._views = views[: len(parameters)]
        # So that an optimizer can make its state before the first step, when a checkpoint is loaded into it.
        for parameter, view in zip(parameters, self._views, strict=True):
            parameter.grad = view
        self.further = views[len(parameters) : -1]
        self.signal = views[-1]

    def clear(self) -> None:
        """Begin a new step: the backward pass then makes gradients instead of adding to them."""
        for parameter in self._parameters:
            parameter.grad = None
        if self.further:
            torch._foreach_zero_(self.further)
        self.signal.zero_()

    def sum(self, ranks: Ranks) -> None:
        """Bring the gradients of the backward pass together and replace each rank's by their sum over ranks."""
        # A parameter that the model did not use has no gradient.
        found = [
            view.zero_() if parameter.grad is None else parameter.grad
            for parameter, view in zip(self._parameters, self._views, strict=True)
        ]
        torch._foreach_copy_(self._views, found)
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.grad = view
        if ranks.world_size > 1:
            ranks.all_reduce_sum(self.vector)

    def are_finite(self) -> Tensor:
        """Return whether no gradient overflowed, as a boolean on the device."""
        return torch.isfinite(self.vector).all()
