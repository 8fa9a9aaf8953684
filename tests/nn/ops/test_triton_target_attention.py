"""The kernels of DIN's attention over events give what plain torch gives: interpreted here, compiled on a GPU."""

import pytest
import torch

from nn.layers.initialization import initialise_dense
from nn.layers.interactions.target_attention import TargetAttention
from tests.helpers.gpus import needs_one_gpu
from tests.nn.ops.jagged_samples import drawn, samples_of
from tests.nn.ops.test_triton_jagged import LENGTHS, TOLERANCE, needs_no_gpu, worst_difference


def results(layer: TargetAttention, query, events, at, *, fused: bool) -> list[torch.Tensor]:
    """Return pooled events, and the gradients of query, events and parameters."""
    from nn.ops.triton.target_attention import attend_weighted

    layer.zero_grad()
    leaves = [query.detach().clone().requires_grad_(), events.detach().clone().requires_grad_()]
    if fused:
        parameters = [each for linear in layer.layers for each in (linear.weight, linear.bias)]
        out = attend_weighted(*leaves, at, layer.pooling, parameters)
    else:
        out = layer.of_events(*leaves, at)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out.device)
    (out * weight.to(out.dtype)).sum().backward()
    return [
        out.detach(),
        *(leaf.grad for leaf in leaves),
        *(each.grad for each in layer.parameters()),
    ]


def check(
    device: str, lengths: list[int], dtype: torch.dtype, columns: int, hidden: list[int], how
):
    at = samples_of(lengths, device, gap=1)
    # Plain torch reads what belongs to no sample; the kernels do not.
    events = drawn(at, columns, dtype=dtype)
    query = drawn(samples_of([len(lengths)], device), columns, seed=4, dtype=dtype)[: len(lengths)]
    layer = TargetAttention(columns, 0, hidden, how)
    initialise_dense(layer, 1)
    layer = layer.to(device)
    ours = results(layer, query, events, at, fused=True)
    wanted = results(layer.double(), query.double(), events.double().nan_to_num(0), at, fused=False)
    assert ours[0].dtype is ours[1].dtype is ours[2].dtype is dtype
    assert worst_difference(ours, wanted) < TOLERANCE[dtype]


@needs_no_gpu
@pytest.mark.parametrize("how", ["sum", "mean"])
def test_the_interpreted_attention_unit_equals_plain_torch(how):
    # More than a block of positions.
    check("cpu", LENGTHS * 2, torch.float32, 5, [20, 9], how)


@needs_one_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("columns", "hidden"), [(16, [80, 40]), (5, [20, 9]), (32, [128, 64])], ids=str
)
@pytest.mark.parametrize("how", ["sum", "mean"])
def test_on_a_gpu_the_attention_unit_equals_plain_torch(dtype, columns, hidden, how):
    # More than a block for each program.
    check("cuda", LENGTHS * 500, dtype, columns, hidden, how)


@needs_one_gpu
def test_on_a_gpu_autocast_takes_the_kernels_and_two_runs_give_the_same_bits():
    at = samples_of(LENGTHS * 500, "cuda")
    layer = TargetAttention(16, 0, [80, 40], "mean").cuda()
    events = drawn(at, 16, dtype=torch.bfloat16)
    query = torch.randn(len(at.starts), 16, device="cuda", dtype=torch.bfloat16)
    with torch.autocast("cuda", torch.bfloat16):
        first, again = (results(layer, query, events, at, fused=False) for _ in range(2))
    assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
    with torch.autocast("cuda", torch.bfloat16):
        direct = results(layer, query, events, at, fused=True)
    assert all(torch.equal(one, two) for one, two in zip(first, direct, strict=True))
