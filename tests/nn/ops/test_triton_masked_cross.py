"""FCN's cross layers by kernels are as near the exact result as plain PyTorch: interpreted here, compiled on a GPU."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor

from nn.layers import cross_net
from nn.layers.cross_net import MaskedCrossLayer
from nn.layers.pass_state import PassState, attach
from nn.models.fcn import CrossBranch
from tests.helpers.gpus import check_same_bits, needs_no_gpu, needs_one_gpu

pytest.importorskip("triton")
EXACT = 2e-5
"""Of the norm of a result and of gradients."""
NEAR = {torch.float32: 5e-3, torch.float16: 0.02, torch.bfloat16: 0.06}
"""Of gradients on a GPU: a rounding may decide whether a mask near 0 passes one, there or in PyTorch alone."""
TIMES = 2.0
"""Errors of the kernels over those of PyTorch's operations in the same dtype, beyond that."""
SIZE = 0.25
"""Of inputs; three exponential layers make numbers of them that float16 holds."""
BRANCHES = [(1, 0.0, True), (3, 0.0, True), (3, 0.3, True), (1, 0.0, False), (4, 0.3, False)]
BRANCHES += [(2, 0.0, False)]


def branch_of(
    columns: int, branch: tuple[int, float, bool], device: str, rows: int, *, dealt: bool = False
) -> CrossBranch:
    """Return a branch whose parameters all matter, in a training pass; `dealt` rows are every third of the global batch."""
    torch.manual_seed(0)
    layers, dropout, exponential = branch
    kind = {"exponential": exponential, "batch_norm": False}
    made = CrossBranch(columns, layers, dropout, **kind).to(device)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "norm" in name:
                parameter.normal_(std=0.5).add_("weight" in name)
    state = PassState(1, torch.device(device), rank=1)
    attach(made, state)
    row = 2000 - 3 * torch.arange(rows, device=device, dtype=torch.int32)
    state.set(5, rows, rows, 2 * rows, row if dealt else None)
    return made


def outcome(branch: CrossBranch, x: Tensor, *, fused: bool) -> list[Tensor]:
    """Result, and gradients of x and all parameters of the layers."""
    x, first = (x.detach().requires_grad_(),) * 2
    leaves = [x, *(parameter for layer in branch.layers for parameter in small(layer))]
    for layer in branch.layers:
        factor = x if branch.exponential else first
        x = by_kernel(layer, factor, x) if fused else layer(factor, x)
    weight = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
    return [x.detach(), *torch.autograd.grad(x, leaves, weight.to(x))]


def by_kernel(layer: MaskedCrossLayer, factor: Tensor, x: Tensor) -> Tensor:
    from nn.ops.triton.cross_net import masked_cross

    return masked_cross(factor, x, layer.dropout.mask, layer.norm.eps, small(layer))


def small(layer: MaskedCrossLayer) -> list[Tensor]:
    return [layer.linear.weight, layer.norm.weight, layer.norm.bias, layer.bias]


def plain_outcome(branch: CrossBranch, x: Tensor) -> list[Tensor]:
    """Return what PyTorch's operations give, each in the dtype of x."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cross_net, "can_fuse", lambda *_: False)
        return outcome(deepcopy(branch).to(x.dtype), x, fused=False)


def check(
    branch: CrossBranch,
    rows: int,
    device: str,
    near: float = EXACT,
    dtype: torch.dtype = torch.float32,
) -> None:
    columns = branch.logit.in_features
    x = SIZE * torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))
    x = x.to(device, dtype)
    ours, plain = outcome(branch, x, fused=True), plain_outcome(branch, x)
    exact = outcome(deepcopy(branch).double(), x.double(), fused=False)
    names = ["out", "x", *(["weight", "norm's weight", "norm's bias", "bias"] * len(branch.layers))]
    assert [one.dtype for one in ours[:2]] == [dtype] * 2
    assert {one.dtype for one in ours[2:]} == {torch.float32}
    for name, one, other, wanted in zip(names, ours, plain, exact, strict=True):
        assert one.shape == wanted.shape
        assert (wanted.abs() < torch.finfo(dtype).max).all()
        size = wanted.norm().clamp(min=1e-6)
        error, of_plain = (((each - wanted).norm() / size).item() for each in (one, other))
        limit = TIMES * of_plain + (EXACT if name == "out" else near)
        assert error < limit, (rows, columns, name, error, of_plain)


@needs_no_gpu
@pytest.mark.parametrize("rows", [1, 23])
@pytest.mark.parametrize("branch", BRANCHES)
def test_interpreted_layers_are_exact(branch, rows, monkeypatch):
    from nn.ops.triton import cross_net as kernels

    # Programs take one block of rows, several, and no whole one.
    monkeypatch.setattr(kernels, "MASKED_PROGRAMS", 2)
    monkeypatch.setattr(kernels, "MASKED_BLOCK", 64)
    check(branch_of(32, branch, "cpu", rows), rows, "cpu")
    check(branch_of(20, branch, "cpu", rows, dealt=True), rows, "cpu")


@needs_no_gpu
@pytest.mark.parametrize("exponential", [True, False])
def test_no_rows_give_gradients_of_zero(exponential):
    check(branch_of(20, (2, 0.0, exponential), "cpu", 0), 0, "cpu")


@needs_no_gpu
def test_rows_that_are_not_adjacent_are_read_where_they_lie():
    (layer,) = branch_of(20, (1, 0.0, True), "cpu", 3).layers
    x, factor = torch.randn(3, 40).chunk(2, dim=1)
    torch.testing.assert_close(by_kernel(layer, factor, x), layer(factor, x))


@needs_one_gpu
@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("branch", BRANCHES)
def test_on_a_gpu_layers_are_as_near_as_plain_ones(branch, dtype, set_tf32):
    set_tf32(False)
    for columns, rows, dealt in (
        (624, 1, False),
        (624, 1_111, True),
        (20, 1_111, False),
        (6_000, 300, False),
    ):
        made = branch_of(columns, branch, "cuda", rows, dealt=dealt)
        check(made, rows, "cuda", NEAR[dtype], dtype)


@needs_one_gpu
@pytest.mark.parametrize("exponential", [True, False])
def test_on_a_gpu_two_runs_and_a_graph_give_the_same_bits(exponential):
    branch = branch_of(624, (4, 0.3, exponential), "cuda", 4_000)
    x = torch.randn(4_000, 624, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    leaves = [x, *branch.parameters()]

    def once() -> list[Tensor]:
        with torch.autocast("cuda", torch.bfloat16):
            out = branch(x)
        assert out.dtype is torch.float32
        return [out.detach(), *torch.autograd.grad(out, leaves, out.detach())]

    check_same_bits(once)
