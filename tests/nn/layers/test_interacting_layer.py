"""AutoInt's attention by kernels is as near the exact result as plain torch is: interpreted here, compiled on a GPU."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor

from nn.layers.interactions import target_attention
from nn.layers.interactions.target_attention import InteractingLayer
from nn.ops.target_attention import fields_fit
from tests.helpers.gpus import check_same_bits, needs_gpus, needs_no_gpu, needs_one_gpu

pytest.importorskip("triton")
# Features, columns, heads and columns of a head: those of the default options, the least, no powers of 2, and the most.
SIZES = [(39, 16, 2, 16), (39, 32, 2, 16), (1, 1, 1, 1), (7, 20, 3, 5), (17, 8, 1, 20)]
WIDE = (64, 64, 2, 32)
LEFT_OUT, LEFT_OUT_TF32 = 1e-6, 1e-3
"""Of the norm of a result, what an error may be though plain torch's is less; the last where cuBLAS may take no TF32."""


def outcome(layer: InteractingLayer, x: Tensor, weight: Tensor) -> list[Tensor]:
    """Result, and gradients of x and the weights."""
    x = x.detach().requires_grad_()
    out = layer(x)
    return [out.detach(), *torch.autograd.grad(out, [x, layer.projections], weight.to(out))]


def sample(sizes: tuple[int, ...], samples: int, device: str) -> tuple[InteractingLayer, Tensor]:
    torch.manual_seed(0)
    features, *of_layer = sizes
    return InteractingLayer(*of_layer).to(device), torch.randn(
        samples, features, of_layer[0], device=device
    )


def errors(
    layer: InteractingLayer, x: Tensor, monkeypatch, *, amp: torch.dtype | None = None
) -> list[tuple[float, float]]:
    """Relative errors of result and gradients, with kernels and by plain torch.

    Where ReLU's input is near 0 a rounding decides whether it lets a gradient pass; there it has none. Elsewhere it is
    positive, so that the sums of the least layer are no small differences.
    """
    exact_layer = deepcopy(layer).double()
    result = exact_layer(x.double())
    generator = torch.Generator().manual_seed(2)
    weight = torch.rand(result.shape, generator=generator).to(x.device) * (result > 0.1)
    exact = outcome(exact_layer, x.double(), weight)
    pair = []
    for fused in (True, False):
        monkeypatch.setattr(target_attention, "can_fuse", lambda *_, fused=fused: fused)
        with torch.autocast(x.device.type, amp, enabled=amp is not None):
            found = outcome(layer, x, weight)
        assert [one.shape for one in found] == [one.shape for one in exact]
        assert [one.dtype for one in found] == [amp or x.dtype, x.dtype, torch.float32]
        pair.append(
            [
                ((one.double() - wanted).norm() / wanted.norm().clamp(min=1e-6)).item()
                for one, wanted in zip(found, exact, strict=True)
            ]
        )
    return list(zip(*pair, strict=True))


@needs_no_gpu
@pytest.mark.parametrize("samples", [0, 1, 3])
@pytest.mark.parametrize("sizes", SIZES)
def test_an_interpreted_layer_is_exact(sizes, samples, monkeypatch):
    for ours, _ in errors(*sample(sizes, samples, "cpu"), monkeypatch):
        assert ours < 1e-6


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=needs_no_gpu), pytest.param("cuda", marks=needs_gpus(1))]
)
def test_what_is_nan_stays_so(device, tf32, set_tf32):
    from nn.ops.triton.target_attention import interact

    set_tf32(tf32)
    torch.manual_seed(0)
    for part in range(4):
        parts = torch.randn(2, 5, 4 * 6)
        # The one of all bits, as a GPU's arithmetic makes it.
        parts[1, 2, 6 * part] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
        out = interact(parts.to(device), 2)
        # A query's scores, a key's of all, a column of all by its value, and one sum by its residual.
        columns = slice(0, 3 if part < 2 else 1)
        rows = [2] if part in (0, 3) else list(range(5))
        assert out[1, rows, columns].isnan().all()
        assert out.isnan().sum() == len(rows) * (3 if part < 2 else 1)


def test_layers_that_registers_have_no_room_for_are_known():
    assert fields_fit(64, 32)
    assert not any((fields_fit(65, 1), fields_fit(1, 33)))


@needs_one_gpu
@pytest.mark.parametrize(
    ("tf32", "amp"), [(False, None), (True, None), (True, torch.bfloat16), (True, torch.float16)]
)
@pytest.mark.parametrize("sizes", [*SIZES, WIDE], ids=str)
def test_on_a_gpu_a_layer_is_as_exact_as_plain_torch(sizes, tf32, amp, set_tf32, monkeypatch):
    set_tf32(tf32)
    is_odd = tf32 and amp is None and sizes not in (SIZES[0], SIZES[1], WIDE)
    for samples in (0, 1, 1_111):
        for ours, plain in errors(*sample(sizes, samples, "cuda"), monkeypatch, amp=amp):
            # One sample has few errors, of which the largest decides.
            most = (1.5 if samples > 1 else 3) * plain + (LEFT_OUT_TF32 if is_odd else LEFT_OUT)
            assert ours <= most, (samples, ours, plain)


@needs_one_gpu
def test_on_a_gpu_a_layer_without_room_is_plain():
    layer, x = sample((70, 16, 2, 16), 3, "cuda")
    torch.testing.assert_close(layer(x).cpu(), layer.cpu()(x.cpu()), rtol=1e-3, atol=1e-3)


@needs_one_gpu
@pytest.mark.parametrize("sizes", [SIZES[1], WIDE], ids=str)
@pytest.mark.parametrize("amp", [None, torch.bfloat16])
def test_on_a_gpu_two_runs_and_a_graph_give_the_same_bits(sizes, amp):
    layer, x = sample(sizes, 4_000, "cuda")
    weight = torch.randn(*x.shape[:2], sizes[2] * sizes[3], device="cuda")

    def once() -> list[Tensor]:
        with torch.autocast("cuda", amp, enabled=amp is not None):
            return outcome(layer, x, weight)

    check_same_bits(once)
