"""One batch of one rank, on the host or on the device."""

from functools import partial

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from dataloading.dataset.batch_layout import NO_ID, BatchLayout, Column


class Batch:
    """Rows of one rank at one step, in one `memory`, uint8; rows [num_valid, B) are padding.

    Attributes:
        global_valid: rows without padding over all ranks.
        numerical: float32 [B, num_numerical].
        labels: float32 [B]; [B, labels] with several.
        flat_ids: all ids as a step reads them, see `BatchLayout`.
        weights: float32 [B], 0 of padding rows; None if all rows count alike.
        keep_rates: float32 [B], 1 of padding rows; None without such a column.
        teachers: scores of other models by column, float32 [B], 0 of padding rows.
        global_rows: of each row its number in the global batch, int32 [B]; None if ranks have consecutive rows.
        flat_events: numbers of events as a step reads them, float32, in the order of `FeatureSpec.event_columns`.
    """

    def __init__(
        self, memory: Tensor, layout: BatchLayout, num_valid: int, global_valid: int
    ) -> None:
        self.memory, self.layout = memory, layout
        self.num_valid, self.global_valid = num_valid, global_valid
        view = partial(_view, memory)
        self.numerical, self.labels = view(layout.numerical), view(layout.labels)
        self.flat_ids = view(layout.ids)
        self.weights = None if layout.weights is None else view(layout.weights)
        self.keep_rates = None if layout.keep_rates is None else view(layout.keep_rates)
        self.teachers = {name: view(column) for name, column in layout.teachers.items()}
        self.global_rows = None if layout.global_rows is None else view(layout.global_rows)
        self.flat_events = tuple(map(view, layout.events))

    def at(self, memory: Tensor) -> "Batch":
        """Return the batch whose memory is a copy of this one's."""
        return Batch(memory, self.layout, self.num_valid, self.global_valid)

    def to(self, device: torch.device) -> "Batch":
        """Return a copy on `device`, or this memory if it is there."""
        return self.at(self.memory.to(device))

    def feature(self, name: str) -> JaggedTensor:
        """View the ids of a feature without those of padding, and their number in each row, [B].

        The host waits for a device if the feature is ragged.
        """
        count, first = self.layout.counts[name], self.layout.firsts[name]
        ids, lengths = self.flat_ids[first : first + count.sent_size(self.layout.rows)].split(
            [count.capacity, 0 if count.hotness else self.layout.rows]
        )
        if not count.hotness:
            return JaggedTensor(ids[: int(lengths.sum())], lengths=lengths)
        lengths = ids.new_zeros(self.layout.rows)
        lengths[: self.num_valid] = count.hotness
        return JaggedTensor(ids[: self.num_valid * count.hotness], lengths=lengths)

    @property
    def ids(self) -> KeyedJaggedTensor:
        """A copy of the ids of all features, in the spec's order; padding rows have none."""
        features = {name: self.feature(name) for name in self.layout.counts}
        return KeyedJaggedTensor.from_jt_dict(features)

    @property
    def events(self) -> list[Tensor]:
        """Numbers of events, as many as the group has in this batch; the host waits for a device."""
        groups = [group for group in self.layout.spec.sequences for _ in group.numbers]
        return [
            numbers[: len(self.feature(group.features[0]).values())]
            for group, numbers in zip(groups, self.flat_events, strict=True)
        ]

    def in_layout(self, layout: BatchLayout) -> "Batch":
        """Return a copy of the batch that has larger capacities."""
        memory = torch.empty(layout.num_bytes, dtype=torch.uint8, device=self.memory.device)
        copy = Batch(memory, layout, self.num_valid, self.global_valid)
        for own, other in zip(self.layout.columns, layout.columns, strict=True):
            if own.shape == other.shape:  # others depend on the capacities
                _view(memory, other).copy_(_view(self.memory, own))
        copy.flat_ids.fill_(NO_ID)
        for name, count in self.layout.counts.items():
            mine = self.flat_ids[self.layout.firsts[name] :]
            larger = copy.flat_ids[layout.firsts[name] :]
            larger[: count.capacity].copy_(mine[: count.capacity])
            if not count.hotness:
                lengths = mine[count.capacity :][: layout.rows]
                larger[layout.counts[name].capacity :][: layout.rows].copy_(lengths)
        for mine, larger in zip(self.flat_events, copy.flat_events, strict=True):
            larger.zero_()[: len(mine)].copy_(mine)
        return copy


def _view(memory: Tensor, column: Column) -> Tensor:
    dtype = getattr(torch, column.dtype.name)
    return memory[column.first : column.end].view(dtype).view(column.shape)
