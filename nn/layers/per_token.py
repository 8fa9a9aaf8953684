"""Networks with weights of their own for every token, and their experts (RankMixer, arXiv:2507.15551)."""

import math

import torch
from torch import Tensor, nn

from nn.layers.fp8 import Fp8Network
from nn.layers.initialization import truncated_glorot_, truncated_normal_
from nn.layers.mlp import round_up
from nn.layers.pass_state import PassLayer

# B: samples, T: tokens, D: columns of a token, E: experts of a token, K: columns of an expert's hidden layer

FIRST_STRENGTH, STRENGTH_FACTOR = 1e-8, 1.2
"""Of the penalty on gates, from ReMoE (arXiv:2412.14711, section 3.3), since RankMixer's authors give none."""


class PerTokenLinear(nn.Module):
    """Linear layers W_t x_t + b_t, one per token; tokens are the first dimension, so that all are one batched product."""

    def __init__(self, tokens: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(tokens, inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(tokens, 1, outputs))
        self.initialise(torch.default_generator)

    def initialise(self, generator: torch.Generator) -> None:
        """Draw the weights as those of an MLP; biases begin at zero."""
        truncated_glorot_(self.weight, generator)

    def forward(self, x: Tensor) -> Tensor:
        """Map [T, B, inputs] to [T, B, outputs]."""
        inputs, outputs = self.weight.shape[1:]
        if inputs >= outputs:
            return torch.baddbmm(self.bias.to(x.dtype), x, self.weight.to(x.dtype))
        # `baddbmm` writes the bias to all outputs before it adds to them; here it is the weight of an input that is 1.
        more = round_up(inputs + 1) - inputs
        weight = torch.cat([self.weight, self.bias], dim=1)
        weight = nn.functional.pad(weight, (0, 0, 0, more - 1)).to(x.dtype)
        return torch.bmm(nn.functional.pad(x, (0, more), value=1.0), weight)


class PerTokenExperts(nn.Module):
    """Per-token feed-forward networks (section 3.3.2), or a sparse mixture of them (section 3.4).

    v_t = sum_j G_tj e_tj(s_t), e_tj(s) = W_tj' GELU(W_tj s + b_tj) + b_tj'; G is 1 for a single expert. The hidden layers
    of a token's experts lie side by side, so both products of all experts are one product each, of zeros where a gate is
    closed: a closed gate saves no time here. `fp8`: the products of a single expert in 8 bits, or None; see `use_fp8`.
    """

    fp8_term = "per-token networks"

    def __init__(self, tokens: int, columns: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.experts = experts
        self.up = nn.Parameter(torch.empty(tokens, columns, experts * hidden))
        self.up_bias = nn.Parameter(torch.zeros(tokens, 1, experts * hidden))
        self.down = nn.Parameter(torch.empty(tokens, experts * hidden, columns))
        self.down_bias = nn.Parameter(torch.zeros(tokens, experts, columns))
        self._std = math.sqrt(2 / (columns + hidden))
        self.fp8: Fp8Network | None = None
        self.initialise(torch.default_generator)

    def initialise(self, generator: torch.Generator) -> None:
        """Draw the weights as those of an MLP of one expert's widths; biases begin at zero."""
        truncated_normal_(self.up, self._std, generator)
        truncated_normal_(self.down, self._std, generator)

    def use_fp8(self, *, weight_gradients: bool) -> None:
        """Compute both products in 8 bits in training, gradients of weights too or in 16 bits."""
        self.fp8 = Fp8Network(2, 2, weight_gradients=weight_gradients)

    def fp8_products(self) -> list[tuple[str, int, int]]:
        tokens, columns, hidden = self.up.shape
        return [("up", columns, hidden), ("down", hidden, columns)] * tokens

    def forward(self, x: Tensor, gates: Tensor | None) -> Tensor:
        """Map [T, B, D] and the gates [T, B, E], None for a single expert, to [T, B, D]."""
        if self.fp8 is not None and self.training:
            return self.fp8(x, self.up, self.down, self.up_bias) + self.down_bias.to(x.dtype)
        hidden = torch.baddbmm(self.up_bias.to(x.dtype), x, self.up.to(x.dtype))
        hidden = nn.functional.gelu(hidden)
        bias = self.down_bias.to(hidden.dtype)
        if gates is not None:
            gates = gates.to(hidden.dtype)
            hidden = hidden.unflatten(2, (self.experts, -1)) * gates.unsqueeze(3)
            hidden, bias = hidden.flatten(2), torch.bmm(gates, bias)
        return torch.baddbmm(bias, hidden, self.down.to(hidden.dtype))

    @torch.compiler.disable
    def between_norms(self, x: Tensor, before: nn.LayerNorm, after: nn.LayerNorm) -> Tensor:
        """Compute a whole `nn.models.rankmixer.RankMixerBlock` of one expert on a GPU, [T, B, D] to the same."""
        # Only CUDA builds of torch include Triton.
        from nn.ops.triton.rankmixer import Parameters, mixer_block

        products = self.up, self.down, self.up_bias, self.down_bias
        norms = before.weight, before.bias, after.weight, after.bias
        fp8 = self.fp8 if self.training else None
        network = None if fp8 is None else fp8.begin_pass(*products[:3])
        return mixer_block(x, before.eps, Parameters(*products, *norms), network)


class ReluRouter(PassLayer):
    """Gates ReLU(h(s)) of two routers, of which evaluation uses the second alone (section 3.4, equations 12 and 13).

    Only the second router's gates are penalised, by lambda * sum of them, so that it becomes sparse while the first keeps
    all experts in training. lambda follows the share of open gates: after a step it is multiplied by 1.2, or divided if that
    share is below the wanted one. The paper does not say how training joins both routers; here it takes the mean of their
    gates, so both learn from the task.

    Args:
        tokens: T.
        columns: D.
        experts: E.
        active: wanted share of open gates.
    """

    strength: Tensor
    _open: Tensor
    reduces_over_ranks = True

    def __init__(self, tokens: int, columns: int, experts: int, active: float) -> None:
        super().__init__()
        self.active = active
        self.training_router = PerTokenLinear(tokens, columns, experts)
        self.router = PerTokenLinear(tokens, columns, experts)
        self.register_buffer("strength", torch.full((1,), FIRST_STRENGTH))
        # A captured pass writes it, also while it is captured; `update` uses that of passes that are applied.
        self.register_buffer("_open", torch.zeros(1), persistent=False)
        self._penalty: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Map [T, B, D] to gates [T, B, E]."""
        gates = torch.relu(self.router(x))
        if not self.training:
            return gates
        state = self.pass_state
        is_valid = torch.arange(x.shape[1], device=x.device) < state.num_valid
        own = torch.where(is_valid[:, None], gates.float(), 0)
        self._penalty = self.strength * own.sum() / state.global_valid
        count = state.all_reduce_sum((own.detach() > 0).sum().float().view(1))
        self._open.copy_(count / (state.global_valid * gates.shape[0] * gates.shape[2]))
        return (gates + torch.relu(self.training_router(x))) / 2

    def penalty(self) -> Tensor:
        """Return this rank's share of the latest training pass's penalty, the mean over the rows, []."""
        assert self._penalty is not None, "a training pass came before"
        return self._penalty.squeeze()

    @torch.no_grad()
    def update(self) -> None:
        """Queue the change of lambda by the share of open gates in the latest pass."""
        self.strength.mul_(STRENGTH_FACTOR ** torch.sign(self._open - self.active))

    def extra_repr(self) -> str:
        return f"active={self.active:g}"
