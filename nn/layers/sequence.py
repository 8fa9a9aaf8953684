"""Operations on events of samples, [C, ...] in flat positions: kernels of our own on a GPU, plain torch elsewhere.

`at` is a `SequenceEvents`, or the positions that `append` returns. Positions behind the last event matter to no result, and
have zeros in all of them. Nothing reads the device; shapes depend on no data; sums have one order.
"""

from typing import Any, get_args

import torch
from torch import Tensor, nn

from nn.layers.initialization import initialise_linear_, normal_
from nn.ops import jagged, jagged_attention
from nn.ops.column_blocks import GradientBlocks
from nn.ops.fused_linear import can_fuse
from nn.ops.jagged import Pooling, Positions, SamplePositions
from nn.ops.jagged import append as append
from nn.ops.jagged_attention import ScoreBias

# B: samples, C: positions, D: columns, H: heads, K: columns of a head


def expand(values: Tensor, at: SamplePositions) -> Tensor:
    """Return the vector of each position's sample, [C, D], from one per sample, [B, D]."""
    return _jagged(values).expand(values, at)


def pool(values: Tensor, at: SamplePositions, how: Pooling) -> Tensor:
    """Return the sum, the mean or the last vector of each sample, [B, D], from [C, D]; zeros for a sample without events."""
    return _jagged(values).pool(values, at, how)


def softmax(scores: Tensor, at: SamplePositions) -> Tensor:
    """Return the softmax of scores [C] or [C, H] over the events of each sample, in the same shape and dtype."""
    return _jagged(scores).softmax(scores, at)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    at: SamplePositions,
    *,
    queries: SamplePositions | None = None,
    causal: bool = True,
    bias: ScoreBias | None = None,
    gradients: GradientBlocks | None = None,
) -> Tensor:
    """Return softmax attention of each query to the events of its sample, causal to itself and earlier ones.

    A score is q . k / sqrt(K) plus biases. `q`: [C, H, K], or [Q, H, K] of other positions `queries`: the last one of a
    sample is where its last event is, and there are no more than events. `k`, `v`: [C, H, K]. Returns the shape of `q`.
    `gradients`: blocks for those of q, k and v, where kernels may write them.
    """
    rest = at, queries or at, causal, q.shape[2] ** -0.5, bias or ScoreBias()
    if not can_fuse(q, k):
        return jagged_attention.attend(q, k, v, *rest)
    # Only CUDA builds of torch include Triton.
    from nn.ops.triton import jagged_attention as kernels

    return kernels.attend(q, k, v, *rest, gradients)


def attend_once(q: Tensor, k: Tensor, v: Tensor, at: SamplePositions) -> Tensor:
    """Return softmax attention of one query per sample, a candidate say, [B, H, K]; zeros for a sample without events."""
    sample = torch.arange(q.shape[0], device=q.device)
    queries = Positions(sample, at.lengths.clamp(max=1), sample, 1)
    return attend(q, k, v, at, queries=queries)


def pool_weighted(values: Tensor, weights: Tensor, at: SamplePositions, *, is_mean: bool) -> Tensor:
    """Return the sum over each sample of weights [C] * values [C, D], [B, D] float32; of a mean, divided by that of the weights.

    Zeros where that is 0. A weight below 0 gives NaN.
    """
    weights = torch.where(weights < 0, torch.nan, weights).unsqueeze(1)
    total = pool(weights * values.float(), at, "sum")
    if not is_mean:
        return total
    mass = pool(weights, at, "sum")
    return total / torch.where(mass == 0, 1, mass)


def rows_at(table: Tensor, index: Tensor) -> Tensor:
    """Return the row of each position, [C, D], of a table [R, D]; its backward pass adds up a row's gradients in one order."""
    if not table.is_cuda or torch.compiler.is_exporting():
        return jagged.rows_at(table, index)
    from nn.ops.triton.row_sums import rows_at as by_kernels

    return by_kernels(table, index)


class SequencePooling(nn.Module):
    """One vector per sample from its events: sum, mean, last, or attention without a query.

    Attention weighs event x by a softmax of u . tanh(W x + b) (Yang et al., NAACL 2016, equations 5 to 7). D is `columns`.
    """

    def __init__(self, how: str, columns: int) -> None:
        super().__init__()
        assert how in ("attention", *get_args(Pooling)), how
        self.how = how
        if how == "attention":
            self.hidden = nn.Linear(columns, columns)
            self.score = nn.Linear(columns, 1, bias=False)
            self.initialise(torch.default_generator)

    def initialise(self, generator: torch.Generator) -> None:
        if self.how == "attention":
            initialise_linear_(self.hidden, generator)
            normal_(self.score.weight, generator)

    def forward(self, values: Tensor, at: SamplePositions) -> Tensor:
        """Map [C, D] to [B, D]; zeros for a sample without events."""
        if self.how != "attention":
            return pool(values, at, self.how)  # type: ignore[arg-type]
        weights = softmax(self.score(torch.tanh(self.hidden(values))), at)
        return pool(weights * values, at, "sum")


class LayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm` (Ba et al., arXiv:1607.06450) that returns the dtype of its input, under autocast too.

    Statistics are float32, or float64 if the input is. C is `columns`; each has a weight and a bias, which the kernels read.
    """

    def __init__(self, columns: int, eps: float = 1e-5) -> None:
        # A list, so that several dimensions are refused.
        super().__init__([columns], eps)

    def forward(self, x: Tensor, *, swish: bool = False) -> Tensor:
        """Map [..., C] to LN(x) or, if `swish`, to x * sigmoid(LN(x)), in the same shape and dtype."""
        if not can_fuse(x, self.weight):
            normed = super().forward(x).to(x.dtype)
            return x * torch.sigmoid(normed) if swish else normed
        from nn.ops.triton.layer_norm import layer_norm

        return layer_norm(x, self.weight, self.bias, self.eps, swish=swish)

    def beside(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return LN(x), and x for a residual, whose gradient a kernel adds to the norm's without a pass of its own."""
        if not can_fuse(x, self.weight):
            return self(x), x
        from nn.ops.triton.layer_norm import norm_beside

        return norm_beside(x, self.weight, self.bias, self.eps)


def _jagged(values: Tensor) -> Any:
    if not can_fuse(values, values):
        return jagged
    # Only CUDA builds of torch include Triton.
    from nn.ops.triton import jagged as kernels

    return kernels
