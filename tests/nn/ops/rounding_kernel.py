"""A kernel that only rounds, for `tests/nn/ops/test_stochastic_rounding.py`."""

import triton
import triton.language as tl

from nn.ops.triton.stochastic_rounding import random_bits, round_stochastically, step_bits


@triton.jit
def round_matrix(values, out, rows, step, first_pair, columns, BLOCK: tl.constexpr):
    """Round one row per program, with the table key -77."""
    index = tl.program_id(0) + tl.arange(0, 1)
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < columns
    of_step = step_bits(tl.full((1,), -77, tl.int32), tl.load(step))
    bits = random_bits(of_step, tl.load(rows + index), first_pair, column)
    offset = index[:, None] * columns + column
    rounded = round_stochastically(
        tl.load(values + offset, mask=inside), bits, out.dtype.element_ty
    )
    tl.store(out + offset, rounded, mask=inside)
