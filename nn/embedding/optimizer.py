"""Optimizers of tables: one record per optimizer with everything that differs between them.

A new one is a `TableRule` here, or in a module outside the project that `optimizer.embedding_name=package.module:NAME` names,
and a branch of the kernel (`nn.ops.triton.row_updates` has the built-in ones).

The kernels and the plain torch of this file have the same arithmetic, that of FBGEMM's fused optimizers, so neither the plan
nor the device changes the result.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torchrec.optim import RowWiseAdagrad

from configs.schema import OptimizerConfig, OptimizerName
from configs.user_objects import load_user_object

Update = Callable[[list[Tensor], list[Tensor], list[dict[str, Tensor]], dict[str, Any]], None]
"""Change tables [rows, columns] and their states in place by gradients of the same shape, all float32.

The last argument is that of `update_settings`. A state has the fields of the record, and where the optimizer uses the step
`iter`, the number of updates before this one, to be counted up.
"""

FP32_BYTES = 4


@dataclass(frozen=True, slots=True)
class StateField:
    """A state that an optimizer keeps beside a table, float32.

    Attributes:
        name: in checkpoints and exports.
        per_row: one number per row, otherwise one per element.
    """

    name: str
    per_row: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRule:
    """Record of a table optimizer for planner, step, kernels, memory estimate and checkpoints.

    Attributes:
        name: in messages.
        update: in plain torch.
        kernel: branch of the Triton kernel, a `@triton.jit` function, as `package.module:NAME`, since Triton may not be
            installed on machines without a GPU; None: the optimizer trains on CPUs only.
        states: at most two.
        options: further options of `OptimizerConfig` that an update depends on: `update` finds them by name in its last
            argument, the kernel from `scalars[5]` on in this order.
        uses_step: whether an update depends on the number of updates before.
        columns_may_be_cut: whether a table sharded by columns trains as an unsharded one.
        leaves_untouched_rows: whether `update` does not change rows whose gradient is zero, state included; otherwise
            `TableOptimizer` restores them. If not, a row that a batch looks up with a gradient of exactly zero is updated
            in tables of one rank and left in replicated ones.
    """

    name: str
    update: Update
    kernel: str | None = None
    states: tuple[StateField, ...] = ()
    options: tuple[str, ...] = ()
    uses_step: bool = False
    columns_may_be_cut: bool = True
    leaves_untouched_rows: bool = False

    def __post_init__(self) -> None:
        if len(self.states) > 2:
            raise ValueError(
                f"table optimizer {self.name} has {len(self.states)} states, at most 2 are supported"
            )
        if len(set(self.state_names)) < len(self.states):
            raise ValueError(
                f"table optimizer {self.name} has two states {self.state_names[0]}, one name in a checkpoint; give each its own"
            )
        if {"weight", "iter"} & {field.name for field in self.states}:
            raise ValueError(
                f"table optimizer {self.name} calls a state weight or iter; both have a meaning already"
            )
        if self.columns_may_be_cut and any(field.per_row for field in self.states):
            raise ValueError(
                f"table optimizer {self.name} keeps a state per row, so a row cut by columns would have several; set "
                "columns_may_be_cut=False"
            )

    @property
    def state_names(self) -> tuple[str, ...]:
        """Return the names of the states in checkpoints."""
        return tuple(field.name for field in self.states)

    @property
    def bytes_per_element(self) -> int:
        """Return the bytes of state per element of a table."""
        return FP32_BYTES * sum(not field.per_row for field in self.states)

    @property
    def bytes_per_row(self) -> int:
        """Bytes of state that each row has beside those of its elements."""
        return FP32_BYTES * sum(field.per_row for field in self.states)

    @property
    def planner_class(self) -> type[torch.optim.Optimizer]:
        """An optimizer with as much state, by which TorchRec's planner knows how much that is."""
        per_element = sum(not field.per_row for field in self.states)
        if not per_element and self.states:
            return RowWiseAdagrad
        return (torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam)[per_element]

    def state_shapes(self, shape: torch.Size) -> dict[str, torch.Size]:
        """Return the shape of each state of a table [rows, columns]."""
        return {field.name: shape[:1] if field.per_row else shape for field in self.states}

    def new_state(self, table: Tensor) -> dict[str, Tensor]:
        """Return the states of a table that was never updated, and `iter` where the step is used."""
        shapes = self.state_shapes(table.shape)
        if self.uses_step:
            shapes["iter"] = torch.Size()
        return {name: table.new_zeros(shape, dtype=torch.float32) for name, shape in shapes.items()}


def _sgd(
    tables: list[Tensor],
    gradients: list[Tensor],
    states: list[dict[str, Tensor]],
    group: dict[str, Any],
) -> None:
    torch._foreach_add_(tables, gradients, alpha=-group["lr"])


