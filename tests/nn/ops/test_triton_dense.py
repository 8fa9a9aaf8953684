"""The fused MLP and cross network are as near the exact result as plain torch: interpreted here, compiled on a GPU."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from nn.layers.cross_net import CrossNet
from nn.layers.mlp import MLP
from nn.layers.pass_state import PassState, attach
from tests.helpers.gpus import needs_no_gpu

# Columns of the input and the module. The widths fill no block of the kernels.
MODULES = {
    "mlp-to-one-logit": (13, lambda: MLP(13, [24, 40, 1], final_activation=False)),
    "mlp-to-relu": (16, lambda: MLP(16, [130, 5], final_activation=True)),
    "mlp-with-dropout-to-one-logit": (
        13,
        lambda: MLP(13, [24, 40, 1], final_activation=False, dropout=0.3),
    ),
    "mlp-with-dropout-to-relu": (16, lambda: MLP(16, [130, 5], final_activation=True, dropout=0.5)),
    "mlp-of-one-layer": (8, lambda: MLP(8, [3], final_activation=False)),
    "cross-of-low-rank": (130, lambda: CrossNet(130, 3, 5)),
    "cross-of-full-rank": (13, lambda: CrossNet(13, 2, None)),
    "cross-of-one-layer": (24, lambda: CrossNet(24, 1, 8)),
    "cross-of-four-layers": (24, lambda: CrossNet(24, 4, 8)),
}
# One program of the backward kernels takes 256 rows: below, at and above that. The interpreter takes long.
BATCH_SIZES = [1, 512, 1100] if torch.cuda.is_available() else [1, 256, 300]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def build(name: str, device: str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    module = MODULES[name][1]()
    for parameter in module.parameters():
        # Fresh biases of a cross network are zero, which would hide one that is forgotten.
        nn.init.normal_(parameter, std=0.3)
    state = PassState(1, torch.device(device), rank=2)
    attach(module, state)
    state.set(5, 1100, 1100, 3300)
    return module.to(device)


def draw(name: str, num_rows: int) -> Tensor:
    return torch.randn(num_rows, MODULES[name][0], generator=torch.Generator().manual_seed(1))


def outcome(forward: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor) -> list[Tensor]:
    """Output, and the gradients of the input and of every parameter."""
    x = x.detach().requires_grad_()
    out = forward(x)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)
    gradient = weight.clone()
    gradients = torch.autograd.grad(out, [x, *module.parameters()], gradient)
    assert torch.equal(gradient, weight), "the gradient from outside may have other readers"
    return [out.detach(), *gradients]


def errors(results: list[Tensor], name: str, x: Tensor) -> list[float]:
    """Distance of each result from float64's, relative to its norm."""
    module = build(name, x.device.type).double()
    exact = outcome(module.forward_plain, module, x.double())
    return [
        ((result.double() - wanted).norm() / wanted.norm().clamp(min=1e-6)).item()
        for result, wanted in zip(results, exact, strict=True)
    ]


def assert_as_exact_as_plain(
    fused: list[Tensor], plain: list[Tensor], name: str, x: Tensor, dtype: torch.dtype
):
    # The roundings of one row do not average out: those of plain torch may happen to be small. One rounding is allowed then.
    factor, rounding = (2, 0.0) if len(x) > 1 else (4, torch.finfo(dtype).eps / 2)
    for ours, theirs in zip(errors(fused, name, x), errors(plain, name, x), strict=True):
        assert ours < max(factor * theirs, rounding) + 1e-6, (name, len(x), ours, theirs)


@needs_no_gpu
@pytest.mark.parametrize("name", MODULES)
def test_the_interpreted_functions_are_as_exact_as_plain_torch(name):
    module = build(name)
    for num_rows in BATCH_SIZES:
        x = draw(name, num_rows)
        fused = outcome(module._forward_fused, module, x)
        plain = outcome(module.forward_plain, module, x)
        assert_as_exact_as_plain(fused, plain, name, x, torch.float32)


@pytest.mark.parametrize("name", MODULES)
def test_the_plain_forms_pass_gradcheck(name):
    module = build(name).double()
    x = draw(name, 2).double().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x, *_: module.forward_plain(x), (x, *module.parameters()), fast_mode=True
    )


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODULES)
def test_on_a_gpu_the_fused_functions_are_as_exact_as_plain_torch(name, dtype):
    torch.set_float32_matmul_precision("highest")
    module = build(name, "cuda")
    for num_rows in BATCH_SIZES:
        # An MLP narrows its input itself; the cross network's comes narrowed by the bottom MLP.
        x = draw(name, num_rows).to("cuda", torch.float32 if name.startswith("mlp") else dtype)
        with torch.autocast("cuda", dtype, enabled=dtype is not torch.float32):
            fused, plain = (
                outcome(forward, module, x) for forward in (module, module.forward_plain)
            )
        # A fused layer with one output gives what a loss reads.
        out = torch.float32 if name.endswith("one-logit") else plain[0].dtype
        assert [tensor.dtype for tensor in fused] == [out, *(tensor.dtype for tensor in plain[1:])]
        assert_as_exact_as_plain(fused, plain, name, x, dtype)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", MODULES)
def test_on_a_gpu_two_runs_give_the_same_bits(name):
    module = build(name, "cuda")
    x = draw(name, 10_000).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        first, second = (outcome(module, module, x) for _ in range(2))
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", MODULES)
def test_on_a_gpu_a_compiled_module_gives_what_it_gives_uncompiled(name):
    torch.compiler.reset()
    module = build(name, "cuda")
    x = draw(name, 512).cuda()
    wanted = outcome(module, module, x)
    compiled = outcome(torch.compile(module, backend="eager"), module, x)
    for one, two in zip(compiled, wanted, strict=True):
        # The same kernels; the compiled graph may sum a product in another order.
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-4)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", MODULES)
def test_on_a_gpu_float64_runs_in_plain_torch(name):
    module = build(name, "cuda").double()
    x = draw(name, 4).cuda().double()
    torch.testing.assert_close(module(x), module.forward_plain(x), rtol=0, atol=0)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", MODULES)
def test_on_a_gpu_an_exported_module_is_in_plain_torch(name):
    module = build(name, "cuda")
    module.eval()
    x = draw(name, 4).cuda()
    exported = torch.export.export(module, (x,)).module()
    torch.testing.assert_close(exported(x), module.forward_plain(x))
