"""Adagrad: divide by the root of the sum of squares of each element."""

from typing import Any

import torch
from torch import Tensor

from nn.embedding.optimizer import StateField, TableRule
from nn.ops.optional_triton import jit, tl


def _update(
    tables: list[Tensor],
    gradients: list[Tensor],
    states: list[dict[str, Tensor]],
    group: dict[str, Any],
) -> None:
    totals = [state["momentum1"] for state in states]
    torch._foreach_addcmul_(totals, gradients, gradients)
    divisors = torch._foreach_sqrt(totals)
    torch._foreach_add_(divisors, group["eps"])
    torch._foreach_addcdiv_(tables, gradients, divisors, value=-group["lr"])


@jit
def _kernel(weight, gradient, state1, state2, step):
    total = state1 + gradient * gradient
    return weight - step.rate * gradient / (tl.sqrt(total) + step.eps), total, state2


RULE = TableRule(
    name="adagrad",
    update=_update,
    kernel=_kernel,
    states=(StateField("momentum1"),),
    leaves_untouched_rows=True,
)
