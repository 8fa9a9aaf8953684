"""Launches of the kernels of `nn.ops.triton.embedding_bag` for one group of tables: addresses, blocks, levels."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from math import gcd, inf
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.jit import KernelInterface

from configs.schema import OptimizerConfig
from nn.embedding.key_sources import KeySources
from nn.embedding.local_tables import (
    LocalTable,
    PlacedLookup,
    SortedIds,
    UpdateScalars,
    row_bases,
)
from nn.embedding.lookups import Pooling
from nn.embedding.optimizer import TableRule, table_rule, update_settings
from nn.ops.addresses import elements_between
from nn.ops.triton.embedding_bag import _pooled_lookup, _segment_update

SAMPLES_PER_PROGRAM = 32
"""Fewest samples per program of the lookup."""

MOST_SAMPLES_PER_PROGRAM = 256

ELEMENTS_PER_PROGRAM = 4096
"""Elements per program of the lookup, if tables are narrow."""

IDS_PER_BLOCK = 32
"""Ids per program of the update."""

IDS_PER_GROUP = 4
"""Ids of a program whose gradients are loaded together; a divisor of `IDS_PER_BLOCK`."""


@dataclass(frozen=True, slots=True)
class _Level:
    """One level of the update.

    Attributes:
        blocks: per block its table, first id, end, first id of the table and end of the table, int32 [5, blocks].
        sums: partial sums of runs that cross an edge of a block, two per block, float32 [2 * blocks, columns].
        sums_keys: their keys, int64.
        sums_counts: whether the partial sum exists, int8.
    """

    blocks: Tensor
    sums: Tensor
    sums_keys: Tensor
    sums_counts: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All, in the order of the kernel's arguments."""
        return self.sums, self.sums_keys, self.sums_counts, self.blocks


class TritonLauncher:
    """Launcher of the lookup and the update of one group of local tables.

    Tables of one width class (the next power of two) share their launches: a program has as many columns as its class.

    Raises:
        ValueError: the optimizer has no kernel.
    """

    def __init__(
        self,
        tables: Sequence[LocalTable],
        lookups: Sequence[PlacedLookup],
        key_bases: Sequence[int],
        sources: KeySources | None,
        num_samples: int,
        config: OptimizerConfig,
    ) -> None:
        assert all(table.weight.dtype == tables[0].weight.dtype for table in tables)
        classes = [triton.next_power_of_2(table.weight.shape[1]) for table in tables]
        self._classes = [
            _WidthClass(
                tables,
                [position for position, kind in enumerate(classes) if kind == block_d],
                lookups,
                key_bases,
                sources,
                num_samples,
                config,
            )
            for block_d in sorted(set(classes), reverse=True)
        ]

    def look_up(self, ids: Tensor, out: Tensor) -> None:
        """See `LocalEmbeddingBags.look_up`."""
        for width_class in self._classes:
            width_class.look_up(ids, out)

    def update(
        self,
        ids: SortedIds,
        gradients: Tensor,
        scalars: UpdateScalars,
        is_good: Tensor,
        touched: Tensor | None = None,
    ) -> None:
        """See `LocalEmbeddingBags.update`; `touched`, uint8 by row keys, becomes 1 for rows that are updated."""
        for width_class in self._classes:
            width_class.update(ids, gradients, scalars, is_good, touched)


