"""The kernels of layer norms are as near the exact result as their dtype allows: interpreted here, compiled on a GPU."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm, silu

from nn.layers.pass_state import PassState, attach
from nn.layers.stu import STULayer
from nn.ops.dropout_mask import DropoutMask
from nn.ops.hstu_attention import JaggedPositions
from tests.helpers.gpus import check_same_bits, needs_no_gpu, needs_one_gpu

EPS = 1e-5
# Of the norm of a result: some roundings of an element in its dtype.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 6e-4}
FORMS = ["norm", "swish", "beside", "gate", "gate without concat", "gate with dropout"]
FORMS += ["gate with dropout of dealt rows"]
# Programs take one block of rows, several, and no whole one.
ROWS = [0, 1, 7, 20_011] if torch.cuda.is_available() else [0, 1, 7, 50]


def inputs_of(form: str, rows: int, columns: int, device: str, dtype: torch.dtype) -> list[Tensor]:
    """Return the input of a norm, weight and bias, and of a gate its factors, a part of wider rows."""
    generator = torch.Generator().manual_seed(1)
    x = 2 + torch.randn(rows, columns, generator=generator)
    parameters = [torch.randn(columns, generator=generator).to(device) for _ in range(2)]
    if not form.startswith("gate"):
        return [x.to(device, dtype), *parameters]
    u = torch.randn(rows, 4 * columns, generator=generator).to(device, dtype).chunk(4, dim=1)[1]
    return [x.to(device, dtype), *parameters, u]


def kernels_of(form: str, rows: int, device: str) -> Callable[..., Tensor]:
    from nn.ops.triton import layer_norm as kernels

    if form == "beside":
        # Two of what is beside the norm, so that its gradient is another.
        return lambda *of: torch.cat(
            [part * n for n, part in enumerate(kernels.norm_beside(*of, EPS), 1)]
        )
    if not form.startswith("gate"):
        return lambda x, *of: kernels.layer_norm(x, *of, EPS, swish=form == "swish")

    mask, at = dropout_of(form, rows, device)

    def gate(a: Tensor, weight: Tensor, bias: Tensor, u: Tensor) -> Tensor:
        return kernels.gate(u, a, weight, bias, EPS, mask, at, concat="without" not in form)

    return gate


def plain_of(form: str, device: str) -> Callable[..., Tensor]:
    def run(x: Tensor, weight: Tensor, bias: Tensor, u: Tensor | None = None) -> Tensor:
        normed = layer_norm(x, weight.shape, weight, bias, EPS)
        if form == "beside":
            return torch.cat([normed, 2 * x])
        if u is None:
            return x * torch.sigmoid(normed) if form == "swish" else normed
        parts = [silu(u), x, silu(u) * normed]
        y = parts[-1] if "without" in form else torch.cat(parts, dim=1)
        mask, at = dropout_of(form, len(x), device)
        return y if mask is None or not len(y) else mask.apply(y, at)

    return run


def dropout_of(
    form: str, rows: int, device: str
) -> tuple[DropoutMask | None, tuple[Tensor, Tensor]]:
    """Mask, and sample and offset of each row, of which samples have three."""
    row = torch.arange(rows, device=device)
    step, first = (torch.tensor([number], device=device) for number in (5, 1100))
    # As of a rank that has every third row of the global batch.
    dealt = 2000 - 3 * row.int() if "dealt" in form else None
    mask = DropoutMask(-7, 0.3, step, first, dealt) if "dropout" in form else None
    return mask, (row // 3, row % 3)


def outcome(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Result and gradients."""
    leaves = [each.detach().requires_grad_() for each in inputs]
    out = function(*leaves)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    return [out.detach(), *torch.autograd.grad(out, leaves, weight.to(out))]


def check(form: str, rows: int, columns: int, device: str, dtype: torch.dtype) -> None:
    inputs = inputs_of(form, rows, columns, device, dtype)
    ours = outcome(kernels_of(form, rows, device), inputs)
    exact = outcome(plain_of(form, device), [each.double() for each in inputs])
    wanted_dtypes = [dtype, dtype, torch.float32, torch.float32, dtype][: len(ours)]
    assert [each.dtype for each in ours] == wanted_dtypes
    for number, (one, wanted) in enumerate(zip(ours, exact, strict=True)):
        error = ((one.double() - wanted).norm() / wanted.norm().clamp(min=1e-6)).item()
        assert error < TOLERANCE[dtype], (rows, columns, number, error)


@needs_no_gpu
@pytest.mark.parametrize("form", FORMS)
def test_the_interpreted_norms_are_exact(form, monkeypatch):
    from nn.ops.triton import layer_norm as kernels

    monkeypatch.setattr(kernels, "PROGRAMS", 3)
    for name in ("FORWARD", "BACKWARD", "GATE_FORWARD", "GATE_BACKWARD"):
        monkeypatch.setattr(kernels, name, 256)
    monkeypatch.setattr(kernels, "WIDE_PROGRAMS", 2)
    for columns in (16, 100):
        for rows in ROWS:
            check(form, rows, columns, "cpu", torch.float32)
    check(form, 7, 600, "cpu", torch.float32)


@needs_one_gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("form", FORMS)
def test_on_a_gpu_norms_are_exact(form, dtype):
    for columns in (16, 64, 100, 512):
        for rows in ROWS:
            check(form, rows, columns, "cuda", dtype)
    check(form, 1_000, 3_000, "cuda", dtype)


@needs_one_gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("columns", [64, 512])
def test_on_a_gpu_two_runs_and_a_graph_give_the_same_bits(form, columns):
    rows = 100_003
    inputs = inputs_of(form, rows, columns, "cuda", torch.bfloat16)
    run = kernels_of(form, rows, "cuda")
    leaves = [each.detach().requires_grad_() for each in inputs]

    def once() -> list[Tensor]:
        out = run(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, out.detach())]

    check_same_bits(once)


@needs_no_gpu
@pytest.mark.parametrize("only_candidates", [True, False])
@pytest.mark.parametrize("concat", [True, False])
def test_an_interpreted_layer_equals_plain_torch(concat, only_candidates, monkeypatch):
    torch.manual_seed(0)
    layer, state = STULayer(12, 2, 4, 0.3, concat=concat), PassState(1, torch.device("cpu"), 2)
    attach(layer, state)
    state.set(5, 4, 4, 12)
    lengths = torch.tensor([3, 1, 9])
    starts, samples = lengths.cumsum(0) - lengths, torch.tensor([0] * 3 + [1] + [2] * 11)
    offsets = torch.arange(15) - starts[samples]
    at = JaggedPositions(starts, lengths, samples, offsets, offsets < lengths[samples], 9)

    x = torch.randn(15, 12, requires_grad=True)

    def run() -> list[Tensor]:
        out = layer(x, at, torch.full((3,), 9), only_candidates=only_candidates)
        return [out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])]

    plain = run()
    for name in ("stu", "sequence"):
        monkeypatch.setattr(f"nn.layers.{name}.can_fuse", lambda *_: True)
    for one, wanted in zip(run(), plain, strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-5, atol=1e-5)
