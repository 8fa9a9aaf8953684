"""Update rules for tables whose gradient arrives as a dense tensor: the same as FBGEMM fuses into its backward pass.

A replicated table (`data_parallel`), and with Adam every table on a CPU, has no fused optimizer. If such a table were
stepped by another rule, or by the same rule with eps elsewhere, the plan would change what a run computes.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from configs.schema import OptimizerConfig, OptimizerName
from nn.embedding.local_tables import LocalTable
from nn.ops.stochastic_rounding import random_bits, round_stochastically


class TableOptimizer(torch.optim.Optimizer):
    """SGD, Adagrad, row-wise Adagrad or Adam on tables [rows, dim] with dense gradients.

    A row whose gradient is zero in all columns is left as it is, its state included: FBGEMM touches only the rows that
    a batch looks up. Under Adam two things differ: FBGEMM would decay the moments of a looked-up row whose gradient is
    exactly zero, and its `iter` counts every forward pass, evaluation included, where ours counts updates.

    State of a table, made at once so that a checkpoint can be loaded before the first step, under FBGEMM's names:
    `momentum1` [rows, dim] (Adagrad's sum, Adam's mean) or [rows] (row-wise Adagrad's sum), `momentum2` [rows, dim]
    (Adam's variance) and `iter` [] (Adam's count of steps). All of it is float32, whatever the table is.

    Args:
        params: the tables, or parameter groups of them.
        name: the rule.
        lr: learning rate.
        eps: added to the square root in the denominator; all rules but SGD.
        beta1: decay of Adam's mean.
        beta2: decay of Adam's variance.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        name: OptimizerName,
        lr: float,
        eps: float = 1e-8,
        beta1: float = 0.9,
        beta2: float = 0.999,
    ) -> None:
        super().__init__(params, {"lr": lr, "eps": eps, "beta1": beta1, "beta2": beta2})
        self._update = UPDATES[name]
        for group in self.param_groups:
            for table in group["params"]:
                self.state[table].update(_new_state(name, table))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Apply one update to every table that has a gradient."""
        assert closure is None, "a closure would evaluate the model again, which no rule here needs"
        for group in self.param_groups:
            tables = [table for table in group["params"] if table.grad is not None]
            if tables:
                grads = [table.grad for table in tables]
                self._update(tables, grads, [self.state[table] for table in tables], group)


def _new_state(name: OptimizerName, table: Tensor) -> dict[str, Tensor]:
    def zeros(*size: int) -> Tensor:
        return table.new_zeros(size, dtype=torch.float32)

    if name is OptimizerName.sgd:
        return {}
    if name is OptimizerName.rowwise_adagrad:
        return {"momentum1": zeros(len(table))}
    if name is OptimizerName.adagrad:
        return {"momentum1": zeros(*table.shape)}
    return {"momentum1": zeros(*table.shape), "momentum2": zeros(*table.shape), "iter": zeros()}


def _sgd(
    tables: list[Tensor],
    grads: list[Tensor],
    states: list[dict[str, Tensor]],
    group: dict[str, Any],
) -> None:
    torch._foreach_add_(tables, grads, alpha=-group["lr"])


def _adagrad(
    tables: list[Tensor],
    grads: list[Tensor],
    states: list[dict[str, Tensor]],
    group: dict[str, Any],
) -> None:
    totals = [state["momentum1"] for state in states]
    torch._foreach_addcmul_(totals, grads, grads)
    divisors = torch._foreach_sqrt(totals)
    torch._foreach_add_(divisors, group["eps"])
    torch._foreach_addcdiv_(tables, grads, divisors, value=-group["lr"])


def _rowwise_adagrad(
    tables: list[Tensor],
    grads: list[Tensor],
    states: list[dict[str, Tensor]],
    group: dict[str, Any],
) -> None:
    for table, grad, state in zip(tables, grads, states, strict=True):
        total = state["momentum1"].add_(grad.square().mean(dim=1))
        rate = group["lr"] / (total.sqrt() + group["eps"])
        table.sub_(grad * rate.unsqueeze(1))


def _adam(
    tables: list[Tensor],
    grads: list[Tensor],
    states: list[dict[str, Tensor]],
    group: dict[str, Any],
) -> None:
    for table, grad, state in zip(tables, grads, states, strict=True):
        touched = grad.ne(0).any(dim=1, keepdim=True).to(grad.dtype)  # [rows, 1], 1 or 0
        mean = state["momentum1"].lerp_(grad, touched * (1 - group["beta1"]))
        variance = state["momentum2"].lerp_(grad.square(), touched * (1 - group["beta2"]))
        # in double: 1 - 0.999 keeps four digits only in single precision
        count = state["iter"].add_(1).double()
        mean = mean / (1 - group["beta1"] ** count)
        variance = variance / (1 - group["beta2"] ** count)
        table.sub_(mean / (variance.sqrt() + group["eps"]) * (touched * group["lr"]))


UPDATES = {
    OptimizerName.sgd: _sgd,
    OptimizerName.adagrad: _adagrad,
    OptimizerName.rowwise_adagrad: _rowwise_adagrad,
    OptimizerName.adam: _adam,
}


@torch.no_grad()
def update_rows(
    part: LocalTable,
    rows: Tensor,
    gradients: Tensor,
    config: OptimizerConfig,
    *,
    lr: float,
    step: Tensor,
) -> None:
    """Apply one update to some rows of a table, in plain torch.

    Args:
        part: a table, or a range of its columns. Weights of 16 bits are computed in float32 and rounded by chance.
        rows: which, each once, [n].
        gradients: of these rows, float32 [n, D].
        config: the rule.
        lr: learning rate.
        step: updates before this one, [1].
    """
    # In one copy a row; indexing by brackets reads number after number.
    some = part.weight.index_select(0, rows).float()
    some_state = {name: each.index_select(0, rows) for name, each in part.state.items()}
    group = {"lr": lr, "eps": config.eps, "beta1": config.beta1, "beta2": config.beta2}
    UPDATES[config.table_name]([some], [gradients], [some_state | {"iter": step.float()}], group)
    if part.weight.dtype is not torch.float32:
        bits = random_bits(part.rounding_key, step, rows, part.first_column, some.shape[1])
        some = round_stochastically(some, part.weight.dtype, bits)
    part.weight[rows] = some
    for name, each in some_state.items():
        part.state[name][rows] = each
