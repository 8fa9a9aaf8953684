"""Parts of HSTU before and behind its STU layers: a sample's positions and their vectors, and the user's vectors.

A sample is [context][events, oldest first][candidates]. B samples with K context vectors and M candidates have room for C + B (K
+ M) positions, if there is room for C events.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Self

import torch
from torch import Tensor, nn

from nn.layers.distinct_rows import DistinctRows
from nn.layers.initialization import initialise_without_bias_, normal_, uniform_
from nn.layers.sequence import LayerNorm, rows_at
from nn.layers.sequence_events import SequenceEvents
from nn.layers.stu import RowsAt, SwishMLP, draw_normal_
from nn.ops.hstu_attention import JaggedPositions

# B: samples, C: events with room for, P: positions, K: context vectors, M: candidates, D: columns of a position

NO_TIME = 1e18
"""Age in seconds of positions without a time: in the last bucket."""


@dataclass(frozen=True, slots=True)
class SampleParts:
    """The kind of each position, and where it comes from; indices are in range for all positions."""

    at: JaggedPositions
    is_context: Tensor  # bool [P]
    is_event: Tensor  # bool [P]; positions of no sample repeat events: sums of gradients would meet in one row otherwise
    is_candidate: Tensor  # bool [P]
    event: Tensor  # which of C events, [P]
    candidate: Tensor  # which of B * M candidates, [P]

    @classmethod
    def of(cls, events: SequenceEvents, num_context: int, num_candidates: int) -> Self:
        """Lay out the events of samples between context and candidates."""
        count, capacity, device = (
            events.starts.shape[0],
            events.samples.shape[0],
            events.starts.device,
        )
        lengths = events.lengths.long() + num_context + num_candidates
        ends = lengths.cumsum(0)
        starts = ends - lengths
        position = torch.arange(capacity + count * (num_context + num_candidates), device=device)
        samples = torch.searchsorted(ends, position, right=True).clamp(max=count - 1)
        offsets = position - starts[samples]
        inside = offsets < lengths[samples]
        from_end = lengths[samples] - offsets  # 1 of the last position
        max_length = events.max_length + num_context + num_candidates
        at = JaggedPositions(starts, lengths, samples, offsets, inside, max_length)
        is_context = offsets < num_context
        is_candidate = inside & (from_end <= num_candidates)
        event = events.starts[samples] + offsets - num_context
        first = events.starts[0]
        used = (events.starts[-1] + events.lengths[-1] - first).clamp(min=1)
        candidate = samples * num_candidates + num_candidates - from_end
        return cls(
            at,
            is_context,
            ~is_context & ~is_candidate,
            is_candidate,
            torch.where(inside, event, first + position % used).clamp(0, capacity - 1),
            candidate.clamp(0, count * num_candidates - 1),
        )

    def choose(self, of_event: Tensor, of_candidate: Tensor | float, other: float) -> Tensor:
        """Return a number per position, [P], from those of C events and of B * M candidates, or the same of all candidates."""
        if isinstance(of_candidate, Tensor):
            of_candidate = of_candidate[self.candidate]
        rest = torch.where(self.is_candidate, of_candidate, other)
        return torch.where(self.is_event, of_event[self.event], rest).to(of_event.dtype)

    def positions(
        self, events: Sequence[DistinctRows], candidates: Sequence[DistinctRows]
    ) -> list[Tensor]:
        """Return the position in a table's rows of each position, [P] a feature of events; without an id the last row, zeros.

        `candidates` are those of the first features: candidates lack what only events have.
        """
        found = []
        for of_event, of_candidate in zip_longest(events, candidates):
            last = of_event.rows.shape[0] - 1
            own = last if of_candidate is None else of_candidate.positions
            found.append(self.choose(of_event.positions, own, last))
        return found

    def with_context(self, rows: RowsAt, context: Tensor) -> RowsAt:
        """Return the rows with the vectors of context, [B, K, D], behind them and at their positions."""
        # Not `len`, which torch.export takes for a constant.
        first = rows.table.shape[0] + self.at.samples * context.shape[1]
        index = torch.where(self.is_context, first + self.at.offsets, rows.index)
        joined = torch.cat([rows.table, context.flatten(0, 1).to(rows.table.dtype)])
        return RowsAt(joined, index.to(rows.index.dtype))


class ItemVectors(nn.Module):
    """MLP(item) + MLP(additional features) of events and candidates.

    MLP(item) is computed once per distinct row. So is the other one if `once_per_item`, for features that follow from the item,
    as an album does: what has two of them in a batch gives NaN. `columns` are those of tables.
    """

    def __init__(
        self, columns: int, num_additional: int, hidden: int, width: int, *, once_per_item: bool
    ) -> None:
        super().__init__()
        self._once_per_item = once_per_item
        self.item = SwishMLP(columns, hidden, width)
        self.additional = (
            SwishMLP(num_additional * columns, hidden, width) if num_additional else None
        )

    def kept(self) -> tuple[int, int]:
        """Return the columns that backward keeps of a position, and of a distinct row of the item."""
        at_position, at_row = 0, self.item.kept
        if self.additional is not None:
            at_position = self.additional.kept + self.additional.first.in_features
        return (0, at_position + at_row) if self._once_per_item else (at_position, at_row)

    def forward(self, rows: Sequence[Tensor], positions: Sequence[Tensor]) -> RowsAt:
        """Map tables' distinct rows, [R + 1, columns] of each feature, and positions [P] in them to rows of D columns at [P].

        Positions without an id point to the last row of all features.
        """
        item, *others = rows
        of_item, *of_others = positions
        if self.additional is None:
            return RowsAt(self.item(item), of_item)
        if self._once_per_item:
            indices = [self._of_rows(of_item, other, item.shape[0]) for other in of_others]
            joined = torch.cat(list(map(rows_at, others, indices)), dim=1)
            pairs = zip(indices, of_others, strict=True)
            agree = torch.stack([(index[of_item] == other).all() for index, other in pairs]).all()
            of_rows = self.item(item) + self.additional(joined)
            none_or_nan = torch.where(agree, 0.0, torch.nan).to(of_rows.dtype)
            return RowsAt(of_rows + none_or_nan, of_item)
        joined = torch.cat(list(map(rows_at, others, of_others)), dim=1)
        return RowsAt.each(rows_at(self.item(item), of_item) + self.additional(joined))

    @staticmethod
    def _of_rows(of_item: Tensor, other: Tensor, num_rows: int) -> Tensor:
        """Return the position of another feature for each row of the item, [R + 1]: the largest of those beside it."""
        found = other.new_zeros(num_rows)
        return found.scatter_reduce(0, of_item.long(), other, "amax", include_self=True)


class ActionVectors(nn.Module):
    """MLP of what the user did: a vector of its own for each bit of the action that is set, zeros for the others.

    Candidates have one learned input, since their action is what is predicted. There are few different actions, so the MLP is
    computed once for each combination of bits.
    """

    bits: Tensor

    def __init__(self, bits: Sequence[int], columns: int, hidden: int, width: int) -> None:
        super().__init__()
        self.register_buffer("bits", torch.tensor(bits), persistent=False)
        self.of_bits = nn.Parameter(torch.empty(len(bits), columns))
        self.of_candidate = nn.Parameter(torch.empty(len(bits) * columns))
        self.mlp = SwishMLP(len(bits) * columns, hidden, width)
        self.initialise(torch.default_generator)

    def initialise(self, generator: torch.Generator) -> None:
        draw_normal_(self.of_bits, 0.1, generator)
        draw_normal_(self.of_candidate, 0.1, generator)

    def forward(self, actions: Tensor, parts: SampleParts) -> RowsAt:
        """Map the actions of events, whole numbers [C], to rows of D columns at [P]; zeros for context."""
        count = len(self.bits)
        shifts = torch.arange(count, device=actions.device)
        combinations = torch.arange(2**count, device=actions.device)
        is_set = (combinations[:, None] >> shifts & 1).to(self.of_bits.dtype)
        inputs = (is_set[:, :, None] * self.of_bits).flatten(1)
        vectors = self.mlp(torch.cat([inputs, self.of_candidate[None]]))
        # Zeros up to a multiple of 8 rows, as tensor cores take them.
        vectors = torch.cat([vectors, vectors.new_zeros(8 - len(vectors) % 8, vectors.shape[1])])
        chosen = parts.choose(actions, 0.0, 0.0).long()
        combination = (((chosen[:, None] & self.bits) != 0).long() << shifts).sum(1)
        combination = torch.where(parts.is_event, combination, 2**count + 1)
        return RowsAt(vectors, torch.where(parts.is_candidate, 2**count, combination))


class ContextVectors(nn.Module):
    """Vectors of a sample's other features, each by a matrix of its own, and one of its numbers, if some are chosen."""

    def __init__(self, num_features: int, columns: int, numbers: Sequence[int], width: int) -> None:
        super().__init__()
        self._numbers = numbers
        self.matrices = nn.Parameter(torch.empty(num_features, columns, width))
        self.biases = nn.Parameter(torch.empty(num_features, width))
        self.numbers = nn.Linear(len(numbers), width) if numbers else None
        self.initialise(torch.default_generator)

    def initialise(self, generator: torch.Generator) -> None:
        for matrix in self.matrices:
            normal_(matrix, generator)
        nn.init.zeros_(self.biases)
        if self.numbers is not None:
            initialise_without_bias_(self.numbers, generator)

    def forward(self, vectors: Tensor | None, numbers: Tensor) -> Tensor:
        """Map vectors [B, features * columns], None of no feature, and numbers [B, N], of which some are chosen, to [B, K, D]."""
        found = []
        if vectors is not None:
            of_feature = vectors.unflatten(1, self.matrices.shape[:2])
            found.append(torch.einsum("bke,ked->bkd", of_feature, self.matrices) + self.biases)
        if self.numbers is not None:
            # No list of columns: a host's copy cannot be captured.
            chosen = torch.stack([numbers[:, column] for column in self._numbers], dim=1)
            found.append(self.numbers(chosen).unsqueeze(1))
        return torch.cat(found, dim=1)


