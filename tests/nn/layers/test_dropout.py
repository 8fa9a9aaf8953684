"""Dropout: statistics, gradient, modes, and the same mask for every number of ranks and on every device."""

import pytest
import torch

from nn.layers.dropout import Dropout
from nn.layers.mlp import MLP
from nn.layers.pass_state import PassState, attach
from nn.ops.jagged import Positions
from tests.helpers.gpus import needs_no_gpu, needs_one_gpu

CPU = torch.device("cpu")


def layer_at(
    rate: float,
    *,
    step: int = 3,
    rows: int = 64,
    rank: int = 0,
    seed: int = 1,
    number: int = 0,
    device: torch.device = CPU,
    global_rows: torch.Tensor | None = None,
) -> Dropout:
    layer, state = Dropout(rate), PassState(seed, device, rank)
    layer.attach(state, number)
    there = None if global_rows is None else global_rows.to(device)
    state.set(step, rows, rows, rows, there)
    return layer


def kept(layer: Dropout, rows: int = 64, columns: int = 40) -> torch.Tensor:
    return layer(torch.ones(rows, columns)) != 0


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_the_rate_and_the_mean_are_those_asked_for(rate):
    out = layer_at(rate)(torch.ones(2_000, 512))
    deviation = (rate * (1 - rate) / out.numel()) ** 0.5
    assert (out == 0).double().mean().item() == pytest.approx(rate, abs=4 * deviation)
    values = out[out != 0]
    torch.testing.assert_close(values, torch.full_like(values, 1 / (1 - rate)))
    # No row and no column is dropped more often than others.
    for dim, count in ((0, 2_000), (1, 512)):
        shares = (out == 0).double().mean(dim)
        assert (shares - rate).abs().max() < 6 * (rate * (1 - rate) / count) ** 0.5


def test_neighbours_are_independent():
    for layer in (layer_at(0.5), layer_at(0.5, step=4), layer_at(0.5, number=1)):
        mask = kept(layer, 1_000, 256).double() - 0.5
        for lag in (1, 2, 3, 8):
            for one, other in ((mask[lag:], mask[:-lag]), (mask[:, lag:], mask[:, :-lag])):
                assert abs(4 * (one * other).mean().item()) < 4 / 250_000**0.5


def test_the_mask_depends_on_seed_step_layer_and_row():
    base = kept(layer_at(0.5))
    assert torch.equal(base, kept(layer_at(0.5)))
    for changed in ({"seed": 2}, {"step": 4}, {"number": 1}, {"rank": 1}):
        same = (kept(layer_at(0.5, **changed)) == base).double().mean().item()
        assert same == pytest.approx(0.5, abs=0.05), changed


def test_steps_beyond_32_bits_have_masks():
    assert not torch.equal(kept(layer_at(0.5, step=2**40)), kept(layer_at(0.5, step=2**40 + 1)))


@pytest.mark.parametrize("shape", [(64,), (64, 24), (64, 5, 6)])
def test_ranks_together_have_the_mask_of_one_rank(shape):
    x = torch.randn(shape)
    whole = layer_at(0.3)(x)
    halves = [layer_at(0.3, rows=32, rank=rank)(x.chunk(2)[rank]) for rank in range(2)]
    assert torch.equal(torch.cat(halves), whole)


def test_rows_have_their_mask_on_any_rank_and_in_any_chunk():
    """As of batches whose rows are dealt to the ranks."""
    x, order = torch.randn(64, 24), torch.randperm(64)
    whole = layer_at(0.3)(x)
    lengths = torch.arange(64) % 4
    samples = torch.arange(64).repeat_interleave(lengths)
    at = Positions(lengths.cumsum(0) - lengths, lengths, samples, 3)
    of_events = layer_at(0.3)(x[samples], at)
    for rank, own in enumerate(order.chunk(2)):
        layer = layer_at(0.3, rows=32, rank=rank, global_rows=own.int())
        assert torch.equal(layer(x[own]), whole[own])
        theirs = torch.arange(32).repeat_interleave(lengths[own])
        begins = lengths[own].cumsum(0) - lengths[own]
        found = layer(x[own][theirs], Positions(begins, lengths[own], theirs, 3))
        at_whole = [torch.nonzero(samples == row).flatten() for row in own]
        assert torch.equal(found, of_events[torch.cat(at_whole)])
        for number, first in enumerate((0, 20)):
            layer.pass_state.set_chunk(number, first, 12, 24)
            assert torch.equal(layer(x[own[first:]][:12]), whole[own[first:]][:12])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_passes_where_values_pass(dtype):
    layer = layer_at(0.4)
    x = torch.randn(64, 24).to(dtype).requires_grad_()
    out = layer(x)
    out.backward(torch.full_like(out, 2))
    expected = torch.where(out != 0, torch.tensor(2 / 0.6), torch.tensor(0.0)).to(dtype)
    assert out.dtype is dtype
    torch.testing.assert_close(x.grad, expected)


def test_gradcheck():
    layer = layer_at(0.4)
    x = torch.randn(8, 3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layer, (x,))


def test_a_transposed_input_is_accepted():
    x = torch.randn(24, 64)
    assert torch.equal(layer_at(0.4)(x.t()), layer_at(0.4)(x.t().contiguous()))


def test_dropped_values_become_zero_even_if_they_are_not_finite():
    out = layer_at(0.5)(torch.full((64, 24), torch.nan))
    assert 0 < (out == 0).sum() < out.numel()


def test_evaluation_and_a_rate_of_zero_are_the_identity_and_need_no_state():
    x = torch.randn(4, 3)
    assert Dropout(0.5).eval()(x) is x
    assert Dropout(0.0)(x) is x
    with pytest.raises(RuntimeError, match="Dropout in training mode needs the step"):
        Dropout(0.5)(x)


