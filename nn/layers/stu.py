"""Layers of HSTU, the hierarchical sequential transducer (arXiv:2402.17152), as MLPerf's `dlrm_v4` has them.

They work on flat positions [C, D]; what crosses those of a sample takes `JaggedPositions`. Numbers of positions that belong to
no sample are finite if the inputs are, reach no other position, and have no gradient.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from nn.layers.dropout import Dropout
from nn.layers.initialization import normal_, uniform_
from nn.layers.sequence import LayerNorm, rows_at
from nn.ops.column_blocks import GradientBlocks, column_blocks
from nn.ops.fused_linear import as_autocast, can_fuse
from nn.ops.hstu_attention import JaggedPositions, hstu_attention
from nn.ops.jagged import pad

# B: samples, R: rows, C: positions, D: columns of a position, H: heads, K: columns of a head, L: most positions of a sample

NORM_EPS = 1e-6
"""Of the norms in an STU layer; all others have PyTorch's."""


class SwishNorm(nn.Module):
    """x * sigmoid(LayerNorm(x)): what is multiplied is not normalised."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.norm = LayerNorm(columns)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., columns] to the same shape and dtype."""
        return self.norm(x, swish=True)


class SwishMLP(nn.Module):
    """Two linear layers with `SwishNorm` between them and, unless `norm` is false, a layer norm behind.

    Weights are Xavier normal, or Xavier uniform if `uniform`; biases are 0.
    """

    def __init__(
        self, inputs: int, hidden: int, outputs: int, *, norm: bool = True, uniform: bool = False
    ) -> None:
        super().__init__()
        self._uniform = uniform
        # Columns that the backward pass keeps beside the input, on a GPU.
        self.kept = 2 * hidden + norm * outputs
        self.first = nn.Linear(inputs, hidden)
        self.swish = SwishNorm(hidden)
        self.second = nn.Linear(hidden, outputs)
        self.norm = LayerNorm(outputs) if norm else nn.Identity()
        self.initialise(torch.default_generator)

    def initialise(self, generator: torch.Generator) -> None:
        for layer in (self.first, self.second):
            draw = xavier_uniform_ if self._uniform else normal_
            draw(layer.weight, generator)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., inputs] to [..., outputs]."""
        return self.norm(self.second(self.swish(self.first(x))))


def xavier_uniform_(weight: Tensor, generator: torch.Generator) -> None:
    """Fill [out, in] with draws on the CPU from +-sqrt(6 / (in + out)) (Glorot and Bengio, 2010)."""
    bound = math.sqrt(6 / sum(weight.shape))
    uniform_(weight, -bound, bound, generator)


@dataclass(frozen=True, slots=True)
class RowsAt:
    """A row of a table for each position, times `scale`."""

    table: Tensor  # [R, D]
    index: Tensor  # of the row, integer [C]
    scale: float = 1.0

    @classmethod
    def each(cls, vectors: Tensor) -> "RowsAt":
        """Return a row of its own for each position, of [C, D]."""
        # Not `len`, which torch.export takes for a constant.
        return cls(vectors, torch.arange(vectors.shape[0], device=vectors.device))


class PositionDropout(Dropout):
    """`Dropout` of [C, D] whose mask follows from the row of the sample in the global batch, and the offset in the sample."""

    def forward(self, x: Tensor, at: JaggedPositions) -> Tensor:  # type: ignore[override]
        """Map [C, D] to the same shape and dtype."""
        return self._drop(x, (at.samples, at.offsets)) if self.training and self.rate > 0 else x

    def of_rows(self, rows: Sequence[RowsAt], at: JaggedPositions) -> Tensor:
        """Return the dropped out sum of the rows at each position, [C, D], on a GPU in autocast's dtype.

        There the backward pass adds up the gradients of a row in one order, and from numbers in that dtype.
        """
        tables, indices = [of.table for of in rows], [of.index for of in rows]
        scales, where = [of.scale for of in rows], (at.samples, at.offsets)
        if can_fuse(tables[0], tables[0]):
            # Only CUDA builds of torch include Triton.
            from nn.ops.triton.row_sums import sum_of_rows

            return sum_of_rows(tables, indices, scales, self.mask, where)
        total = reduce(torch.add, map(torch.mul, map(rows_at, tables, indices), scales))
        return as_autocast(total if self.mask is None else self.mask.apply(total, where))


class STULayer(nn.Module):
    """x + W_o dropout([u, a, u * LN(a)]) with u, v, q, k = W LN(x) + b and a = `hstu_attention`(q, k, v).

    SiLU is on u or, if `silu_all`, on all four, as in the paper and its research code. Without `concat` W_o sees u * LN(a) only,
    as in that code. D is `width`.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        head_dim: int,
        dropout: float = 0.0,
        *,
        silu_all: bool = False,
        concat: bool = True,
    ) -> None:
        super().__init__()
        self._heads, self._silu_all, self._concat = heads, silu_all, concat
        inner = heads * head_dim
        self.input_norm = LayerNorm(width, eps=NORM_EPS)
        self.uvqk = nn.Linear(width, 4 * inner)
        self.attention_norm = LayerNorm(inner, eps=NORM_EPS)
        self.dropout = PositionDropout(dropout)
        self.output = nn.Linear((3 if concat else 1) * inner, width, bias=False)
        self.initialise(torch.default_generator)

    def initialise(self, generator: torch.Generator) -> None:
        xavier_uniform_(self.uvqk.weight, generator)
        nn.init.zeros_(self.uvqk.bias)
        xavier_uniform_(self.output.weight, generator)

    def kept(self, *, only_candidates: bool = False) -> int:
        """Return the columns that backward keeps of a position on a GPU."""
        width, inner = self.output.out_features, self.uvqk.out_features // 4
        copies = 5 + 3 * self._silu_all + (3 if self._concat else 1)
        if only_candidates:
            copies = 2 + 2 * self._silu_all
        return 2 * width + copies * inner

    def forward(
        self,
        x: Tensor,
        at: JaggedPositions,
        norm: Tensor,
        num_candidates: int = 1,
        *,
        only_candidates: bool = False,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Map [C, D] to [C, D] or, of the candidates only, to [B * num_candidates, D].

        `norm`: what the attention of each sample is divided by, [B]. `bias`: added to the scores, [B, L of queries, L].
        """
        normed, x = self.input_norm.beside(x)
        queries, gradients = at, None
        if only_candidates:
            # Keys and values are those of all positions, and nothing else is.
            queries, rows = at.last(num_candidates)
            x = x.index_select(0, rows)
            # Again: a gradient of some rows of `normed` would be as large as that of all.
            own = self.input_norm(x)
            weights, biases = self.uvqk.weight.chunk(4), self.uvqk.bias.chunk(4)
            inputs = own, normed, own, normed
            u, v, q, k = map(linear, inputs, weights, biases)
        else:
            (u, v, q, k), gradients = column_blocks(self.uvqk(normed), 4)
        if self._silu_all:
            v, q, k, gradients = silu(v), silu(q), silu(k), None
        v, q, k = (of.unflatten(1, (self._heads, -1)) for of in (v, q, k))
        if _has_kernel(q, bias):
            # Only CUDA builds of torch include Triton.
            from nn.ops.triton.hstu_attention import attend

            of_qkv = None if gradients is None else (gradients, (2, 3, 1))
            a = attend(q, k, v, norm, at, queries, num_candidates, of_qkv).flatten(1)
        else:
            a = hstu_attention(
                q, k, v, norm, at, queries, num_candidates=num_candidates, bias=bias
            ).flatten(1)
        return x + self.output(self._gated(u, a, queries, gradients))

    def _gated(
        self, u: Tensor, a: Tensor, at: JaggedPositions, gradients: GradientBlocks | None
    ) -> Tensor:
        """Return what W_o reads, of u before SiLU."""
        norm = self.attention_norm
        if can_fuse(a, norm.weight):
            # Only CUDA builds of torch include Triton.
            from nn.ops.triton.layer_norm import gate

            where, mask = (at.samples, at.offsets), self.dropout.mask
            return gate(
                *(u, a, norm.weight, norm.bias, norm.eps, mask, where),
                concat=self._concat,
                gradients=gradients,
            )
        u = silu(u)
        y = u * norm(a)
        if self._concat:
            y = torch.cat([u, a, y], dim=1)
        return self.dropout(y, at)


def _has_kernel(q: Tensor, bias: Tensor | None) -> bool:
    return q.is_cuda and bias is None and not torch.compiler.is_exporting()


def kept_columns(layers: Sequence[STULayer], before: int) -> int:
    """Return the columns that backward keeps of a position at its peak, in all layers, the last of candidates, and `before`."""
    *first, last = layers
    kept = sum(layer.kept() for layer in first) + last.kept(only_candidates=True)
    # Gradients of a layer's columns.
    widest = max(last.output.out_features, last.uvqk.out_features // 4)
    return before + kept + widest * 2


class RelativeBias(nn.Module):
    """Bias of the attention's scores by distance and by time between query and key, as in the paper's research code.

    The bucket of a time is log(max(1, seconds)) / 0.301, cut; 128 of them reach 5e16 seconds.
    """

    BUCKETS = 128

    def __init__(self, max_length: int) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.empty(max_length))
        self.times = nn.Parameter(torch.empty(self.BUCKETS + 1))
        self.initialise(torch.default_generator)

    def initialise(self, generator: torch.Generator) -> None:
        for table in (self.positions, self.times):
            draw_normal_(table, 0.02, generator)

    def forward(
        self, ages: Tensor, at: JaggedPositions, queries: JaggedPositions, num_candidates: int = 1
    ) -> Tensor:
        """Return [B, L of queries, L] of the ages of positions in seconds, [C]; all candidates are where the first one is."""
        padded = pad(ages, at)  # [B, L]
        row = torch.arange(queries.max_length, device=ages.device)
        offset = row + (at.lengths - queries.lengths)[:, None]
        offset = offset.clamp(0, at.max_length - 1)
        seconds = (padded.gather(1, offset)[:, :, None] - padded[:, None]).abs()
        bucket = (seconds.clamp(min=1).log() / 0.301).clamp(max=self.BUCKETS).long()
        place = torch.minimum(offset, (at.lengths - num_candidates)[:, None])
        distance = place[:, :, None] - torch.arange(at.max_length, device=ages.device)
        return self.positions[distance.clamp(min=0)] + self.times[bucket]


@torch.no_grad()
def draw_normal_(parameter: Tensor, std: float, generator: torch.Generator) -> None:
    if not parameter.is_meta:
        drawn = torch.empty(parameter.shape, device="cpu")
        parameter.copy_(drawn.normal_(0, std, generator=generator))
