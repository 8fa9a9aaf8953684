"""Compressed interactions by kernels are as near the exact result as plain ones: interpreted here, compiled on a GPU."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor

from nn.layers.cross_net import CompressedInteraction
from nn.models.options import XDeepFMOptions
from nn.models.xdeepfm import XDeepFM
from tests.helpers.gpus import check_same_bits, needs_no_gpu, needs_one_gpu
from tests.helpers.specs import sized_spec

pytest.importorskip("triton")
# Features, vectors of the input (None: the features themselves) and of the output: no powers of 2, the least, of the default
# options, the most.
SMALL = [(7, None, 5), (20, 33, 3), (1, None, 1)]
SIZES = [*SMALL, (39, None, 16), (39, 16, 16), (64, 64, 64)]


def operands(
    sizes: tuple[int, int | None, int],
    samples: int,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> tuple[CompressedInteraction, Tensor, Tensor]:
    """Return a layer, x and the vectors, which may be one."""
    features, inputs, outputs = sizes
    torch.manual_seed(0)
    layer = CompressedInteraction(features, inputs or features, outputs).to(device)
    vectors = torch.randn(samples, 4, features).to(device, dtype)
    x = vectors if inputs is None else torch.randn(samples, 4, inputs).to(device, dtype)
    return layer, x, vectors


def outcome(
    layer: CompressedInteraction, x: Tensor, vectors: Tensor, *, fused: bool
) -> list[Tensor]:
    """Result, and gradients of the vectors, of x if it is not the vectors, and of the weight."""
    from nn.ops.triton.cross_net import interact

    leaf = vectors.detach().requires_grad_()
    first = leaf if x is vectors else x.detach().requires_grad_()
    layer.has_kernels = False
    out = interact(first, leaf, layer.weight) if fused else layer(first, leaf)
    leaves = [leaf, *([] if first is leaf else [first]), layer.weight]
    # Exact in all dtypes, and positive: the sums of the least layer are no small differences.
    weight = torch.randint(1, 64, out.shape, generator=torch.Generator().manual_seed(2)) / 64
    return [out.detach(), *torch.autograd.grad(out, leaves, weight.to(out))]


def errors(found: list[Tensor], wanted: list[Tensor]) -> list[float]:
    """Return the norms of the differences, as shares of what is wanted."""
    assert [one.shape for one in found] == [one.shape for one in wanted]
    pairs = [(one.double(), other.double()) for one, other in zip(found, wanted, strict=True)]
    return [((one - other).norm() / other.norm().clamp(min=1e-6)).item() for one, other in pairs]


def exact(layer: CompressedInteraction, x: Tensor, vectors: Tensor) -> list[Tensor]:
    wide = vectors.double()
    return outcome(
        deepcopy(layer).double(), wide if x is vectors else x.double(), wide, fused=False
    )


@pytest.fixture
def few_rows(monkeypatch, set_tf32):
    """Programs take few rows and pairs, so that there are several, and one takes several blocks."""
    from nn.ops.triton import cross_net as kernels

    small = {"M": 16, "num_warps": 1}
    for name, sizes in (("PRODUCTS", small), ("OF_PAIRS", small | {"N": 32}), ("EXACT", {})):
        monkeypatch.setattr(kernels, name, sizes)
    monkeypatch.setattr(kernels, "PAIR_PROGRAMS", 40)
    set_tf32(False)


@needs_no_gpu
@pytest.mark.parametrize("samples", [0, 1, 13])
@pytest.mark.parametrize("sizes", SMALL)
def test_an_interpreted_layer_is_exact(sizes, samples, few_rows):
    layer, x, vectors = operands(sizes, samples)
    ours = outcome(layer, x, vectors, fused=True)
    assert max(errors(ours, exact(layer, x, vectors))) < 1e-6


@needs_no_gpu
@pytest.mark.parametrize("sizes", SMALL)
def test_in_16_bits_an_interpreted_layer_is_as_exact_as_a_plain_one(sizes, few_rows):
    # The interpreter multiplies bfloat16 as integers.
    layer, x, vectors = operands(sizes, 13, dtype=torch.float16)
    ours, plain = (outcome(layer, x, vectors, fused=fused) for fused in (True, False))
    assert [one.dtype for one in ours] == [one.dtype for one in plain]
    wanted = exact(layer, x, vectors)
    pairs = zip(errors(ours, wanted), errors(plain, wanted), strict=True)
    assert all(one <= 1.5 * other for one, other in pairs)


@needs_no_gpu
def test_several_layers_add_up_the_gradients_of_their_vectors(few_rows):
    from nn.ops.triton.cross_net import interact

    first, _, vectors = operands((7, None, 5), 9)
    second = CompressedInteraction(7, 5, 4)

    def gradients(of: list[CompressedInteraction], leaf: Tensor, *, fused: bool) -> list[Tensor]:
        leaf = leaf.detach().requires_grad_()
        x = leaf
        for layer in of:
            x = interact(x, leaf, layer.weight) if fused else layer(x, leaf)
        leaves = [leaf, *(layer.weight for layer in of)]
        return list(torch.autograd.grad(x.square().sum(), leaves))

    layers = [first, second]
    wanted = gradients(
        [deepcopy(layer).double() for layer in layers], vectors.double(), fused=False
    )
    assert max(errors(gradients(layers, vectors, fused=True), wanted)) < 1e-6


@needs_no_gpu
def test_tf32_is_rounded_to_nearest(few_rows, set_tf32):
    from nn.ops.triton.cross_net import interact

    def rounded(values: Tensor) -> Tensor:
        # 10 bits behind the first one.
        scale = 2.0 ** (10 - values.double().abs().log2().floor())
        return (values.double() * scale).round() / scale

    layer, x, vectors = operands((20, 33, 3), 13)
    set_tf32(True)
    found, narrow = interact(x, vectors, layer.weight).detach(), deepcopy(layer).double()
    narrow.weight.data = rounded(layer.weight.detach())
    wanted = narrow(x.double(), rounded(vectors)).detach()
    truth = exact(layer, x, vectors)[0]
    assert errors([found], [wanted])[0] < 1e-6
    assert 1e-4 < errors([found], [truth])[0] < 1e-3


@needs_no_gpu
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("is_on", [False, True])
def test_what_is_not_finite_stays_so_in_its_rows(is_on, few_rows, set_tf32):
    set_tf32(is_on)
    layer, x, vectors = operands((7, 5, 3), 3)
    # As a GPU writes it: all bits set.
    vectors[0, 0, 0] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    vectors[1, 0, 0] = float("inf")
    out, of_vectors, of_x, of_weight = outcome(layer, x, vectors, fused=True)
    for values in (out, of_x):
        is_finite = values.isfinite().flatten(0, 1)
        assert not is_finite[[0, 4]].any()
        assert is_finite[[1, 2, 3, *range(5, 12)]].all()
    assert of_vectors.isfinite().all()
    assert not of_weight.isfinite().all()


@needs_no_gpu
def test_vectors_that_are_not_adjacent_and_saved_ones_that_were_copied_are_read(few_rows):
    layer, _, vectors = operands((7, None, 5), 5)
    apart = vectors.transpose(1, 2).contiguous().transpose(1, 2)
    wanted = exact(layer, vectors, vectors)
    assert max(errors(outcome(layer, apart, apart, fused=True), wanted)) < 1e-6
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved):
        found = outcome(layer, vectors, vectors, fused=True)
    assert max(errors(found, wanted)) < 1e-6


def test_layers_that_kernels_have_no_room_for_are_known():
    assert CompressedInteraction(64, 64, 64).has_kernels
    sizes = ((65, 1, 1), (1, 65, 1), (1, 1, 65))
    assert not any(CompressedInteraction(*of_layer).has_kernels for of_layer in sizes)


def test_the_plan_has_products_of_pairs_where_there_are_no_kernels():
    def columns(*layers: int) -> int:
        options = XDeepFMOptions(embedding_dim=2, cross_layers=list(layers))
        return XDeepFM(options, sized_spec(3, 4, 1)).activations().backward_columns

    # The vectors, those of each layer, and of both gradients that are there at once.
    assert columns(16, 8) == 2 * (7 + 16 + 8 + 2 * 7 + 2 * 16)
    assert columns(65) == 2 * (7 + 65 + 7 * 7 + 7 * 7)


@needs_one_gpu
@pytest.mark.parametrize("kind", ["exact", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("sizes", SIZES)
def test_on_a_gpu_a_layer_is_as_exact_as_a_plain_one(sizes, kind, set_tf32):
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(kind, torch.float32)
    set_tf32(kind == "tf32")
    # For odd sizes cuBLAS takes no TF32, which rounds by at most 2^-11.
    tiny = {torch.float32: 2**-11 if kind == "tf32" else 3e-7}.get(dtype, 1e-3)
    for samples in (0, 1, 1_111):
        layer, x, vectors = operands(sizes, samples, "cuda", dtype)
        ours, plain = (outcome(layer, x, vectors, fused=fused) for fused in (True, False))
        assert [one.dtype for one in ours] == [one.dtype for one in plain]
        wanted = exact(layer, x, vectors)
        pairs = list(zip(errors(ours, wanted), errors(plain, wanted), strict=True))
        assert all(one <= 1.5 * other + tiny for one, other in pairs), (samples, pairs)


@needs_one_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sizes", SIZES[3:])
def test_on_a_gpu_two_runs_and_a_graph_give_the_same_bits(sizes, dtype, set_tf32):
    set_tf32(True)
    layer, x, vectors = operands(sizes, 10_000, "cuda")
    leaves = [vectors, *([] if x is vectors else [x]), layer.weight]
    for leaf in leaves:
        leaf.requires_grad_()

    def once() -> list[Tensor]:
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype is torch.bfloat16):
            out = layer(x, vectors)
        assert out.dtype is dtype
        assert type(out.grad_fn).__name__ == "_InteractionBackward"
        return [out.detach(), *torch.autograd.grad(out, leaves, out.detach())]

    check_same_bits(once)


@needs_one_gpu
def test_on_a_gpu_no_products_of_pairs_lie_in_memory():
    layer, x, vectors = operands((39, None, 16), 10_000, "cuda")
    vectors.requires_grad_()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    layer(x, vectors).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < vectors.numel() * 39 * 4 / 3
