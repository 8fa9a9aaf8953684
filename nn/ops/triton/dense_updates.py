"""SGD and Adagrad of the dense component as one Triton kernel each, in one pass over memory.

Torch's fused SGD gives a program 65,536 weights, which leaves most of a GPU idle; its Adagrad passes over the weights about
eight times. The arithmetic of Adagrad is that of `torch.optim.Adagrad`, with the same roundings.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from nn.ops.triton.parameters import ALIGN, BLOCK, NUM_WARPS, TensorBlocks


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
        self._found: tuple[list[int], TensorBlocks] | None = None

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
        num_blocks = blocks.table.shape[1]
        kernel[(num_blocks,)](
            self._parameters[0].detach(),
            gradients[0],
            *states,
            blocks.table,
            num_blocks,
            blocks.num_aligned,
            rate,
            found_inf,
            *further,
            ALIGN=ALIGN,
            num_warps=NUM_WARPS,
        )

    def _blocks(self, gradients: list[Tensor]) -> TensorBlocks:
        addresses = [gradient.data_ptr() for gradient in gradients]
        if self._found is None or self._found[0] != addresses:
            weights = [weight.detach() for weight in self._parameters]
            self._found = addresses, TensorBlocks([weights, gradients, *self._states()])
        return self._found[1]

    def _states(self) -> list[list[Tensor]]:
        return []

    def _kernel(self) -> tuple[Any, tuple[Tensor, ...], tuple[float, ...]]:
        """Return the kernel, its arguments behind weights and gradients, and its last ones."""
        raise NotImplementedError


class FusedSGD(_Fused):
    """`torch.optim.SGD` without momentum and decay.

    `params`: float32 parameters on one device.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float | Tensor = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    def _kernel(self) -> tuple[Any, tuple[Tensor, ...], tuple[float, ...]]:
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

    def _kernel(self) -> tuple[Any, tuple[Tensor, ...], tuple[float, ...]]:
        first = self.state[self._parameters[0]]["sum"]
        return _dense_adagrad, (first, self._steps), (self.param_groups[0]["eps"],)


@triton.jit
def _dense_sgd(
    weights, gradients, blocks, num_blocks, num_aligned, rate, found_inf, ALIGN: tl.constexpr
):
    if tl.load(found_inf) != 0:
        return
    if tl.program_id(0) < num_aligned:
        _sgd_block(weights, gradients, blocks, num_blocks, rate, ALIGN)
    else:
        _sgd_block(weights, gradients, blocks, num_blocks, rate, 1)


@triton.jit
def _sgd_block(weights, gradients, blocks, num_blocks, rate, ALIGN: tl.constexpr):
    entry = blocks + tl.program_id(0)
    weight_at = weights + tl.multiple_of(tl.load(entry), ALIGN)
    gradient_at = gradients + tl.multiple_of(tl.load(entry + num_blocks), ALIGN)
    count = tl.multiple_of(tl.load(entry + 2 * num_blocks), ALIGN)
    offset = tl.arange(0, BLOCK)
    inside = offset < count
    gradient = tl.load(gradient_at + offset, mask=inside, other=0.0)
    weight = tl.load(weight_at + offset, mask=inside, other=0.0)
    tl.store(weight_at + offset, weight - tl.load(rate) * gradient, mask=inside)


@triton.jit
def _dense_adagrad(
    weights,
    gradients,
    sums,
    steps,
    blocks,
    num_blocks,
    num_aligned,
    rate,
    found_inf,
    eps,
    ALIGN: tl.constexpr,
):
    if tl.load(found_inf) != 0:
        return
    if tl.program_id(0) < num_aligned:
        _adagrad_block(weights, gradients, sums, steps, blocks, num_blocks, rate, eps, ALIGN)
    else:
        _adagrad_block(weights, gradients, sums, steps, blocks, num_blocks, rate, eps, 1)


@triton.jit
def _adagrad_block(
    weights, gradients, sums, steps, blocks, num_blocks, rate, eps, ALIGN: tl.constexpr
):
    entry = blocks + tl.program_id(0)
    weight_at = weights + tl.multiple_of(tl.load(entry), ALIGN)
    gradient_at = gradients + tl.multiple_of(tl.load(entry + num_blocks), ALIGN)
    sum_at = sums + tl.multiple_of(tl.load(entry + 2 * num_blocks), ALIGN)
    count = tl.multiple_of(tl.load(entry + 3 * num_blocks), ALIGN)
    begins = tl.load(entry + 4 * num_blocks)
    if begins >= 0:
        # The first block of a parameter counts its updates.
        tl.store(steps + begins, tl.load(steps + begins) + 1)
    offset = tl.arange(0, BLOCK)
    inside = offset < count
    gradient = tl.load(gradient_at + offset, mask=inside, other=0.0)
    total = tl.load(sum_at + offset, mask=inside, other=0.0) + gradient * gradient
    tl.store(sum_at + offset, total, mask=inside)
    weight = tl.load(weight_at + offset, mask=inside, other=0.0)
    change = tl.div_rn(gradient * -tl.load(rate), tl.sqrt_rn(total) + eps)
    tl.store(weight_at + offset, weight + change, mask=inside)
