"""The kernels that round to 8 bits give the bits of plain torch: interpreted here, compiled on a GPU."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from nn.ops import fp8 as plain
from nn.ops.fp8 import GRADIENT, INPUT, LARGEST, Fp8Matrix, Scale
from nn.ops.triton.fp8 import cross_net
from nn.ops.triton.fp8 import quantise as fp8
from tests.helpers.gpus import needs_no_gpu, needs_one_gpu

# One program takes 256 rows and 128 columns: below, at and above that.
SHAPES = [(16, 16), (256, 128), (528, 208), (65_536, 3456)]
INTERPRETED = [(272, 144)]
TORCH_DTYPES = {"fp8e4nv": INPUT, "fp8e5": GRADIENT, "fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.fixture
def exact_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter cast as a GPU does: its own casts to 8 bits lose carries."""
    from triton.runtime import interpreter

    kinds = TORCH_DTYPES | {"fp32": torch.float32}

    def convert(values, source, target, rounding):
        bits = getattr(torch, f"int{source.primitive_bitwidth}")
        wide = torch.frombuffer(bytearray(values.tobytes()), dtype=bits).view(kinds[source.name])
        result = wide.to(kinds[target.name])
        unsigned = getattr(torch, f"uint{target.primitive_bitwidth}")
        return result.view(unsigned).numpy().reshape(values.shape)

    monkeypatch.setattr(interpreter, "_convert_float", convert)


def drawn(*shape: int, device: str, seed: int = 1) -> Tensor:
    """Values of many magnitudes, some too large and some too small for 8 bits."""
    generator = torch.Generator(device).manual_seed(seed)
    values = torch.randn(shape, generator=generator, device=device)
    scales = torch.randn(shape, generator=generator, device=device).mul(4).exp()
    return (values * scales).bfloat16()


def a_scale(device: str, factor: float = 4.0) -> Scale:
    tensor = torch.tensor([factor], device=device)
    return Scale(tensor, 1 / tensor, torch.zeros(1, device=device))


def copied(scale: Scale) -> Scale:
    assert scale.latest is not None
    return replace(scale, latest=scale.latest.clone())


def assert_same(ours: Fp8Matrix, wanted: Fp8Matrix) -> None:
    assert torch.equal(ours.rows.view(torch.uint8), wanted.rows.view(torch.uint8))
    assert (ours.columns is None) == (wanted.columns is None)
    if ours.columns is not None:
        assert torch.equal(ours.columns.view(torch.uint8), wanted.columns.view(torch.uint8))


def check_quantise(device: str, shapes: list[tuple[int, int]]) -> None:
    for shape in shapes:
        for dtype, transposed in ((INPUT, True), (GRADIENT, True), (GRADIENT, False)):
            x = drawn(*shape, device=device)
            one, other = a_scale(device), a_scale(device)
            wanted = plain.quantise(x, dtype, other, transposed=transposed)
            assert_same(fp8.quantise(x, dtype, one, transposed=transposed), wanted)
            assert torch.equal(one.latest, other.latest)
            largest = (x.float() * one.factor).abs().max().item()
            assert shape[0] == 16 or largest > LARGEST[dtype], "some must be too large"
        weight = drawn(*shape, device=device).float()
        unread = replace(a_scale(device), latest=None)
        wanted = plain.quantise(weight, INPUT, unread, transposed=True)
        assert_same(fp8.quantise(weight, INPUT, unread, transposed=True), wanted)


def check_gradient(device: str, shapes: list[tuple[int, int]]) -> None:
    for shape in shapes:
        # Sums of these have no rounding.
        grad = drawn(*shape, device=device).sign() * 2.0 ** torch.arange(
            shape[1], device=device
        ).fmod(9)
        grad = grad.bfloat16()
        activation = drawn(*shape, device=device, seed=2).relu()
        activation[1, 1] = torch.nan
        for active in (None, activation):
            for transposed in (True, False):
                one, other = a_scale(device), a_scale(device)
                ours, our_wide, our_sum = fp8.quantise_gradient(
                    grad, active, one, transposed=transposed
                )
                matrix, wide, bias_sum = plain.quantise_gradient(
                    grad, active, other, transposed=transposed
                )
                assert_same(ours, matrix)
                assert (our_wide is None) == (wide is None) == transposed
                assert wide is None or torch.equal(our_wide, wide)
                assert torch.equal(our_sum, bias_sum)
                assert torch.equal(one.latest, other.latest)


