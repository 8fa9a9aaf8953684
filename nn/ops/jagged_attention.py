"""Multi-head softmax attention within each sample's positions, in plain torch on padded samples.

`nn.ops.triton.jagged_attention` has the kernels of GPUs. For positions see `nn.ops.jagged`. A score is scale * q . k plus
biases, each a table of numbers per head:

- `position_bias` [H, R] by the distance i - j of query i and key j. Causal attention has the distances 0, 1, ..., R - 1,
  of which the last stands for all further ones; other attention has -(R // 2), ..., R // 2 likewise, so R is odd.
- `time_bias` [H, T] by the difference of their times: `time_bucket`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nn.ops.jagged import SamplePositions, expand, offsets, pad, places, pool, softmax, unpad

# B: samples, C: positions, L: most positions of a sample, H: heads, K: columns of a head

OCTAVES = 32
"""Doublings of a second that `time_bucket` tells apart: 136 years."""


@dataclass(frozen=True, slots=True)
class ScoreBias:
    """Biases of attention scores, each of them or none; times in seconds, float32 [C], of which only differences count."""

    position: Tensor | None = None
    time: Tensor | None = None
    times: Tensor | None = None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    at: SamplePositions,
    *,
    causal: bool = True,
    scale: float | None = None,
    bias: ScoreBias | None = None,
) -> Tensor:
    """Map queries, keys and values [C, H, K] to [C, H, K]: each position attends to those of its sample, causal to earlier ones and itself.

    `scale`: None for 1 / sqrt(K). Products and sums are float32 or wider; the result has the dtype of `v`.
    """
    bias = bias or ScoreBias()
    wide = torch.promote_types(q.dtype, torch.float32)
    q, k, wide_v = (pad(each.to(wide), at).transpose(1, 2) for each in (q, k, v))  # [B, H, L, K]
    scores = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scale is None else scale)
    place = torch.arange(at.max_length, device=q.device)
    distance = place[:, None] - place
    if bias.position is not None:
        scores = scores + bias.position[:, position_index(distance, bias.position, causal)]
    if bias.time is not None:
        assert bias.times is not None
        times = pad(bias.times, at)
        bucket = time_bucket(times[:, :, None] - times[:, None], bias.time.shape[1])
        scores = scores + bias.time[:, bucket].transpose(0, 1)
    is_key = places(at)[1][:, None, None]  # [B, 1, 1, L]
    if causal:
        is_key = is_key & (distance >= 0)
    weights = torch.softmax(torch.where(is_key, scores, torch.finfo(wide).min), -1)
    return unpad((weights @ wide_v).transpose(1, 2), at).to(v.dtype)


def attend_once(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    at: SamplePositions,
    *,
    scale: float | None = None,
    bias: ScoreBias | None = None,
) -> Tensor:
    """Map one query per sample [B, H, K], keys and values [C, H, K] to [B, H, K]; zeros for a sample without positions.

    The query comes after all events: distance 0 is the last event's, and its time is 0, so `times` are ages.
    """
    bias = bias or ScoreBias()
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (expand(q.to(wide), at) * k.to(wide)).sum(-1)  # [C, H]
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias.position is not None:
        distance = at.lengths[at.samples] - 1 - offsets(at)[0]
        scores = scores + bias.position.t()[position_index(distance, bias.position, True)]
    if bias.time is not None:
        assert bias.times is not None
        scores = scores + bias.time.t()[time_bucket(bias.times, bias.time.shape[1])]
    return pool(softmax(scores, at)[..., None] * v.to(wide), at, "sum").to(v.dtype)


def position_index(distance: Tensor, table: Tensor, causal: bool) -> Tensor:
    """Return the columns of a position bias [H, R] for distances."""
    centre = 0 if causal else table.shape[1] // 2
    return (distance + centre).clamp(0, table.shape[1] - 1)


def time_bucket(difference: Tensor, buckets: int) -> Tensor:
    """Return the bucket of each difference in seconds, whatever its sign; up to 1 s it is 0.

    A power of two of buckets divides 32 doublings: 32 begin at 1, 2, 4, 8, ... seconds; of 64, every second one begins in
    the middle between those. They are read from the bits of the number, so all machines agree.
    """
    bits = difference.abs().clamp(min=1).view(torch.int32) - (127 << 23)
    return (bits >> time_shift(buckets)).clamp(0, buckets - 1)


def time_shift(buckets: int) -> int:
    """Return the lowest bit of a float32 that tells two buckets apart."""
    return 23 - (buckets.bit_length() - 1) + (OCTAVES.bit_length() - 1)
