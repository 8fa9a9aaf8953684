"""Copies of the dense half's weights in the dtype to compute in, and their gradients, which are computed last.

What comes from a step's end back to its beginning, the embeddings' gradient, waits for no gradient of a weight; the
products that give these are long. Autograd runs what was created last first, so their node is created before anything
else of a step: the embeddings' gradient is then on its way, and the tables are updated, while the weights' gradients are
computed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# For each parameter: what gives its gradient, by the node that owes it (`id` of its context).
_Debts = list[dict[int, Callable[[], Tensor]]]

_early: "_Copies | None" = None


class CopiedWeights:
    """The copies that one function of the dense half computes with.

    Args:
        copies: of these parameters, and perhaps of others.
        parameters: in the order that the function wants.

    Attributes:
        tensors: the copies, in that order.
    """

    def __init__(self, copies: "_Copies", parameters: Sequence[Tensor]) -> None:
        self._copies = copies
        self._places = [copies.places[id(each)] for each in parameters]
        self.tensors: list[Tensor] = [copies.tensors[place] for place in self._places]

    def owe(self, node: Any, position: int, gradient: Callable[[], Tensor]) -> None:
        """Say what will give the gradient of the parameter at `position`, in float32 or the parameter's dtype.

        `node` is the function's context: going back through it again replaces what it owed. Its gradient of the copy
        itself is None.
        """
        self._copies.debts[self._places[position]][id(node)] = gradient


class _Copies:
    """Copies of some parameters, all made at once."""

    def __init__(self, dtype: torch.dtype, parameters: Sequence[Tensor]) -> None:
        self.dtype = dtype
        self.places = {id(each): place for place, each in enumerate(parameters)}
        self.debts: _Debts = [{} for _ in parameters]
        self.tensors: tuple[Tensor, ...] = _Copy.apply(dtype, self.debts, *parameters)


def copied(parameters: Sequence[Tensor], dtype: torch.dtype) -> CopiedWeights:
    """Return copies of the parameters: those made early, or new ones."""
    copies = _early
    if (
        copies is None
        or copies.dtype != dtype
        or any(id(p) not in copies.places for p in parameters)
    ):
        copies = _Copies(dtype, parameters)
    return CopiedWeights(copies, parameters)


@contextmanager
def copied_early(dense: nn.Module) -> Iterator[None]:
    """Copy the weights of a dense half now, so that the backward pass ends with their gradients.

    Within it, `copied` finds them. Enter it under the autocast that the forward pass is to run in.
    """
    global _early
    parameters = list(dense.parameters())
    device = parameters[0].device.type
    autocast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocast else parameters[0].dtype
    _early = _Copies(dtype, parameters)
    try:
        yield
    finally:
        _early = None


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, dtype: torch.dtype, debts: _Debts, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.debts = debts
        ctx.dtypes = [each.dtype for each in parameters]
        ctx.set_materialize_grads(False)
        if all(each.dtype is dtype for each in parameters):
            return tuple(each.detach() for each in parameters)
        copies = [torch.empty_like(each, dtype=dtype) for each in parameters]
        # One launch instead of one a parameter.
        torch._foreach_copy_(copies, list(parameters))
        return tuple(copies)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        assert not any(each is not None for each in gradients), "gradients of copies are owed"
        needed = ctx.needs_input_grad[2:]
        return None, None, *map(_pay, ctx.debts, ctx.dtypes, needed)


def _pay(debts: dict[int, Callable[[], Tensor]], dtype: torch.dtype, needed: bool) -> Tensor | None:
    """Compute a parameter's gradient and forget what was owed."""
    parts = [debts.pop(node) for node in list(debts)]
    if not parts or not needed:
        return None
    total = parts[0]()
    for part in parts[1:]:
        total = total + part()
    return total.to(dtype)
