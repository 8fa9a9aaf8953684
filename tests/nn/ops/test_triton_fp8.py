"""The kernels that round to 8 bits give the bits of plain torch: interpreted here, compiled on a GPU."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from nn.layers.pass_state import PassState, attach
from nn.models.rankmixer import RankMixerBlock
from nn.ops import fp8 as plain
from nn.ops.fp8 import GRADIENT, INPUT, LARGEST, Fp8Matrix, Scale
from nn.ops.triton.fp8 import cross_net
from nn.ops.triton.fp8 import quantise as fp8
from tests.helpers.gpus import check_same_bits, needs_no_gpu, needs_one_gpu
from tests.nn.ops.test_triton_rankmixer import block_of, outcome

# One program takes 128 rows and 64 columns: below, at and above that.
SHAPES = [(16, 16), (128, 64), (528, 208), (65_536, 3456)]
INTERPRETED = [(272, 144)]
TORCH_DTYPES = {"fp8e4nv": INPUT, "fp8e5": GRADIENT, "fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.fixture
def exact_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter cast as a GPU does: its own casts to 8 bits lose carries, and have no largest number."""
    from triton.runtime import interpreter

    kinds = TORCH_DTYPES | {"fp32": torch.float32}

    def convert(values, source, target, rounding):
        bits = getattr(torch, f"int{source.primitive_bitwidth}")
        wide = torch.frombuffer(bytearray(values.tobytes()), dtype=bits).view(kinds[source.name])
        if limit := LARGEST.get(kinds[target.name]):
            wide = wide.clamp(-limit, limit)
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
                    grad, active, None, one, transposed=transposed
                )
                matrix, wide, bias_sum = plain.quantise_gradient(
                    grad, active, None, other, transposed=transposed
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


def check_tokens(device: str, shapes: list[tuple[int, int, int]]) -> None:
    """Matrices of several tokens, each rounded and transposed for itself; GELU's share is near to 3e-7."""
    for tokens, rows, columns in shapes:
        x = drawn(tokens, rows, columns, device=device)
        hidden = x.clamp(-2, 2)  # below -3 torch's 1 + erf has few bits
        grad = drawn(tokens, rows, columns, device=device, seed=2).clamp(-64, 64)
        bias = drawn(tokens, 1, columns, device=device, seed=3).clamp(-1, 1).float()
        for transposed in (True, False):
            kind = {"transposed": transposed}
            wanted = plain.quantise(x, INPUT, a_scale(device), **kind)
            assert_same(fp8.quantise(x, INPUT, a_scale(device), **kind), wanted)
            one, other = a_scale(device, 32.0), a_scale(device, 32.0)
            ours, our_wide = fp8.activate(hidden, bias, one, **kind)
            matrix, wide = plain.activate(hidden, bias, other, **kind)
            assert_close(ours, matrix, our_wide, wide, one, other)
            one, other = a_scale(device, 4096.0), a_scale(device, 4096.0)
            ours, our_wide, our_sum = fp8.quantise_gradient(grad, hidden, bias, one, **kind)
            matrix, wide, bias_sum = plain.quantise_gradient(grad, hidden, bias, other, **kind)
            assert_close(ours, matrix, our_wide, wide, one, other)
            assert our_sum.shape == bias_sum.shape
            torch.testing.assert_close(our_sum, bias_sum, rtol=1e-5, atol=1e-4 * rows)


def assert_close(
    ours: Fp8Matrix,
    matrix: Fp8Matrix,
    our_wide: Tensor | None,
    wide: Tensor | None,
    one: Scale,
    other: Scale,
) -> None:
    """All but a few numbers are the same, and none is more than a step of 8 bits away."""
    values, wanted = ours.rows.float() * ours.inverse, matrix.rows.float() * matrix.inverse
    assert (values != wanted).float().mean() < 1e-3
    torch.testing.assert_close(values, wanted, rtol=0.26, atol=1e-4)
    assert (ours.columns is None) == (matrix.columns is None)
    if ours.columns is not None:
        assert ours.columns.is_contiguous()
        assert torch.equal(ours.columns.view(torch.uint8), ours.rows.view(torch.uint8).mT)
    assert (our_wide is None) == (wide is None) == (ours.columns is not None)
    if our_wide is not None:
        torch.testing.assert_close(our_wide, wide, rtol=0.01, atol=1e-4)
    torch.testing.assert_close(one.latest, other.latest, rtol=0.01, atol=0)


def check_gelu(device: str) -> None:
    """GELU and its gradient are exact to 1e-6, and rows that are not there have no largest value."""
    exact = torch.linspace(-12, 12, 4096, device=device, dtype=torch.float64)
    exact = exact.view(1, 256, 16).requires_grad_()
    hidden, bias = exact.detach().float() - 0.25, torch.full((1, 1, 16), 0.25, device=device)
    wanted = nn.functional.gelu(exact)
    (slope,) = torch.autograd.grad(wanted.sum(), exact)
    scale, kind = a_scale(device), {"transposed": False}
    _, ours = fp8.activate(hidden, bias, scale, **kind)
    _, our_slope, _ = fp8.quantise_gradient(torch.ones_like(hidden), hidden, bias, scale, **kind)
    for one, other in ((ours, wanted.detach()), (our_slope, slope)):
        torch.testing.assert_close(one.double(), other, rtol=0, atol=1.5e-6)
    scale = a_scale(device)
    fp8.activate(torch.full((1, 16, 16), -9.0, device=device), bias + 4, scale, **kind)
    assert torch.lt(scale.latest, 1e-4)


def block_in_8_bits(
    sizes: tuple[int, int, int], rows: int, device: str, *, full: bool
) -> RankMixerBlock:
    block = block_of(*sizes, device)
    block.network.use_fp8(weight_gradients=full)
    block.to(device)
    state = PassState(1, torch.device(device))
    attach(block, state)
    state.set(0, rows, rows, rows)
    return block


def check_block(
    sizes: tuple[int, int, int],
    rows: int,
    device: str,
    *,
    full: bool,
    kernels: Callable[[], AbstractContextManager] = nullcontext,
) -> None:
    """A block by kernels is as near to one in plain torch as their products' last bits allow, and to the exact one as 8 bits."""
    block = block_in_8_bits(sizes, rows, device, full=full)
    plainly = block_in_8_bits(sizes, rows, "cpu", full=full)
    x = torch.randn(sizes[0], rows, sizes[1], generator=torch.Generator().manual_seed(1))
    x = x.bfloat16()
    for _ in range(2):  # the second pass has the scales of the first
        with kernels():
            ours = [one.cpu() for one in outcome(block, x.to(device), fused=True)]
        wanted = outcome(plainly, x, fused=False)
        latest = block.network.fp8._latest.cpu()
        torch.testing.assert_close(latest, plainly.network.fp8._latest, rtol=0.05, atol=0)
        block.network.fp8.update(), plainly.network.fp8.update()
    exact = deepcopy(plainly).double().train(False)
    exact = outcome(exact, x.double(), fused=False)
    names = ["out", "x", *(name for name, _ in block.named_parameters())]
    for name, one, plain_one, exact_one in zip(names, ours, wanted, exact, strict=True):
        assert one.shape == exact_one.shape
        size = exact_one.norm()
        between = ((one.double() - plain_one.double()).norm() / size).item()
        of_ours = ((one.double() - exact_one).norm() / size).item()
        of_plain = ((plain_one.double() - exact_one).norm() / size).item()
        assert of_ours < 0.12, (name, of_ours)
        # Both round to 8 bits; torch's norms on a CPU add their weights' gradients in 16 bits.
        assert between < (0.15 if "norm" in name else 0.04), (name, between)
        assert of_ours < 1.2 * of_plain + 1e-3, (name, of_ours, of_plain)


@needs_no_gpu
def test_the_interpreted_kernels_give_the_bits_of_plain_torch(exact_casts):
    check_quantise("cpu", INTERPRETED)
    check_gradient("cpu", INTERPRETED)
    check_cross("cpu", INTERPRETED, [3])
    check_tokens("cpu", [(3, 272, 80)])
    check_gelu("cpu")


@needs_no_gpu
@pytest.mark.parametrize("full", [True, False], ids=["full", "partial"])
def test_an_interpreted_block_in_8_bits_is_as_the_plain_one(full, exact_casts, monkeypatch):
    @contextmanager
    def interpreted() -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr("nn.layers.fp8.ops_for", lambda x: cross_net)
            yield

    check_block((4, 32, 2), 48, "cpu", full=full, kernels=interpreted)


@needs_one_gpu
def test_on_a_gpu_the_kernels_give_the_bits_of_plain_torch():
    check_quantise("cuda", SHAPES)
    check_gradient("cuda", SHAPES)
    check_cross("cuda", SHAPES, [1, 3])
    check_tokens("cuda", [(1, 16, 16), (3, 272, 80), (16, 4096, 2304)])
    check_gelu("cuda")


@needs_one_gpu
@pytest.mark.parametrize("full", [True, False], ids=["full", "partial"])
def test_on_a_gpu_a_block_in_8_bits_is_as_the_plain_one(full):
    for sizes, rows in (((4, 32, 2), 48), ((3, 48, 3), 272), ((16, 224, 3), 528)):
        check_block(sizes, rows, "cuda", full=full)


@needs_one_gpu
@pytest.mark.parametrize("full", [True, False], ids=["full", "partial"])
@pytest.mark.parametrize("rows", [4_000, 1_111])
def test_on_a_gpu_two_runs_of_a_block_in_8_bits_and_a_graph_give_the_same_bits(rows, full):
    block = block_in_8_bits((16, 768, 3), rows, "cuda", full=full)
    x = torch.randn(16, rows, 768, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    leaves = [x, *block.parameters()]

    def once() -> list[Tensor]:
        with torch.autocast("cuda", torch.bfloat16):
            out = block(x)
        assert (out.dtype, out.shape) == (torch.bfloat16, x.shape)
        gradients = torch.autograd.grad(out, leaves, out.detach())
        return [out.detach(), *gradients, block.network.fp8._latest.clone()]

    check_same_bits(once)


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
