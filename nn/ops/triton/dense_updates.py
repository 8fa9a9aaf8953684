"""SGD, Adagrad and Adam of the dense component as one Triton kernel each, in one pass over memory.

Torch's fused optimizers give a program 65,536 weights, which leaves most of a GPU idle. The arithmetic of Adagrad is that of
`torch.optim.Adagrad`, with the same roundings.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from nn.ops.triton.parameters import ALIGN, NUM_WARPS, Blocks, block_of, blocks_of, is_there


class _Fused(torch.optim.Optimizer):
    """An optimizer whose step is one kernel.

    Weights and gradients must stay where they are; a gradient that moves is found again, which costs host time.

    `params`: float32 parameters on one device. `defaults`: of the parameter group; `lr` is a number or a tensor of the
    device. `found_inf`: float32 [] on the device; if it is not 0, `step` changes nothing.
    """

    def __init__(self, params: Iterable[nn.Parameter], defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)
        self._parameters = [weight for group in self.param_groups for weight in group["params"]]
        first = self._parameters[0]
        self.found_inf: Tensor | None = None
        self._zero, self._rate = first.new_zeros(1), first.new_zeros(1)
        self._found: tuple[list[int], Blocks] | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Apply one update to all parameters; return nothing, as without a closure there is no loss."""
        assert closure is None, "a closure would evaluate the model again"
        (group,) = self.param_groups
        rate = group["lr"]
        if not isinstance(rate, Tensor):
            rate = self._rate.fill_(rate)
        found_inf = self._zero if self.found_inf is None else self.found_inf
        gradients = [weight.grad for weight in self._parameters]
        blocks, (kernel, states, further) = self._blocks(gradients), self._kernel()
        tensors = self._parameters[0].detach(), gradients[0], *states
        arguments = tensors, blocks, rate, found_inf, *further
        kernel[(blocks.num_blocks,)](*arguments, ALIGN=ALIGN, num_warps=NUM_WARPS)

    def _blocks(self, gradients: list[Tensor]) -> Blocks:
        addresses = [gradient.data_ptr() for gradient in gradients]
        if self._found is None or self._found[0] != addresses:
            weights = [weight.detach() for weight in self._parameters]
            self._found = addresses, blocks_of([weights, gradients, *self._states()])
        return self._found[1]

    def _states(self) -> list[list[Tensor]]:
        return []

    def _kernel(self) -> tuple[Any, tuple[Tensor, ...], tuple[Any, ...]]:
        """Return the kernel, its tensors behind weights and gradients, and its last arguments."""
        raise NotImplementedError


class FusedSGD(_Fused):
    """`torch.optim.SGD` without momentum and decay.

    `params`: float32 parameters on one device.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float | Tensor = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    def _kernel(self) -> tuple[Any, tuple[Tensor, ...], tuple[Any, ...]]:
        return _dense_sgd, (), ()


class FusedAdagrad(_Fused):
    """`torch.optim.Adagrad` without its decays, with torch's names of its state.

    `params`: float32 parameters on one device.
    """

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float | Tensor = 1e-2, eps: float = 1e-10
    ) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})
        self._steps = torch.zeros(len(self._parameters), device=self._zero.device)
        for weight, steps in zip(self._parameters, self._steps, strict=True):
            self.state[weight] = {"step": steps, "sum": torch.zeros_like(weight)}

    def _states(self) -> list[list[Tensor]]:
        return [[self.state[weight]["sum"] for weight in self._parameters]]

    def _kernel(self) -> tuple[Any, tuple[Tensor, ...], tuple[Any, ...]]:
        first = self.state[self._parameters[0]]["sum"]
        return _dense_adagrad, (first,), (self._steps, self.param_groups[0]["eps"])


class FusedAdam(_Fused):
    """`torch.optim.AdamW`, which without decay is `torch.optim.Adam`, with torch's names of its state.

    `params`: float32 parameters on one device.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, options)
        self._steps = torch.zeros(len(self._parameters), device=self._zero.device)
        for weight, steps in zip(self._parameters, self._steps, strict=True):
            moments = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
            self.state[weight] = {"step": steps, **moments}

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        # All programs of a parameter read the number of its updates, so none of them counts.
        self._steps += 1 if self.found_inf is None else self.found_inf == 0
        return super().step(closure)

    def _states(self) -> list[list[Tensor]]:
        names = "exp_avg", "exp_avg_sq"
        return [[self.state[weight][name] for weight in self._parameters] for name in names]

    def _kernel(self) -> tuple[Any, tuple[Tensor, ...], tuple[Any, ...]]:
        group, first = self.param_groups[0], self.state[self._parameters[0]]
        rests = [1 - beta for beta in group["betas"]]
        logarithms = [math.log(beta) if beta else -math.inf for beta in group["betas"]]
        numbers = *rests, *logarithms, group["eps"], group["weight_decay"]
        return _dense_adam, (first["exp_avg"], first["exp_avg_sq"]), (self._steps, numbers)


