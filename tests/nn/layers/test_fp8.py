"""Products in 8 bits follow the formulas on rounded matrices, and their scales the largest values of passes before."""

import math

import pytest
import torch
from torch import Tensor, nn

from nn.layers.cross_net import CrossNet
from nn.layers.fp8 import HISTORY, Fp8Linear
from nn.layers.mlp import MLP
from nn.layers.pass_state import PassState, attach
from nn.layers.per_token import PerTokenExperts
from nn.ops.fp8 import GRADIENT, INPUT, LARGEST, Scale, quantise, scale_factors

CPU = torch.device("cpu")
MODULES = {
    "cross-of-low-rank": (48, lambda: CrossNet(48, 3, 16)),
    "cross-of-one-layer": (32, lambda: CrossNet(32, 1, 16)),
    "cross-of-full-rank": (32, lambda: CrossNet(32, 2, None)),
    "mlp": (48, lambda: MLP(48, [32, 1], final_activation=False)),
}


def built(name: str, *, weight_gradients: bool = True, rows: int = 64) -> nn.Module:
    torch.manual_seed(0)
    module = MODULES[name][1]()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.2)
    module.use_fp8(weight_gradients=weight_gradients)
    state = PassState(1, CPU)
    attach(module, state)
    state.set(0, rows, rows, rows)
    return module


def outcome(forward, module: nn.Module, x: Tensor, rows: int) -> list[Tensor]:
    """Output, and the gradients of the input and of every parameter, of a mean over rows."""
    x = x.detach().requires_grad_()
    out = forward(x)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)) / rows
    return [out.detach(), *torch.autograd.grad(out, [x, *module.parameters()], weight.to(out))]


