"""Adagrad: divide by the root of the sum of squares of each element."""

from nn.embedding.optimizer import Group, StateField, States, TableRule, Tensors
from nn.ops.optional_triton import jit, tl


def _update(tables: Tensors, gradients: Tensors, states: States, group: Group) -> None:
    for table, gradient, state in zip(tables, gradients, states, strict=True):
        total = state["momentum1"].addcmul_(gradient, gradient)
        table.addcdiv_(gradient, total.sqrt().add_(group["eps"]), value=-group["lr"])


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