@triton.jit
def _dense_sgd(tensors, blocks, rate, found_inf, ALIGN: tl.constexpr):
    if tl.load(found_inf) != 0:
        return
    if tl.program_id(0) < blocks.num_aligned:
        _sgd_block(tensors, blocks, rate, ALIGN)
    else:
        _sgd_block(tensors, blocks, rate, 1)


@triton.jit
def _sgd_block(tensors, blocks, rate, ALIGN: tl.constexpr):
    weight_at = block_of(tensors, 0, blocks, ALIGN)
    gradient_at = block_of(tensors, 1, blocks, ALIGN)
    inside = is_there(2, blocks, ALIGN)
    gradient = tl.load(gradient_at, mask=inside, other=0.0)
    weight = tl.load(weight_at, mask=inside, other=0.0)
    tl.store(weight_at, weight - tl.load(rate) * gradient, mask=inside)


@triton.jit
def _dense_adagrad(tensors, blocks, rate, found_inf, steps, eps, ALIGN: tl.constexpr):
    if tl.load(found_inf) != 0:
        return
    if tl.program_id(0) < blocks.num_aligned:
        _adagrad_block(tensors, blocks, rate, steps, eps, ALIGN)
    else:
        _adagrad_block(tensors, blocks, rate, steps, eps, 1)


@triton.jit
def _adagrad_block(tensors, blocks, rate, steps, eps, ALIGN: tl.constexpr):
    weight_at = block_of(tensors, 0, blocks, ALIGN)
    gradient_at = block_of(tensors, 1, blocks, ALIGN)
    sum_at = block_of(tensors, 2, blocks, ALIGN)
    inside = is_there(3, blocks, ALIGN)
    begins = tl.load(blocks.table + tl.program_id(0) + 4 * blocks.num_blocks)
    if begins >= 0:
        # The first block of a parameter counts its updates.
        tl.store(steps + begins, tl.load(steps + begins) + 1)
    gradient = tl.load(gradient_at, mask=inside, other=0.0)
    total = tl.load(sum_at, mask=inside, other=0.0) + gradient * gradient
    tl.store(sum_at, total, mask=inside)
    weight = tl.load(weight_at, mask=inside, other=0.0)
    change = tl.div_rn(gradient * -tl.load(rate), tl.sqrt_rn(total) + eps)
    tl.store(weight_at, weight + change, mask=inside)


@triton.jit
def _dense_adam(tensors, blocks, rate, found_inf, steps, numbers, ALIGN: tl.constexpr):
    if tl.load(found_inf) != 0:
        return
    rest1, rest2, log_beta1, log_beta2, eps, decay = numbers
    at = tl.load(blocks.table + 5 * blocks.num_blocks + tl.program_id(0))
    # In double: 1 - 0.999 keeps four digits only in single precision.
    count = tl.load(steps + tl.where(at < 0, -1 - at, at)).to(tl.float64)
    size = tl.load(rate) / (1 - tl.exp(count * log_beta1)).to(tl.float32)
    root = tl.sqrt_rn((1 - tl.exp(count * log_beta2)).to(tl.float32))
    kept = 1 - tl.load(rate) * decay
    numbers = rest1, rest2, size, root, eps, kept
    if tl.program_id(0) < blocks.num_aligned:
        _adam_block(tensors, blocks, numbers, ALIGN)
    else:
        _adam_block(tensors, blocks, numbers, 1)


@triton.jit
def _adam_block(tensors, blocks, numbers, ALIGN: tl.constexpr):
    rest1, rest2, size, root, eps, kept = numbers
    weight_at = block_of(tensors, 0, blocks, ALIGN)
    gradient_at = block_of(tensors, 1, blocks, ALIGN)
    mean_at = block_of(tensors, 2, blocks, ALIGN)
    square_at = block_of(tensors, 3, blocks, ALIGN)
    inside = is_there(4, blocks, ALIGN)
    gradient = tl.load(gradient_at, mask=inside, other=0.0)
    mean = tl.load(mean_at, mask=inside, other=0.0)
    mean += rest1 * (gradient - mean)
    tl.store(mean_at, mean, mask=inside)
    square = tl.load(square_at, mask=inside, other=0.0)
    square = square - rest2 * square + rest2 * gradient * gradient
    tl.store(square_at, square, mask=inside)
    weight = tl.load(weight_at, mask=inside, other=0.0) * kept
    change = tl.div_rn(size * mean, tl.div_rn(tl.sqrt_rn(square), root) + eps)
    tl.store(weight_at, weight - change, mask=inside)
