"""Rows of int8 and int4 tables."""

import pytest
import torch

from nn.deltas.scaled_rows import NARROW, quantize
from serving.inference.tables import dequantized


def rows_of(columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(columns)
    rows = torch.randn(200, columns, generator=generator)
    rows[7], rows[8], rows[9] = 0, 1e-36, 3e38
    rows[10, 1:] = 0
    return rows


def error(rows: torch.Tensor, steps: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the squared error of each row."""
    return (steps.double() * scales.double()[:, None] - rows.double()).square().sum(1)


@pytest.mark.parametrize("columns", [1, 10, 16, NARROW, 128])
def test_int8_rows_are_near_and_zero_rows_stay_zero(columns):
    rows = rows_of(columns)
    steps, scales = quantize(rows)
    assert (steps.dtype, scales.dtype) == (torch.int8, torch.float32)
    differences = (steps.double() * scales.double()[:, None] - rows.double()).abs()
    assert (differences <= 0.75 * scales.double()[:, None]).all()
    assert steps[7].eq(0).all()
    assert scales[7] == 0
    assert steps.abs().max() <= 127
    if columns == 1:
        assert (differences <= 1e-7 * rows.abs()).all()


@pytest.mark.parametrize("columns", [2, 9, 16, 128])
def test_int4_rows_are_two_numbers_a_byte_and_near(columns):
    rows = rows_of(columns)[:9]
    pairs, scales = quantize(rows, "int4")
    assert (pairs.dtype, pairs.shape) == (torch.uint8, (9, -(-columns // 2)))
    # One number after the other.
    for row, scale, found in zip(pairs, scales, dequantized(pairs, scales, columns), strict=True):
        integers = [(int(row[at // 2]) >> 4 * (at % 2) & 15) - 8 for at in range(columns)]
        assert found.tolist() == [float(scale * integer) for integer in integers]
        assert max(map(abs, integers)) <= 7
    differences = (dequantized(pairs, scales, columns).double() - rows.double()).abs()
    # The largest number may lie one and a half steps beyond the last level that suits the others.
    assert (differences <= 1.5 * scales.double()[:, None] + 1e-45).all()
    plain = rows.abs().amax(1) / 7
    steps = (rows / torch.where(plain == 0, 1.0, plain)[:, None]).round()
    assert (differences.square().sum(1) <= error(rows, steps, plain) * (1 + 1e-6)).all()


@pytest.mark.parametrize(("columns", "share"), [(10, 0.6), (16, 0.7), (NARROW, 0.9), (128, 1.0)])
def test_the_scale_is_chosen_by_the_error_of_the_row(columns, share):
    rows = rows_of(columns)[11:]
    largest = rows.abs().amax(1) / 127
    plain = error(rows, (rows / largest[:, None]).round(), largest)
    found = error(rows, *quantize(rows))
    assert found.sum() < share * plain.sum()
    assert (found <= plain * (1 + 1e-6)).all()


@pytest.mark.parametrize("columns", [16, 128])
def test_a_row_does_not_depend_on_those_beside_it(columns):
    """A version that deltas make has the bytes of an export, and they change some rows only."""
    rows = rows_of(columns)
    steps, scales = quantize(rows)
    for first, last in ((0, 1), (7, 12), (13, 150), (199, 200)):
        some_steps, some_scales = quantize(rows[first:last])
        assert some_steps.equal(steps[first:last])
        assert some_scales.equal(scales[first:last])