def check_cross(device: str, shapes: list[tuple[int, int]], depths: list[int]) -> None:
    for shape in shapes:
        x, x0 = drawn(*shape, device=device), drawn(*shape, device=device, seed=2)
        for num_layers in depths:
            factors = drawn(num_layers, *shape, device=device, seed=3)
            # Of sums of products, the kernel's and torch's rounding may differ: these have none.
            factors, x0 = factors.sign(), x0.sign()
            one, other = a_scale(device), a_scale(device)
            out, stored = cross_net.add_product(x, x0, factors[0], one, transposed=True)
            wanted, matrix = plain.add_product(x, x0, factors[0], other, transposed=True)
            assert torch.equal(out, wanted)
            assert_same(stored, matrix)
            assert torch.equal(one.latest, other.latest)
            left_out, again = cross_net.add_product(
                x, x0, factors[0], one, transposed=True, keep=False
            )
            assert left_out is None
            assert_same(again, matrix)
            for index in range(num_layers):
                check_backward(index, factors, x0, transposed=index != 1)


def check_backward(index: int, factors: Tensor, x0: Tensor, *, transposed: bool) -> None:
    device = x0.device.type
    grad = drawn(*x0.shape, device=device, seed=4).sign()
    others = drawn(max(1, len(factors) - 1), *x0.shape, device=device, seed=5).sign()
    results = []
    for ops in (cross_net, plain):
        products, scale = others.clone(), a_scale(device)
        outcome = ops.cross_backward(
            index, grad, products, x0, factors, scale, transposed=transposed
        )
        results.append((*outcome, products, scale.latest))
    (ours, our_wide, our_sum, *our_rest), (matrix, wide, bias_sum, *rest) = results
    assert_same(ours, matrix)
    assert (our_wide is None) == (wide is None) == transposed
    assert wide is None or torch.equal(our_wide, wide)
    assert torch.equal(our_sum, bias_sum)
    assert all(torch.equal(one, other) for one, other in zip(our_rest, rest, strict=True))


@needs_no_gpu
def test_the_interpreted_kernels_give_the_bits_of_plain_torch(exact_casts):
    check_quantise("cpu", INTERPRETED)
    check_gradient("cpu", INTERPRETED)
    check_cross("cpu", INTERPRETED, [3])


@needs_one_gpu
def test_on_a_gpu_the_kernels_give_the_bits_of_plain_torch():
    check_quantise("cuda", SHAPES)
    check_gradient("cuda", SHAPES)
    check_cross("cuda", SHAPES, [1, 3])


@needs_one_gpu
@pytest.mark.parametrize("exact", [False, True])
def test_on_a_gpu_products_are_those_of_the_rounded_matrices(exact):
    for rows, inner, columns in ((64, 48, 32), (1024, 3456, 512), (4096, 512, 3456)):
        left = drawn(rows, inner, device="cuda").clamp(-1, 1)
        right = drawn(columns, inner, device="cuda", seed=2).clamp(-1, 1)
        bias = drawn(columns, device="cuda", seed=3).clamp(-1, 1)
        for dtype, out_dtype in ((INPUT, torch.bfloat16), (GRADIENT, torch.float32)):
            a = fp8.quantise(left, dtype, a_scale("cuda", 64.0), transposed=True)
            b = fp8.quantise(right, INPUT, a_scale("cuda"), transposed=True)
            added = None if out_dtype is torch.float32 else bias
            out = plain.product(a, b, out_dtype, bias=added, exact=exact)
            wide = (a.rows.double() * a.inverse) @ (b.rows.double() * b.inverse).t()
            wide = wide if added is None else wide + added
            error = (out.double() - wide).norm() / wide.norm()
            assert error < (0.005 if out_dtype is torch.bfloat16 or not exact else 1e-3)
