"""Gradients of the dense component as one vector, which is cleared and checked in one operation each.

Matrices begin the vector, the last layer's first, as the backward pass computes them; layers that compute their gradient in one
product write it there (`nn.ops.gradient_buffer`). So the first part of a vector can be summed over ranks before the rest is
known.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nn.distributed.process_group import Ranks
from nn.ops.gradient_buffer import offer_buffer, withdraw_buffer

ALIGNMENT = 64
"""Elements; products are written where a result begins at a multiple of it, as memory of their own does."""
EARLY_BYTES = 2**22
"""Least size of a part that is all-reduced before the rest; a smaller one is not worth a collective of its own."""
CLIP_EPS = 1e-6
"""Added to the norm by which gradients are divided; torch's."""


class GradientBucket:
    """The memory of all gradients; after `sum`, each `parameter.grad` is a view into it.

    `further` are gradients that are summed over ranks with those of the parameters, whose norm together is at most `clip_norm`.
    `vector` has all of them, and behind them the `signal`, a number that is summed too, 0 until it is set.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        further: Sequence[torch.Size] = (),
        clip_norm: float | None = None,
    ) -> None:
        # An odd matrix would shift those behind it, whose products then could not write into the vector.
        parameters = sorted(
            reversed([*parameters]), key=lambda of: (of.dim() < 2, of.numel() % ALIGNMENT > 0)
        )
        shapes = [parameter.shape for parameter in parameters] + list(further) + [torch.Size(())]
        sizes = [shape.numel() for shape in shapes]
        self.vector: Tensor = parameters[0].new_zeros(sum(sizes))
        views = [
            flat.view(shape) for flat, shape in zip(self.vector.split(sizes), shapes, strict=True)
        ]
        self._own = self.vector[: sum(sizes[: len(parameters)])]
        self._clip_norm = clip_norm
        self._parameters = parameters
        self._views = views[: len(parameters)]
        # Of all ranks: parameters whose gradients are summed early, None before the first pass, and how many numbers these have.
        self._num_early: int | None = None
        self._early_size = 0
        # Of a pass: parameters that were known at `start_sum`, those whose gradients are in the vector, and the end of the sum.
        self._num_known = self._num_collected = 0
        self._end_early_sum: Callable[[], Any] | None = None
        # An optimizer can then create its state before the first step, so that a checkpoint can be loaded.
        for parameter, view in zip(parameters, self._views, strict=True):
            parameter.grad = view
        self.further = views[len(parameters) : -1]
        self.signal = views[-1]

    def clear(self) -> None:
        """Remove the gradients, so that the backward pass creates them instead of adding to them."""
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.grad = None
            if view.storage_offset() % ALIGNMENT == 0:
                offer_buffer(parameter, view)
        if self.further:
            torch._foreach_zero_(self.further)
        self._num_known = self._num_collected = 0
        self._end_early_sum = None

    def keep(self) -> None:
        """Let the next backward pass add to the gradients, which nobody may write over."""
        for parameter in self._parameters:
            withdraw_buffer(parameter)

    def start_sum(self, ranks: Ranks) -> None:
        """Start to sum over ranks what begins the vector and is known, beside the rest of the backward pass; `sum` ends it.

        As much as all ranks knew here in their first pass; in that nothing is started.
        """
        unknown = (number for number, of in enumerate(self._parameters) if of.grad is None)
        self._num_known = next(unknown, len(self._parameters))
        # A rank whose model has left out a branch joins in `sum`, as CPUs do, all of whose collectives are in one order.
        if self._num_early and self._num_known >= self._num_early and ranks.device.type == "cuda":
            self._collect(self._num_early)
            self._end_early_sum = ranks.start_all_reduce_sum(self.vector[: self._early_size])

    def sum(self, ranks: Ranks) -> None:
        """Copy into the vector what the backward pass has not written there, and sum it over ranks."""
        self._collect(len(self._parameters))
        if ranks.world_size == 1:
            return
        if self._num_early is None:
            self._agree_on_early(ranks)
        if self._end_early_sum is not None:
            self._end_early_sum()
        elif self._early_size:
            ranks.all_reduce_sum(self.vector[: self._early_size])
        ranks.all_reduce_sum(self.vector[self._early_size :])

    def _agree_on_early(self, ranks: Ranks) -> None:
        known = torch.tensor(-self._num_known, device=ranks.device)
        self._num_early = -int(ranks.all_reduce_max(known))
        size = sum(view.numel() for view in self._views[: self._num_early])
        if size * self.vector.element_size() >= EARLY_BYTES:
            self._early_size = size
        else:
            self._num_early = 0

    def _collect(self, num: int) -> None:
        """Let the gradients of the first `num` parameters be views of the vector, and copy those that are not written there."""
        gradients: list[Tensor] = []
        first, self._num_collected = self._num_collected, num
        end = sum(view.numel() for view in self._views[:first])
        for parameter, view in zip(
            self._parameters[first:num], self._views[first:num], strict=True
        ):
            withdraw_buffer(parameter)
            gradient, parameter.grad = parameter.grad, view
            if gradient is not None and gradient.data_ptr() == view.data_ptr():
                self._copy(gradients, end)
                gradients = []
            else:
                # A parameter that the model did not use has no gradient.
                gradients.append(torch.zeros_like(view) if gradient is None else gradient)
            end += view.numel()
        self._copy(gradients, end)

    def _copy(self, gradients: list[Tensor], end: int) -> None:
        """Copy gradients into the vector, the last of them up to element `end`."""
        if gradients:
            # On a GPU, `torch._foreach_copy_` has one program per 65,536 numbers, which leaves most of it idle.
            target = self._own[end - sum(gradient.numel() for gradient in gradients) : end]
            torch.cat([gradient.reshape(-1) for gradient in gradients], out=target)

    def clip(self) -> None:
        """Shorten the parameters' gradients to `clip_norm` if they are longer, as `torch.nn.utils.clip_grad_norm_` does.

        Call it after `sum` and after the loss scale is divided out. The ranks have the same sums, and so the same factor.
        """
        if self._clip_norm is None:
            return
        norm = torch.linalg.vector_norm(self._own)
        self._own.mul_((self._clip_norm / (norm + CLIP_EPS)).clamp(max=1.0))

    def are_finite(self) -> Tensor:
        """Return whether no gradient overflowed, as a boolean on the device."""
        return torch.isfinite(self.vector).all()
