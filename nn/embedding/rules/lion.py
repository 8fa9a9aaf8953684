"""Lion (Chen et al., Symbolic Discovery of Optimization Algorithms, 2023): the sign of a mix of mean and gradient.

Every weight of a looked-up row moves by the learning rate, so that takes a third to a tenth of Adam's.
"""

from torch import Tensor

from nn.embedding.optimizer import Group, StateField, States, TableRule, Tensors
from nn.ops.optional_triton import jit, tl


def lion_step(mean: Tensor, gradient: Tensor, group: Group, touched: Tensor) -> Tensor:
    """Move the mean in place where `touched` is 1, not where it is 0; return the direction of the weights, all of them."""
    direction = mean.lerp(gradient, 1 - group["beta1"]).sign()
    mean.lerp_(gradient, touched * (1 - group["beta2"]))
    return direction


def _update(tables: Tensors, gradients: Tensors, states: States, group: Group) -> None:
    for table, gradient, state in zip(tables, gradients, states, strict=True):
        touched = gradient.ne(0).any(dim=1, keepdim=True).to(gradient.dtype)  # [rows, 1], 1 or 0
        direction = lion_step(state["momentum1"], gradient, group, touched)
        table.sub_(direction * (touched * group["lr"]))


@jit
def _kernel(weight, gradient, state1, state2, step):
    mix = step.beta1 * state1 + step.rest1 * gradient
    direction = tl.where(mix > 0, 1.0, tl.where(mix < 0, -1.0, 0.0))
    mean = step.beta2 * state1 + step.rest2 * gradient
    return weight - step.rate * direction, mean, state2


RULE = TableRule(
    name="lion",
    update=_update,
    kernel=_kernel,
    states=(StateField("momentum1"),),
    defaults={"beta1": 0.9, "beta2": 0.99},
    leaves_untouched_rows=True,
)
