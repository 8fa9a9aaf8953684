"""Copy embeddings out of the blocks that the all-to-all left, into one matrix, and back: a Triton kernel."""

import triton
import triton.language as tl
from torch import Tensor

from nn.ops.embedding_layout import EmbeddingLayout

BLOCK = 16


def copy_pieces(apart: Tensor, matrix: Tensor, layout: EmbeddingLayout, *, together: bool) -> None:
    """Copy every piece of `apart` to its columns of `matrix`, or the other way.

    Args:
        apart: the blocks.
        matrix: [B, F * D], rows may lie further apart.
        layout: of the blocks.
        together: from `apart` to `matrix`.
    """
    grid = (triton.cdiv(len(matrix), BLOCK), len(layout.pieces))
    _join_copy[grid](
        apart,
        matrix,
        layout.table,
        len(layout.pieces),
        len(matrix),
        matrix.stride(0),
        TOGETHER=together,
        ALIGN=layout.alignment,
        BLOCK=BLOCK,
        BLOCK_D=triton.next_power_of_2(layout.embedding_dim),
    )


@triton.jit
def _join_copy(
    apart,
    matrix,
    table,
    num_pieces,
    num_samples,
    matrix_stride,
    TOGETHER: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    piece = tl.program_id(1)
    offset = tl.multiple_of(tl.load(table + piece), ALIGN)
    stride = tl.multiple_of(tl.load(table + num_pieces + piece), ALIGN)
    start = tl.multiple_of(tl.load(table + 2 * num_pieces + piece), ALIGN)
    columns = tl.multiple_of(tl.load(table + 3 * num_pieces + piece), ALIGN)
    sample = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK_D)[None, :]
    inside = (sample < num_samples) & (column < columns)
    there = apart + offset + sample * stride + column
    here = matrix + sample * matrix_stride + start + column
    if TOGETHER:
        tl.store(here, tl.load(there, mask=inside), mask=inside)
    else:
        tl.store(there, tl.load(here, mask=inside), mask=inside)
