"""Batch normalization equals torch's of one process: gradients and running statistics, on ranks with partial batches."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nn.layers.batch_norm import BatchNorm
from nn.layers.mlp import MLP
from nn.layers.pass_state import PassState, attach
from nn.ops import batch_norm as plain
from tests.helpers.composed import ranks_of_cpu
from tests.helpers.distributed import run_distributed
from tests.helpers.gpus import needs_no_gpu, needs_one_gpu

CPU = torch.device("cpu")
COLUMNS = 5
# Rows of a batch over all ranks, of one or two ranks: full, uneven, and none for the second rank.
BATCHES = [8, 7, 5, 3, 1]
# Values and gradients are of the order of 1; a gradient is a sum of up to 24 of them.
CLOSE = {"rtol": 1e-6, "atol": 5e-6}


def drawn(rows: int, *shape: int, mean: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, *shape, generator=generator) * 2 + mean


def with_weights(norm: nn.Module) -> Any:
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 2, COLUMNS))
        norm.bias.copy_(torch.linspace(-1, 1, COLUMNS))
    return norm


def outcomes(batches: list[Tensor], gradients: list[Tensor]) -> list[list[Tensor]]:
    """Return this rank's results for global batches, one after the other: see `reference`."""
    results = []
    with ranks_of_cpu() as ranks:
        norm = with_weights(BatchNorm(COLUMNS))
        state = PassState(1, CPU, ranks.rank, ranks.all_reduce_sum)
        attach(norm, state)
        for step, (batch, gradient) in enumerate(zip(batches, gradients, strict=True)):
            slots = -(-len(batch) // ranks.world_size)
            here = slice(ranks.rank * slots, (ranks.rank + 1) * slots)
            x, grad = batch[here], gradient[here]
            num_valid = len(x)
            padding = x.new_full((slots - num_valid, *x.shape[1:]), torch.nan)
            x = torch.cat([x, padding]).requires_grad_()
            state.set(step, slots, num_valid, len(batch))
            norm.zero_grad()
            out = norm(x)
            out.backward(torch.cat([grad, torch.zeros_like(padding)]))
            norm.update()
            assert x.grad is not None
            assert torch.equal(x.grad[num_valid:], torch.zeros_like(padding))
            assert out.isfinite().all()
            weights = torch.stack([norm.weight.grad, norm.bias.grad])
            results.append(
                [
                    out[:num_valid].detach(),
                    x.grad[:num_valid],
                    ranks.all_reduce_sum(weights),
                    torch.stack([norm.running_mean, norm.running_var]),
                    norm.eval()(batch).detach(),
                ]
            )
            norm.train()
    return results


def reference(batches: list[Tensor], gradients: list[Tensor]) -> list[list[Tensor]]:
    """Return output, gradients, running statistics and the result of an evaluation, computed by torch in float64."""
    norm = with_weights(nn.BatchNorm1d(COLUMNS).double())
    results = []
    for batch, gradient in zip(batches, gradients, strict=True):
        x = batch.double().requires_grad_()
        norm.zero_grad()
        out = norm(x.flatten(0, -2)).view(x.shape)
        out.backward(gradient.double())
        results.append(
            [
                out.detach(),
                x.grad,
                torch.stack([norm.weight.grad, norm.bias.grad]),
                torch.stack([norm.running_mean, norm.running_var]).clone(),
                norm.eval()(batch.double().flatten(0, -2)).view(x.shape).detach(),
            ]
        )
        norm.train()
    return results


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("shape", [(COLUMNS,), (3, COLUMNS)], ids=["matrix", "positions"])
def test_ranks_together_are_torchs_batch_norm_of_one_process(world_size, shape):
    batches = [drawn(rows, *shape) for rows in BATCHES[:-1]]
    gradients = [drawn(rows + 100, *shape, mean=0.0)[:rows] for rows in BATCHES[:-1]]
    ranks = run_distributed(outcomes, world_size, batches, gradients)
    for index, wanted in enumerate(reference(batches, gradients)):
        parts = [rank[index] for rank in ranks]
        whole = [torch.cat([part[number] for part in parts]) for number in (0, 1)]
        for part in parts:
            for ours, theirs in zip([*whole, *part[2:]], wanted, strict=True):
                torch.testing.assert_close(ours, theirs.float(), **CLOSE)


def test_a_large_mean_costs_no_accuracy():
    """A sum of squares in float32 would have no correct digit."""
    batches, gradients = [drawn(64, COLUMNS, mean=3e4)], [drawn(65, COLUMNS, mean=0.0)[:64]]
    for world_size in (1, 2):
        ranks = run_distributed(outcomes, world_size, batches, gradients)
        out = torch.cat([rank[0][0] for rank in ranks])
        torch.testing.assert_close(
            out, reference(batches, gradients)[0][0].float(), rtol=0, atol=1e-2
        )


def layer_at(rows: int, num_valid: int | None = None, columns: int = COLUMNS) -> BatchNorm:
    norm, state = BatchNorm(columns), PassState(1, CPU)
    attach(norm, state)
    valid = rows if num_valid is None else num_valid
    state.set(0, rows, valid, valid)
    return norm


def test_one_row_becomes_the_bias_and_leaves_finite_statistics():
    norm = with_weights(layer_at(1))
    x = drawn(1, COLUMNS).requires_grad_()
    out = norm(x)
    out.sum().backward()
    norm.update()
    torch.testing.assert_close(out.detach(), norm.bias.detach()[None])
    assert torch.equal(x.grad, torch.zeros_like(x))
    assert norm.running_var.isfinite().all()


def test_gradcheck_with_padding():
    norm = layer_at(6, 4).double()
    x = drawn(6, COLUMNS).double().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x, *_: norm(x)[:4], (x, norm.weight, norm.bias), fast_mode=True
    )


