"""Operations on events of samples, [C, ...] in flat positions: kernels of our own on a GPU, plain torch elsewhere.

`at` is a `SequenceEvents`, or the positions that `append` returns. Positions behind the last event matter to no result, and
have zeros in all of them. Nothing reads the device; shapes depend on no data; sums have one order.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nn.layers.initialization import initialise_linear_, normal_
from nn.ops import jagged, jagged_attention
from nn.ops.jagged import Pooling, Positions, SamplePositions, append
from nn.ops.jagged_attention import ScoreBias

__all__ = [
    "Positions",
    "SamplePositions",
    "ScoreBias",
    "SequencePooling",
    "append",
    "attend",
    "attend_once",
    "expand",
    "pool",
    "softmax",
]

# B: samples, C: positions, D: columns, H: heads, K: columns of a head


def expand(values: Tensor, at: SamplePositions) -> Tensor:
    """Return the vector of each position's sample, [C, D], from one per sample, [B, D]."""
    return jagged.expand(values, at)


def pool(values: Tensor, at: SamplePositions, how: Pooling) -> Tensor:
    """Return the sum, the mean or the last vector of each sample, [B, D], from [C, D]; zeros for a sample without events."""
    return jagged.pool(values, at, how)


def softmax(scores: Tensor, at: SamplePositions) -> Tensor:
    """Return the softmax of scores [C] or [C, H] over the events of each sample, in the same shape and dtype."""
    return jagged.softmax(scores, at)


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
    """Return softmax attention of each event to those of its sample; see `nn.ops.jagged_attention.attend`."""
    return jagged_attention.attend(q, k, v, at, causal=causal, scale=scale, bias=bias)


def attend_once(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    at: SamplePositions,
    *,
    scale: float | None = None,
    bias: ScoreBias | None = None,
) -> Tensor:
    """Return softmax attention of one query per sample [B, H, K]; see `nn.ops.jagged_attention.attend_once`."""
    return jagged_attention.attend_once(q, k, v, at, scale=scale, bias=bias)


class SequencePooling(nn.Module):
    """One vector per sample from its events: sum, mean, last, or attention without a query.

    Attention weighs event x by a softmax of u . tanh(W x + b) (Yang et al., NAACL 2016, equations 5 to 7). D is `columns`.
    """

    def __init__(self, how: str, columns: int) -> None:
        super().__init__()
        self.how = how
        if how == "attention":
            self.hidden = nn.Linear(columns, columns)
            self.score = nn.Linear(columns, 1, bias=False)
            self.initialise(torch.default_generator)

    def initialise(self, generator: torch.Generator) -> None:
        """Draw all weights from a CPU generator."""
        if self.how == "attention":
            initialise_linear_(self.hidden, generator)
            normal_(self.score.weight, generator)

    def forward(self, values: Tensor, at: SamplePositions) -> Tensor:
        """Map [C, D] to [B, D]; zeros for a sample without events."""
        if self.how != "attention":
            return pool(values, at, self.how)  # type: ignore[arg-type]
        scores = self.score(torch.tanh(self.hidden(values)))
        return pool(softmax(scores, at) * values, at, "sum")
