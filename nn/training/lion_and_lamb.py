"""Lion and LAMB of the dense component, in operations that a CUDA graph captures."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from configs.schema import OptimizerConfig
from nn.embedding.rules.lion import lion_step


class _Captured(torch.optim.Optimizer):
    """`lr` of its group is a number or a tensor of the device. `found_inf`: if it is not 0, `step` changes nothing."""

    states: tuple[str, ...] = ()

    def __init__(self, params: Iterable[nn.Parameter], config: OptimizerConfig) -> None:
        names = ("lr", "beta1", "beta2", "eps", "weight_decay")
        super().__init__(params, {name: getattr(config, name) for name in names})
        self.found_inf: Tensor | None = None
        for weight in self.param_groups[0]["params"]:
            self.state[weight] = {name: torch.zeros_like(weight) for name in self.states}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Apply one update to all parameters; return nothing, as without a closure there is no loss."""
        assert closure is None, "a closure would evaluate the model again"
        (group,) = self.param_groups
        for weight in group["params"]:
            gradient, is_good = weight.grad, weight.new_ones(())
            if self.found_inf is not None:
                is_good = (self.found_inf == 0).to(weight.dtype)
                gradient = torch.where(is_good > 0, gradient, 0)
            self._update(weight, gradient, self.state[weight], group, is_good)

    def _update(
        self,
        weight: Tensor,
        gradient: Tensor,
        state: dict[str, Tensor],
        group: dict[str, Any],
        is_good: Tensor,
    ) -> None:
        """Change weight and state in place where `is_good` [] is 1; where it is 0 they stay."""
        raise NotImplementedError


class Lion(_Captured):
    """Lion (arXiv:2302.06675, program 2), as that of tables: w -= lr (sign(beta1 m + (1 - beta1) g) + weight_decay w)."""

    states = ("mean",)

    def _update(self, weight, gradient, state, group, is_good) -> None:  # type: ignore[no-untyped-def]
        rate = is_good * group["lr"]
        direction = lion_step(state["mean"], gradient, group, is_good)
        weight.mul_(1 - rate * group["weight_decay"]).sub_(direction * rate)


class LAMB(_Captured):
    """LAMB (arXiv:1904.00962, algorithm 2, with phi the identity): w -= lr |w| / |r| r, with Adam's step plus decay as r.

    r = m' / (sqrt(v') + eps) + weight_decay w, with the corrected moments m' and v'; a parameter of which a norm is 0 moves by
    lr r, as in the authors' program. Every parameter is a layer of the paper; |w| counts the weights of inputs that `MLP` pads.
    """

    states = ("mean", "variance")

    def __init__(self, params: Iterable[nn.Parameter], config: OptimizerConfig) -> None:
        super().__init__(params, config)
        for weight, state in self.state.items():
            state["step"] = torch.zeros((), device=weight.device)

    def _update(self, weight, gradient, state, group, is_good) -> None:  # type: ignore[no-untyped-def]
        mean = state["mean"].lerp_(gradient, is_good * (1 - group["beta1"]))
        variance = state["variance"].lerp_(gradient.square(), is_good * (1 - group["beta2"]))
        # In double: 1 - 0.999 keeps four digits only in single precision. A first step that is skipped divides by no 0.
        count = state["step"].add_(is_good).double().clamp(min=1)
        mean = mean / (1 - group["beta1"] ** count)
        variance = variance / (1 - group["beta2"] ** count)
        ratio = mean / (variance.sqrt() + group["eps"]) + group["weight_decay"] * weight
        norms = weight.norm(), ratio.norm()
        trust = torch.where((norms[0] > 0) & (norms[1] > 0), norms[0] / norms[1], 1.0)
        weight.sub_(ratio * (trust * is_good * group["lr"]))
