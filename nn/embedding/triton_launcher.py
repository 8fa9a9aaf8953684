"""Launches of the kernels of `nn.ops.triton.embedding_bag` for one group of tables: addresses, blocks, levels."""

from collections.abc import Sequence
from functools import cached_property
from math import gcd, inf
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.runtime.jit import KernelInterface

from configs.schema import OptimizerConfig
from nn.embedding.key_sources import KeySources
from nn.embedding.local_tables import LocalTable, PlacedLookup, SortedIds, UpdateScalars, row_bases
from nn.embedding.lookups import Pooling
from nn.embedding.optimizer import TableRule, table_rule, update_settings
from nn.ops.addresses import elements_between
from nn.ops.triton.embedding_bag import Listed, _pooled_lookup, _segment_update, _table_update

SAMPLES_PER_PROGRAM = 32
"""Fewest samples per program of the lookup."""

MOST_SAMPLES_PER_PROGRAM = 256

ELEMENTS_PER_PROGRAM = 4096
"""Elements per program of the lookup, if tables are narrow."""

IDS_PER_BLOCK = 32
"""Ids per program of the update."""

IDS_PER_GROUP = 4
"""Ids of a program whose gradients are loaded together; a divisor of `IDS_PER_BLOCK`."""

ROWS_PER_PROGRAM = 4
"""Rows per program of the update by dense gradients."""


class _Level(NamedTuple):
    """One level of the update, by the names of the kernel's arguments."""

    sums: Tensor  # partial sums of runs that cross an edge of a block, two per block, float32 [2 * blocks, columns]
    sums_keys: Tensor  # their keys, int64
    sums_exist: Tensor  # whether the partial sum exists, int8
    blocks: Tensor  # per block its table, first id, end, first id of the table and end of the table, int32 [5, blocks]


