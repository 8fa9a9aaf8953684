"""An interacting layer by kernels is as near the exact result as its dtype allows: interpreted here, compiled on a GPU."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor

from nn.layers.interactions.interacting import InteractingLayer, fits
from tests.helpers.gpus import check_same_bits, needs_no_gpu, needs_one_gpu

pytest.importorskip("triton")
# Of the norm of a result and of gradients. Of many sums some are so near 0 that a rounding decides whether ReLU lets a gradient
# pass.
TOLERANCE = {
    torch.float32: (1e-5, 3e-3),
    torch.bfloat16: (1.5e-2, 0.15),
    torch.float16: (2e-3, 0.05),
}
# Features, columns, heads and columns of a head: those of the default options, the least, and no powers of 2.
SIZES = [(39, 16, 2, 16), (39, 32, 2, 16), (1, 1, 1, 1), (7, 20, 3, 5)]


def outcome(layer: InteractingLayer, x: Tensor, *, fused: bool) -> list[Tensor]:
    """Result, and gradients of x and the weights."""
    from nn.ops.triton.target_attention import interact

    x = x.detach().requires_grad_()
    out = interact(x, layer.projections, layer.heads) if fused else layer(x)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    return [out.detach(), *torch.autograd.grad(out, [x, layer.projections], weight.to(out))]


def check(
    sizes: tuple[int, ...],
    samples: int,
    device: str,
    tolerance: tuple[float, float] = (2e-6, 2e-6),
    dtype: torch.dtype = torch.float32,
) -> None:
    features, *of_layer = sizes
    torch.manual_seed(0)
    layer = InteractingLayer(*of_layer).to(device)
    x = torch.randn(samples, features, of_layer[0]).to(device, dtype)
    ours = outcome(layer, x, fused=True)
    exact = outcome(deepcopy(layer).double(), x.double(), fused=False)
    assert [one.dtype for one in ours] == [dtype, dtype, torch.float32]
    for name, one, wanted in zip(("out", "x", "weights"), ours, exact, strict=True):
        assert one.shape == wanted.shape
        error = ((one.double() - wanted).norm() / wanted.norm().clamp(min=1e-6)).item()
        assert error < tolerance[name != "out"], (sizes, samples, name, error)


@needs_no_gpu
@pytest.mark.parametrize("samples", [0, 1, 5])
@pytest.mark.parametrize("sizes", SIZES)
def test_an_interpreted_layer_is_exact(sizes, samples, monkeypatch):
    from nn.ops.triton import target_attention as kernels

    # Programs take several samples, one, and none.
    monkeypatch.setattr(kernels, "FIELD_PROGRAMS", 3)
    check(sizes, samples, "cpu")


@needs_no_gpu
def test_a_sum_that_is_nan_stays_so():
    from nn.ops.triton.target_attention import interact

    x = torch.randn(2, 5, 4, requires_grad=True)
    weight = torch.randn(4, 6, 4)
    weight[3, 0, 0] = float("nan")
    out = interact(x, weight, 2)
    assert out[..., 0].isnan().all()
    assert not out[..., 1:].isnan().any()
    out[..., 0].sum().backward()
    assert x.grad.isnan().any(2).all()


def test_layers_that_registers_have_no_room_for_are_known():
    assert fits(64, 64, 32)
    assert not any((fits(65, 1, 1), fits(1, 65, 1), fits(1, 1, 33)))


@needs_one_gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("sizes", [*SIZES, (64, 64, 2, 32), (17, 48, 4, 16)])
def test_on_a_gpu_a_layer_is_exact(sizes, dtype, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    for samples in (0, 1, 1_111):
        check(sizes, samples, "cuda", TOLERANCE[dtype], dtype)


@needs_one_gpu
def test_on_a_gpu_a_layer_without_room_is_plain():
    layer = InteractingLayer(16, 2, 16).cuda()
    x = torch.randn(3, 70, 16, device="cuda")
    torch.testing.assert_close(layer(x).cpu(), layer.cpu()(x.cpu()), rtol=1e-3, atol=1e-3)


@needs_one_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_a_gpu_two_runs_and_a_graph_give_the_same_bits(dtype):
    layer = InteractingLayer(32, 2, 16).cuda()
    x = torch.randn(4_000, 39, 32, device="cuda", dtype=dtype, requires_grad=True)

    def once() -> list[Tensor]:
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype is torch.bfloat16):
            out = layer(x)
        assert out.dtype is dtype
        return [out.detach(), *torch.autograd.grad(out, [x, layer.projections], out.detach())]

    check_same_bits(once)