class PositionVectors(nn.Module):
    """Vectors of a position's distance from the end and of the time from it to the query.

    Context has the first rows of the table of positions, and the first candidate the next; all others of a sample are counted
    from there. `buckets`: the last bucket of time; None without times.
    """

    def __init__(self, positions: int, buckets: int | None, width: int) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.empty(positions, width))
        self.times = nn.Parameter(torch.empty(buckets + 1, width)) if buckets else None
        self.initialise(torch.default_generator)

    def initialise(self, generator: torch.Generator) -> None:
        bound = len(self.positions) ** -0.5
        uniform_(self.positions, -bound, bound, generator)
        if self.times is not None:
            bound = (len(self.times) - 1) ** -0.5
            uniform_(self.times, -bound, bound, generator)

    def forward(
        self, at: JaggedPositions, num_context: int, num_candidates: int, seconds: Tensor
    ) -> list[RowsAt]:
        """Return rows of D columns at [P]. `seconds`: from each position to the query, [P]."""
        index = position_index(at, num_context, num_candidates, len(self.positions))
        rows = [RowsAt(self.positions, spread_rows(index, at, self.positions))]
        if self.times is not None:
            bucket = time_index(seconds, len(self.times) - 1)
            rows.append(RowsAt(self.times, spread_rows(bucket, at, self.times)))
        return rows