@pytest.mark.parametrize("rate", [-0.1, 1.0, float("nan")])
def test_a_rate_outside_is_refused(rate):
    with pytest.raises(ValueError, match=r"must lie in \[0, 1\)"):
        Dropout(rate)
    with pytest.raises(ValueError, match=r"dropout must lie in \[0, 1\)"):
        MLP(8, [8, 1], final_activation=False, dropout=rate)


def test_layers_are_numbered_in_the_order_of_registration():
    mlp = MLP(8, [16, 16, 1], final_activation=False, dropout=0.5)
    state = PassState(1, CPU)
    assert attach(mlp, state) == list(mlp.dropouts)
    state.set(0, 32, 32, 32)
    assert not torch.equal(kept(mlp.dropouts[0]), kept(mlp.dropouts[1]))


def test_an_mlp_drops_after_every_relu_and_has_the_same_parameters():
    torch.manual_seed(0)
    plain = MLP(8, [16, 24], final_activation=True)
    torch.manual_seed(0)
    mlp = MLP(8, [16, 24], final_activation=True, dropout=0.5)
    assert plain.state_dict().keys() == mlp.state_dict().keys()
    state = PassState(1, CPU)
    attach(mlp, state)
    state.set(0, 32, 32, 32)
    x = torch.randn(32, 8)
    first, second = mlp.dropouts
    hidden = first(torch.relu(mlp.layers[0](x)))
    assert torch.equal(mlp(x), second(torch.relu(mlp.layers[1](hidden))))
    assert torch.equal(mlp.eval()(x), plain(x))


def test_a_new_step_is_seen_without_a_python_number():
    """As in a replayed CUDA graph, which repeats Python's numbers."""
    layer = layer_at(0.5)
    mask = layer.mask
    before = mask.kept(8, 8)
    layer.pass_state.set(4, 64, 64, 64)
    assert not torch.equal(mask.kept(8, 8), before)


def compare_kernel(device: str) -> None:
    from nn.ops.triton.dropout import apply_mask

    for rows, columns, dtype in (
        (1, 1, torch.float32),
        (50, 130, torch.float32),
        (33, 7, torch.bfloat16),
        (17, 256, torch.float16),
    ):
        x = torch.randn(rows, columns).to(dtype)
        dealt = torch.randperm(4 * rows)[:rows].int()
        for rate, step, rank, order in (
            (0.5, 0, 0, None),
            (0.1, 2**33 + 5, 3, None),
            (0.5, 1, 2, dealt),
        ):
            of_pass = {"step": step, "rows": rows, "rank": rank, "global_rows": order}
            mask = layer_at(rate, **of_pass).mask
            there = layer_at(rate, **of_pass, device=torch.device(device))
            moved = x.to(device)
            out = apply_mask(moved, there.mask)
            wanted = mask.apply(x)
            assert torch.equal(out.cpu() == 0, wanted == 0), (rows, columns, dtype, rate)
            # The interpreter cuts float32 to bf16 where a GPU rounds.
            tolerance = 2**-7 if device == "cpu" and dtype is torch.bfloat16 else 0
            torch.testing.assert_close(out.cpu(), wanted, rtol=tolerance, atol=0)
            assert apply_mask(moved, there.mask, out=moved) is moved
            assert torch.equal(moved, out)


@needs_no_gpu
def test_the_interpreted_kernel_gives_the_same_bits():
    compare_kernel("cpu")


@needs_one_gpu
def test_on_a_gpu_the_kernel_gives_the_same_bits():
    compare_kernel("cuda")


@needs_one_gpu
def test_on_a_gpu_a_replayed_graph_has_the_mask_of_its_step():
    device = torch.device("cuda")
    layer = layer_at(0.5, device=device, global_rows=torch.arange(64).int())
    x = torch.ones(64, 40, device=device)
    layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(x)
    for step in (7, 8):
        order = torch.randperm(200)[:64].int()
        layer.pass_state.set(step, 64, 64, 64, order.to(device))
        graph.replay()
        wanted = layer_at(0.5, step=step, global_rows=order)(torch.ones(64, 40))
        assert torch.equal(out.cpu(), wanted)


def test_an_event_is_dropped_by_its_sample_and_its_place():
    """Wherever it lies, so for any number of ranks and any cut of a batch."""
    lengths = torch.tensor([3, 0, 5, 2])
    starts = lengths.cumsum(0) - lengths
    samples = torch.arange(4).repeat_interleave(lengths)
    at = Positions(starts, lengths, torch.cat([samples, samples.new_zeros(2)]), 5)
    found = layer_at(0.5, rows=4)(torch.ones(12, 8), at) != 0
    whole = kept(layer_at(0.5, rows=4), 4, 5 * 8).view(4, 5, 8)
    for row, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        assert torch.equal(found[start : start + length], whole[row, :length])
    later = Positions(starts[2:] + 4, lengths[2:], torch.tensor([0] * 7 + [0] * 5 + [1] * 2), 5)
    moved = layer_at(0.5, rows=2, rank=1)(torch.ones(14, 8), later) != 0
    assert torch.equal(moved[7:], found[3:10])


@needs_one_gpu
def test_events_are_dropped_alike_on_a_gpu():
    lengths = torch.tensor([3, 0, 70, 2])
    starts = lengths.cumsum(0) - lengths
    at = Positions(starts, lengths, torch.arange(4).repeat_interleave(lengths), 70)
    there = Positions(*(each.cuda() for each in (starts, lengths, at.samples)), 70)
    x = torch.randn(75, 136)
    layer = layer_at(0.3, rows=4, device=torch.device("cuda"))
    assert torch.equal(layer(x.cuda(), there).cpu(), layer_at(0.3, rows=4)(x, at))