def test_a_pass_changes_running_statistics_only_once_it_is_applied():
    norm = layer_at(8)
    norm(drawn(8, COLUMNS))
    norm(drawn(8, COLUMNS))
    assert torch.equal(norm.running_mean, torch.zeros(COLUMNS))
    norm.update()
    torch.testing.assert_close(norm.running_mean, 0.1 * drawn(8, COLUMNS).mean(0))


def test_statistics_are_float32_under_autocast():
    norm = layer_at(64)
    x = drawn(64, COLUMNS).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        out = norm(x)
    norm.update()
    assert (out.dtype, norm.running_mean.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(norm.running_mean, 0.1 * x.float().mean(0), **CLOSE)


def test_checkpoints_have_the_running_statistics_only():
    assert list(BatchNorm(3).state_dict()) == ["weight", "bias", "running_mean", "running_var"]


def test_an_mlp_normalizes_before_relu_and_drops_after_it():
    mlp = MLP(8, [16, 24, 1], final_activation=False, dropout=0.5, batch_norm=True)
    state = PassState(1, CPU)
    attach(mlp, state)
    state.set(0, 32, 32, 32)
    x = torch.randn(32, 8)
    wanted = x
    for layer, norm, dropout in zip(mlp.layers, mlp.norms, mlp.dropouts, strict=False):
        wanted = dropout(torch.relu(norm(layer(wanted))))
    assert torch.equal(mlp(x), mlp.layers[-1](wanted))
    assert [len(norm.weight) for norm in mlp.norms] == [16, 24]
    assert mlp.kept_columns == 40


def test_a_compiled_mlp_computes_the_same():
    mlp = MLP(8, [16, 24, 1], final_activation=False, dropout=0.5, batch_norm=True)
    state = PassState(1, CPU)
    attach(mlp, state)
    compiled = torch.compile(mlp, backend="eager")
    x = torch.randn(32, 8)
    for step in (3, 4):
        state.set(step, 32, 32, 32)
        wanted = torch.autograd.grad(mlp(x).sum(), list(mlp.parameters()))
        for ours, theirs in zip(
            torch.autograd.grad(compiled(x).sum(), list(mlp.parameters())), wanted, strict=True
        ):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    "arguments", [{"columns": 0}, {"columns": 3, "eps": 0.0}, {"columns": 3, "momentum": 1.5}]
)
def test_impossible_arguments_are_refused(arguments):
    with pytest.raises(ValueError, match="want at least one column, a positive eps"):
        BatchNorm(**arguments)


def compare_kernels(device: str) -> None:
    from nn.ops.triton import batch_norm as kernels

    # Below, at and above the rows of one program.
    for rows, valid, columns, dtype in (
        (1, 1, 1, torch.float32),
        (33, 20, 7, torch.float32),
        (256, 256, 130, torch.float32),
        (600, 515, 40, torch.float16),
    ):
        x, grad = drawn(rows, columns).to(dtype), drawn(rows, columns, mean=0.1).to(dtype)
        x[valid:] = torch.nan
        num_valid = torch.tensor([valid])
        row = torch.rand(4, columns) + 0.5
        sums = torch.rand(2, columns)
        for name, arguments in {
            "moments": (x, num_valid),
            "normalise": (x, num_valid, *row),
            "gradient_sums": (grad, x, num_valid, *row[:2]),
            "input_gradient": (grad, x, num_valid, *row[:3], sums),
        }.items():
            wanted = getattr(plain, name)(*arguments)
            ours = getattr(kernels, name)(*(each.to(device) for each in arguments)).cpu()
            assert ours.dtype is wanted.dtype, name
            if name == "moments":  # of blocks; their total is that of one block
                wanted[1] += wanted[2] - wanted[0].square() / valid
                ours[1] += ours[2] - ours[0].square() / valid
                wanted, ours = wanted[:2], ours[:2]
            tolerance = 2e-3 if dtype is torch.float16 else 1e-5
            torch.testing.assert_close(ours, wanted, rtol=tolerance, atol=tolerance)


@needs_no_gpu
def test_the_interpreted_kernels_are_plain_torch():
    compare_kernels("cpu")


@needs_one_gpu
def test_on_a_gpu_the_kernels_are_plain_torch():
    compare_kernels("cuda")


@needs_one_gpu
def test_on_a_gpu_two_runs_give_the_same_bits():
    device = torch.device("cuda")
    norm, state = BatchNorm(130), PassState(1, device)
    attach(norm.to(device), state)
    state.set(0, 10_000, 9_000, 9_000)
    x = drawn(10_000, 130).to(device, torch.bfloat16).requires_grad_()
    results = []
    for _ in range(2):
        out = norm(x)
        results.append([out, *torch.autograd.grad(out.float().square().sum(), [x, norm.weight])])
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))