def relative(one: Tensor, exact: Tensor) -> float:
    return ((one.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("dtype", [INPUT, GRADIENT])
def test_rounding_is_to_the_nearest_and_saturates(dtype):
    limit = LARGEST[dtype]
    x = torch.tensor([[0.0, -limit, 3 * limit, math.inf, math.nan, 1.0, -0.3, limit / 3]])
    latest = torch.zeros(1)
    scale = Scale(torch.tensor([0.5]), torch.tensor([2.0]), latest)
    stored = quantise(x.nan_to_num(posinf=4 * limit), dtype, scale, transposed=True)
    assert latest.item() == 4 * limit
    stored = quantise(x, dtype, scale, transposed=True)
    values = stored.rows.float() * stored.inverse
    assert values[0, :4].tolist() == [0, -limit, 2 * limit, 2 * limit]
    assert values[0, 4].isnan()
    torch.testing.assert_close(values[0, 5:], x[0, 5:], rtol=0.126, atol=0)
    assert torch.equal(stored.transposed.rows.view(torch.uint8), stored.rows.t().view(torch.uint8))


def test_scales_are_the_largest_fitting_powers_of_two():
    largest = torch.tensor([1e-40, 1e-6, 0.99, 1.0, 1.01, 3.0, 447.0, 1e30])
    factors = scale_factors(largest, torch.full_like(largest, 448.0))
    assert factors.isfinite().all()
    assert torch.frexp(factors).mantissa.eq(0.5).all()
    assert (factors * largest <= 448).all()
    assert (factors * largest * 2 > 448)[1:].all()


@pytest.mark.parametrize("weight_gradients", [True, False], ids=["full", "partial"])
@pytest.mark.parametrize("name", MODULES)
def test_products_have_the_error_of_8_bits_and_no_more(name, weight_gradients):
    rows = 200  # no multiple of 16
    module = built(name, weight_gradients=weight_gradients, rows=rows)
    x = torch.randn(rows, MODULES[name][0], generator=torch.Generator().manual_seed(1))
    for _ in range(2):  # the second pass has the scales of the first
        with torch.autocast("cpu", torch.bfloat16):
            results = outcome(module, module, x, rows)
        module.fp8.update()
    module.train(False)
    wide = outcome(module, module, x, rows)
    exact = outcome(module.double().forward_plain, module, x.double(), rows)
    for ours, bfloat16, wanted in zip(results, wide, exact, strict=True):
        assert relative(bfloat16, wanted) < 1e-5, "evaluation is in the dtype of its input"
        # Near 0 rounding turns some ReLUs on or off.
        assert 0 < relative(ours, wanted) < 0.2
    by_name = dict(zip(["out", "x", *dict(module.named_parameters())], results, strict=True))
    assert all(value.shape == wanted.shape for value, wanted in zip(results, exact, strict=True))
    assert by_name["x"].dtype is torch.float32


def test_a_product_is_that_of_the_rounded_matrices():
    torch.manual_seed(0)
    layer = Fp8Linear(weight_gradients=True)
    state = PassState(1, CPU)
    attach(layer, state)
    state.set(0, 32, 32, 32)
    x, weight, bias = torch.randn(32, 48), torch.randn(16, 48), torch.randn(16)
    x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()
    out = layer(x, weight, bias)
    grad = torch.randn(out.shape).bfloat16() / 32
    gradients = torch.autograd.grad(out, [x, weight, bias], grad)

    def rounded(values: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
        return (values.detach().bfloat16().float() * factor).to(dtype).float() / factor

    # Before any pass, inputs of up to 16 fit into half of 448, and gradients of 1 / 32 into a sixteenth of 57,344.
    a, g = rounded(x, 8, INPUT), rounded(grad, 65_536, GRADIENT)
    factor = 2.0 ** math.floor(math.log2(448 / weight.abs().max().item()))
    w = (weight.detach() * factor).to(INPUT).float() / factor
    assert torch.equal(out, (a @ w.t() + bias.detach().bfloat16()).bfloat16())
    assert torch.equal(gradients[0], (g @ w).bfloat16().float())
    torch.testing.assert_close(gradients[1], g.t() @ a, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradients[2], grad.float().sum(0))


def test_a_scale_follows_the_largest_of_the_latest_passes():
    layer = Fp8Linear(weight_gradients=True)
    attach(layer, PassState(1, CPU))
    weight, bias = torch.ones(16, 16), torch.zeros(16)

    def factor_after(largest: float) -> float:
        layer(torch.full((16, 16), largest), weight, bias)
        layer.update()
        return layer.begin()[0].factor.item()

    assert factor_after(1.0) == 128  # 224 / 1
    assert factor_after(10.0) == 16
    kept = [factor_after(1.0) for _ in range(HISTORY)]
    assert kept == [16.0] * (HISTORY - 1) + [128.0]
    layer(torch.full((16, 16), 99.0), weight, bias)
    assert layer.begin()[0].factor.item() == 128, "a pass that is not applied changes nothing"


def test_weights_of_per_token_networks_have_the_scales_of_passes_before():
    network = PerTokenExperts(2, 16, 32, 1)
    network.use_fp8(weight_gradients=True)
    attach(network, PassState(1, CPU))
    x = torch.ones(2, 16, 16, dtype=torch.bfloat16)
    factors = []
    for largest in (0.5, 0.001):
        nn.init.constant_(network.up, largest)
        nn.init.constant_(network.down, -largest)
        factors.append([scale.factor.item() for scale in network.fp8.begin()[4:]])
        network(x, None)
        network.fp8.update()
    # Before any pass up to 16 fits into half of 448.
    assert factors == [[8.0] * 2, [256.0] * 2]


@pytest.mark.parametrize("weight_gradients", [True, False], ids=["full", "partial"])
@pytest.mark.parametrize(
    "options", [{}, {"dropout": 0.5}, {"batch_norm": True}], ids=["plain", "dropout", "norm"]
)
def test_an_mlp_that_alone_reads_the_cross_layers_gives_the_same_bits(options, weight_gradients):
    def model() -> nn.Module:
        torch.manual_seed(0)
        cross = CrossNet(48, 2, 16)
        module = nn.ModuleList([cross, MLP(48, [32, 1], final_activation=False, **options)])
        for layer in module:
            layer.use_fp8(weight_gradients=weight_gradients)
        state = PassState(1, CPU)
        attach(module, state)
        state.set(0, 40, 40, 40)
        return module

    x = torch.randn(40, 48, generator=torch.Generator().manual_seed(1))
    (cross, mlp), apart = model(), model()
    with torch.autocast("cpu", torch.bfloat16):
        ours = outcome(lambda x: cross(x, mlp), nn.ModuleList([cross, mlp]), x, 40)
        wanted = outcome(lambda x: apart[1](apart[0](x)), apart, x, 40)
    assert all(torch.equal(one, other) for one, other in zip(ours, wanted, strict=True))
    for layer, other in zip((cross, mlp), apart, strict=True):
        assert torch.equal(layer.fp8._latest, other.fp8._latest)
