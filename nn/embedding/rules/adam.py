"""Adam on the rows of a batch: along the corrected mean, divided by the root of the corrected variance."""

from nn.embedding.optimizer import Group, StateField, States, TableRule, Tensors
from nn.ops.optional_triton import jit, tl


def _update(tables: Tensors, gradients: Tensors, states: States, group: Group) -> None:
    for table, gradient, state in zip(tables, gradients, states, strict=True):
        touched = gradient.ne(0).any(dim=1, keepdim=True).to(gradient.dtype)  # [rows, 1], 1 or 0
        mean = state["momentum1"].lerp_(gradient, touched * (1 - group["beta1"]))
        variance = state["momentum2"].lerp_(gradient.square(), touched * (1 - group["beta2"]))
        # in double: 1 - 0.999 keeps four digits only in single precision
        count = state["iter"].add_(1).double()
        mean = mean / (1 - group["beta1"] ** count)
        variance = variance / (1 - group["beta2"] ** count)
        table.sub_(mean / (variance.sqrt() + group["eps"]) * (touched * group["lr"]))


@jit
def _kernel(weight, gradient, state1, state2, step):
    mean = step.beta1 * state1 + step.rest1 * gradient
    variance = step.beta2 * state2 + step.rest2 * gradient * gradient
    corrected_mean = mean * tl.load(step.scalars + 1)
    corrected_variance = variance * tl.load(step.scalars + 2)
    change = step.rate * corrected_mean / (tl.sqrt(corrected_variance) + step.eps)
    return weight - change, mean, variance


RULE = TableRule(
    name="adam",
    update=_update,
    kernel=_kernel,
    states=(StateField("momentum1"), StateField("momentum2")),
    uses_step=True,
    leaves_untouched_rows=True,
)
