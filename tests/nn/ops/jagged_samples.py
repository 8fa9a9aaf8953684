"""Samples of different lengths, one after another: none, one event, the most; positions behind the last are NaN."""

import torch
from torch import Tensor

from nn.ops.jagged import Positions

BEHIND = 5


def samples_of(lengths: list[int], device: str = "cpu", gap: int = 0) -> Positions:
    """Positions of samples, with `gap` unused ones after each, and `BEHIND` at the end."""
    count = torch.tensor(lengths, dtype=torch.int32)
    starts = (count + gap).cumsum(0).int() - count - gap
    owners = torch.repeat_interleave(torch.arange(len(lengths)), count + gap).int()
    owners = torch.cat([owners, owners.new_zeros(BEHIND)])
    return Positions(starts.to(device), count.to(device), owners.to(device), max(lengths))


def is_used(at: Positions) -> Tensor:
    used = torch.zeros(len(at.samples), dtype=torch.bool)
    for start, length in zip(at.starts.tolist(), at.lengths.tolist(), strict=True):
        used[start : start + length] = True
    return used


def drawn(at: Positions, *shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of positions, NaN where they belong to no sample."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(len(at.samples), *shape, generator=generator, dtype=torch.float64)
    values[~is_used(at)] = torch.nan
    return values.to(at.starts.device, dtype)
