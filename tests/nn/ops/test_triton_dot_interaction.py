"""The fused interaction gives what plain torch gives: under Triton's interpreter here, compiled on a GPU."""

from itertools import product

import pytest
import torch

from nn.layers.dot_interaction import DotInteraction
from nn.ops.embedding_layout import EmbeddingLayout, LayoutSegment

SHAPES = list(product([2, 5, 26, 63], [16, 20, 128], [True, False]))
# Rounded once in each: relative to the largest value of a result.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def worst_difference(
    shape: tuple[int, int, bool], dtype: torch.dtype, device: str, batch_size: int
) -> float:
    """Largest difference of outputs and gradients, each relative to its own largest value."""
    from nn.ops.triton.dot_interaction import fused_dot_interaction

    num_embeddings, dim, has_bottom = shape
    generator = torch.Generator().manual_seed(1)
    module = DotInteraction(num_embeddings, dim, has_bottom=has_bottom).to(device)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(device, dtype)

    # As two ranks would send them: the first half of the features, sample after sample, then the others.
    half = num_embeddings // 2
    pieces = [LayoutSegment(f, 0, dim, f * dim, half * dim) for f in range(half)]
    rest = num_embeddings - half
    pieces += [
        LayoutSegment(half + f, 0, dim, batch_size * half * dim + f * dim, rest * dim)
        for f in range(rest)
    ]
    layout = EmbeddingLayout(pieces, [dim] * num_embeddings, torch.device(device))
    inputs = [draw(batch_size * num_embeddings * dim)]
    if has_bottom:
        inputs.insert(0, draw(batch_size, dim))
    weight = draw(batch_size, module.num_outputs)
    results = []
    for interact in (module.forward_plain, None):
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        bottom, embeddings = leaves if has_bottom else (None, leaves[0])
        if interact is None:
            out = fused_dot_interaction(bottom, embeddings, layout, module.num_outputs)
        else:
            split = batch_size * half * dim
            vectors = torch.cat(
                [
                    embeddings[:split].view(batch_size, half, dim),
                    embeddings[split:].view(batch_size, rest, dim),
                ],
                dim=1,
            )
            out = interact(None if bottom is None else bottom.double(), vectors.double().flatten(1))
        (out * weight).sum().backward()
        results.append([out.detach().double(), *(leaf.grad.double() for leaf in leaves)])
    return max(
        ((ours - plain).abs().max() / plain.abs().max().clamp(min=1)).item()
        for plain, ours in zip(*results, strict=True)
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where a GPU is")
def test_the_interpreted_interaction_equals_plain_torch():
    for shape in SHAPES:
        worst = worst_difference(shape, torch.float32, "cpu", batch_size=2)
        assert worst < TOLERANCE[torch.float32], (shape, worst)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_fused_interaction_equals_plain_torch_on_a_gpu(dtype):
    torch.set_float32_matmul_precision("highest")
    for shape in SHAPES:
        worst = worst_difference(shape, dtype, "cuda", batch_size=1000)
        assert worst < TOLERANCE[dtype], (shape, worst)
