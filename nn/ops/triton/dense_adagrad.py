"""Adagrad of the dense component as one Triton kernel; torch's `foreach` passes over the weights about eight times.

The arithmetic is that of `torch.optim.Adagrad`, with the same roundings.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

BLOCK = 4096
"""Elements per program."""
NUM_WARPS = 8
ALIGN = 16


class FusedAdagrad(torch.optim.Optimizer):
    """`torch.optim.Adagrad` without its decays, in one pass over memory.

    Weights and gradients must stay where they are; a gradient that moves is found again, which costs host time.

    Args:
        params: float32 parameters on one device.
        lr: learning rate, a number or a tensor of the device.
        eps: added to the root of the sum of squares.

    Attributes:
        found_inf: float32 [] on the device; if it is not 0, `step` changes nothing.
    """

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float | Tensor = 1e-2, eps: float = 1e-10
    ) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})
        self._parameters = [weight for group in self.param_groups for weight in group["params"]]
        first = self._parameters[0]
        # In one memory, in order.
        counts = torch.zeros(len(self._parameters), device=first.device)
        for weight, count in zip(self._parameters, counts, strict=True):
            self.state[weight] = {"step": count, "sum": torch.zeros_like(weight)}
        self.found_inf: Tensor | None = None
        self._zero, self._rate = first.new_zeros(1), first.new_zeros(1)
        self._launchers: dict[tuple[int, ...], _Launcher] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Apply one update to all parameters; return nothing, as without a closure there is no loss."""
        assert closure is None, "a closure would evaluate the model again"
        (group,) = self.param_groups
        rate = group["lr"]
        if not isinstance(rate, Tensor):
            rate = self._rate.fill_(rate)
        found_inf = self._zero if self.found_inf is None else self.found_inf
        self._launcher()(rate, group["eps"], found_inf)

    def _launcher(self) -> "_Launcher":
        gradients = [weight.grad for weight in self._parameters]
        assert all(gradient is not None for gradient in gradients), "every weight has a gradient"
        addresses = tuple(gradient.data_ptr() for gradient in gradients)
        if addresses not in self._launchers:
            states = [self.state[weight] for weight in self._parameters]
            self._launchers = {
                addresses: _Launcher(
                    [weight.detach() for weight in self._parameters],
                    gradients,
                    [state["sum"] for state in states],
                    [state["step"] for state in states],
                )
            }
        return self._launchers[addresses]


class _Launcher:
    """Launcher of the kernel for parameters and gradients that stay where they are.

    Args:
        weights: float32, contiguous, on one device.
        gradients: of the weights, of their shapes.
        sums: sums of squares, of their shapes.
        steps: number of updates of each parameter, float32 []; in the order of their memory.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        sums: Sequence[Tensor],
        steps: Sequence[Tensor],
    ) -> None:
        columns = (weights, gradients, sums, steps)
        assert all(values.is_contiguous() for column in columns for values in column)
        self._first = [column[0] for column in columns]
        rows = [
            (
                *(place + begin for place in places),
                min(size - begin, BLOCK),
                step if not begin else -1,
            )
            for *places, step, size in zip(
                *map(_offsets, columns), [weight.numel() for weight in weights], strict=True
            )
            for begin in range(0, size, BLOCK)
        ]
        device = weights[0].device
        # A block that begins or ends between two vectors of a thread's registers would slow down all others.
        self._groups = [
            (align, torch.tensor(group, dtype=torch.int64).t().contiguous().to(device))
            for align in (ALIGN, 1)
            if (group := [row for row in rows if _is_aligned(row) == (align == ALIGN)])
        ]

    def __call__(self, rate: Tensor, eps: float, found_inf: Tensor) -> None:
        """Update the weights, unless `found_inf` is not 0.

        Args:
            rate: learning rate, float32 [] or [1].
            eps: added to the root.
            found_inf: float32 [] or [1].
        """
        for align, blocks in self._groups:
            num_blocks = blocks.shape[1]
            _dense_adagrad[(num_blocks,)](
                *self._first,
                blocks,
                num_blocks,
                rate,
                found_inf,
                eps,
                ALIGN=align,
                BLOCK=BLOCK,
                num_warps=NUM_WARPS,
            )


def _is_aligned(row: tuple[int, ...]) -> bool:
    """Return whether all places of a block, and its number of elements, are multiples of `ALIGN`."""
    return all(value % ALIGN == 0 for value in row[:4])


def _offsets(tensors: Sequence[Tensor]) -> list[int]:
    """Return the distance of each tensor from the first, in elements; they may be separate allocations."""
    first, size = tensors[0].data_ptr(), tensors[0].element_size()
    assert all((tensor.data_ptr() - first) % size == 0 for tensor in tensors)
    return [(tensor.data_ptr() - first) // size for tensor in tensors]


@triton.jit
def _dense_adagrad(
    weights,
    gradients,
    sums,
    steps,
    blocks,
    num_blocks,
    rate,
    found_inf,
    eps,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if tl.load(found_inf) != 0:
        return
    entry = blocks + tl.program_id(0)
    weight_at = weights + tl.multiple_of(tl.load(entry), ALIGN)
    gradient_at = gradients + tl.multiple_of(tl.load(entry + num_blocks), ALIGN)
    sum_at = sums + tl.multiple_of(tl.load(entry + 2 * num_blocks), ALIGN)
    count = tl.multiple_of(tl.load(entry + 3 * num_blocks), ALIGN)
    step = tl.load(entry + 4 * num_blocks)
    if step >= 0:
        # The first block of a parameter counts its updates.
        tl.store(steps + step, tl.load(steps + step) + 1)
    place = tl.arange(0, BLOCK)
    inside = place < count
    gradient = tl.load(gradient_at + place, mask=inside, other=0.0)
    total = tl.load(sum_at + place, mask=inside, other=0.0) + gradient * gradient
    tl.store(sum_at + place, total, mask=inside)
    weight = tl.load(weight_at + place, mask=inside, other=0.0)
    change = tl.div_rn(gradient * -tl.load(rate), tl.sqrt_rn(total) + eps)
    tl.store(weight_at + place, weight + change, mask=inside)
