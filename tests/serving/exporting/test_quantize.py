"""Rows of int8 tables."""

import torch

from serving.exporting.tables import quantize


def test_int8_rows_are_within_half_a_step_and_zero_rows_stay_zero():
    rows = torch.randn(50, 9)
    rows[7] = 0
    steps, scales = quantize(rows)
    assert ((steps * scales[:, None] - rows).abs() <= scales[:, None] / 2 + 1e-7).all()
    assert steps[7].eq(0).all()
