"""Multi-head softmax attention within each sample's positions, in plain torch on padded samples.

`nn.ops.triton.jagged_attention` has the kernels of GPUs. For positions see `nn.ops.jagged`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nn.ops.jagged import SamplePositions, pad, padded_positions, unpad

# B: samples, C: positions, L: most positions of a sample, H: heads, K: columns of a head

OCTAVES = 32
"""Doublings of a second that `time_bucket` tells apart: 136 years."""


@dataclass(frozen=True, slots=True)
class ScoreBias:
    """Terms of a score, by the distance of query and key and by the difference of their times.

    Causal attention has the distances 0, 1, ..., R - 1, of which the last stands for all further ones; other attention has
    -(R // 2), ..., R // 2 likewise, so R is odd. Times are seconds, of which only differences count.
    """

    position: Tensor | None = None  # [H, R]
    time: Tensor | None = None  # by `time_bucket`, [H, T]; T is a power of two
    times: Tensor | None = None  # of the keys, float32 [C]; a query has that of the key where it is


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    at: SamplePositions,
    queries: SamplePositions,
    causal: bool,
    scale: float,
    bias: ScoreBias,
) -> Tensor:
    """Map queries [Q, H, K], keys and values [C, H, K] to [Q, H, K] in the dtype of `q`; sums are float32 or wider.

    The last query of a sample is where its last key is, and there are no more queries than keys.
    """
    dtype, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
    q = pad(q.to(wide), queries).transpose(1, 2)  # [B, H, L, K]
    k, v = (pad(each.to(wide), at).transpose(1, 2) for each in (k, v))
    scores = q @ k.transpose(2, 3) * scale
    offset = (at.lengths - queries.lengths)[:, None] + torch.arange(q.shape[2], device=q.device)
    key = torch.arange(k.shape[2], device=q.device)
    distance = offset[:, :, None] - key  # [B, L, L]
    if bias.position is not None:
        columns = bias.position.shape[1]
        index = (distance + (0 if causal else columns // 2)).clamp(0, columns - 1)
        scores = scores + bias.position[:, index].transpose(0, 1)
    if bias.time is not None:
        assert bias.times is not None
        of_keys = pad(bias.times, at)
        of_queries = of_keys.gather(1, offset.clamp(max=key.shape[0] - 1))
        bucket = time_bucket(of_queries[:, :, None] - of_keys[:, None], bias.time.shape[1])
        scores = scores + bias.time[:, bucket].transpose(0, 1)
    is_key = padded_positions(at)[1][:, None, None]
    if causal:
        is_key = is_key & (distance >= 0)[:, None]
    weights = torch.softmax(torch.where(is_key, scores, torch.finfo(wide).min), -1)
    return unpad((weights @ v).transpose(1, 2), queries).to(dtype)


def time_bucket(difference: Tensor, buckets: int) -> Tensor:
    """Return the bucket of each difference in seconds, whatever its sign; up to 1 s it is 0.

    A power of two of buckets divides 32 doublings: 32 begin at 1, 2, 4, 8, ... seconds; of 64, every second one begins in
    the middle between those. They are read from the bits of the number, so all machines agree.
    """
    bits = difference.abs().clamp(min=1).view(torch.int32) - (127 << 23)
    return (bits >> time_shift(buckets)).clamp(0, buckets - 1)


def time_shift(buckets: int) -> int:
    """Return the lowest bit of a float32 that tells two buckets apart."""
    return 23 + OCTAVES.bit_length() - buckets.bit_length()
