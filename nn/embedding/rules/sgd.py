"""SGD, without momentum: a row that a batch does not look up would have to move too."""

from nn.embedding.optimizer import Group, States, TableRule, Tensors
from nn.ops.optional_triton import jit, tl  # noqa: F401  (Triton's interpreter looks for tl)


def _update(tables: Tensors, gradients: Tensors, states: States, group: Group) -> None:
    for table, gradient in zip(tables, gradients, strict=True):
        table.add_(gradient, alpha=-group["lr"])


@jit
def _kernel(weight, gradient, state1, state2, step):
    return weight - step.rate * gradient, state1, state2


RULE = TableRule(name="sgd", update=_update, kernel=_kernel, leaves_untouched_rows=True)
