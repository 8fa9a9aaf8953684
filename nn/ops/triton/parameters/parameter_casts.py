"""Casts of all parameters of a layer to the dtype of its products, as one launch of many small programs."""

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from nn.ops.triton.parameters.tensor_blocks import BLOCK, NUM_WARPS, TensorBlocks

ALIGNMENT = 128
"""Elements; matrix products are fastest where matrices begin at such places."""
_found: dict[tuple[tuple[int, int], ...], TensorBlocks] = {}
"""Blocks of layers, by addresses and sizes of their parameters; a few KiB each. CUDA graphs hold their addresses."""


def cast_parameters(dtype: torch.dtype, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Cast the parameters, float32 or all of the dtype already, to another dtype."""
    if all(parameter.dtype is dtype for parameter in parameters):
        return list(parameters)
    parameters = [parameter.detach().contiguous() for parameter in parameters]
    sizes = [parameter.numel() for parameter in parameters]
    starts = list(accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))
    memory = torch.empty(starts[-1], dtype=dtype, device=parameters[0].device)
    copies = [
        memory[start : start + size].view(parameter.shape)
        for start, size, parameter in zip(starts, sizes, parameters, strict=False)
    ]
    key = tuple(zip((parameter.data_ptr() for parameter in parameters), sizes, strict=True))
    if key not in _found:
        _found[key] = TensorBlocks([parameters, copies])
    for align, blocks in _found[key].groups:
        num_blocks = blocks.shape[1]
        _cast[(num_blocks,)](
            parameters[0],
            memory,
            blocks,
            num_blocks,
            ALIGN=align,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )
    return copies


@triton.jit
def _cast(source, target, blocks, num_blocks, ALIGN: tl.constexpr, BLOCK: tl.constexpr):
    entry = blocks + tl.program_id(0)
    source_at = source + tl.multiple_of(tl.load(entry), ALIGN)
    target_at = target + tl.multiple_of(tl.load(entry + num_blocks), ALIGN)
    count = tl.multiple_of(tl.load(entry + 2 * num_blocks), ALIGN)
    place = tl.arange(0, BLOCK)
    inside = place < count
    values = tl.load(source_at + place, mask=inside, other=0.0)
    tl.store(target_at + place, values.to(target.dtype.element_ty), mask=inside)
