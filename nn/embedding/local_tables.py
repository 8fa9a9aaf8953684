"""Inputs of lookup and update: local tables, sorted ids, and the scalars of a step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from configs.schema import OptimizerConfig
from nn.embedding.id_blocks import IdBlock
from nn.embedding.lookups import Lookup
from nn.embedding.optimizer import table_rule, update_settings
from nn.ops.host_copy import DeviceValues

# G: samples, H: hotness of a lookup, N: total number of ids (sum of G * H over features), K: number of keys (sum of G * H over
# lookups), D: columns of a local table, T: columns of all lookups


@dataclass(frozen=True, slots=True)
class SlotRows:
    """The rows that an arena holds for a table whose ids are slots; tables of a group number their rows table after table."""

    rows: Tensor  # row of the group in each slot, int32 [C + 1]; the last one is greater than all rows
    group: int  # position of the group
    first_row: int  # row of the table at which its rows on this rank begin
    num_rows: int  # of the table on this rank
    offset: int  # number of the table's row 0 in the group

    def rows_here(self, slots: Tensor) -> Tensor:
        """Return the rows in slots, counted from `first_row`; `num_rows` for the slot behind the last one, int32."""
        rows = self.rows.index_select(0, slots) - (self.offset + self.first_row)
        return rows.clamp_(max=self.num_rows)


@dataclass(frozen=True, slots=True)
class LocalTable:
    """A table, or a range of its columns, on this rank."""

    lookups: tuple[Lookup, ...]  # in the order of their columns in the embeddings of a sample
    weight: Tensor  # [rows, D], contiguous
    state: dict[str, Tensor]  # by name, float32; the optimizer's `TableRule` has the shapes
    first_column: int = 0  # of the table, at which `weight` begins; even
    rounding_key: int = 0  # `nn.ops.stochastic_rounding`; ignored for float32 weights
    # row of the table at which `weight` begins, if ranks share its rows; None: it has all rows
    first_row: int | None = None
    # the rows in `weight`, if that is an arena; `first_row` is then None or 0
    slots: SlotRows | None = None

    @property
    def is_bounded(self) -> bool:
        """Return whether there may be ids without a row here: of other ranks' rows, or none of a ragged feature."""
        return self.first_row is not None or any(lookup.is_ragged for lookup in self.lookups)

    @property
    def num_rows(self) -> int:
        """Rows of the table on this rank, wherever they lie."""
        return len(self.weight) if self.slots is None else self.slots.num_rows

    def rows_of_table(self, rows: Tensor) -> Tensor:
        """Return the rows of the table that lie at some rows of `weight`."""
        if self.slots is None:
            return rows + (self.first_row or 0)
        return self.slots.rows_here(rows) + self.slots.first_row

    @property
    def num_columns(self) -> int:
        return self.weight.shape[1] * sum(lookup.num_vectors for lookup in self.lookups)


def key_bases(tables: Sequence[LocalTable]) -> list[int]:
    """Return the keys of all tables before each: one per row, and a last one for all ids that have no row here."""
    return list(accumulate([len(t.weight) + t.is_bounded for t in tables], initial=0))


def row_bases(tables: Sequence[LocalTable]) -> list[int]:
    """Return the same with a key per row of the tables on this rank, wherever they lie."""
    return list(accumulate([table.num_rows + table.is_bounded for table in tables], initial=0))


@dataclass(frozen=True, slots=True)
class PlacedLookup:
    table: int
    lookup: Lookup
    ids: IdBlock
    first_key: int  # in the keys [K], of which it has one per id
    first_column: int  # in the embeddings [G, T]
    width: int


def place_lookups(
    tables: Sequence[LocalTable], blocks: Mapping[str, IdBlock]
) -> list[PlacedLookup]:
    """Return the lookups of all tables with their positions: keys lie table after table, and so do columns unless given."""
    placed, first_key, first_column = [], 0, 0
    for position, table in enumerate(tables):
        width = table.weight.shape[1]
        for lookup in table.lookups:
            block = blocks[lookup.feature]
            assert lookup.is_ragged == block.is_ragged, (lookup, block)
            if lookup.column is not None:
                first_column = lookup.column
            placed.append(PlacedLookup(position, lookup, block, first_key, first_column, width))
            first_key += block.count
            first_column += lookup.num_vectors * width
    return placed


@dataclass(frozen=True, slots=True)
class SortedIds:
    """Ids in ascending order of their rows, ready for an update; all [K]."""

    keys: Tensor  # row or slot + rows of all tables before, one per id and table that it is looked up in
    order: Tensor  # position of each key before sorting
    row_keys: Tensor  # keys that the rows would have without slots, ascending


class UpdateScalars:
    """Scalars of an update that change from step to step; in device memory, where each replay of a CUDA graph reads them.

    `values`: float32 [5 or more]: learning rate, 1 / (1 - beta1 ** step) and 1 / (1 - beta2 ** step) if the optimizer uses the
    step, the factor of gradients, `optimizer.embedding_l2`, and the options that the `TableRule` names. `step`: number of updates
    before this one, int32 [1].
    """

    def __init__(
        self, config: OptimizerConfig, gradient_scale: float, device: torch.device
    ) -> None:
        rule, settings = table_rule(config.table_name), update_settings(config)
        self._beta1, self._beta2 = settings["beta1"], settings["beta2"]
        self._has_bias = rule.uses_step
        options = [settings[name] for name in rule.options]
        values = [1.0, 1.0, 1.0, gradient_scale, config.embedding_l2, *options]
        self._device_values = DeviceValues(values, device)
        self.values, self.step = self._device_values.floats, self._device_values.integer

    def set(self, step: int, lr: float) -> None:
        """Set the values of the update after `step` others at once, outside of a captured pass."""
        self.write(step, lr)
        self._device_values.load_now()

    def write(self, step: int, lr: float) -> None:
        """Write these values, for the next `load`; the device must have passed the one before."""
        self._device_values.write_integer(step)
        self._device_values.write_float(0, lr)
        if self._has_bias:
            self._device_values.write_float(1, 1 / (1 - self._beta1 ** (step + 1)))
            self._device_values.write_float(2, 1 / (1 - self._beta2 ** (step + 1)))

    def load(self) -> None:
        """Queue the copy of the values to the device."""
        self._device_values.load()
