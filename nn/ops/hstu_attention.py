"""Attention of HSTU (arXiv:2402.17152, equation 2) within each sample's positions: SiLU of the scores instead of a softmax.

    a_i = sum_j silu(q_i . k_j / sqrt(K) + bias_ij) v_j / n

A query sees the positions up to its own, but no candidate except itself; candidates are the last positions of a sample. Without
a softmax the keys may be added in any order, and the backward pass needs no statistics of rows.

`nn.ops.triton.hstu_attention` has the kernels of GPUs; here samples are padded to the longest possible one.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from nn.ops.jagged import pad, unpad

# B: samples, C: positions, L: most positions of a sample, H: heads, K: columns of a head


@dataclass(frozen=True, slots=True)
class JaggedPositions:
    """Positions of samples, one sample's behind another's; those behind the last sample's belong to none.

    Of queries that are some of a sample's positions, the last ones, `offsets` are still those in the sample.
    """

    starts: Tensor  # first position of each sample, [B]
    lengths: Tensor  # positions of each sample, [B]
    samples: Tensor  # sample of each position, [C]; any sample where a position belongs to none
    offsets: Tensor  # of each position within its sample, [C]
    is_inside: Tensor  # whether a position belongs to a sample, bool [C]
    max_length: int

    def last(self, count: int) -> tuple["JaggedPositions", Tensor]:
        """Return the last positions of each sample as positions of their own, [B * count], and which they are of these."""
        number = torch.arange(self.starts.shape[0] * count, device=self.starts.device)
        samples = number // count
        offsets = self.lengths[samples] - count + number % count
        lengths = torch.full_like(self.lengths, count)
        inside = torch.ones_like(number, dtype=torch.bool)
        starts = torch.arange(self.starts.shape[0], device=number.device) * count
        last = JaggedPositions(starts, lengths, samples, offsets, inside, count)
        return last, self.starts[samples] + offsets


def hstu_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    norm: Tensor,
    keys: JaggedPositions,
    queries: JaggedPositions | None = None,
    *,
    num_candidates: int = 1,
    bias: Tensor | None = None,
) -> Tensor:
    """Return the attention of queries [Q, H, K] to keys and values [C, H, K], as [Q, H, K]; zeros where a query has no sample.

    `norm`: n of each sample, [B]. `queries`: the last positions of each sample; None for all. `bias`: [B, L of queries, L].
    Products are added in float32 or wider.
    """
    queries = keys if queries is None else queries
    wide = torch.promote_types(q.dtype, torch.float32)
    padded_q = pad(q.to(wide), queries)
    padded_k, padded_v = (pad(of.to(wide), keys) for of in (k, v))
    scores = torch.einsum("bihk,bjhk->bhij", padded_q, padded_k) * q.shape[-1] ** -0.5
    if bias is not None:
        scores = scores + bias.unsqueeze(1)
    row = torch.arange(queries.max_length, device=q.device)
    offset = row + (keys.lengths - queries.lengths)[:, None]  # [B, L of queries]
    seen = may_see(offset[:, :, None], keys.lengths[:, None, None], keys.max_length, num_candidates)
    weights = torch.where(seen.unsqueeze(1), silu(scores), 0) / norm.to(wide).view(-1, 1, 1, 1)
    return unpad(torch.einsum("bhij,bjhk->bihk", weights, padded_v), queries).to(v.dtype)


def may_see(offset: Tensor, lengths: Tensor, num_keys: int, num_candidates: int) -> Tensor:
    """Return which of `num_keys` keys the queries at these offsets see, [..., num_keys]; the others end in a dimension of 1."""
    key = torch.arange(num_keys, device=offset.device)
    return (key == offset) | ((key < offset) & (key < lengths - num_candidates))
