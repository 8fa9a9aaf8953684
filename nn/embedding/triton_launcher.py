"""Launches of the kernels of `nn.ops.triton.embedding_bag` for one group of tables: addresses, blocks, levels."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import gcd
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.jit import KernelInterface

from configs.schema import OptimizerConfig
from nn.embedding.local_tables import LocalTable, SortedIds, UpdateScalars
from nn.embedding.optimizer import TableRule, table_rule
from nn.ops.triton.embedding_bag import _pooled_lookup, _segment_update
from nn.user_objects import load_user_object

SAMPLES_PER_PROGRAM = 32
"""Samples per program of the lookup."""

WARPS = 4
"""Blocks of ids per program of the update, one block per warp."""

IDS_PER_BLOCK = 32


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


class TritonLauncher:
    """Launcher of the lookup and the update of one group of local tables.

    Args:
        tables: in order; all of one dtype.
        num_samples: G.
        id_starts: position of each table's first id.
        columns: first column of each table, and the total number of columns at the end.
        key_bases: rows of all tables before each table.
        config: optimizer of the tables.

    Raises:
        ValueError: the optimizer has no kernel.
    """

    def __init__(
        self,
        tables: Sequence[LocalTable],
        *,
        num_samples: int,
        id_starts: Sequence[int],
        columns: Sequence[int],
        key_bases: Sequence[int],
        config: OptimizerConfig,
    ) -> None:
        device = tables[0].weight.device
        self._num_samples = num_samples
        self._config, self._rule = config, table_rule(config.table_name)
        self._branch = branch_of(self._rule)
        self._weights = tables[0].weight
        assert all(table.weight.dtype == self._weights.dtype for table in tables)
        self._weight_offset = _offsets([table.weight for table in tables])
        # Replicated tables have no state here: they are looked up by this kernel, and updated elsewhere.
        names = [name for name in self._rule.state_names if name in tables[0].state]
        self._state = [tables[0].state[name] for name in names]
        self._state_offset = [_offsets([table.state[name] for table in tables]) for name in names]
        # The kernel has two state arguments; the weights fill those that the optimizer lacks, and are not read there.
        while len(self._state) < 2:
            self._state.append(self._weights)
            self._state_offset.append(self._weight_offset)

        def on_device(values: Sequence[int], dtype: torch.dtype) -> Tensor:
            return torch.tensor(list(values), dtype=dtype, device=device)

        widths = [table.weight.shape[1] for table in tables]
        self._id_start = on_device(id_starts[: len(tables)], torch.int64)
        self._column = on_device(columns[: len(tables)], torch.int64)
        self._key_base = on_device(key_bases[: len(tables)], torch.int64)
        self._width = on_device(widths, torch.int32)
        self._hotness = on_device([table.hotness for table in tables], torch.int32)
        self._rounding_key = on_device([table.rounding_key for table in tables], torch.int32)
        # Two columns share their random bits, so a shard must begin at an even column.
        assert all(table.first_column % 2 == 0 for table in tables)
        self._first_pair = on_device([table.first_column // 2 for table in tables], torch.int32)
        # Every address is a multiple of this number of elements, so a thread can load as many at once.
        self._align = gcd(
            16, *widths, *(offset.item() % 16 or 16 for offset in self._aligned_offsets())
        )
        self._one_hot = all(table.hotness == 1 for table in tables)
        self._block_d = triton.next_power_of_2(max(widths))
        self._counts = [num_samples * table.hotness for table in tables]

    @cached_property
    def _levels(self) -> list[_Level]:
        """Levels of the update, allocated at the first one; `nn.sharding.memory_estimate` counts their size."""
        return _levels(self._counts, IDS_PER_BLOCK, self._block_d, self._weights.device)

    def _aligned_offsets(self) -> Tensor:
        """Return the offsets of weights and states; a state with one number per row requires no alignment."""
        states = zip(self._rule.states, self._state_offset, strict=False)
        return torch.cat(
            [self._weight_offset, *(offset for field, offset in states if not field.per_row)]
        )

    def look_up(self, ids: Tensor, out: Tensor) -> None:
        """See `LocalEmbeddingBags.look_up`."""
        grid = (triton.cdiv(self._num_samples, SAMPLES_PER_PROGRAM), len(self._width))
        _pooled_lookup[grid](
            self._weights,
            ids,
            out,
            self._weight_offset,
            self._id_start,
            self._column,
            self._width,
            self._hotness,
            self._num_samples,
            out.stride(0),
            ALIGN=self._align,
            BLOCK=SAMPLES_PER_PROGRAM,
            BLOCK_D=self._block_d,
        )

    def update(
        self, ids: SortedIds, gradients: Tensor, scalars: UpdateScalars, is_good: Tensor
    ) -> None:
        """See `LocalEmbeddingBags.update`."""
        keys, values, counts = ids.keys, gradients, is_good
        for number, level in enumerate(self._levels):
            num_blocks = level.blocks.shape[1]
            _segment_update[(triton.cdiv(num_blocks, WARPS),)](
                self._weights,
                *self._state,
                keys,
                ids.order,
                values,
                counts,
                level.sums,
                level.sums_keys,
                level.sums_counts,
                level.blocks,
                num_blocks,
                self._weight_offset,
                *self._state_offset,
                self._key_base,
                self._id_start,
                self._column,
                self._width,
                self._hotness,
                self._rounding_key,
                self._first_pair,
                gradients.stride(0) if number == 0 else self._block_d,
                scalars.values,
                scalars.step,
                is_good,
                self._config.eps,
                self._config.beta1,
                # In single precision 1 - 0.999 keeps four digits only.
                1 - self._config.beta1,
                self._config.beta2,
                1 - self._config.beta2,
                **self._branch,
                L2=self._config.embedding_l2 > 0,
                LEVEL=min(number, 1),
                ONE_HOT=self._one_hot,
                ALIGN=self._align,
                WARPS=WARPS,
                LENGTH=IDS_PER_BLOCK,
                BLOCK_D=self._block_d,
                num_warps=WARPS,
            )
            keys, values, counts = level.sums_keys, level.sums, level.sums_counts


def branch_of(rule: TableRule) -> dict[str, Any]:
    """Return the constants of `_segment_update` for an optimizer: its `@triton.jit` function and the kinds of its states.

    Raises:
        ValueError: it has no kernel, or the kernel is no `@triton.jit` function.
    """
    if rule.kernel is None:
        raise ValueError(
            f"table optimizer {rule.name} has no kernel for GPUs; set its TableRule's kernel, or device=cpu"
        )
    kernel = load_user_object(rule.kernel, f"the kernel of table optimizer {rule.name}")
    if not isinstance(kernel, KernelInterface):
        raise ValueError(
            f"the kernel of table optimizer {rule.name} is {rule.kernel}, a {type(kernel).__name__}; name a "
            "@triton.jit function"
        )
    kinds = ["row" if field.per_row else "element" for field in rule.states]
    return {"UPDATE": kernel} | dict(
        zip(("STATE1", "STATE2"), [*kinds, "none", "none"], strict=False)
    )


def _offsets(tensors: Sequence[Tensor]) -> Tensor:
    """Return the distance of each tensor from the first, in elements; they may be separate allocations."""
    first = tensors[0].data_ptr()
    size = tensors[0].element_size()
    assert all((tensor.data_ptr() - first) % size == 0 for tensor in tensors)
    offsets = [(tensor.data_ptr() - first) // size for tensor in tensors]
    return torch.tensor(offsets, dtype=torch.int64, device=tensors[0].device)


def _levels(counts: Sequence[int], length: int, block_d: int, device: torch.device) -> list[_Level]:
    """Cut the ids of each table into blocks, then the two partial sums per block, until every table is one block."""
    levels = []
    ranges = list(zip(accumulate(counts, initial=0), accumulate(counts), strict=False))
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
