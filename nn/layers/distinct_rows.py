"""The distinct rows of a table that a batch needs, for a dense component that takes them itself, without pooling."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nn.layers.sequence import rows_at

# B: samples, C: capacity for the ids of a feature, R: capacity for distinct rows, D: columns


@dataclass(frozen=True, slots=True)
class DistinctRows:
    """The distinct rows of a table that this rank's batch needs, and where the ids of one of its features find theirs.

    Rows are in no particular order, and which of them are used changes from batch to batch: work on rows must not depend on
    their position or number. Those that no id points to are zeros, and their gradient is ignored.

    Attributes:
        rows: [R + 1, D], differentiable; the last one is zeros. Features of one table have the same.
        positions: row of each id, [C]; R behind the last id.
        starts: position of each sample's first id in `positions`, [B].
        lengths: ids of each sample, [B].
        hotness: ids of every sample; 0 if they differ.
        max_length: ids that a sample has at most, if they differ; None if that is not known.
        vectors: returns the row of each id, [C, D], with those of the table's other features, if the step looks them up: their
            gradients are added up by its own sort.
    """

    rows: Tensor
    positions: Tensor
    starts: Tensor
    lengths: Tensor
    hotness: int = 0
    max_length: int | None = None
    vectors: Callable[[], Tensor] | None = None

    @torch.compiler.disable
    def by_id(self) -> Tensor:
        """Return the row of each id, [C, D]; the backward pass adds up the gradients of a row in one order."""
        if self.vectors is not None:
            return self.vectors()
        return rows_at(self.rows, self.positions)

    def by_sample(self) -> Tensor:
        """Return the row of each sample's first id, [B, D]."""
        if self.hotness == 1:
            return self.by_id()
        return rows_at(self.rows, self.positions.index_select(0, self.starts))

    def of_samples(self, first: int, end: int, room: int | None = None) -> "DistinctRows":
        """Return the same of some samples, with `part_of` the positions where samples differ in their number of ids.

        `room`: the ids that they have at most, if that is known; `vectors` returns no more.
        """
        if end - first == self.starts.shape[0]:
            return self if room is None else replace(self, positions=self.positions[:room])
        if self.hotness:
            positions = self.positions[self.hotness * first : self.hotness * end]
            starts = self.starts[: end - first]
        else:
            capacity, samples = self.positions.shape[0], slice(first, end)
            begin, part = part_of(self.starts, capacity, self.max_length, samples, room)
            positions = self.positions.index_select(0, part)
            starts = self.starts[first:end] - begin
        lengths = self.lengths[first:end]
        return replace(self, positions=positions, starts=starts, lengths=lengths, vectors=None)


def part_of(
    starts: Tensor, capacity: int, max_length: int | None, samples: slice, room: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the first of the positions [C] in which some samples' ids lie, a scalar, and all of them, as many as they can have.

    Samples begin at `starts`, [B], and have at most `room` ids. The part begins before them where positions end too soon behind
    them.
    """
    size = capacity if room is None else min(room, capacity)
    if max_length is not None:
        size = min((samples.stop - samples.start) * max_length, size)
    begin = starts[samples.start].clamp(max=capacity - size)
    return begin, begin + torch.arange(size, device=starts.device)
