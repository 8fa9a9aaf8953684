"""Binary cross entropy and its gradient as one Triton kernel instead of a dozen small ones; see `nn.layers.bce_loss`."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def fused_bce_loss_share(
    logits: Tensor, labels: Tensor, num_valid: int, global_valid: int
) -> Tensor:
    """Compute `nn.layers.bce_loss.bce_loss_share` with a fixed order of summation."""
    return _BceLossShare.apply(logits, labels, num_valid, global_valid)


class _BceLossShare(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, num_valid: int, global_valid: int
    ) -> Tensor:
        logits = logits.contiguous()
        gradient = torch.empty_like(logits)
        blocks = triton.cdiv(len(logits), BLOCK)
        sums = logits.new_empty(blocks)
        _cross_entropy[(blocks,)](
            logits, labels, gradient, sums, len(logits), num_valid, 1 / global_valid, BLOCK=BLOCK
        )
        ctx.save_for_backward(gradient)
        return sums.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad, None, None, None


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
