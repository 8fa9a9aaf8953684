"""Rounding by chance: neighbours, means, exact numbers, extremes, and the same bits from Triton as from torch."""

import pytest
import torch

from nn.ops.stochastic_rounding import random_bits, round_stochastically, rounding_key
from tests.helpers.gpus import needs_no_gpu

DTYPES = [torch.bfloat16, torch.float16]
ALL_BITS = torch.arange(2**16, dtype=torch.int32)
NOW = torch.tensor([3], dtype=torch.int32)


def hard_numbers() -> torch.Tensor:
    """Float32 of all sizes and both signs: drawn bit by bit, and those at the edges of both dtypes."""
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(-(2**31), 2**31, (20_000,), generator=generator).to(torch.int32)
    near_fp16 = torch.randn(20_000, generator=generator) * 10.0 ** torch.randint(
        -8, 6, (20_000,), generator=generator
    )
    edges = [0.0, 2**-14, 2**-24, 2**-25, 2**-40, 65504, 65519, 65520, 1e38, 3.3895e38, 3.4e38]
    edges += [float("inf"), float("nan"), 1e-45, 1e-38]
    numbers = torch.cat([drawn.view(torch.float32), near_fp16, torch.tensor(edges)])
    return torch.cat([numbers, -numbers])


def neighbours(values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest number of a dtype that is not above each value, and the smallest that is not below it."""
    nearest = values.to(dtype)
    below = torch.where(
        nearest.float() > values, torch.nextafter(nearest, -nearest.new_tensor(torch.inf)), nearest
    )
    above = torch.where(
        nearest.float() < values, torch.nextafter(nearest, nearest.new_tensor(torch.inf)), nearest
    )
    return below.float(), above.float()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_number_becomes_one_of_its_two_neighbours(dtype):
    values = hard_numbers()
    values = values[values.abs() <= torch.finfo(dtype).max]
    bits = random_bits(5, NOW, torch.arange(len(values)), 0, 2)[:, 0]
    rounded = round_stochastically(values, dtype, bits).float()
    below, above = neighbours(values, dtype)
    assert torch.equal(torch.where(rounded > values, above, below), rounded)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_mean_over_all_bits_is_the_number(dtype):
    values = [1.0001, -3.3, 0.0123, 1e-4, -7.1e-6, 3e-7, 1e-8, 65503.9, -1000.7]
    for value in torch.tensor(values):
        rounded = round_stochastically(value.expand(2**16), dtype, ALL_BITS).double()
        # Of fp16's normal numbers and of all bf16 exactly; between subnormal ones the chance has 16 bits.
        off_by = 2.0**-40 if dtype is torch.float16 and value.abs() < 2**-14 else 0.0
        assert abs(rounded.mean() - value.double()) <= off_by, value


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_the_dtype_holds_stays_as_it_is(dtype):
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    for bits in (0, 1, 2**15, 2**16 - 1):
        same = round_stochastically(
            every.float(), dtype, torch.full((2**16,), bits, dtype=torch.int32)
        )
        is_number = ~every.isnan()
        assert torch.equal(same[is_number], every[is_number])
        assert torch.equal(same.isnan(), every.isnan())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_finite_number_never_becomes_infinite(dtype):
    largest = torch.finfo(dtype).max
    values = torch.tensor([3.4e38, -3.4e38, largest * (1 + 1e-6)])
    for bits in (0, 2**16 - 1):
        rounded = round_stochastically(values, dtype, torch.full((3,), bits, dtype=torch.int32))
        assert rounded.tolist() == [largest, -largest, largest]
    extremes = torch.tensor([torch.inf, -torch.inf, torch.nan])
    kept = round_stochastically(extremes, dtype, torch.full((3,), 2**16 - 1, dtype=torch.int32))
    assert kept[:2].tolist() == [torch.inf, -torch.inf]
    assert kept[2].isnan()


def test_random_bits_depend_on_seed_table_step_row_and_column_and_on_nothing_else():
    rows = torch.tensor([0, 1, 7, 2**31, 2**33 + 1])
    key = rounding_key(1, "cat_0")
    whole = random_bits(key, NOW, rows, 0, 8)
    assert torch.equal(whole, random_bits(key, NOW, rows, 0, 8))
    # A part of the columns, in part of the rows, in another order.
    assert torch.equal(whole[[2, 0]][:, 4:], random_bits(key, NOW, rows[[2, 0]], 4, 4))
    others = [
        random_bits(rounding_key(2, "cat_0"), NOW, rows, 0, 8),
        random_bits(rounding_key(1, "cat_1"), NOW, rows, 0, 8),
        random_bits(key, NOW + 1, rows, 0, 8),
        random_bits(key, NOW, rows + 1, 0, 8),
        random_bits(key, NOW, rows, 8, 8),
    ]
    for other in others:
        assert (other != whole).float().mean() > 0.9


def test_random_bits_are_even_and_not_alike_across_steps_rows_and_columns():
    steps = [
        random_bits(rounding_key(1, "a"), NOW + step, torch.arange(500), 0, 16)
        for step in range(40)
    ]
    drawn = torch.stack(steps).double() / 2**16  # [40, 500, 16]
    assert drawn.mean().item() == pytest.approx(0.5, abs=0.002)
    counts = torch.histc(drawn, 16, 0, 1)
    assert (counts / counts.mean() - 1).abs().max() < 0.03
    centred = drawn - 0.5
    shifted = [(centred[1:], centred[:-1]), (centred[:, 1:], centred[:, :-1])]
    shifted += [(centred[..., lag:], centred[..., :-lag]) for lag in (1, 2, 3)]
    for one, other in shifted:
        assert abs((one * other).mean().item() * 12) < 0.01


def from_triton(
    values: torch.Tensor, dtype: torch.dtype, rows: torch.Tensor, first_column: int
) -> torch.Tensor:
    """Round a matrix in a kernel of its own."""
    import triton

    from tests.nn.ops.rounding_kernel import round_matrix

    out = torch.empty_like(values, dtype=dtype)
    columns = values.shape[1]
    round_matrix[(len(values),)](
        values,
        out,
        rows,
        NOW.to(values.device),
        first_column // 2,
        columns,
        triton.next_power_of_2(columns),
    )
    return out


def compare(device: str) -> None:
    numbers = hard_numbers()
    values = numbers[: len(numbers) // 12 * 12].view(-1, 12).to(device)
    if device == "cpu":
        # The interpreter takes its time.
        values = torch.cat([values[:50], values[-70:], values[3300:3350]])
    rows = torch.arange(len(values), device=device) * 3 + 2**31
    for dtype in DTYPES:
        bits = random_bits(-77, NOW.to(device), rows, 4, 12)
        expected = round_stochastically(values, dtype, bits)
        actual = from_triton(values, dtype, rows, 4)
        same = (expected.view(torch.int16) == actual.view(torch.int16)) | (
            expected.isnan() & actual.isnan()
        )
        assert same.all(), (dtype, values[~same][:5], expected[~same][:5], actual[~same][:5])


@needs_no_gpu
def test_triton_gives_the_same_bits_under_its_interpreter():
    compare("cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_triton_gives_the_same_bits_on_a_gpu():
    compare("cuda")
