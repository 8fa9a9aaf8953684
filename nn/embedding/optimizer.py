"""Optimizers of tables: the record of what differs between them.

A new one is a file of `nn/embedding/rules/` with its `RULE`; the file's name is the optimizer's. One outside the project is a
`TableRule` that `optimizer.embedding_name=package.module:NAME` names.

A rule's kernel and its plain torch have the same arithmetic, for the built-in ones that of FBGEMM's fused optimizers, so
neither the plan nor the device changes the result.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torchrec.optim import RowWiseAdagrad

from configs.schema import OptimizerConfig, table_optimizers
from configs.user_objects import load_user_object, one_line_if_it_fails

Tensors = list[Tensor]
States = list[dict[str, Tensor]]
Group = dict[str, Any]
Update = Callable[[Tensors, Tensors, States, Group], None]
"""Change tables [rows, columns] and their states in place by gradients of the same shape, all float32.

The last argument is that of `update_settings`. A state has the fields of the record, and where the optimizer uses the step
`iter`, the number of updates before this one, to be counted up.
"""

FP32_BYTES = 4


@dataclass(frozen=True, slots=True)
class StateField:
    """A float32 state beside a table, by its name in checkpoints and exports: a number per element, or one per row."""

    name: str
    per_row: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRule:
    """Record of a table optimizer for planner, step, kernels, memory estimate and checkpoints.

    `kernel` is a `@jit` function (`nn.ops.optional_triton`), the optimizer's branch of the update kernel, which calls
    `kernel(weight, gradient, state1, state2, step)` for a row when its gradient is summed and L2 added. It returns the new
    weights and both states; a state that the optimizer lacks as it came. All are float32 [columns], a state per row a scalar.
    A width that is no power of two has further columns of zeros. `step` is a `RowStep` of `nn.ops.triton.embedding_bag`.
    """

    name: str
    update: Update
    # None: the optimizer trains on CPUs only.
    kernel: Callable[..., Any] | None = None
    # At most two.
    states: tuple[StateField, ...] = ()
    # Further options that an update depends on: `update` finds them by name in its last argument, the kernel from
    # `step.scalars + 5` on in this order. They are the rule's own, with a default below, or those of `OptimizerConfig`.
    options: tuple[str, ...] = ()
    # The rule's values of options, also of eps, beta1 and beta2, where they differ from those of `OptimizerConfig`.
    defaults: Mapping[str, float] = field(default_factory=dict)
    # Whether an update depends on the number of updates before.
    uses_step: bool = False
    # Whether a table sharded by columns trains as an unsharded one.
    columns_may_be_cut: bool = True
    # Whether `update` does not change rows whose gradient is zero, state included, nor `kernel` weights of rows whose gradients
    # were all zero. If not, `TableOptimizer` restores or skips them; a row that a batch looks up with a gradient of exactly zero
    # is updated in tables of one rank and left in replicated ones; and the rule is refused for tables from files.
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
        return tuple(field.name for field in self.states)

    @property
    def bytes_per_element(self) -> int:
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
        return {field.name: shape[:1] if field.per_row else shape for field in self.states}

    def new_state(self, table: Tensor) -> dict[str, Tensor]:
        """Return the states of a table that was never updated, and `iter` where the step is used."""
        shapes = self.state_shapes(table.shape)
        if self.uses_step:
            shapes["iter"] = torch.Size()
        return {name: table.new_zeros(shape, dtype=torch.float32) for name, shape in shapes.items()}


ADDITION = OptimizerConfig(name="sgd")
"""With a rate of -1 it adds gradients to rows."""


def update_settings(config: OptimizerConfig) -> dict[str, Any]:
    """Return the last argument of `TableRule.update`: `lr` (the peak), `eps`, `beta1`, `beta2` and the rule's options."""
    rule = table_rule(config.table_name)
    names = ("eps", "beta1", "beta2", *rule.options)
    chosen = config.embedding_options or {}
    unknown = [name for name in chosen if name not in names]
    if unknown:
        raise ValueError(
            f"optimizer.embedding_options: {rule.name} has no option {unknown[0]}, expected one of {', '.join(names)}"
        )
    own = {**rule.defaults, **chosen}
    values = {name: own[name] if name in own else getattr(config, name) for name in names}
    return {"lr": config.table_lr} | values


@cache
def table_rule(name: str) -> TableRule:
    """Return the record of a built-in table optimizer, or of `package.module:NAME`; ValueError if that is no `TableRule`."""
    if name in table_optimizers():
        return import_module(f"nn.embedding.rules.{name}").RULE
    rule = load_user_object(name, "optimizer.embedding_name")
    if not isinstance(rule, TableRule):
        raise ValueError(
            f"optimizer.embedding_name={name} is a {type(rule).__name__}, and the tables require a TableRule "
            "(nn.embedding.optimizer); name one, or a built-in optimizer"
        )
    return rule


@torch.no_grad()
def check_table_rule(config: OptimizerConfig) -> None:
    """Update a small table by a rule from outside the project.

    Raises ValueError: the update fails, or does not change table and state in place, or the rule has no such
    `optimizer.embedding_options`.
    """
    name, settings = config.table_name, update_settings(config)
    if name in table_optimizers():
        return
    rule, table = table_rule(name), torch.ones(2, 4)
    state = rule.new_state(table)
    given, option = dict(state), f"optimizer.embedding_name={name}"
    with one_line_if_it_fails(option):
        # A view, since an update may set its `data`, by which the table stays what it was.
        rule.update([table.view(2, 4)], [torch.ones(2, 4)], [given], settings)
    # An update by which no number changes, as at a rate of 0, still has a new version.
    is_left = table._version == 0 and table.eq(1).all()
    if is_left or any(given.get(key) is not tensor for key, tensor in state.items()):
        raise ValueError(
            f"{option} leaves a table or its state as it was; its update must change them in place"
        )


def _built_in() -> list[TableRule]:
    return [table_rule(name) for name in table_optimizers()]


def less_state(rule: TableRule) -> list[str]:
    """Return the built-in optimizers without state per element if `rule` has such state; largest state first."""
    if not rule.bytes_per_element:
        return []
    smaller = [other for other in _built_in() if not other.bytes_per_element]
    return [other.name for other in sorted(smaller, key=lambda other: -other.bytes_per_row)]


def with_column_cuts(rule: TableRule) -> str:
    """Return the built-in optimizer with as many states as `rule` whose tables may be sharded by columns."""
    return next(
        other.name
        for other in _built_in()
        if other.columns_may_be_cut and len(other.states) == len(rule.states)
    )
