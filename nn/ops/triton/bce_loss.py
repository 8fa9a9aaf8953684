"""Binary cross entropy and its gradient as one Triton kernel instead of a dozen small ones; see `nn.layers.bce_loss`."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def fused_bce_loss_share(
    logits: Tensor, labels: Tensor, num_valid: int, global_valid: int, unit: Tensor | None = None
) -> Tensor:
    """Compute `nn.layers.bce_loss.bce_loss_share` with a fixed order of summation.

    A backward pass that begins with `unit`, a tensor of 1, does not multiply by it.
    """
    return _BceLossShare.apply(logits, labels, num_valid, global_valid, unit)


class _BceLossShare(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        num_valid: int,
        global_valid: int,
        unit: Tensor | None,
    ) -> Tensor:
        logits = logits.contiguous()
        gradient = torch.empty_like(logits)
        blocks = triton.cdiv(len(logits), BLOCK)
        sums = logits.new_empty(blocks)
        _cross_entropy[(blocks,)](
            logits, labels, gradient, sums, len(logits), num_valid, 1 / global_valid, BLOCK=BLOCK
        )
        ctx.save_for_backward(gradient)
        ctx.unit = unit
        return sums.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        is_unit = ctx.unit is not None and grad.data_ptr() == ctx.unit.data_ptr()
        return gradient if is_unit else gradient * grad, None, None, None, None


@triton.jit
def _cross_entropy(
    logits, labels, gradient, sums, num_rows, num_valid, weight, BLOCK: tl.constexpr
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_valid = row < num_valid
    x = tl.load(logits + row, mask=is_valid, other=0.0)
    y = tl.load(labels + row, mask=is_valid, other=0.0)
    # log(1 + exp(x)) - x y, without overflow
    small = tl.exp(-tl.abs(x))
    loss = tl.maximum(x, 0.0) - x * y + tl.log(1 + small)
    probability = tl.where(x >= 0, 1 / (1 + small), small / (1 + small))
    grad = tl.where(is_valid, (probability - y) * weight, 0.0)
    tl.store(gradient + row, grad, mask=row < num_rows)
    tl.store(sums + tl.program_id(0), tl.sum(tl.where(is_valid, loss, 0.0)) * weight)
