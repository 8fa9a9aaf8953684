"""Row-wise Adagrad: divide by the root of the sum of each row's mean squares."""

from nn.embedding.optimizer import Group, StateField, States, TableRule, Tensors
from nn.ops.optional_triton import jit, tl


def _update(tables: Tensors, gradients: Tensors, states: States, group: Group) -> None:
    for table, gradient, state in zip(tables, gradients, states, strict=True):
        total = state["momentum1"].add_(gradient.square().mean(dim=1))
        rate = group["lr"] / (total.sqrt() + group["eps"])
        table.sub_(gradient * rate.unsqueeze(1))


@jit
def _kernel(weight, gradient, state1, state2, step):
    total = state1 + tl.sum(gradient * gradient, 0) / step.width
    return weight - (step.rate / (tl.sqrt(total) + step.eps)) * gradient, total, state2


RULE = TableRule(
    name="rowwise_adagrad",
    update=_update,
    kernel=_kernel,
    states=(StateField("momentum1", per_row=True),),
    columns_may_be_cut=False,
    leaves_untouched_rows=True,
)
