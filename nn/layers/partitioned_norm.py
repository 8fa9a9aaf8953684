"""Batch normalization of every domain's rows by themselves (STAR, arXiv:2101.11427)."""

from typing import Any

import torch
from torch import Tensor, nn

from nn.layers.pass_state import PassLayer, PassState

# B: samples, C: columns, P: domains


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sums: Tensor, state: PassState) -> Tensor:
        ctx.state = state
        return state.all_reduce_sum(sums.clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.state.all_reduce_sum(grad.clone()), None


class PartitionedNorm(PassLayer):
    """Partitioned Normalization: (g g_p) (x - mean_p) / sqrt(variance_p + eps) + b + b_p, for the rows of domain p.

    In training, mean and variance are those of the domain's valid rows in the global batch, of which a domain without any
    changes nothing; in evaluation the running ones, of momentum .1. The paper's batches are of one domain, these of all.
    """

    running_mean: Tensor  # [P, C], float32; a part of checkpoints
    running_var: Tensor  # unbiased, [P, C], float32; a part of checkpoints
    _latest: Tensor
    reduces_over_ranks = True
    eps, momentum = 1e-5, 0.1

    def __init__(self, domains: int, columns: int) -> None:
        super().__init__()
        self.scale, self.bias = (
            nn.Parameter(torch.ones(columns)),
            nn.Parameter(torch.zeros(columns)),
        )
        self.domain_scale = nn.Parameter(torch.ones(domains, columns))
        self.domain_bias = nn.Parameter(torch.zeros(domains, columns))
        self.register_buffer("running_mean", torch.zeros(domains, columns))
        self.register_buffer("running_var", torch.ones(domains, columns))
        # Rows of every domain, and the sums of x and of its squares, in the latest batch. A captured pass writes them, also
        # while it is captured, and `update` uses those of passes that are applied.
        sums = torch.zeros(domains, 1 + 2 * columns, dtype=torch.float64)
        self.register_buffer("_latest", sums, persistent=False)

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        """Map x [B, C] and each row's domain as 1 among 0 [B, P] to [B, C]."""
        mean, variance = self.running_mean, self.running_var
        if self.training:
            state = self.pass_state
            is_valid = torch.arange(len(x), device=x.device) < state.num_valid
            counted, exact = (chosen * is_valid.unsqueeze(1)).double().T, x.double()
            own = [counted.sum(1, keepdim=True), counted @ exact, counted @ exact.square()]
            sums = _SumOverRanks.apply(torch.cat(own, dim=1), state)
            self._latest.copy_(sums.detach() + (self._latest if state.chunk else 0))
            mean, variance = (of_x.to(self.scale.dtype) for of_x in self._moments(sums)[1:])
        scale = (self.scale * self.domain_scale) * torch.rsqrt(variance + self.eps)
        shift = self.bias + self.domain_bias - mean * scale
        return (x * (chosen @ scale) + chosen @ shift).to(x.dtype)

    @torch.no_grad()
    def update(self) -> None:
        """Queue the update of the running mean and variance with those of the latest batch."""
        count, mean, variance = self._moments(self._latest)
        share = self.momentum * (count > 0).float()
        self.running_mean.lerp_(mean.float(), share)
        self.running_var.lerp_((variance * count / (count - 1).clamp(min=1)).float(), share)

    @staticmethod
    def _moments(sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows [P, 1], mean [P, C] and variance [P, C] of sums in float64."""
        columns = sums.shape[1] // 2
        count, total, squares = sums.split([1, columns, columns], dim=1)
        mean = total / count.clamp(min=1)
        return count, mean, (squares / count.clamp(min=1) - mean.square()).clamp(min=0)
