"""Gradients that are summed over ranks while the backward pass goes on equal those that are summed at its end."""

from unittest import mock

import pytest
import torch
from torch import nn

from nn.distributed.process_group import Ranks, process_group, ranks_from_environment
from nn.training import gradient_bucket
from nn.training.gradient_bucket import GradientBucket
from tests.helpers.distributed import run_distributed
from tests.helpers.gpus import needs_gpus

WIDTH = 256
LAYERS = ("bottom", "branch", "top")


class _Marked(torch.autograd.Function):
    """The identity; it calls a function inside the backward pass."""

    @staticmethod
    def forward(ctx, call, x):
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.call()
        return None, gradient


def gradients(
    ranks: Ranks, *, starts: bool, leaves_out: frozenset[int]
) -> tuple[list[list[torch.Tensor]], list[int]]:
    """Return the sums of three passes, and the numbers that each pass has summed early.

    Layers `branch` and `top` follow the mark, `bottom` comes before it. Ranks in `leaves_out` leave the branch out of the second
    pass, and the mark, which stands for the embeddings, out of the third.
    """
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in LAYERS}).to(ranks.device)
    bucket = GradientBucket(model.parameters())
    sums, early = [], []
    for number in range(3):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(10 * number + ranks.rank))
        bucket.clear()
        out = model["bottom"](x.to(ranks.device)).relu()
        if starts and (number != 2 or ranks.rank not in leaves_out):
            out = _Marked.apply(lambda: bucket.start_sum(ranks), out)
        if number != 1 or ranks.rank not in leaves_out:
            out = model["branch"](out).relu()
        model["top"](out).square().mean().backward()
        bucket.sum(ranks)
        early.append(bucket._early_size)
        sums.append([parameter.grad.cpu().clone() for parameter in model.parameters()])
    return sums, early


def both(
    device: str, leaves_out: frozenset[int]
) -> tuple[list[list[torch.Tensor]], list[list[torch.Tensor]], list[int]]:
    """Return the sums at the end, the early ones, and the numbers that were summed early."""
    ranks = ranks_from_environment(device)
    with mock.patch.object(gradient_bucket, "EARLY_BYTES", 8 * WIDTH**2), process_group(ranks):
        at_end, nothing = gradients(ranks, starts=False, leaves_out=leaves_out)
        early, numbers = gradients(ranks, starts=True, leaves_out=leaves_out)
    assert nothing == [0, 0, 0]
    return at_end, early, numbers


@pytest.mark.parametrize("leaves_out", [frozenset(), frozenset({1})])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpus(2))])
def test_an_early_sum_is_the_one_at_the_end(device, leaves_out):
    for at_end, early, numbers in run_distributed(both, 2, device, leaves_out):
        # The two matrices behind the mark, which begin the vector.
        assert numbers == [2 * WIDTH**2] * 3
        for wanted, found in zip(at_end, early, strict=True):
            for one, other in zip(wanted, found, strict=True):
                # Of two ranks the order of a sum says nothing.
                assert torch.equal(one, other)


def few_early(device: str) -> int:
    ranks = ranks_from_environment(device)
    with process_group(ranks):
        return gradients(ranks, starts=True, leaves_out=frozenset())[1][0]


def test_a_small_part_is_not_summed_alone():
    assert run_distributed(few_early, 2, "cpu") == [0, 0]
