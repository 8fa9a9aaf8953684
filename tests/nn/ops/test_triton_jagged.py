"""The kernels over positions of samples give what plain torch gives: interpreted here, compiled on a GPU."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nn.ops import jagged as plain
from nn.ops import jagged_attention as plain_attention
from nn.ops.jagged import Positions
from nn.ops.jagged_attention import ScoreBias
from tests.helpers.gpus import check_same_bits, needs_no_gpu, needs_one_gpu
from tests.nn.ops.jagged_samples import drawn, samples_of

# Relative to the largest value of a result. In 16 bits weights and their gradients are rounded before products, too.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
LENGTHS = [3, 0, 1, 36, 17]
# On a GPU: blocks of 128 queries, and of 64.
LONG, SHORT = [700, 0, 33, 1, 129, 2000, 1000], [200, 0, 64, 65, 1, 20] * 20


def outcome(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Return result and gradients."""
    leaves = [each.detach().clone().requires_grad_() for each in inputs]
    out = function(*leaves)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    grads = torch.autograd.grad((out * weight.to(out.device, out.dtype)).sum(), leaves)
    return [out.detach(), *grads]


def worst_difference(ours: list[Tensor], wanted: list[Tensor]) -> float:
    """Largest difference of results, each relative to its own largest value."""
    assert all(each.isfinite().all() for each in ours)
    return max(
        ((one.double() - two.double()).abs().max() / two.abs().max().clamp(min=1)).item()
        for one, two in zip(ours, wanted, strict=True)
    )


def check_pooling(device: str, lengths: list[int], dtype: torch.dtype) -> None:
    from nn.ops.triton import jagged as kernels

    for gap, width in ((0, 3), (2, 130)):
        at = samples_of(lengths, device, gap)
        values = drawn(at, width, dtype=dtype)
        vectors = drawn(samples_of([len(lengths)], device), width, dtype=dtype)[: len(lengths)]
        for name, *rest in (
            ("expand", vectors),
            ("softmax", values[:, :3] * 5),
            ("softmax", values[:, 0] * 5),
            *(("pool", values, how) for how in ("sum", "mean", "last")),
        ):
            ours, theirs = (
                outcome(lambda x, of=of: getattr(of, name)(x, at, *rest[1:]), [start])  # noqa: B023
                for of, start in ((kernels, rest[0]), (plain, rest[0].double()))
            )
            assert ours[0].dtype is dtype
            assert worst_difference(ours, theirs) < TOLERANCE[dtype], (name, rest[1:], width)


def inputs_of(
    at: Positions, queries: Positions, heads: int, width: int, columns: tuple[int, int], dtype
) -> list[Tensor]:
    """Queries, keys and values, as parts of one projection if they are of the same positions, and biases."""
    q = drawn(queries, heads, width, seed=7, dtype=dtype)
    if queries is at:
        q, k, v = drawn(at, 3 * heads * width, dtype=dtype).view(-1, 3, heads, width).unbind(1)
    else:
        k, v = drawn(at, 2 * heads * width, dtype=dtype).view(-1, 2, heads, width).unbind(1)
    generator = torch.Generator().manual_seed(5)
    biases = [
        torch.randn(heads, each, generator=generator).to(q.device) for each in columns if each
    ]
    return [q, k, v, *biases]


def attention(of, at: Positions, queries: Positions, causal: bool) -> Callable[..., Tensor]:
    times = drawn(at).abs() * 1e6

    def run(q, k, v, position=None, time=None):
        bias = ScoreBias(position, time, times)
        return of.attend(q, k, v, at, queries, causal, 0.3, bias)

    return run


def check_attention(
    lengths: list[int],
    most: int | None,
    causal: bool,
    columns: tuple[int, int],
    dtype,
    device: str,
    **sizes: int,
) -> None:
    """Compare with plain torch: all events are queries, or at most `most` of each sample, which come last."""
    from nn.ops.triton import jagged_attention as kernels

    at = samples_of(lengths, device, gap=1)
    queries = at if most is None else samples_of([min(n, most) for n in lengths], device)
    inputs = inputs_of(at, queries, *sizes.values(), columns, dtype)
    ours = outcome(attention(kernels, at, queries, causal), inputs)
    wanted = outcome(attention(plain_attention, at, queries, causal), [x.float() for x in inputs])
    assert ours[0].dtype is dtype
    for number, (one, two) in enumerate(zip(ours, wanted, strict=True)):
        # A bias that most keys of a query share gets the rounding of the query's result whole: its slopes sum to zero else.
        tolerance = TOLERANCE[dtype] * (2 if number > 3 else 1)
        assert worst_difference([one], [two]) < tolerance, (number, columns)


@needs_no_gpu
def test_the_interpreted_pooling_equals_plain_torch():
    check_pooling("cpu", LENGTHS, torch.float32)


CASES = {
    "causal": (None, True, (36, 32)),
    "both sides, distances beyond the table": (None, False, (9, 0)),
    "a candidate": (1, True, (9, 64)),
    "some last events": (20, False, (71, 0)),
}


@needs_no_gpu
@pytest.mark.parametrize("name", ["causal", "a candidate", "some last events"])
def test_the_interpreted_attention_equals_plain_torch(name, monkeypatch):
    from nn.ops.triton import jagged_attention as kernels

    if name == "causal":
        # Blocks of more queries than keys, and of fewer, as on a GPU.
        blocks = [{"M": 32, "N": 16}, {"M": 32, "N": 16}, {"M": 16, "N": 32}]
        monkeypatch.setattr(kernels, "blocks", lambda _: blocks)
    check_attention(LENGTHS, *CASES[name], torch.float32, "cpu", heads=2, width=20)


@needs_one_gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_on_a_gpu_pooling_equals_plain_torch(dtype):
    check_pooling("cuda", LENGTHS * 50, dtype)


# Each is compiled, which takes seconds: of 16 bits the long blocks, of float32 the short ones.
@needs_one_gpu
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("dtype", "lengths", "width"),
    [
        (torch.float32, SHORT, 20),
        (torch.bfloat16, SHORT, 32),
        (torch.bfloat16, LONG, 128),
        (torch.float16, LONG, 64),
    ],
)
def test_on_a_gpu_attention_equals_plain_torch(name, dtype, lengths, width):
    torch.set_float32_matmul_precision("highest")
    most, causal, _ = CASES[name]
    longest = max(lengths)
    for columns in ((0, 0), (longest if causal else 2 * longest - 1, 64), (9, 16)):
        check_attention(lengths, most, causal, columns, dtype, "cuda", heads=2, width=width)


@needs_one_gpu
@pytest.mark.parametrize("lengths", [SHORT, LONG])
def test_on_a_gpu_two_runs_and_a_graph_give_the_same_bits(lengths):
    from nn.ops.triton import jagged as kernels
    from nn.ops.triton import jagged_attention

    at = samples_of(lengths, "cuda")
    inputs = inputs_of(at, at, 4, 64, (max(lengths), 64), torch.bfloat16)
    attend = attention(jagged_attention, at, at, True)

    leaves = [x.detach().clone().requires_grad_() for x in inputs]

    def once() -> list[Tensor]:
        mixed = attend(*leaves)
        out = kernels.pool(mixed * kernels.softmax(mixed[:, :, :1], at), at, "mean").float()
        return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]

    check_same_bits(once)
