"""One batch of one rank, on the host or on the device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

ALIGNMENT = 256
"""Alignment of columns in one memory, in bytes."""


def aligned(num_bytes: int) -> int:
    """Return the space of a column in one memory, in bytes."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def jagged(
    keys: Sequence[str],
    values: Tensor,
    lengths: Tensor,
    offsets: Tensor | None,
    length_per_key: Sequence[int],
) -> KeyedJaggedTensor:
    """Return a `KeyedJaggedTensor` that holds every count TorchRec would otherwise read back from the device.

    `keys`: feature names in the spec's order. `lengths`: ids of each row, feature after feature, [F * B]. `offsets`: [F
    * B + 1]; None: TorchRec computes them from `lengths` on first use, on their device.
    """
    return KeyedJaggedTensor(
        keys=list(keys),
        values=values,
        lengths=lengths,
        offsets=offsets,
        stride=len(lengths) // len(keys),
        length_per_key=list(length_per_key),
        offset_per_key=list(accumulate(length_per_key, initial=0)),
    )


class FixedLayout:
    """Lengths and offsets of batches with fixed hotness: built once, and copied to a device once.

    `keys`: feature names in the spec's order. `num_valid`: rows with ids; the others have none. `dtype`: dtype of the
    ids; FBGEMM requires the same for offsets.
    """

    def __init__(
        self,
        keys: tuple[str, ...],
        hotness: tuple[int, ...],
        num_valid: int,
        padded_to: int,
        dtype: torch.dtype,
    ) -> None:
        lengths = torch.zeros(len(keys), padded_to, dtype=dtype)
        lengths[:, :num_valid] = torch.tensor(hotness, dtype=dtype)[:, None]
        lengths = lengths.flatten()
        offsets = torch.zeros(len(lengths) + 1, dtype=dtype)
        torch.cumsum(lengths, 0, dtype=dtype, out=offsets[1:])
        self.keys = keys
        self.length_per_key = [num_valid * count for count in hotness]
        self._copies = {torch.device("cpu"): (lengths, offsets)}

    def jagged(self, values: Tensor) -> KeyedJaggedTensor:
        """Return `values` (all ids, feature after feature) under this layout, on their device."""
        if values.device not in self._copies:
            lengths, offsets = self._copies[torch.device("cpu")]
            self._copies[values.device] = (lengths.to(values.device), offsets.to(values.device))
        return jagged(self.keys, values, *self._copies[values.device], self.length_per_key)


fixed_layout = lru_cache(maxsize=8)(FixedLayout)
"""`FixedLayout`, shared between all full batches."""


@dataclass
class Batch:
    """Rows of one rank at one step; rows [num_valid, B) are padding."""

    numerical: Tensor  # float32 [B, num_numerical]
    labels: Tensor  # float32 [B]; [B, labels] with several
    # keys are the feature names in the spec's order; padding rows have length 0, so they touch no
    # table
    ids: KeyedJaggedTensor
    num_valid: int  # rows without padding
    global_valid: int  # rows without padding over all ranks
    layout: FixedLayout | None = field(default=None, repr=False)
    """Layout of `ids`, if batches share it; then only the ids themselves are copied to the device."""
    weights: Tensor | None = None  # float32 [B], 0 of padding rows; None if all rows count alike
    keep_rates: Tensor | None = None  # float32 [B], 1 of padding rows; None without such a column
    # numbers of events, float32 [events of the group in this batch], in the order of
    # `FeatureSpec.event_columns`; rows, lengths and order are those of the group's features
    events: tuple[Tensor, ...] = ()
    # uint8, all tensors of the batch but a shared layout; None if they do not lie in one memory
    memory: Tensor | None = field(default=None, repr=False)

    @property
    def columns(self) -> list[Tensor]:
        """The columns that a pass reads beside the ids."""
        weights = [] if self.weights is None else [self.weights]
        return [self.numerical, self.labels, *weights, *self.events]

    def with_columns(self, columns: Sequence[Tensor]) -> "Batch":
        """Return the batch with other `columns`."""
        numerical, labels, *events = columns
        weights = None if self.weights is None else events.pop(0)
        return replace(
            self, numerical=numerical, labels=labels, weights=weights, events=tuple(events)
        )

    def at(self, memory: Tensor) -> "Batch":
        """Return the batch whose tensors lie in `memory`, a copy of `Batch.memory`, as they do there."""
        assert self.memory is not None, "the tensors lie in one memory"
        assert self.layout is not None, "ragged features have no layout"
        first = self.memory.data_ptr()

        def moved(values: Tensor) -> Tensor:
            start = values.data_ptr() - first
            return memory[start : start + values.nbytes].view(values.dtype).view(values.shape)

        return replace(self._mapped(moved), memory=memory)

    def packed_as(self, example: "Batch") -> Tensor:
        """Return the memory of the batch, laid out as that of `example`, which has the same shapes: its own, if it has one."""
        if self.memory is not None:
            return self.memory
        assert example.memory is not None, "the tensors of the example lie in one memory"
        memory = torch.empty_like(example.memory)
        packed = example.at(memory)
        for mine, other in zip(
            (*packed.columns, packed.ids.values()), (*self.columns, self.ids.values()), strict=True
        ):
            mine.copy_(other)
        return memory

    def in_one_memory(self) -> "Batch":
        """Return a copy whose tensors lie in one memory, on their device; a batch with ragged features is returned as it is."""
        if self.layout is None:
            return self
        further = [values for values in (self.weights, self.keep_rates) if values is not None]
        tensors = [self.numerical, self.labels, self.ids.values(), *further]
        starts = list(accumulate((aligned(values.nbytes) for values in tensors), initial=0))
        memory = torch.empty(starts[-1], dtype=torch.uint8, device=self.labels.device)
        offsets = {id(values): start for values, start in zip(tensors, starts, strict=False)}

        def copied(values: Tensor) -> Tensor:
            piece = memory[offsets[id(values)] :][: values.nbytes]
            return piece.view(values.dtype).view(values.shape).copy_(values)

        return replace(self._mapped(copied), memory=memory)

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        """Return a copy on `device`; a shared layout is copied to a device only once."""
        return self._mapped(lambda values: values.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        """Return a copy in pinned memory; a shared layout is not copied."""
        return self._mapped(lambda values: values.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory until the work queued on `stream` is done; TorchRec's pipelines call this."""
        for values in (*self.columns, self.ids, self.keep_rates):
            if values is not None:
                values.record_stream(stream)

    def _mapped(self, copy: Callable[[Any], Any]) -> "Batch":
        """Return a batch of copies of all tensors; ragged ids are copied as a whole."""
        layout = self.layout
        ids = copy(self.ids) if layout is None else layout.jagged(copy(self.ids.values()))
        return Batch(
            copy(self.numerical),
            copy(self.labels),
            ids,
            self.num_valid,
            self.global_valid,
            self.layout,
            None if self.weights is None else copy(self.weights),
            None if self.keep_rates is None else copy(self.keep_rates),
            tuple(map(copy, self.events)),
        )
