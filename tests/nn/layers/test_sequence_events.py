"""Events of some samples of a batch: those of a chunk, and no more positions than they can have."""

import pytest
import torch
from torch import Tensor

from nn.layers.distinct_rows import DistinctRows
from nn.layers.sequence_events import SequenceEvents

MOST = 4


def events_of(lengths: list[int], spare: int) -> SequenceEvents:
    """Return events whose positions count from 100, with `spare` positions behind them."""
    of = torch.tensor(lengths, dtype=torch.int32)
    starts = (of.cumsum(0) - of).int()
    capacity = sum(lengths) + spare
    samples = torch.searchsorted(starts + of, torch.arange(capacity), right=True)
    positions = torch.arange(100, 100 + capacity)
    rows = {"item": DistinctRows(torch.empty(0, 2), positions, starts, of, max_length=MOST)}
    numbers = {"time": positions.float()}
    return SequenceEvents(rows, numbers, starts, of, samples.clamp(max=len(of) - 1), MOST)


def own(values: Tensor, starts: Tensor, lengths: Tensor) -> list[list[float]]:
    spans = zip(starts.tolist(), lengths.tolist(), strict=True)
    return [values[first : first + count].tolist() for first, count in spans]


@pytest.mark.parametrize("spare", [0, 3, 40])
@pytest.mark.parametrize("lengths", [[4, 4, 4, 4, 4, 4], [0, 2, 0, 4, 1, 0], [0, 0, 0, 0, 0, 0]])
def test_a_chunk_has_its_events_and_no_more_positions_than_they_can_fill(lengths, spare):
    whole = events_of(lengths, spare + (not any(lengths)))
    wanted = own(whole.numbers["time"], whole.starts, whole.lengths)
    for first, end in ((0, 2), (2, 3), (3, 6), (4, 6)):
        part = whole.of_samples(first, end)
        rows = part.rows["item"]
        size = min((end - first) * MOST, len(whole.samples))
        assert len(part.samples) == len(rows.positions) == len(part.numbers["time"]) == size
        assert own(part.numbers["time"], part.starts, part.lengths) == wanted[first:end]
        assert own(rows.positions, rows.starts, rows.lengths) == wanted[first:end]
        samples = own(part.samples, part.starts, part.lengths)
        assert samples == [[number] * len(of) for number, of in enumerate(wanted[first:end])]


def test_ids_without_a_known_bound_keep_all_positions():
    starts = torch.tensor([0, 2, 3])
    rows = DistinctRows(torch.empty(0, 2), torch.arange(9), starts, torch.tensor([2, 1, 4]))
    part = rows.of_samples(1, 3)
    assert part.positions.tolist() == list(range(9))
    assert part.starts.tolist() == [2, 3]
