"""Dropout (Srivastava et al., JMLR 15, 2014) with random bits from counters."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from configs.options import require_rate
from nn.layers.pass_state import PassLayer, PassState
from nn.ops.dropout_mask import DropoutMask, dropout_key
from nn.ops.jagged import SamplePositions, offsets


class Dropout(PassLayer):
    """Set elements to 0 at random in training and scale the others by 1 / (1 - rate); the identity in evaluation.

    The mask is a hash of seed, step, layer, row of the global batch and element of the row (`nn.ops.dropout_mask`). It is
    the same for any number of ranks, captured or not, and after resuming. The backward pass computes it again: nothing is
    stored. A rate of 0 is the identity.

    `rate`: probability that an element becomes 0; at least 0 and below 1. Raises ValueError: `rate` is outside.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        require_rate("rate", rate)
        self.rate = rate
        self._key = 0

    def attach(self, state: PassState, number: int) -> None:
        """Use `state` in training, and random bits of layer `number`."""
        super().attach(state, number)
        self._key = dropout_key(state.seed, number)

    @property
    def mask(self) -> DropoutMask | None:
        """Mask of the current pass; None if nothing is dropped.

        Raises RuntimeError: the layer trains without a pass state.
        """
        if not self.training or self.rate == 0:
            return None
        state = self.pass_state
        return DropoutMask(self._key, self.rate, state.step, state.first_row, state.global_rows)

    def forward(self, x: Tensor, at: SamplePositions | None = None) -> Tensor:
        """Map [B, ...] to the same shape and dtype; the first dimension is the rows of this rank, or events, `at` its rows."""
        if not self.training or self.rate == 0:
            return x
        return self._drop(x, None if at is None else (at.samples, offsets(at)[0]))

    def extra_repr(self) -> str:
        return f"rate={self.rate:g}"

    @torch.compiler.disable
    def _drop(self, x: Tensor, at: tuple[Tensor, Tensor] | None) -> Tensor:
        return _Dropout.apply(x, self.mask, at)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: DropoutMask, at: tuple[Tensor, Tensor] | None) -> Tensor:
        ctx.mask, ctx.at = mask, at
        return _masked(x, mask, at)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _masked(grad, ctx.mask, ctx.at), None, None


def _masked(x: Tensor, mask: DropoutMask, at: tuple[Tensor, Tensor] | None) -> Tensor:
    if not x.is_cuda:
        return mask.apply(x, at)
    # Only CUDA builds of torch include Triton.
    from nn.ops.triton.dropout import apply_mask

    return apply_mask(x, mask, at=at)