class TritonLauncher:
    """Launcher of lookup and update of a group of tables, by the width class, a power of two, whose columns a program has."""

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
    """Launcher for the tables of one width class; `members` are the positions of its tables in the group."""

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
        placed_here = [placed for placed in lookups if placed.table in members]
        of_table = [[p for p in placed_here if p.table == position] for position in members]
        firsts = [placed[0] for placed in of_table]
        rule, widths = table_rule(config.table_name), [table.weight.shape[1] for table in own]
        self._num_samples = num_samples
        self._weights = own[0].weight
        # Replicated tables have no state here: they are looked up by this kernel, and updated elsewhere.
        states = [field for field in rule.states if field.name in own[0].state]
        weight_offset = _offsets([table.weight for table in own])
        offsets = [_offsets([table.state[field.name] for table in own]) for field in states]
        # A state with one number per row requires no alignment.
        of_elements = [offset for f, offset in zip(states, offsets, strict=True) if not f.per_row]
        # The kernel has two state arguments; the weights fill those that the optimizer lacks, and are not read there.
        lacking = 2 - len(states)
        state1, state2 = [own[0].state[f.name] for f in states] + [self._weights] * lacking
        state1_offset, state2_offset = offsets + [weight_offset] * lacking
        self._first_keys = [placed.first_key for placed in firsts]
        self._counts = [sum(placed.ids.count for placed in of) for of in of_table]
        # Negative for a lookup without pooling; see `_source_of`.
        hotness = [p.lookup.hotness * (-1 if p.lookup.num_vectors > 1 else 1) for p in firsts]
        # Two columns share their random bits, so a shard must begin at an even column.
        assert all(table.first_column % 2 == 0 for table in own)
        numbers, bases = self._numbers(own, firsts, hotness), row_bases(tables)
        slots, self._touched_start = _slots(own, [bases[p] for p in members], numbers["columns"])
        # Arguments of the update's kernel; a tensor has a number per table.
        self._tables = (
            slots
            | numbers
            | {
                "weights": self._weights,
                "state1": state1,
                "state2": state2,
                "weight_offset": weight_offset,
                "state1_offset": state1_offset,
                "state2_offset": state2_offset,
                "key_base": self._on_device([key_bases[p] for p in members], torch.int64),
                "first_keys": self._on_device(self._first_keys, torch.int64),
            }
        )
        self._vectors = _vectors(placed_here, tables, weight_offset.tolist(), members)
        # Every address is a multiple of this number of elements, so a thread can load as many at once.
        self._align = gcd(
            16,
            *widths,
            *(placed.first_column for placed in placed_here),
            *(offset.item() % 16 or 16 for offset in torch.cat([weight_offset, *of_elements])),
        )
        self._set_constants(own, placed_here, config, hotness, sources)

    def _numbers(
        self, own: Sequence[LocalTable], firsts: Sequence[PlacedLookup], hotness: Sequence[int]
    ) -> dict[str, Tensor]:
        reciprocals = [-(-(2**32) // max(abs(count), 1)) for count in hotness]
        return {
            "out_column": self._on_device([p.first_column for p in firsts], torch.int64),
            "columns": self._on_device([t.weight.shape[1] for t in own], torch.int32),
            "hotness": self._on_device(hotness, torch.int32),
            "reciprocals": self._on_device([r % 2**32 for r in reciprocals], torch.int64),
            "factors": self._on_device([p.lookup.factor for p in firsts]),
            "rounding_key": self._on_device([t.rounding_key for t in own], torch.int32),
            "first_pair": self._on_device([t.first_column // 2 for t in own], torch.int32),
            "first_row": self._on_device([t.first_row or 0 for t in own], torch.int64),
            "num_rows": self._on_device([len(t.weight) for t in own], torch.int64),
        }

    def _set_constants(
        self,
        own: Sequence[LocalTable],
        placed_here: Sequence[PlacedLookup],
        config: OptimizerConfig,
        hotness: Sequence[int],
        sources: KeySources | None,
    ) -> None:
        widths = [table.weight.shape[1] for table in own]
        self._is_bounded = any(table.is_bounded for table in own)
        self._has_ragged_mean = any(
            placed.lookup.is_ragged and placed.lookup.pooling is Pooling.mean
            for placed in placed_here
        )
        self._block_d = triton.next_power_of_2(max(widths))
        source = _source_of(own, hotness)
        # Any tensors, unless a table has several lookups or a ragged one.
        width, factor = self._tables["columns"], self._tables["factors"]
        self._listed = Listed(width, width, factor)
        if source == "listed" and sources is not None:
            self._listed = Listed(sources.rows, sources.columns, sources.factors)
        # Of the rounded-up reciprocals.
        excesses = [-(2**32) % max(abs(count), 1) for count in hotness]
        self._constants = _constants_of(config) | {
            "ONE_HOT": all(count == 1 for count in hotness),
            # They must not reach the next whole number.
            "BY_PRODUCT": all(
                ids * excess < 2**32 for ids, excess in zip(self._counts, excesses, strict=True)
            ),
            "SOURCE": source,
            "BOUNDED": self._is_bounded,
            "SLOTS": any(table.slots is not None for table in own),
            "WIDTH": widths[0] if len(set(widths)) == 1 else 0,
            "BLOCK_D": self._block_d,
        }

    def _on_device(self, values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(list(values), dtype=dtype, device=self._weights.device)

    @cached_property
    def _levels(self) -> list[_Level]:
        """Levels of the update, allocated at the first one; `nn.planning.memory_estimate` counts their size."""
        return _levels(
            self._first_keys, self._counts, IDS_PER_BLOCK, self._block_d, self._weights.device
        )

    def look_up(self, ids: Tensor, out: Tensor) -> None:
        samples = max(ELEMENTS_PER_PROGRAM // self._block_d, SAMPLES_PER_PROGRAM)
        samples = min(samples, MOST_SAMPLES_PER_PROGRAM)
        grid = (triton.cdiv(self._num_samples, samples), len(self._vectors["columns"]))
        _pooled_lookup[grid](
            self._weights,
            ids,
            out,
            **self._vectors,
            num_samples=self._num_samples,
            out_stride=out.stride(0),
            BOUNDED=self._is_bounded,
            IS_MEAN=self._has_ragged_mean,
            ALIGN=gcd(self._align, out.stride(0), out.storage_offset()),
            BLOCK=samples,
            BLOCK_D=self._block_d,
        )

    def update(
        self,
        ids: SortedIds,
        gradients: Tensor,
        scalars: UpdateScalars,
        is_good: Tensor,
        touched: Tensor | None,
    ) -> None:
        """Update this class' tables, and store 1 into `touched` for their rows that are updated."""
        # No sums are marked on the first level, which does not read `exists`: any tensor will do.
        keys, values, exists = ids.keys, gradients, is_good
        align = gcd(self._align, gradients.stride(0), gradients.storage_offset())
        # Rows are noted on the first level, which reads all keys; without, the kernel has no code for it.
        noted = (None, None) if touched is None else (touched, self._touched_start)
        for number, level in enumerate(self._levels):
            num_blocks = level.blocks.shape[1]
            _segment_update[(num_blocks,)](
                keys=keys,
                order=ids.order,
                gradients=values,
                exists=exists,
                **level._asdict(),
                num_blocks=num_blocks,
                **self._tables,
                listed=self._listed,
                touched=noted[0],
                touched_start=noted[1],
                scalars=scalars.values,
                updates_before=scalars.step,
                is_good=is_good,
                **self._constants,
                LEVEL=min(number, 1),
                PREFETCHES=number == 0 and isinstance(_segment_update, triton.JITFunction),
                ALIGN=align,
                LENGTH=IDS_PER_BLOCK,
                GROUP=IDS_PER_GROUP,
                STRIDE=gradients.stride(0) if number == 0 else self._block_d,
                num_warps=1,
            )
            keys, values, exists = level.sums_keys, level.sums, level.sums_exist
            noted = None, None


def _vectors(
    lookups: Sequence[PlacedLookup],
    tables: Sequence[LocalTable],
    weight_offsets: Sequence[int],
    members: Sequence[int],
) -> dict[str, Tensor]:
    """Return arguments of the lookup's kernel: of each vector of all lookups, which is one program's, a number."""
    offset_of = dict(zip(members, weight_offsets, strict=True))
    rows = []
    for placed in lookups:
        lookup, table = placed.lookup, tables[placed.table]
        # Of a ragged lookup -1 of a mean, else 0.
        num_ids = lookup.ids_per_vector
        if lookup.is_ragged:
            num_ids = -int(lookup.pooling is Pooling.mean)
        for vector in range(lookup.num_vectors):
            rows.append(
                (
                    offset_of[placed.table],  # first element of the table
                    placed.ids.first + vector * lookup.ids_per_vector,  # of the first sample
                    lookup.hotness,  # ids from a sample to the next
                    num_ids,  # ids whose rows are added
                    lookup.factor,  # of the sum
                    placed.first_column + vector * placed.width,  # in the embeddings
                    placed.width,
                    placed.ids.first_start if lookup.is_ragged else -1,
                    table.first_row or 0,
                    len(table.weight),
                )
            )
    # The longest first: begun last, they would run alone at the end. A ragged one may be long too.
    rows.sort(key=lambda row: row[3] if row[3] > 0 else inf, reverse=True)
    names = ["weight_offset", "first_id", "id_stride", "num_ids", "factor"]
    names += ["out_column", "columns", "first_start", "first_row", "num_rows"]
    dtypes = {"factor": torch.float32} | dict.fromkeys(
        ["id_stride", "num_ids", "columns"], torch.int32
    )
    device = tables[0].weight.device
    return {
        name: torch.tensor(values, dtype=dtypes.get(name, torch.int64), device=device)
        for name, values in zip(names, zip(*rows, strict=True), strict=True)
    }


def _slots(
    own: Sequence[LocalTable], row_keys: Sequence[int], unused: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    """Describe the arenas of tables in host memory, by whose rows 16-bit weights are rounded and rows marked.

    Returns the rows of all slots, counted from the lowest address, each table's start in them, negative without an arena, and
    the number of its row 0 in its group, by the names of the kernel's arguments; and, by `row_keys` of first rows, the row key
    of row 0 of an arena's group, otherwise of row 0 here. Without arenas no slot is read.
    """
    arenas = [table.slots for table in own if table.slots is not None]
    rows = min((arena.rows for arena in arenas), key=Tensor.data_ptr, default=unused)
    starts = iter(_offsets([rows, *(arena.rows for arena in arenas)]).tolist()[1:])
    numbers = [
        (-1, 0, key)
        if table.slots is None
        else (next(starts), table.slots.offset, key - table.slots.offset - table.slots.first_row)
        for table, key in zip(own, row_keys, strict=True)
    ]
    columns = zip(*numbers, strict=True)
    start, offset, touched = (torch.tensor(c, device=unused.device) for c in columns)
    return {"slot_rows": rows, "slot_start": start, "slot_offset": offset}, touched


def _source_of(own: Sequence[LocalTable], hotness: Sequence[int]) -> str:
    """Return the way in which the update finds the gradients of an id, with the hotness of first lookups as above."""
    if any(len(table.lookups) > 1 or table.lookups[0].is_ragged for table in own):
        return "listed"
    is_sum = all(table.lookups[0].factor == 1 for table in own)
    return "sum" if is_sum and all(count > 0 for count in hotness) else "one"


def update_table(
    table: LocalTable,
    gradient: Tensor,
    config: OptimizerConfig,
    scalars: UpdateScalars,
    is_good: Tensor,
) -> None:
    """Update the rows of a float32 table by a gradient [rows, D], contiguous, but those where it is zero in all columns.

    The factor of gradients is not applied. If `is_good`, int32 [1], is 0, nothing is updated.
    """
    num_rows, width = table.weight.shape
    lacking = 2 - len(table.state)
    state1, state2 = [*table.state.values()] + [table.weight] * lacking
    _table_update[(triton.cdiv(num_rows, ROWS_PER_PROGRAM),)](
        table.weight,
        state1,
        state2,
        gradient,
        num_rows,
        scalars.values,
        is_good,
        **_constants_of(config),
        WIDTH=width,
        ROWS=ROWS_PER_PROGRAM,
        BLOCK_D=triton.next_power_of_2(width),
        num_warps=1,
    )


def _constants_of(config: OptimizerConfig) -> dict[str, Any]:
    """Return the constants of both updates that the optimizer determines."""
    settings = update_settings(config)
    eps, beta1, beta2 = (settings[name] for name in ("eps", "beta1", "beta2"))
    return branch_of(table_rule(config.table_name)) | {
        # In single precision 1 - 0.999 keeps four digits only.
        "settings": (eps, beta1, 1 - beta1, beta2, 1 - beta2),
        "L2": config.embedding_l2 > 0,
    }


def branch_of(rule: TableRule) -> dict[str, Any]:
    """Return the update kernels' constants for an optimizer; ValueError unless its kernel is a `@triton.jit` function."""
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
    return {"UPDATE": rule.kernel, "STATES": (*kinds, "none", "none")[:2]}


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
                blocks=torch.tensor(blocks, dtype=torch.int32, device=device).t().contiguous(),
                sums=torch.empty(num_sums, block_d, device=device),
                sums_keys=torch.empty(num_sums, dtype=torch.int64, device=device),
                sums_exist=torch.empty(num_sums, dtype=torch.int8, device=device),
            )
        )
        ranges = next_ranges
    return levels
