"""Some events of each sample, the latest or those most like a candidate; and maxima over events."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.compiler import is_exporting

from nn.layers.sequence import Positions, SamplePositions
from nn.ops.jagged import offsets, pad, padded_positions

# B: samples, C: positions of the events of all samples, K: most events of a sample that are chosen


@dataclass(frozen=True, slots=True)
class ChosenEvents:
    """At most K events of each sample, in B * K positions, or among all in their own if `index` is None."""

    index: Tensor | None  # position of each chosen event among all, [B * K]
    at: Positions

    def of(self, values: Tensor) -> Tensor:
        """Return the values [C, ...] of the chosen events."""
        return values if self.index is None else values.index_select(0, self.index)


def latest(at: SamplePositions, count: int) -> ChosenEvents:
    """Return the last `count` events of each sample, oldest first."""
    lengths = at.lengths.clamp(max=count)
    starts = at.starts + at.lengths - lengths
    # Either is right; an exported program has one for all sizes.
    if not is_exporting() and starts.shape[0] * count >= at.samples.shape[0]:
        return ChosenEvents(None, Positions(starts, lengths, at.samples, count))
    return _compact(starts, lengths, at.samples.shape[0], count)


def most_similar(scores: Tensor, at: SamplePositions, count: int) -> ChosenEvents:
    """Return the `count` events of each sample with the highest scores [C], from the highest on; of equal ones the first."""
    _, is_event = offsets(at)
    of_sample = torch.where(is_event, at.samples, at.starts.shape[0])
    order = torch.argsort(scores, descending=True, stable=True)
    order = order[torch.argsort(of_sample[order], stable=True)]
    chosen = _compact(
        at.lengths.cumsum(0) - at.lengths, at.lengths.clamp(max=count), order.shape[0], count
    )
    return ChosenEvents(chosen.of(order), chosen.at)


def _compact(starts: Tensor, lengths: Tensor, positions: int, count: int) -> ChosenEvents:
    """Return the first positions from `starts` on, of so many, in `count` positions per sample."""
    sample, offset = (torch.arange(size, device=starts.device) for size in (starts.shape[0], count))
    index = (starts[:, None] + offset).clamp(max=positions - 1).flatten()
    samples = sample[:, None].expand(-1, count).flatten()
    return ChosenEvents(index, Positions(sample * count, lengths, samples, count))


def latest_vectors(values: Tensor, at: SamplePositions, count: int) -> Tensor:
    """Return the last `count` vectors of each sample, the last one first, [B, count, D] from [C, D]; zeros where it has fewer."""
    offset = at.lengths[:, None] - 1 - torch.arange(count, device=values.device)
    index = (at.starts[:, None] + offset.clamp(min=0)).clamp(max=values.shape[0] - 1)
    found = values.index_select(0, index.flatten()).unflatten(0, index.shape)
    return torch.where((offset >= 0)[:, :, None], found, 0)


def largest(values: Tensor, at: SamplePositions) -> Tensor:
    """Return the largest number of each column over the positions of each sample, [B, D] from [C, D]; zeros without any."""
    is_inside = padded_positions(at)[1]
    padded = torch.where(is_inside[:, :, None], pad(values, at), torch.finfo(values.dtype).min)
    return torch.where(is_inside[:, :1], padded.amax(1), 0)
