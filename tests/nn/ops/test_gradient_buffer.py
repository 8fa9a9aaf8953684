"""Gradients arrive in the bucket's memory, written there or copied, and are those of plain torch."""

import pytest
import torch
from torch import nn

from nn.distributed.process_group import Ranks
from nn.layers.mlp import MLP
from nn.ops.gradient_buffer import take_buffer
from nn.training.gradient_bucket import GradientBucket

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RANKS = Ranks(rank=0, local_rank=0, world_size=1, local_world_size=1, device=DEVICE)


class Twice(nn.Module):
    """Uses one MLP twice, another once, and a third never; one weight belongs to no fused layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shared = MLP(width, [width, width], final_activation=True)
        self.top = MLP(width, [24, 1], final_activation=False)
        self.unused = MLP(width, [8], final_activation=True)
        self.plain = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, *, fused: bool) -> torch.Tensor:
        shared, top = (
            layer._forward_fused if fused else layer.forward_plain
            for layer in (self.shared, self.top)
        )
        return top(self.plain(shared(shared(x))))


def model(width: int) -> Twice:
    torch.manual_seed(0)
    return Twice(width).to(DEVICE)


# With 64 columns all matrices begin at offsets for products; with 24 some do not, and are copied.
@pytest.mark.parametrize("width", [64, 24])
def test_the_bucket_has_the_gradients_of_plain_torch(width):
    fused, plain = model(width), model(width)
    bucket = GradientBucket(fused.parameters())
    for step in range(2):
        x = torch.randn(40, width, generator=torch.Generator().manual_seed(step)).to(DEVICE)
        bucket.clear()
        fused(x, fused=True).square().sum().backward()
        bucket.sum(RANKS)
        plain.zero_grad()
        plain(x, fused=False).square().sum().backward()
        for (name, ours), theirs in zip(fused.named_parameters(), plain.parameters(), strict=True):
            wanted = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
            torch.testing.assert_close(ours.grad, wanted, rtol=1e-4, atol=1e-4, msg=name)
            assert bucket.vector.data_ptr() <= ours.grad.data_ptr()
            assert ours.grad.data_ptr() < bucket.vector[-1].data_ptr()


def test_a_weight_that_is_used_once_has_its_gradient_there_before_anything_is_copied():
    mlp = MLP(64, [64, 64, 1], final_activation=False).to(DEVICE)
    bucket = GradientBucket(mlp.parameters())
    wanted = [layer.weight.grad.data_ptr() for layer in mlp.layers]
    bucket.clear()
    mlp._forward_fused(torch.ones(8, 64, device=DEVICE)).sum().backward()
    found = [layer.weight.grad.data_ptr() for layer in mlp.layers]
    # The last layer's gradient is a sum of columns, and is copied with the biases.
    assert found[:2] == wanted[:2]
    assert found[2] != wanted[2]


def test_an_odd_matrix_does_not_shift_the_others():
    odd = nn.Parameter(torch.ones(13, 16, device=DEVICE))
    weight = nn.Parameter(torch.ones(64, 64, device=DEVICE))
    bucket = GradientBucket([odd, weight])
    bucket.clear()
    buffer = take_buffer(weight)
    assert buffer is not None
    assert buffer.data_ptr() == bucket.vector.data_ptr()


def test_a_place_is_taken_once_and_not_behind_the_pass():
    weight = nn.Parameter(torch.ones(64, 64, device=DEVICE))
    bucket = GradientBucket([weight])
    bucket.clear()
    buffer = take_buffer(weight)
    assert buffer is not None
    assert buffer.data_ptr() == bucket.vector.data_ptr()
    assert take_buffer(weight) is None
    bucket.clear()
    bucket.sum(RANKS)
    assert take_buffer(weight) is None
