"""Tensors of which ranks hold pieces."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Piece(NamedTuple):
    """A part of a tensor, and where its first element lies in the complete one."""

    offsets: tuple[int, ...]
    tensor: Tensor


@dataclass(frozen=True, slots=True)
class ShardedTensor:
    """A tensor, with the pieces that this rank has."""

    shape: torch.Size
    dtype: torch.dtype
    pieces: list[Piece]


State = dict[str, Tensor | ShardedTensor]
"""Weights and optimizer state by name; plain tensors are complete."""


def pieces_of(value: Tensor | ShardedTensor) -> list[Piece]:
    if isinstance(value, ShardedTensor):
        return value.pieces
    return [Piece((0,) * value.dim(), value.detach())]


def local_tensors(value: Tensor | ShardedTensor) -> list[Tensor]:
    return [piece.tensor for piece in pieces_of(value)]
