"""Events of a sequence group, for a dense component: rows of their ids, numbers, and where each sample's lie."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from configs.messages import shown
from dataloading.dataset.sequences import SequenceGroup
from nn.layers.distinct_rows import DistinctRows, part_of

# B: samples, C: capacity for the events of all samples, D: columns


@dataclass(frozen=True, slots=True)
class SequenceEvents:
    """Events of the samples, oldest first, one sample after another in C positions.

    Positions that belong to no sample must not reach a result: they hold zeros, or events of other samples if
    `train.accumulate` cuts a batch. No host knows how many are used.
    """

    # by feature of the group whose table hands out its rows; all have the same starts and lengths
    rows: Mapping[str, DistinctRows]
    numbers: Mapping[str, Tensor]  # float32 [C], by name; of the group's time the age in seconds
    starts: Tensor  # first position of each sample, [B]
    lengths: Tensor  # events of each sample, [B]
    samples: Tensor  # sample of each position, [C]; any sample where a position belongs to none
    max_length: int  # no sample has more events
    of_batch: Tensor | None = None  # events of each sample of the batch, if these are a part of it

    @property
    def longest(self) -> Tensor:
        """Events of the longest sample of the batch, a scalar: the same for all parts of it."""
        return (self.lengths if self.of_batch is None else self.of_batch).max()

    def of_samples(self, first: int, end: int, room: int | None = None) -> "SequenceEvents":
        """Return the same of some samples, with `part_of` the positions; `room`: the events that they have at most, if known."""
        if end - first == len(self.starts):
            return self if room is None else self._narrowed(room)
        some = slice(first, end)
        begin, part = part_of(self.starts, len(self.samples), self.max_length, some, room)
        return replace(
            self,
            rows={name: rows.of_samples(first, end, room) for name, rows in self.rows.items()},
            numbers={name: of.index_select(0, part) for name, of in self.numbers.items()},
            starts=self.starts[first:end] - begin,
            lengths=self.lengths[first:end],
            samples=(self.samples.index_select(0, part) - first).clamp_(0, end - first - 1),
            of_batch=self.lengths if self.of_batch is None else self.of_batch,
        )

    def _narrowed(self, room: int) -> "SequenceEvents":
        rows = {name: of.of_samples(0, len(self.starts), room) for name, of in self.rows.items()}
        numbers = {name: of[:room] for name, of in self.numbers.items()}
        return replace(self, rows=rows, numbers=numbers, samples=self.samples[:room])


@dataclass(frozen=True, slots=True)
class SequenceTables:
    """The sequence groups of a dataset, with the first table that hands out the rows of each feature."""

    groups: Sequence[SequenceGroup]
    tables: Mapping[str, str]

    def max_length(self, feature: str) -> int | None:
        """Return the ids of a feature that a sample has at most; None if it is of no group."""
        lengths = (group.max_length for group in self.groups if feature in group.features)
        return next(lengths, None)

    def with_spare(self, feature: str, rows: DistinctRows) -> DistinctRows:
        """Return the rows of a feature with one position more than ids, if it is of a group.

        Operations on events want at least one position, and samples may have no events.
        """
        if not any(feature in group.features for group in self.groups):
            return rows
        spare = rows.positions.new_full((1,), rows.rows.shape[0] - 1)
        return replace(rows, positions=torch.cat([rows.positions, spare]))

    def events_with_spare(
        self, name: str, rows_of: Callable[[str, str], DistinctRows], numbers: Sequence[Tensor]
    ) -> SequenceEvents:
        """Return the events of a group as `events`: `rows_of` gives them with a spare position, and `numbers` have none."""
        found: dict[str, DistinctRows] = {}

        def noted(table: str, feature: str) -> DistinctRows:
            found[feature] = rows_of(table, feature)
            return found[feature]

        def samples_of(table: str, feature: str) -> Tensor:
            rows = found[feature]
            position = torch.arange(rows.positions.shape[0], device=rows.positions.device)
            samples = torch.searchsorted((rows.starts + rows.lengths).long(), position, right=True)
            return samples.clamp(max=rows.starts.shape[0] - 1)

        longer = [torch.cat([each, each.new_zeros(1)]) for each in numbers]
        return self.events(name, noted, samples_of, longer)

    def events(
        self,
        name: str,
        rows_of: Callable[[str, str], DistinctRows],
        samples_of: Callable[[str, str], Tensor],
        numbers: Sequence[Tensor],
    ) -> SequenceEvents:
        """Return the events of a group.

        `rows_of` and `samples_of` take a table and a feature; `numbers` are those of all groups, as in a batch. Raises
        ValueError: no table hands out rows of the group.
        """
        (group,) = (group for group in self.groups if group.name == name)
        tables = [(self.tables[name], name) for name in group.features if name in self.tables]
        if not tables:
            raise ValueError(
                f"the model takes the events of {shown(name)}, and all of their tables pool; declare a table of "
                f"{shown(group.features[0])} without pooling"
            )
        rows = {feature: rows_of(table, feature) for table, feature in tables}
        first = rows[tables[0][1]]
        columns = [column.name for group in self.groups for column in group.numbers]
        of_name = dict(zip(columns, numbers, strict=True))
        return SequenceEvents(
            rows,
            {column.name: of_name[column.name] for column in group.numbers},
            first.starts,
            first.lengths,
            samples_of(*tables[0]),
            group.max_length,
        )
