"""Optimizer of tables in plain torch, for dense gradients and for gradients of some rows.

On CPUs all tables are updated here; on GPUs `step_by_kernels` updates replicated tables, as `nn.embedding.triton_launcher` does
the others. The arithmetic is that of the kernels, including the position of eps, so that the plan does not change the result.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from configs.schema import OptimizerConfig
from nn.embedding.local_tables import LocalTable, UpdateScalars
from nn.embedding.optimizer import Group, States, TableRule, Tensors, table_rule, update_settings
from nn.ops.addresses import join_adjacent
from nn.ops.stochastic_rounding import random_bits, round_stochastically


class TableOptimizer(torch.optim.Optimizer):
    """An optimizer of tables [rows, dim] with dense gradients.

    A row whose gradient is zero in all columns is not changed, nor is its state: FBGEMM updates only the rows that a batch
    looks up. Adam differs in two points. FBGEMM decays the moments of a looked-up row whose gradient is exactly zero. Its
    `iter` counts every forward pass, evaluation included; ours counts updates.

    The state is allocated in the constructor, so that a checkpoint can be loaded before the first step. It has the fields of
    the `TableRule` and, if the optimizer uses the step, `iter` [], the number of updates. It is float32 for every dtype of
    the table; load it by copying into it. Tables of one width that are adjacent in memory are updated as one.

    `params`: the tables, or parameter groups of them. `config`: options; those of tables are used.
    """

    def __init__(self, params: Iterable[Any], config: OptimizerConfig) -> None:
        super().__init__(params, update_settings(config))
        self._config = config
        self._rule = table_rule(config.table_name)
        self._l2 = config.embedding_l2
        self._joined = [_joined(group["params"], self._rule) for group in self.param_groups]
        for tables in self._joined:
            for some in tables:
                for table, state in some.state_of_each():
                    self.state[table] = state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update every table that has a gradient; L2 is added in place, since a second gradient is as large as the table."""
        assert closure is None, (
            "a closure would evaluate the model again, which no optimizer here needs"
        )
        update = self._rule.update if self._rule.leaves_untouched_rows else self._update_touched
        for group, of_group in zip(self.param_groups, self._joined, strict=True):
            found = [some for some in of_group if some.has_gradient]
            if found:
                tables = [some.weight for some in found]
                gradients = [some.gradient() for some in found]
                if self._l2:
                    for table, gradient in zip(tables, gradients, strict=True):
                        touched = gradient.ne(0).any(dim=1, keepdim=True)
                        gradient.add_(torch.where(touched, table, 0), alpha=self._l2)
                update(tables, gradients, [some.state for some in found], group)

    def prepare(self, step: int, lr: float) -> None:
        """Set learning rate and step count of the next update."""
        for group in self.param_groups:
            group["lr"] = lr
        if self._rule.uses_step:
            for tables in self._joined:
                for some in tables:
                    some.state["iter"].fill_(step)

    def step_by_kernels(
        self, gradients: Sequence[Tensor], scalars: UpdateScalars, is_good: Tensor
    ) -> None:
        """Update tables on a GPU by one gradient each, unless `is_good`, int32 [1], is 0; a CUDA graph can repeat it.

        Learning rate and step are those of `scalars`. The gradients stay as they are.
        """
        # Only CUDA builds of torch include Triton.
        from nn.embedding.triton_launcher import update_table

        left = iter(gradients)
        for some in chain.from_iterable(self._joined):
            first = 0
            for gradient in join_adjacent(next(left) for _ in some.tables):
                rows = slice(first, first + len(gradient))
                state = {name: some.state[name][rows] for name in self._rule.state_names}
                table = LocalTable((), some.weight[rows], state)
                update_table(table, gradient, self._config, scalars, is_good)
                first = rows.stop

    def _update_touched(
        self, tables: Tensors, gradients: Tensors, states: States, group: Group
    ) -> None:
        """Update all rows, then restore those without a gradient."""
        changed = [
            [table, *(state[name] for name in self._rule.state_names)]
            for table, state in zip(tables, states, strict=True)
        ]
        before = [[tensor.clone() for tensor in tensors] for tensors in changed]
        self._rule.update(tables, gradients, states, group)
        for gradient, tensors, old_tensors in zip(gradients, changed, before, strict=True):
            untouched = gradient.eq(0).all(dim=1)
            for tensor, old in zip(tensors, old_tensors, strict=True):
                rows = untouched.view(-1, *[1] * (tensor.dim() - 1))
                tensor.copy_(torch.where(rows, old, tensor))


@dataclass(frozen=True, slots=True)
class _Joined:
    """Adjacent tables of one width as one, `weight` [rows of all, columns], with the state of all."""

    tables: list[nn.Parameter]
    weight: Tensor
    state: dict[str, Tensor]

    @property
    def has_gradient(self) -> bool:
        return any(table.grad is not None for table in self.tables)

    def gradient(self) -> Tensor:
        """Return the gradient of all, zeros for a table without: a view where those of the tables are adjacent too."""
        found = [torch.zeros_like(of) if of.grad is None else of.grad for of in self.tables]
        one, *others = join_adjacent(found)
        return torch.cat(found) if others else one

    def state_of_each(self) -> Iterator[tuple[nn.Parameter, dict[str, Tensor]]]:
        """Yield each table with views of its state."""
        end = 0
        for table in self.tables:
            first, end = end, end + len(table)
            # `iter` is that of all.
            yield table, {n: of[first:end] if of.dim() else of for n, of in self.state.items()}


def _joined(tables: Iterable[nn.Parameter], rule: TableRule) -> list[_Joined]:
    found, left = [], list(tables)
    for weight in join_adjacent(table.detach() for table in tables):
        own: list[nn.Parameter] = []
        while sum(map(len, own)) < len(weight):
            own.append(left.pop(0))
        found.append(_Joined(own, weight, rule.new_state(weight)))
    return found


@torch.no_grad()
def update_rows(
    table: LocalTable,
    rows: Tensor,
    gradients: Tensor,
    config: OptimizerConfig,
    *,
    lr: float,
    step: Tensor,
) -> None:
    """Update distinct rows of a table in plain torch; weights of 16 bits are computed in float32 and rounded stochastically."""
    rule = table_rule(config.table_name)
    # `index_select` copies complete rows; indexing by brackets reads element after element.
    some = table.weight.index_select(0, rows).float()
    some_state = {name: state.index_select(0, rows) for name, state in table.state.items()}
    if config.embedding_l2:
        gradients = gradients.add(some, alpha=config.embedding_l2)
    group = update_settings(config) | {"lr": lr}
    count = {"iter": step.float()} if rule.uses_step else {}
    rule.update([some], [gradients], [some_state | count], group)
    if table.weight.dtype is not torch.float32:
        of_table = table.rows_of_table(rows)
        bits = random_bits(table.rounding_key, step, of_table, table.first_column, some.shape[1])
        some = round_stochastically(some, table.weight.dtype, bits)
    table.weight[rows] = some
    for name, state in some_state.items():
        table.state[name][rows] = state
