"""Adagrad: divide by the root of the sum of squares of each element."""

import torch

from nn.embedding.optimizer import Group, StateField, States, TableRule, Tensors
from nn.ops.optional_triton import jit, tl


def _update(tables: Tensors, gradients: Tensors, states: States, group: Group) -> None:
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