def _adagrad(
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


def _rowwise_adagrad(
    tables: list[Tensor],
    gradients: list[Tensor],
    states: list[dict[str, Tensor]],
    group: dict[str, Any],
) -> None:
    for table, gradient, state in zip(tables, gradients, states, strict=True):
        total = state["momentum1"].add_(gradient.square().mean(dim=1))
        rate = group["lr"] / (total.sqrt() + group["eps"])
        table.sub_(gradient * rate.unsqueeze(1))


def _adam(
    tables: list[Tensor],
    gradients: list[Tensor],
    states: list[dict[str, Tensor]],
    group: dict[str, Any],
) -> None:
    for table, gradient, state in zip(tables, gradients, states, strict=True):
        touched = gradient.ne(0).any(dim=1, keepdim=True).to(gradient.dtype)  # [rows, 1], 1 or 0
        mean = state["momentum1"].lerp_(gradient, touched * (1 - group["beta1"]))
        variance = state["momentum2"].lerp_(gradient.square(), touched * (1 - group["beta2"]))
        # in double: 1 - 0.999 keeps four digits only in single precision
        count = state["iter"].add_(1).double()
        mean = mean / (1 - group["beta1"] ** count)
        variance = variance / (1 - group["beta2"] ** count)
        table.sub_(mean / (variance.sqrt() + group["eps"]) * (touched * group["lr"]))


FTRL_OPTIONS = ("table_lr", "ftrl_beta", "ftrl_l1", "ftrl_l2")


def _ftrl(
    tables: list[Tensor],
    gradients: list[Tensor],
    states: list[dict[str, Tensor]],
    group: dict[str, Any],
) -> None:
    """FTRL-Proximal (McMahan et al., Ad Click Prediction, 2013, algorithm 1) with per-coordinate rates.

    Two things differ from the paper, and neither if weights start at zero and the learning rate is constant. A weight that
    starts elsewhere starts with the `z` whose weight it is; with `z` = 0 its first update would move it towards zero. A
    schedule multiplies the gradient in `z` and leaves alpha alone: a smaller alpha would shrink all weights.
    """
    alpha, beta, l1, l2 = (group[name] for name in FTRL_OPTIONS)
    for table, gradient, state in zip(tables, gradients, states, strict=True):
        touched = gradient.ne(0).any(dim=1, keepdim=True)
        z, n = state["z"], state["n"]
        of_weight = -(table * (beta / alpha + l2) + table.sign() * l1)
        root, new_n = n.sqrt(), n + gradient.square()
        new_root = new_n.sqrt()
        new_z = torch.where(n == 0, of_weight, z)
        new_z = new_z + gradient * (group["lr"] / alpha) - table * ((new_root - root) / alpha)
        weight = (new_z.sign() * l1 - new_z) / ((beta + new_root) / alpha + l2)
        weight = torch.where(new_z.abs() <= l1, 0, weight)
        for old, new in ((table, weight), (z, new_z), (n, new_n)):
            old.copy_(torch.where(touched, new, old))


KERNELS = "nn.ops.triton.row_updates"

TABLE_RULES: dict[str, TableRule] = {
    OptimizerName.sgd: TableRule(
        name="sgd",
        update=_sgd,
        kernel=f"{KERNELS}:sgd",
        leaves_untouched_rows=True,
    ),
    OptimizerName.adagrad: TableRule(
        name="adagrad",
        update=_adagrad,
        kernel=f"{KERNELS}:adagrad",
        states=(StateField("momentum1"),),
        leaves_untouched_rows=True,
    ),
    OptimizerName.rowwise_adagrad: TableRule(
        name="rowwise_adagrad",
        update=_rowwise_adagrad,
        kernel=f"{KERNELS}:rowwise_adagrad",
        states=(StateField("momentum1", per_row=True),),
        columns_may_be_cut=False,
        leaves_untouched_rows=True,
    ),
    OptimizerName.adam: TableRule(
        name="adam",
        update=_adam,
        kernel=f"{KERNELS}:adam",
        states=(StateField("momentum1"), StateField("momentum2")),
        uses_step=True,
        leaves_untouched_rows=True,
    ),
    OptimizerName.ftrl: TableRule(
        name="ftrl",
        update=_ftrl,
        kernel=f"{KERNELS}:ftrl",
        states=(StateField("z"), StateField("n")),
        options=FTRL_OPTIONS,
        leaves_untouched_rows=True,
    ),
}

ADDITION = OptimizerConfig(name=OptimizerName.sgd)
"""With a rate of -1 it adds gradients to rows."""


def update_settings(config: OptimizerConfig) -> dict[str, Any]:
    """Return the last argument of `TableRule.update`: `lr` (the peak), `eps`, `beta1`, `beta2` and the rule's options."""
    names = ("eps", "beta1", "beta2", *table_rule(config.table_name).options)
    return {"lr": config.table_lr} | {name: getattr(config, name) for name in names}


@cache
def table_rule(name: str) -> TableRule:
    """Return the record of a table optimizer.

    Args:
        name: of a built-in one, or `package.module:NAME`.

    Raises:
        ValueError: the name cannot be imported, or is no `TableRule`.
    """
    if name in TABLE_RULES:
        return TABLE_RULES[name]
    rule = load_user_object(name, "optimizer.embedding_name")
    if not isinstance(rule, TableRule):
        raise ValueError(
            f"optimizer.embedding_name={name} is a {type(rule).__name__}, and the tables require a TableRule "
            "(nn.embedding.optimizer); name one, or a built-in optimizer"
        )
    return rule


def less_state(rule: TableRule) -> list[str]:
    """Return the built-in optimizers without state per element if `rule` has such state; largest state first."""
    if not rule.bytes_per_element:
        return []
    smaller = [other for other in TABLE_RULES.values() if not other.bytes_per_element]
    return [other.name for other in sorted(smaller, key=lambda other: -other.bytes_per_row)]


def with_column_cuts(rule: TableRule) -> str:
    """Return the built-in optimizer with as many states as `rule` whose tables may be sharded by columns."""
    return next(
        other.name
        for other in TABLE_RULES.values()
        if other.columns_may_be_cut and len(other.states) == len(rule.states)
    )
