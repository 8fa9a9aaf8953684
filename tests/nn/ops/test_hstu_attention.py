"""The kernels of HSTU's attention against plain torch: under Triton's interpreter here, compiled on a GPU."""

import pytest
import torch
from torch import Tensor

from nn.layers.hstu import SampleParts
from nn.layers.sequence_events import SequenceEvents
from nn.ops.column_blocks import column_blocks
from nn.ops.hstu_attention import JaggedPositions, hstu_attention
from tests.helpers.gpus import needs_gpus, needs_no_gpu, needs_one_gpu

triton_attention = pytest.importorskip("nn.ops.triton.hstu_attention")


def positions_of(lengths: list[int], spare: int, device: str = "cpu") -> JaggedPositions:
    of = torch.tensor(lengths, device=device)
    samples = torch.zeros(int(of.sum()) + spare, dtype=torch.long, device=device)
    events = SequenceEvents({}, {}, of.cumsum(0) - of, of, samples, max(lengths))
    return SampleParts.of(events, 0, 0).at


def outcome(
    attend, packed: Tensor, at: JaggedPositions, num_candidates: int, *, few: bool
) -> list[Tensor]:
    """Return the attention and the gradients of queries, keys and values, which lie side by side, [C, 3, H, K]."""
    packed = packed.detach().requires_grad_()
    q, k, v = packed.unbind(1)
    queries, rows = at.last(num_candidates)
    if few:
        q = q[rows]
    norm = at.lengths.float() + 1
    if few:
        norm = norm.max().expand_as(norm)
    out = attend(q, k, v, norm, at, queries if few else at, num_candidates=num_candidates)
    # Drawn on the CPU and rounded, so that all devices and dtypes have the same.
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(out)
    (grad,) = torch.autograd.grad(out, packed, weight)
    return [out.detach(), *grad.unbind(1)]


def kernels(*arguments, num_candidates: int) -> Tensor:
    return triton_attention.attend(*arguments, num_candidates)


@needs_no_gpu
@pytest.mark.parametrize(
    ("num_candidates", "columns", "few"), [(3, 12, False), (3, 12, True), (1, 16, True)]
)
def test_the_interpreted_kernels_equal_plain_torch(num_candidates, columns, few, monkeypatch):
    # Blocks of different sizes, which lengths below, at and above them fill.
    for name, sizes in (("FORWARD", (16, 32)), ("OF_KEYS", (32, 16)), ("OF_QUERIES", (16, 32))):
        blocks = dict(zip(("BLOCK_Q", "BLOCK_K"), sizes, strict=True))
        monkeypatch.setattr(triton_attention, name, blocks)
    at = positions_of([num_candidates, 33], spare=100)
    packed = torch.randn(len(at.samples), 3, 2, columns, generator=torch.Generator().manual_seed(0))
    packed[~at.is_inside] = torch.nan
    wanted = outcome(hstu_attention, packed, at, num_candidates, few=few)
    got = outcome(kernels, packed, at, num_candidates, few=few)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def gradient_of_blocks(device: str, columns: int, *, are_written: bool) -> Tensor:
    """Return the gradient of [u, v, q, k] side by side through gate and attention."""
    from nn.ops.triton.layer_norm import gate

    at = positions_of([5, 40, 1], spare=30, device=device)
    draw = torch.Generator().manual_seed(2)
    of_gate = torch.rand(2, 2 * columns, generator=draw).to(device)
    rows = torch.randn(len(at.samples), 8 * columns, generator=draw).to(device).requires_grad_()
    (u, v, q, k), gradients = column_blocks(rows, 4)
    v, q, k = (of.unflatten(1, (2, columns)) for of in (v, q, k))
    norm, of_qkv = at.lengths.float() + 1, (gradients, (2, 3, 1))
    a = triton_attention.attend(q, k, v, norm, at, at, 1, of_qkv if are_written else None)
    y = gate(
        *(u, a.flatten(1), *of_gate, 1e-6, None, (at.samples, at.offsets)),
        concat=True,
        gradients=gradients if are_written else None,
    )
    weight = torch.randn(y.shape, generator=draw).to(device) * at.is_inside[:, None]
    (grad,) = torch.autograd.grad(y, rows, weight)
    assert gradients.memory is None, "the graph, which still exists, keeps it no longer"
    return grad


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpus(1))])
def test_gradients_are_written_side_by_side_where_others_are_joined(monkeypatch, device):
    joined = [gradient_of_blocks(device, columns, are_written=False) for columns in (16, 32)]
    cat = []
    monkeypatch.setattr(torch, "cat", lambda *_, **__: cat.append(1))
    written = [gradient_of_blocks(device, columns, are_written=True) for columns in (16, 32)]
    monkeypatch.undo()
    assert not cat
    assert all(map(torch.equal, written, joined))


def relative_errors(
    dtype: torch.dtype, lengths: list[int], num_candidates: int, *, few: bool
) -> list[float]:
    at = positions_of(lengths, spare=100, device="cuda")
    draw = torch.Generator("cuda").manual_seed(0)
    packed = torch.randn(len(at.samples), 3, 4, 128, generator=draw, device="cuda").to(dtype)
    got = outcome(kernels, packed, at, num_candidates, few=few)
    again = outcome(kernels, packed, at, num_candidates, few=few)
    assert all(map(torch.equal, got, again))
    on_cpu = positions_of(lengths, spare=100)
    exact = outcome(hstu_attention, packed.double().cpu(), on_cpu, num_candidates, few=few)
    return [
        ((one.double().cpu() - other).norm() / other.norm()).item()
        for one, other in zip(got, exact, strict=True)
    ]


@needs_one_gpu
@pytest.mark.parametrize("num_candidates", [1, 3])
@pytest.mark.parametrize("few", [False, True])
def test_compiled_kernels_round_as_their_dtype_and_repeat_bit_by_bit(num_candidates, few):
    lengths = [700, 33, 1300, num_candidates, 129]
    # A rounding to bfloat16 is 2.3e-3 of the norm; gradients round weights and results.
    assert max(relative_errors(torch.bfloat16, lengths, num_candidates, few=few)) < 5e-3
    assert max(relative_errors(torch.float32, lengths, num_candidates, few=few)) < 2e-6
