"""The kernels of SGD, Adagrad and Adam, interpreted here and compiled on a GPU, compute what torch's do; so do casts."""

import pytest
import torch
from torch import nn

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# More than a block, sizes that are no multiple of a vector, and parameters behind them.
SHAPES = [(70, 64), (64,), (3, 5), (1,), (4096,), (33,)]


def parameters_with_gradients() -> tuple[list[nn.Parameter], torch.Tensor]:
    """Return parameters and the one memory of their gradients."""
    generator = torch.Generator().manual_seed(3)
    weights = [nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE)) for shape in SHAPES]
    memory = torch.zeros(sum(weight.numel() for weight in weights), device=DEVICE)
    views = memory.split([weight.numel() for weight in weights])
    for weight, view in zip(weights, views, strict=True):
        weight.grad = view.view_as(weight)
    return weights, memory


def test_it_computes_torchs_adagrad():
    from nn.ops.triton.dense_updates import FusedAdagrad

    ours, our_gradients = parameters_with_gradients()
    theirs, their_gradients = parameters_with_gradients()
    fused = FusedAdagrad(ours, lr=0.1, eps=1e-8)
    torchs = torch.optim.Adagrad(theirs, lr=0.1, eps=1e-8, foreach=True)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        our_gradients.copy_(torch.randn(len(our_gradients), generator=generator))
        their_gradients.copy_(our_gradients)
        fused.step()
        torchs.step()
    for weight, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(weight, other, rtol=2e-7, atol=1e-7)
        for name in ("step", "sum"):
            ours_of, theirs_of = fused.state[weight][name], torchs.state[other][name]
            torch.testing.assert_close(ours_of.cpu(), theirs_of.cpu(), rtol=2e-7, atol=0)


def test_it_changes_nothing_when_something_is_not_finite():
    from nn.ops.triton.dense_updates import FusedAdagrad

    weights, gradients = parameters_with_gradients()
    gradients.fill_(torch.inf)
    optimizer = FusedAdagrad(weights, lr=torch.tensor(0.1, device=DEVICE))
    optimizer.found_inf = torch.ones(1, device=DEVICE)
    before = [weight.clone() for weight in weights]
    optimizer.step()
    assert all(torch.equal(weight, old) for weight, old in zip(weights, before, strict=True))
    assert all(not state["step"] and not state["sum"].any() for state in optimizer.state.values())


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.95), (0.9, 0.0)])
@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_it_computes_torchs_adam(decay, betas):
    from nn.ops.triton.dense_updates import FusedAdam

    ours, our_gradients = parameters_with_gradients()
    theirs, their_gradients = parameters_with_gradients()
    options = {"betas": betas, "eps": 1e-6, "weight_decay": decay}
    rate = torch.tensor(0.1, device=DEVICE)
    fused, torchs = FusedAdam(ours, lr=rate, **options), torch.optim.AdamW(theirs, 0.1, **options)
    # A parameter that was frozen until now has no updates behind it, and one that was not has many.
    for optimizer, weight in ((fused, ours[0]), (torchs, theirs[0])):
        moments = {"exp_avg": torch.full_like(weight, 0.5), "exp_avg_sq": torch.ones_like(weight)}
        state = optimizer.state[weight] or {"step": torch.tensor(0.0)}
        state["step"].fill_(1000)
        optimizer.state[weight] = state | moments
    for step in range(4):
        our_gradients.copy_(torch.randn(len(our_gradients), generator=torch.manual_seed(step)))
        their_gradients.copy_(our_gradients)
        is_skipped = step in (0, 2)
        fused.found_inf = torch.tensor(float(is_skipped), device=DEVICE)
        fused.step()
        if not is_skipped:
            torchs.step()
    for weight, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(weight, other, rtol=1e-6, atol=1e-6)
        for name, value in torchs.state[other].items():
            found = fused.state[weight][name].cpu()
            torch.testing.assert_close(found, value.cpu(), rtol=1e-6, atol=1e-7)


def test_sgd_computes_torchs():
    from nn.ops.triton.dense_updates import FusedSGD

    ours, our_gradients = parameters_with_gradients()
    theirs, their_gradients = parameters_with_gradients()
    our_gradients.copy_(torch.randn(len(our_gradients), generator=torch.Generator().manual_seed(1)))
    their_gradients.copy_(our_gradients)
    fused = FusedSGD(ours, lr=torch.tensor(0.1, device=DEVICE))
    torchs = torch.optim.SGD(theirs, lr=0.1)
    for is_skipped in (False, True, False):
        fused.found_inf = torch.tensor(float(is_skipped), device=DEVICE)
        fused.step()
        if not is_skipped:
            torchs.step()
    for weight, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(weight, other, rtol=2e-7, atol=1e-7)


def test_parameters_are_cast_as_torch_casts_them():
    from nn.ops.triton.parameters import cast_parameters

    weights, _ = parameters_with_gradients()
    for _ in range(2):
        for weight, copy in zip(weights, cast_parameters(torch.float16, weights), strict=True):
            assert torch.equal(copy, weight.half())
        with torch.no_grad():
            weights[0].add_(1)
    assert cast_parameters(torch.float32, weights) == weights
