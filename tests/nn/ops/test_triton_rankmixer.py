"""A block of RankMixer by kernels is as near the exact result as its dtype allows: interpreted here, compiled on a GPU."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor

from nn.distributed.process_group import Ranks
from nn.models.options import RankMixerOptions
from nn.models.rankmixer import RankMixerBlock
from nn.training.gradient_bucket import GradientBucket
from tests.helpers.gpus import check_same_bits, needs_no_gpu, needs_one_gpu

pytest.importorskip("triton")
# Of the norm of a result: some roundings of an element in its dtype, in a row of five products.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}


def block_of(tokens: int, columns: int, expansion: int, device: str) -> RankMixerBlock:
    """Return a block whose parameters all matter: biases and weights of norms are drawn too."""
    torch.manual_seed(0)
    options = RankMixerOptions(tokens=tokens, token_dim=columns, expansion=expansion)
    block = RankMixerBlock(options)
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.normal_(std=0.5).add_("norm.weight" in name)
    return block.to(device)


def by_kernels(block: RankMixerBlock, x: Tensor) -> Tensor:
    return block.network.between_norms(x, block.mixing_norm, block.network_norm)


def outcome(block: RankMixerBlock, x: Tensor, *, fused: bool) -> list[Tensor]:
    """Result, and gradients of x and all parameters."""
    leaves = [x.detach().requires_grad_(), *block.parameters()]
    out = by_kernels(block, leaves[0]) if fused else block(leaves[0])
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    return [out.detach(), *torch.autograd.grad(out, leaves, weight.to(out))]


def check(
    sizes: tuple[int, int, int], samples: int, device: str, dtype: torch.dtype = torch.float32
) -> None:
    block = block_of(*sizes, device)
    x = torch.randn(sizes[0], samples, sizes[1], generator=torch.Generator().manual_seed(1))
    x = x.to(device, dtype)
    ours = outcome(block, x, fused=True)
    exact = outcome(deepcopy(block).double(), x.double(), fused=False)
    names = ["out", "x", *(name for name, _ in block.named_parameters())]
    assert [one.dtype for one in ours] == [dtype] * 2 + [torch.float32] * 8
    for name, one, wanted in zip(names, ours, exact, strict=True):
        assert one.shape == wanted.shape
        error = ((one.double() - wanted).norm() / wanted.norm().clamp(min=1e-6)).item()
        assert error < TOLERANCE[dtype], (sizes, samples, name, error)


@needs_no_gpu
@pytest.mark.parametrize("samples", [0, 1, 7, 70])
@pytest.mark.parametrize("sizes", [(4, 32, 5), (3, 24, 2)])
def test_an_interpreted_block_is_exact(sizes, samples, monkeypatch):
    import triton.language as tl

    from nn.ops.triton import rankmixer as kernels

    # Programs take one block of samples, several, and no whole one.
    monkeypatch.setattr(kernels, "PROGRAMS", 2 * sizes[0])
    monkeypatch.setattr(kernels, "PIECE", 8)
    for name in ("FORWARD", "BACKWARD"):
        monkeypatch.setattr(kernels, name, 256)
    for name, size in (("BLOCK_B", 4), ("BLOCK_C", 32), ("BLOCKS_OF_ROWS", 3)):
        monkeypatch.setattr(kernels, name, tl.constexpr(size))
    check(sizes, samples, "cpu")


@needs_no_gpu
def test_gradients_of_products_are_written_where_they_are_wanted():
    block = block_of(4, 32, 2, "cpu")
    bucket = GradientBucket(block.parameters())
    wanted = [weight.grad.data_ptr() for weight in (block.network.up, block.network.down)]
    x = torch.randn(4, 5, 32, requires_grad=True)
    bucket.clear()
    by_kernels(block, x).square().sum().backward()
    found = [weight.grad.data_ptr() for weight in (block.network.up, block.network.down)]
    assert found == wanted
    bucket.sum(Ranks(0, 0, 1, 1, torch.device("cpu")))
    ours = [parameter.grad.clone() for parameter in block.parameters()]
    block.zero_grad()
    block(x).square().sum().backward()
    for one, parameter in zip(ours, block.parameters(), strict=True):
        torch.testing.assert_close(one, parameter.grad, rtol=1e-4, atol=1e-4)


@needs_no_gpu
@pytest.mark.parametrize("sizes", [(4, 32, 2), (1, 32, 2)])
def test_a_gradient_that_all_tokens_share_is_read_where_it_lies(sizes):
    block = block_of(*sizes, "cpu")
    x = torch.randn(sizes[0], 70, sizes[1], requires_grad=True)
    leaves = [x, *block.parameters()]
    grad = torch.randn(70, sizes[1]).expand(sizes[0], -1, -1)
    out = by_kernels(block, x)
    ours = torch.autograd.grad(out, leaves, grad, retain_graph=True)
    wanted = torch.autograd.grad(out, leaves, grad.contiguous())
    assert all(map(torch.equal, ours, wanted))


@needs_one_gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_on_a_gpu_a_block_is_exact(dtype, set_tf32):
    set_tf32(False)
    for samples in (1, 7, 1_111):
        for sizes in ((4, 32, 5), (16, 224, 3)):
            check(sizes, samples, "cuda", dtype)
    check((16, 768, 3), 4_096, "cuda", dtype)


@needs_one_gpu
def test_on_a_gpu_two_runs_and_a_graph_give_the_same_bits():
    block = block_of(16, 768, 3, "cuda")
    x = torch.randn(16, 4_000, 768, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    leaves = [x, *block.parameters()]

    def once() -> list[Tensor]:
        with torch.autocast("cuda", torch.bfloat16):
            out = block(x)
        assert out.dtype is torch.bfloat16
        return [out.detach(), *torch.autograd.grad(out, leaves, out.detach())]

    check_same_bits(once)
