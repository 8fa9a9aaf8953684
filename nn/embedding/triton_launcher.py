"""How the kernels of `nn.ops.triton.embedding_bag` are launched for one group of tables: addresses, blocks, levels."""

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
from nn.embedding.table_rules import TableRule, table_rule
from nn.ops.triton.embedding_bag import _pooled_lookup, _segment_update
from nn.user_objects import load_user_object

SAMPLES = 32
"""What a program of the lookup takes."""

WARPS = 4
"""Blocks of ids a program of the update takes, one a warp."""

LENGTH = 32
"""Ids of a block."""


@dataclass(frozen=True, slots=True)
class _Level:
    """One level of the update.

    Attributes:
        blocks: part, first id, end, first id of the part and end of the part of each block, int32 [5, blocks].
        sums: parts of sums that cross a block's edge, two a block, float32 [2 * blocks, columns].
        sums_keys: their keys, int64.
        sums_counts: whether there is such a part, int8.
    """

    blocks: Tensor
    sums: Tensor
    sums_keys: Tensor
    sums_counts: Tensor


class TritonLauncher:
    """Launches the lookup and the update of one group.

    Args:
        parts: in order; all of one dtype.
        num_samples: G.
        id_starts: where each part's ids start.
        columns: where each part's columns start, and at the end their number.
        key_bases: rows of all parts before.
        config: optimizer of the tables.

    Raises:
        ValueError: the optimizer has no kernel.
    """

    def __init__(
        self,
        parts: Sequence[LocalTable],
        *,
        num_samples: int,
        id_starts: Sequence[int],
        columns: Sequence[int],
        key_bases: Sequence[int],
        config: OptimizerConfig,
    ) -> None:
        device = parts[0].weight.device
        self._num_samples = num_samples
        self._config, self._rule = config, table_rule(config.table_name)
        self._branch = branch_of(self._rule)
        self._weights = parts[0].weight
        assert all(part.weight.dtype == self._weights.dtype for part in parts)
        self._weight_offset = _offsets([part.weight for part in parts])
        self._state = [parts[0].state[name] for name in self._rule.state_names]
        self._state_offset = [
            _offsets([part.state[name] for part in parts]) for name in self._rule.state_names
        ]
        # The kernel takes two states; in place of one that is not there it gets the weights' address, and does not read it.
        while len(self._state) < 2:
            self._state.append(self._weights)
            self._state_offset.append(self._weight_offset)

        def on_device(values: Sequence[int], dtype: torch.dtype) -> Tensor:
            return torch.tensor(list(values), dtype=dtype, device=device)

        widths = [part.weight.shape[1] for part in parts]
        self._id_start = on_device(id_starts[: len(parts)], torch.int64)
        self._column = on_device(columns[: len(parts)], torch.int64)
        self._key_base = on_device(key_bases[: len(parts)], torch.int64)
        self._width = on_device(widths, torch.int32)
        self._hotness = on_device([part.hotness for part in parts], torch.int32)
        self._rounding_key = on_device([part.rounding_key for part in parts], torch.int32)
        # Two columns share their random bits, so a cut must not part them.
        assert all(part.first_column % 2 == 0 for part in parts)
        self._first_pair = on_device([part.first_column // 2 for part in parts], torch.int32)
        # Every address is a multiple of this many elements, which lets a thread load as many at once.
        self._align = gcd(16, *widths, *(each.item() % 16 or 16 for each in self._every_offset()))
        self._one_hot = all(part.hotness == 1 for part in parts)
        self._block_d = triton.next_power_of_2(max(widths))
        self._counts = [num_samples * part.hotness for part in parts]

    @cached_property
    def _levels(self) -> list[_Level]:
        """Made for the first update: `nn.sharding.memory_estimate` knows their size, and evaluation makes no update."""
        return _levels(self._counts, LENGTH, self._block_d, self._weights.device)

    def _every_offset(self) -> Tensor:
        """Of rows of weights and states; a state with one number per row requires no alignment."""
        states = zip(self._rule.states, self._state_offset, strict=False)
        return torch.cat(
            [self._weight_offset, *(offset for field, offset in states if not field.per_row)]
        )

    def look_up(self, ids: Tensor, out: Tensor) -> None:
        """See `LocalEmbeddingBags.look_up`."""
        grid = (triton.cdiv(self._num_samples, SAMPLES), len(self._width))
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
            BLOCK=SAMPLES,
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
                LEVEL=min(number, 1),
                ONE_HOT=self._one_hot,
                ALIGN=self._align,
                WARPS=WARPS,
                LENGTH=LENGTH,
                BLOCK_D=self._block_d,
                num_warps=WARPS,
            )
            keys, values, counts = level.sums_keys, level.sums, level.sums_counts


def branch_of(rule: TableRule) -> dict[str, Any]:
    """Return what `_segment_update` is compiled with for an optimizer: its `@triton.jit` function, and kinds of states.

    Raises:
        ValueError: it has none, or that is another thing.
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
    """Distance of each tensor from the first in elements; they may lie in memory of their own each."""
    first = tensors[0].data_ptr()
    size = tensors[0].element_size()
    assert all((each.data_ptr() - first) % size == 0 for each in tensors)
    offsets = [(each.data_ptr() - first) // size for each in tensors]
    return torch.tensor(offsets, dtype=torch.int64, device=tensors[0].device)


def _levels(counts: Sequence[int], length: int, block_d: int, device: torch.device) -> list[_Level]:
    """Cut the ids of each part into blocks, then the two entries a block leaves, until every part is one block."""
    levels = []
    spans = list(zip(accumulate(counts, initial=0), accumulate(counts), strict=False))
    while any(stop > start for start, stop in spans):
        rows: list[tuple[int, ...]] = []
        next_spans: list[tuple[int, int]] = []
        for part, (start, stop) in enumerate(spans):
            ends = [(each, min(each + length, stop)) for each in range(start, stop, length)]
            first = len(rows)
            rows += [(part, begin, end, start, stop) for begin, end in ends]
            crosses = len(ends) > 1
            next_spans.append((2 * first, 2 * len(rows)) if crosses else (0, 0))
        entries = 2 * len(rows)
        levels.append(
            _Level(
                torch.tensor(rows, dtype=torch.int32, device=device).t().contiguous(),
                sums=torch.empty(entries, block_d, device=device),
                sums_keys=torch.empty(entries, dtype=torch.int64, device=device),
                sums_counts=torch.empty(entries, dtype=torch.int8, device=device),
            )
        )
        spans = next_spans
    return levels
