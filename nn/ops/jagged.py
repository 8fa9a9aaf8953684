"""Copies, sums and softmax over the positions of samples, in plain torch; `nn.ops.triton.jagged` has the kernels of GPUs.

Sample b owns the positions from `starts[b]` on, `lengths[b]` of them; no two samples share one. All other positions may
hold anything, NaN too: what is returned for them is zero, and so is their gradient. Sums have one order.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding

# B: samples, C: positions, D: columns (any number of dimensions), L: most positions of a sample, R: rows of a table.
# Sizes are asked by `shape`, since `len` would be a constant of an exported program.

Pooling = Literal["sum", "mean", "last"]


class SamplePositions(Protocol):
    """Positions of samples, as `nn.layers.sequence_events.SequenceEvents` and `Positions` have them."""

    @property
    def starts(self) -> Tensor: ...
    @property
    def lengths(self) -> Tensor: ...
    @property
    def samples(self) -> Tensor: ...
    @property
    def max_length(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Positions:
    """Positions of samples that were made of others."""

    starts: Tensor  # first position of each sample, not decreasing, integer [B]
    lengths: Tensor  # positions of each sample, integer [B]
    # sample of each position, integer [C]; any sample where a position belongs to none
    samples: Tensor
    max_length: int  # L


def rows_at(table: Tensor, index: Tensor) -> Tensor:
    """Return the row of each position, [C, D], of a table [R, D]."""
    return embedding(index, table)


def offsets(at: SamplePositions) -> tuple[Tensor, Tensor]:
    """Return the offset of each position in its sample, [C], and whether it belongs to one, bool [C]."""
    offset = torch.arange(at.samples.shape[0], device=at.samples.device) - at.starts[at.samples]
    return offset, (offset >= 0) & (offset < at.lengths[at.samples])


def expand(values: Tensor, at: SamplePositions) -> Tensor:
    """Return the vector of each position's sample, [C, D], from one per sample, [B, D]."""
    return _where(offsets(at)[1], values.index_select(0, at.samples))


def pool(values: Tensor, at: SamplePositions, how: Pooling) -> Tensor:
    """Return the sum, the mean or the last vector of each sample, [B, D], from [C, D]; zeros for a sample without positions."""
    if how == "last":
        ends = (at.starts + at.lengths - 1).clamp(0, values.shape[0] - 1)
        return _where(at.lengths > 0, values.index_select(0, ends))
    # Numbers of 16 bits are added in 32.
    wide = _where(offsets(at)[1], values.to(torch.promote_types(values.dtype, torch.float32)))
    sums = wide.new_zeros(at.starts.shape[0], *values.shape[1:]).index_add(0, at.samples, wide)
    if how == "mean":
        sums = sums / at.lengths.clamp(min=1).view(-1, *[1] * (values.dim() - 1))
    return sums.to(values.dtype)


def softmax(scores: Tensor, at: SamplePositions) -> Tensor:
    """Return the softmax of scores [C] or [C, H] over the positions of each sample, in the same shape and dtype."""
    padded = pad(scores, at)
    # The least finite number, since a sample without positions has no other: -inf would make its gradients NaN.
    least = torch.finfo(padded.dtype).min
    padded = torch.where(_as_wide(padded_positions(at)[1], padded), padded, least)
    return unpad(torch.softmax(padded, 1), at)


def padded_positions(at: SamplePositions) -> tuple[Tensor, Tensor]:
    """Return the position of each offset of each sample, and whether the sample has as many; both [B, L]."""
    offset = torch.arange(at.max_length, device=at.starts.device)
    is_inside = offset < at.lengths[:, None]
    return (at.starts[:, None] + offset).clamp(max=at.samples.shape[0] - 1), is_inside


def pad(values: Tensor, at: SamplePositions) -> Tensor:
    """Map [C, D] to [B, L, D] with zeros behind the last position of each sample."""
    position, is_inside = padded_positions(at)
    padded = values.index_select(0, position.flatten()).unflatten(0, position.shape)
    return _where(is_inside, padded)


def unpad(padded: Tensor, at: SamplePositions) -> Tensor:
    """Map [B, L, D] to [C, D] with zeros where a position belongs to no sample."""
    offset, is_inside = offsets(at)
    row = at.samples * at.max_length + offset.clamp(0, at.max_length - 1)
    return _where(is_inside, padded.flatten(0, 1).index_select(0, row))


def append(values: Tensor, one: Tensor, at: SamplePositions) -> tuple[Tensor, Positions]:
    """Return [C + B, D] with one more vector [B, D], a candidate say, behind the last one [C, D] of each sample."""
    count = at.starts.shape[0]
    starts = at.starts + torch.arange(count, device=at.starts.device)
    position = torch.arange(values.shape[0] + count, device=at.starts.device)
    samples = (torch.searchsorted(starts, position, right=True) - 1).clamp(min=0)
    longer = Positions(starts, at.lengths + 1, samples, at.max_length + 1)
    offset, is_inside = offsets(longer)
    source = torch.where(
        offset < at.lengths[samples], at.starts[samples] + offset, values.shape[0] + samples
    )
    both = torch.cat([values, one.to(values.dtype)])
    return _where(is_inside, both.index_select(0, source.clamp(0, both.shape[0] - 1))), longer


def _where(is_inside: Tensor, values: Tensor) -> Tensor:
    # Chosen, not multiplied: what is outside may be NaN.
    return torch.where(_as_wide(is_inside, values), values, 0)


def _as_wide(flags: Tensor, values: Tensor) -> Tensor:
    return flags.view(*flags.shape, *[1] * (values.dim() - flags.dim()))
