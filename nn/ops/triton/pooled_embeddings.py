"""Triton kernel that copies embeddings between the output blocks of the all-to-all and one matrix."""

import triton
import triton.language as tl
from torch import Tensor

from nn.ops.embedding_layout import EmbeddingLayout

BLOCK = 16


def copy_segments(
    values: Tensor, matrix: Tensor, layout: EmbeddingLayout, *, to_matrix: bool
) -> None:
    """Copy the columns of `values` to those of `matrix`, or back.

    `matrix`: [B, T]; its row stride may be larger.
    """
    table, most_columns, alignment = layout.copied_table
    grid = (triton.cdiv(len(matrix), BLOCK), table.shape[1])
    _join_copy[grid](
        values,
        matrix,
        table,
        table.shape[1],
        len(matrix),
        matrix.stride(0),
        TO_MATRIX=to_matrix,
        ALIGN=alignment,
        BLOCK=BLOCK,
        BLOCK_D=triton.next_power_of_2(most_columns),
    )


@triton.jit
def _join_copy(
    values,
    matrix,
    table,
    num_segments,
    num_samples,
    matrix_stride,
    TO_MATRIX: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    segment = tl.program_id(1)
    offset = tl.multiple_of(tl.load(table + segment), ALIGN)
    stride = tl.multiple_of(tl.load(table + num_segments + segment), ALIGN)
    start = tl.multiple_of(tl.load(table + 2 * num_segments + segment), ALIGN)
    columns = tl.multiple_of(tl.load(table + 3 * num_segments + segment), ALIGN)
    sample = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK_D)[None, :]
    inside = (sample < num_samples) & (column < columns)
    in_values = values + offset + sample * stride + column
    in_matrix = matrix + sample * matrix_stride + start + column
    if TO_MATRIX:
        tl.store(in_matrix, tl.load(in_values, mask=inside), mask=inside)
    else:
        tl.store(in_values, tl.load(in_matrix, mask=inside), mask=inside)
