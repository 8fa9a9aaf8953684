"""SGD with momentum on the rows of a batch: `torch.optim.SGD`'s, but a row that is not looked up keeps its momentum.

`nesterov` of its options is 0, or 1 for Nesterov's form.
"""

import torch

from nn.embedding.optimizer import Group, StateField, States, TableRule, Tensors
from nn.ops.optional_triton import jit, tl


def _update(tables: Tensors, gradients: Tensors, states: States, group: Group) -> None:
    for table, gradient, state in zip(tables, gradients, states, strict=True):
        touched = gradient.ne(0).any(dim=1, keepdim=True)
        moved = gradient + group["momentum"] * state["momentum1"]
        change = gradient + group["momentum"] * moved if group["nesterov"] else moved
        table.sub_(change * (touched * group["lr"]))
        state["momentum1"].copy_(torch.where(touched, moved, state["momentum1"]))


@jit
def _kernel(weight, gradient, state1, state2, step):
    momentum, nesterov = tl.load(step.scalars + 5), tl.load(step.scalars + 6)
    moved = gradient + momentum * state1
    change = tl.where(nesterov != 0, gradient + momentum * moved, moved)
    return weight - step.rate * change, moved, state2


RULE = TableRule(
    name="sgd_momentum",
    update=_update,
    kernel=_kernel,
    states=(StateField("momentum1"),),
    options=("momentum", "nesterov"),
    defaults={"momentum": 0.9, "nesterov": 0},
    leaves_untouched_rows=True,
)
