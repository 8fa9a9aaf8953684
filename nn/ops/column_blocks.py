"""Blocks of a matrix's columns whose gradients are written side by side, so that nobody copies them there afterwards."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class GradientBlocks:
    """The memory of the gradient of a matrix [C, count * I], which the first that asks for its block makes."""

    def __init__(self, matrix: Tensor, count: int) -> None:
        self._shape, self._dtype, self._device = matrix.shape, matrix.dtype, matrix.device
        self.count = count
        self.memory: Tensor | None = None

    def block(self, number: int) -> Tensor:
        """View the gradient of a block, [C, I], whose rows are as far apart as those of the block."""
        if self.memory is None:
            self.memory = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        return self.memory.chunk(self.count, dim=1)[number]


def column_blocks(matrix: Tensor, count: int) -> tuple[tuple[Tensor, ...], GradientBlocks]:
    """View `count` blocks of a matrix's columns, [C, I] each, and return where their gradients may be written."""
    gradients = GradientBlocks(matrix, count)
    return _ColumnBlocks.apply(matrix, gradients), gradients


class _ColumnBlocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, matrix: Tensor, gradients: GradientBlocks) -> tuple[Tensor, ...]:
        ctx.gradients = gradients
        return matrix.chunk(gradients.count, dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *blocks: Tensor) -> tuple[Tensor | None, ...]:
        # The graph keeps the blocks until it ends, which is behind the gradients of the layers before.
        memory, ctx.gradients.memory = ctx.gradients.memory, None
        if memory is not None:
            places = [_place(block) for block in memory.chunk(ctx.gradients.count, dim=1)]
            if places == [_place(block) for block in blocks]:
                return memory, None
        return torch.cat(blocks, dim=1), None


def _place(block: Tensor) -> tuple[int, int]:
    return block.untyped_storage()._cdata, int(block.storage_offset())