def spread_rows(index: Tensor, at: JaggedPositions, table: Tensor) -> Tensor:
    """Return rows of a table, [P], with any where a position belongs to no sample: sums of gradients would meet in one."""
    return torch.where(at.is_inside, index, at.offsets % len(table))


def position_index(at: JaggedPositions, num_context: int, num_candidates: int, rows: int) -> Tensor:
    last = at.lengths[at.samples] - num_candidates  # offset of the first candidate
    index = (last - at.offsets).clamp(min=0) + num_context
    return torch.where(at.offsets < num_context, at.offsets, index).clamp(0, rows - 1)


def time_index(seconds: Tensor, last: int) -> Tensor:
    """Return the bucket of a time: the root of its minutes, cut."""
    return (seconds.clamp(min=1e-6) / 60).sqrt().clamp(max=last).long()


def times_of(
    events: SequenceEvents,
    time: str | None,
    parts: SampleParts,
    hours: Tensor | None,
    *,
    from_last: bool,
) -> tuple[Tensor, Tensor]:
    """Return the age of each position and its time before the query, both in seconds, [P]; zeros without a time of events.

    The query is at the moment of the sample or, `from_last`, of its last event. `hours`: of the query since the reference's
    time 0, [B], which is that of context.
    """
    at = parts.at
    if time is None:
        return (torch.zeros(at.samples.shape[0], device=at.samples.device),) * 2
    age = events.numbers[time]
    query = age.new_zeros(at.starts.shape[0])
    if from_last:
        last = (events.starts + events.lengths - 1).clamp(0, age.shape[0] - 1)
        query = torch.where(events.lengths > 0, age[last], 0)
    of_query = query[at.samples]
    ages = torch.where(parts.is_candidate, of_query, parts.choose(age, 0.0, NO_TIME))
    of_context = NO_TIME if hours is None else 3600 * hours[at.samples]
    return ages, torch.where(parts.is_context, of_context, ages - of_query)


class UserVectors(nn.Module):
    """LN(W [x, clock] + b): the user for each candidate, from its position behind all layers and the query's time."""

    def __init__(self, width: int, *, has_clock: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(width + (4 if has_clock else 0), width)
        self.norm = LayerNorm(width)
        self.initialise(torch.default_generator)

    def initialise(self, generator: torch.Generator) -> None:
        initialise_without_bias_(self.linear, generator)

    def forward(self, x: Tensor, hours: Tensor | None) -> Tensor:
        """Map [B * M, D], and hours [B] with a clock, to [B * M, D]."""
        if hours is not None:
            clock = clock_of(hours).repeat_interleave(x.shape[0] // hours.shape[0], dim=0)
            x = torch.cat([x, clock.to(x.dtype)], dim=1)
        return self.norm(self.linear(x))


def clock_of(hours: Tensor) -> Tensor:
    """Return cosine and sine of the hour of the day, then of the day of the week, [B, 4]; the reference's pi is 3.14."""
    hour, day = hours.floor().remainder(24) / 24, (hours / 24).floor().remainder(7) / 7
    angles = torch.stack([hour, day], dim=1) * (2 * 3.14)
    return torch.stack([angles.cos(), angles.sin()], dim=2).flatten(1)