class _WidthClass:
    """Launcher for the tables of one width class.

    `members` are the positions of its tables in the group.
    """

    def __init__(
        self,
        tables: Sequence[LocalTable],
        members: Sequence[int],
        lookups: Sequence[PlacedLookup],
        key_bases: Sequence[int],
        sources: KeySources | None,
        num_samples: int,
        config: OptimizerConfig,
    ) -> None:
        own = [tables[position] for position in members]
        self._placed = [placed for placed in lookups if placed.table in members]
        self._num_samples = num_samples
        self._weights = own[0].weight
        self._rule, self._settings = table_rule(config.table_name), update_settings(config)
        self._has_l2 = config.embedding_l2 > 0
        self._branch = branch_of(self._rule)
        self._weight_offset = _offsets([table.weight for table in own])
        # Replicated tables have no state here: they are looked up by this kernel, and updated elsewhere.
        names = [name for name in self._rule.state_names if name in own[0].state]
        self._state = [own[0].state[name] for name in names]
        self._state_offset = [_offsets([table.state[name] for table in own]) for name in names]
        # The kernel has two state arguments; the weights fill those that the optimizer lacks, and are not read there.
        while len(self._state) < 2:
            self._state.append(self._weights)
            self._state_offset.append(self._weight_offset)

        self._set_positions(tables, members, key_bases)
        self._sources = sources

    def _set_positions(
        self, tables: Sequence[LocalTable], members: Sequence[int], key_bases: Sequence[int]
    ) -> None:
        """Describe the positions of keys, columns and vectors on the device."""
        own = [tables[position] for position in members]
        widths = [table.weight.shape[1] for table in own]
        firsts = [
            next(placed for placed in self._placed if placed.table == position)
            for position in members
        ]
        self._first_keys = [placed.first_key for placed in firsts]
        self._counts = [
            sum(placed.ids.count for placed in self._placed if placed.table == position)
            for position in members
        ]
        self._first_key = self._on_device(self._first_keys, torch.int64)
        self._column = self._on_device([placed.first_column for placed in firsts], torch.int64)
        self._key_base = self._on_device([key_bases[index] for index in members], torch.int64)
        self._width = self._on_device(widths, torch.int32)
        # Negative for a lookup without pooling; see `_source_of`.
        hotness = [
            placed.lookup.hotness * (-1 if placed.lookup.num_vectors > 1 else 1)
            for placed in firsts
        ]
        self._hotness = self._on_device(hotness, torch.int32)
        divisors = [max(abs(count), 1) for count in hotness]
        reciprocals = [-(-(2**32) // divisor) for divisor in divisors]
        self._reciprocal = self._on_device([x % 2**32 for x in reciprocals], torch.int64)
        # The excess of the rounded-up reciprocal must not reach the next whole number.
        self._by_product = all(
            ids * (reciprocal * divisor - 2**32) < 2**32
            for ids, reciprocal, divisor in zip(self._counts, reciprocals, divisors, strict=True)
        )
        factors = [placed.lookup.factor for placed in firsts]
        self._factor = self._on_device(factors, torch.float32)
        self._rounding_key = self._on_device([table.rounding_key for table in own], torch.int32)
        # Two columns share their random bits, so a shard must begin at an even column.
        assert all(table.first_column % 2 == 0 for table in own)
        self._first_pair = self._on_device([table.first_column // 2 for table in own], torch.int32)
        self._vectors = _vectors(self._placed, tables, self._weight_offset.tolist(), members)
        # Every address is a multiple of this number of elements, so a thread can load as many at once.
        self._align = gcd(
            16,
            *widths,
            *(placed.first_column for placed in self._placed),
            *(offset.item() % 16 or 16 for offset in self._aligned_offsets()),
        )
        self._first_row = self._on_device([table.first_row or 0 for table in own], torch.int64)
        self._num_rows = self._on_device([len(table.weight) for table in own], torch.int64)
        bases = row_bases(tables)
        self._set_slots(own, [bases[position] for position in members])
        self._is_bounded = any(table.is_bounded for table in own)
        self._has_ragged_mean = any(
            placed.lookup.is_ragged and placed.lookup.pooling is Pooling.mean
            for placed in self._placed
        )
        self._one_hot = all(count == 1 for count in hotness)
        self._block_d = triton.next_power_of_2(max(widths))
        self._width_of_all = widths[0] if len(set(widths)) == 1 else 0
        self._source = _source_of(own, hotness, factors)

    def _set_slots(self, own: Sequence[LocalTable], row_starts: Sequence[int]) -> None:
        """Describe the rows in the arenas of tables in host memory, by which 16-bit weights are rounded and rows marked.

        `row_starts` are the row keys of each table's first row here.
        """
        rows = [table.slots.rows for table in own if table.slots is not None]
        self._has_slots = bool(rows)
        # Counted from the lowest address, so that a negative start means none; not read without arenas.
        self._slot_rows = min(rows, key=Tensor.data_ptr, default=self._width)
        starts = iter(_offsets([self._slot_rows, *rows]).tolist()[1:])
        self._slot_start = self._on_device(
            [-1 if table.slots is None else next(starts) for table in own], torch.int64
        )
        offsets = [0 if table.slots is None else table.slots.offset for table in own]
        self._slot_offset = self._on_device(offsets, torch.int64)
        # Row key of row 0 of an arena's group, otherwise of row 0 here.
        before = [0 if t.slots is None else t.slots.offset + t.slots.first_row for t in own]
        starts_of_rows = [start - rows for start, rows in zip(row_starts, before, strict=True)]
        self._touched_start = self._on_device(starts_of_rows, torch.int64)

    def _on_device(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(list(values), dtype=dtype, device=self._weights.device)

    @property
    def _listed(self) -> tuple[Tensor, Tensor, Tensor]:
        """Row, column and factor of each key; not read, unless a table has several lookups or a ragged one."""
        if self._source != "listed":
            return self._width, self._width, self._factor
        assert self._sources is not None, "there is a table of this kind"
        return self._sources.rows, self._sources.columns, self._sources.factors

    @property
    def _slots(self) -> tuple[Tensor, Tensor, Tensor]:
        """Rows in the slots of arenas; see `_set_slots`."""
        return self._slot_rows, self._slot_start, self._slot_offset

    def _touched(
        self, touched: Tensor | None, level: int
    ) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Return where the kernel notes rows: on the first level, which reads all keys; without, it has no code for it."""
        if touched is None or level:
            return None, None
        return touched, self._touched_start

    @cached_property
    def _levels(self) -> list[_Level]:
        """Levels of the update, allocated at the first one; `nn.planning.memory_estimate` counts their size."""
        return _levels(
            self._first_keys, self._counts, IDS_PER_BLOCK, self._block_d, self._weights.device
        )

    def _aligned_offsets(self) -> Tensor:
        """Return the offsets of weights and states; a state with one number per row requires no alignment."""
        states = zip(self._rule.states, self._state_offset, strict=False)
        return torch.cat(
            [self._weight_offset, *(offset for field, offset in states if not field.per_row)]
        )

    def look_up(self, ids: Tensor, out: Tensor) -> None:
        """Look up this class' tables."""
        samples = min(
            max(ELEMENTS_PER_PROGRAM // self._block_d, SAMPLES_PER_PROGRAM),
            MOST_SAMPLES_PER_PROGRAM,
        )
        grid = (triton.cdiv(self._num_samples, samples), len(self._vectors.columns))
        _pooled_lookup[grid](
            self._weights,
            ids,
            out,
            *self._vectors.tensors,
            self._num_samples,
            out.stride(0),
            BOUNDED=self._is_bounded,
            IS_MEAN=self._has_ragged_mean,
            ALIGN=gcd(self._align, out.stride(0), out.storage_offset()),
            BLOCK=samples,
            BLOCK_D=self._block_d,
        )

    @property
    def _constants(self) -> dict[str, Any]:
        """Constants of the update that are the same on all levels."""
        return {
            "L2": self._has_l2,
            "ONE_HOT": self._one_hot,
            "BY_PRODUCT": self._by_product,
            "SOURCE": self._source,
            "BOUNDED": self._is_bounded,
            "SLOTS": self._has_slots,
            "WIDTH": self._width_of_all,
            "BLOCK_D": self._block_d,
        }

    def _decays(self) -> tuple[float, float, float, float, float]:
        """Return eps, beta1, beta2 and, after each beta, 1 minus it: in single precision 1 - 0.999 keeps four digits only."""
        eps, beta1, beta2 = (self._settings[name] for name in ("eps", "beta1", "beta2"))
        return eps, beta1, 1 - beta1, beta2, 1 - beta2

    def update(
        self,
        ids: SortedIds,
        gradients: Tensor,
        scalars: UpdateScalars,
        is_good: Tensor,
        touched: Tensor | None,
    ) -> None:
        """Update this class' tables, and store 1 into `touched` for their rows that are updated."""
        keys, values, counts = ids.keys, gradients, is_good
        align = gcd(self._align, gradients.stride(0), gradients.storage_offset())
        for number, level in enumerate(self._levels):
            num_blocks = level.blocks.shape[1]
            _segment_update[(num_blocks,)](
                self._weights,
                *self._state,
                keys,
                ids.order,
                values,
                counts,
                *level.tensors,
                num_blocks,
                self._weight_offset,
                *self._state_offset,
                self._key_base,
                self._first_key,
                self._column,
                self._width,
                self._hotness,
                self._reciprocal,
                self._factor,
                self._rounding_key,
                self._first_pair,
                self._first_row,
                self._num_rows,
                *self._slots,
                *self._touched(touched, number),
                *self._listed,
                scalars.values,
                scalars.step,
                is_good,
                *self._decays(),
                **self._branch,
                **self._constants,
                LEVEL=min(number, 1),
                PREFETCHES=number == 0 and isinstance(_segment_update, triton.JITFunction),
                ALIGN=align,
                LENGTH=IDS_PER_BLOCK,
                GROUP=IDS_PER_GROUP,
                STRIDE=gradients.stride(0) if number == 0 else self._block_d,
                num_warps=1,
            )
            keys, values, counts = level.sums_keys, level.sums, level.sums_counts


@dataclass(frozen=True, slots=True)
class _Vectors:
    """The vectors of all lookups, on the device: one program of the lookup each.

    Attributes:
        weight_offset: first element of the table.
        first_id: position of the first sample's first id.
        id_stride: ids from a sample to the next.
        num_ids: ids whose rows are added.
        factor: of the sum.
        out_column: first column in the embeddings.
        columns: D.
        first_start: position of the starts of a ragged lookup, otherwise -1; its `num_ids` is 0, or -1 of a mean.
        first_row: first row here.
        num_rows: rows here.
    """

    weight_offset: Tensor
    first_id: Tensor
    id_stride: Tensor
    num_ids: Tensor
    factor: Tensor
    out_column: Tensor
    columns: Tensor
    first_start: Tensor
    first_row: Tensor
    num_rows: Tensor

    @property
    def tensors(self) -> list[Tensor]:
        """All, in the order of the kernel's arguments."""
        return [getattr(self, field.name) for field in fields(self)]


def _vectors(
    lookups: Sequence[PlacedLookup],
    tables: Sequence[LocalTable],
    weight_offsets: Sequence[int],
    members: Sequence[int],
) -> _Vectors:
    offset_of = dict(zip(members, weight_offsets, strict=True))
    rows = []
    for placed in lookups:
        lookup, table = placed.lookup, tables[placed.table]
        is_mean = lookup.pooling is Pooling.mean
        for vector in range(lookup.num_vectors):
            rows.append(
                (
                    offset_of[placed.table],
                    placed.ids.first + vector * lookup.ids_per_vector,
                    lookup.hotness,
                    -int(is_mean) if lookup.is_ragged else lookup.ids_per_vector,
                    lookup.factor,
                    placed.first_column + vector * placed.width,
                    placed.width,
                    placed.ids.first_start if lookup.is_ragged else -1,
                    table.first_row or 0,
                    len(table.weight),
                )
            )
    # The longest first: begun last, they would run alone at the end. A ragged one may be long too.
    rows.sort(key=lambda row: row[3] if row[3] > 0 else inf, reverse=True)
    dtypes = [torch.int64, torch.int64, torch.int32, torch.int32, torch.float32]
    dtypes += [torch.int64, torch.int32, torch.int64, torch.int64, torch.int64]
    device = tables[0].weight.device
    return _Vectors(
        *(
            torch.tensor(values, dtype=dtype, device=device)
            for values, dtype in zip(zip(*rows, strict=True), dtypes, strict=True)
        )
    )


def _source_of(own: Sequence[LocalTable], hotness: Sequence[int], factors: Sequence[float]) -> str:
    """Return the way in which the update finds the gradients of an id.

    `hotness` is that of each table's first lookup, negative without pooling; `factors` are those of its vectors.
    """
    if any(len(table.lookups) > 1 or table.lookups[0].is_ragged for table in own):
        return "listed"
    if all(count > 0 for count in hotness) and all(factor == 1 for factor in factors):
        return "sum"
    return "one"


def branch_of(rule: TableRule) -> dict[str, Any]:
    """Return the constants of `_segment_update` for an optimizer: its `@triton.jit` function and the kinds of its states.

    Raises:
        ValueError: it has no kernel, or the kernel is no `@triton.jit` function.
    """
    if rule.kernel is None:
        raise ValueError(
            f"table optimizer {rule.name} has no kernel for GPUs; set its TableRule's kernel, or device=cpu"
        )
    if not isinstance(rule.kernel, KernelInterface):
        raise ValueError(
            f"the kernel of table optimizer {rule.name} is a {type(rule.kernel).__name__}; give a @jit function "
            "(nn.ops.optional_triton)"
        )
    kinds = ["row" if field.per_row else "element" for field in rule.states]
    return {"UPDATE": rule.kernel} | dict(
        zip(("STATE1", "STATE2"), [*kinds, "none", "none"], strict=False)
    )


def _offsets(tensors: Sequence[Tensor]) -> Tensor:
    """Return the distance of each tensor from the first, in elements."""
    offsets = [elements_between(tensors[0], tensor) for tensor in tensors]
    return torch.tensor(offsets, dtype=torch.int64, device=tensors[0].device)


def _levels(
    first_keys: Sequence[int],
    counts: Sequence[int],
    length: int,
    block_d: int,
    device: torch.device,
) -> list[_Level]:
    """Cut the keys of each table into blocks, then the two partial sums per block, until every table is one block."""
    levels = []
    ranges = [(first, first + count) for first, count in zip(first_keys, counts, strict=True)]
    while any(stop > start for start, stop in ranges):
        blocks: list[tuple[int, ...]] = []
        next_ranges: list[tuple[int, int]] = []
        for table, (start, stop) in enumerate(ranges):
            ends = [(begin, min(begin + length, stop)) for begin in range(start, stop, length)]
            first = len(blocks)
            blocks += [(table, begin, end, start, stop) for begin, end in ends]
            crosses = len(ends) > 1
            next_ranges.append((2 * first, 2 * len(blocks)) if crosses else (0, 0))
        num_sums = 2 * len(blocks)
        levels.append(
            _Level(
                torch.tensor(blocks, dtype=torch.int32, device=device).t().contiguous(),
                sums=torch.empty(num_sums, block_d, device=device),
                sums_keys=torch.empty(num_sums, dtype=torch.int64, device=device),
                sums_counts=torch.empty(num_sums, dtype=torch.int8, device=device),
            )
        )
        ranges = next_ranges
    return levels
