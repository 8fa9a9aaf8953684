"""Batch normalization (Ioffe and Szegedy, arXiv:1502.03167) over the global batch, or over the rows of each domain."""

from math import gcd
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from nn.layers.pass_state import PassLayer, PassState
from nn.ops import batch_norm as plain
from nn.ops.fused_linear import FUSED_DTYPES

MOST_PARTS = 64
"""Of a batch whose rows are summed by domain."""


class BatchNorm(PassLayer):
    """Normalize columns by mean and variance, then scale and shift them, as `torch.nn.BatchNorm1d` on one process.

    In training, mean and variance are those of the valid rows of the global batch: ranks sum moments in the forward pass
    and gradients in the backward pass, and padding rows count in no sum. In evaluation they are the running ones.
    A step that takes its batch in parts (`train.accumulate`) normalizes each part by itself; the running ones take their mean.
    Statistics are float32, under autocast too. A batch of one row is normalized to the bias.

    `momentum`: share of a batch in the running mean and variance. `affine`: whether columns are scaled and shifted after
    that; False has no parameters. `kept_columns`: columns that the backward pass keeps of the input. Raises ValueError:
    `columns` or `eps` is not positive, or `momentum` is not above 0 and at most 1.
    """

    weight: Tensor
    bias: Tensor
    running_mean: Tensor  # [columns], float32; a part of checkpoints
    running_var: Tensor  # unbiased, [columns], float32; a part of checkpoints
    _latest: Tensor
    reduces_over_ranks = True

    def __init__(
        self, columns: int, eps: float = 1e-5, momentum: float = 0.1, *, affine: bool = True
    ) -> None:
        super().__init__()
        if columns < 1 or not eps > 0 or not 0 < momentum <= 1:
            raise ValueError(
                f"got columns={columns}, eps={eps:g}, momentum={momentum:g}; want at least one column, a positive eps, and "
                "a momentum above 0 and at most 1"
            )
        self.eps, self.momentum = eps, momentum
        self.kept_columns = columns
        for name, values in (("weight", torch.ones(columns)), ("bias", torch.zeros(columns))):
            if affine:
                self.register_parameter(name, nn.Parameter(values))
            else:
                self.register_buffer(name, values, persistent=False)
        self.register_buffer("running_mean", torch.zeros(columns))
        self.register_buffer("running_var", torch.ones(columns))
        # Mean and unbiased variance of the latest pass. A captured pass writes them, also while it is captured, and
        # `update` uses those of passes that are applied.
        self.register_buffer("_latest", torch.zeros(2, columns), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, ..., columns] to the same shape and dtype; the first dimension is the rows of this rank."""
        if not self.training:
            scale = self.weight * torch.rsqrt(self.running_var + self.eps)
            return (x * scale + (self.bias - self.running_mean * scale)).to(x.dtype)
        return self._normalise(x, self.pass_state)

    @torch.no_grad()
    def update(self) -> None:
        """Queue the update of the running mean and variance with those of the latest pass."""
        running = [self.running_mean, self.running_var]
        torch._foreach_lerp_(running, list(self._latest.unbind()), self.momentum)

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, eps={self.eps:g}, momentum={self.momentum:g}"

    @torch.compiler.disable
    def _normalise(self, x: Tensor, state: PassState) -> Tensor:
        matrix = x.reshape(-1, x.shape[-1])
        out = _BatchNorm.apply(matrix, self.weight, self.bias, self, state, len(matrix) // len(x))
        return out.view(x.shape)


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        layer: BatchNorm,
        state: PassState,
        rows_per_sample: int,
    ) -> Tensor:
        ops, x = _ops(x), x.contiguous()
        num_valid = state.num_valid * rows_per_sample
        count = (state.global_valid * rows_per_sample).double()
        total, squares, of_means = state.all_reduce_sum(ops.moments(x, num_valid))
        mean = total / count
        squares = (squares + of_means - total * mean).clamp(min=0)
        dtype = plain.statistics_dtype(x)
        latest = torch.stack([mean, squares / (count - 1).clamp(min=1)])
        if state.chunk == 0:
            layer._latest.copy_(latest)
        else:
            # The mean over the parts of the batch so far.
            layer._latest.lerp_(latest.float(), 1 / (state.chunk + 1))
        rstd = torch.rsqrt(squares / count + layer.eps).to(dtype)
        mean = mean.to(dtype)
        ctx.save_for_backward(x, weight, mean, rstd, num_valid, count)
        ctx.state = state
        return ops.normalise(x, num_valid, mean, rstd, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd, num_valid, count = ctx.saved_tensors
        ops, grad = _ops(x), grad.contiguous()
        sums = ops.gradient_sums(grad, x, num_valid, mean, rstd)
        mean_sums = (ctx.state.all_reduce_sum(sums.clone()) / count).to(mean.dtype)
        grad_x = ops.input_gradient(grad, x, num_valid, mean, rstd, weight, mean_sums)
        grad_bias, grad_weight = sums.to(weight.dtype)
        return grad_x, grad_weight, grad_bias, None, None, None


def _ops(x: Tensor) -> ModuleType:
    if not x.is_cuda or x.dtype not in FUSED_DTYPES:
        return plain
    # Only CUDA builds of torch include Triton.
    from nn.ops.triton import batch_norm

    return batch_norm


# B: samples, C: columns, P: domains


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sums: Tensor, state: PassState) -> Tensor:
        ctx.state = state
        return state.all_reduce_sum(sums.clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.state.all_reduce_sum(grad.clone()), None


def _sums(chosen: Tensor, x: Tensor) -> Tensor:
    """Sum the rows of x [B, C] of every domain, [P, C].

    One product of as few rows as there are domains keeps few multiprocessors busy: parts of a batch are products of their own.
    """
    parts = gcd(len(x), MOST_PARTS)
    return (chosen.unflatten(0, (parts, -1)).mT @ x.unflatten(0, (parts, -1))).sum(0)


class _OfDomain(torch.autograd.Function):
    """Vectors [P, C] of the domain of each row, [B, C]."""

    @staticmethod
    def forward(ctx: Any, chosen: Tensor, vectors: Tensor) -> Tensor:
        ctx.save_for_backward(chosen)
        return chosen @ vectors

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (chosen,) = ctx.saved_tensors
        return None, _sums(chosen, grad.to(chosen.dtype))


class PartitionedNorm(PassLayer):
    """Partitioned Normalization of STAR (arXiv:2101.11427), for the rows of domain p.

    It is (g g_p) (x - mean_p) / sqrt(variance_p + eps) + b + b_p. In training, mean and variance are those of the domain's valid
    rows in the global batch, of which a domain without any changes nothing; in evaluation the running ones, of momentum .1.
    The paper's batches are of one domain, these of all.
    """

    running_mean: Tensor  # [P, C], float32; a part of checkpoints
    running_var: Tensor  # unbiased, [P, C], float32; a part of checkpoints
    _latest: Tensor
    reduces_over_ranks = True
    eps, momentum = 1e-5, 0.1

    def __init__(self, domains: int, columns: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(columns))
        self.bias = nn.Parameter(torch.zeros(columns))
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
            counted, exact = (chosen * is_valid.unsqueeze(1)).double(), x.double()
            own = [counted.sum(0)[:, None], _sums(counted, exact), _sums(counted, exact.square())]
            sums = _SumOverRanks.apply(torch.cat(own, dim=1), state)
            self._latest.copy_(sums.detach() + (self._latest if state.chunk else 0))
            mean, variance = (of_x.to(self.scale.dtype) for of_x in self._moments(sums)[1:])
        scale = (self.scale * self.domain_scale) * torch.rsqrt(variance + self.eps)
        shift = self.bias + self.domain_bias - mean * scale
        return (x * _OfDomain.apply(chosen, scale) + _OfDomain.apply(chosen, shift)).to(x.dtype)

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
