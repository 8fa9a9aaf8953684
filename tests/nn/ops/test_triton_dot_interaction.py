"""The fused interaction gives what plain torch gives: under Triton's interpreter here, compiled on a GPU."""

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from configs.schema import OptimizerConfig
from nn.embedding.embedding_bags import LocalEmbeddingBags
from nn.embedding.local_tables import LocalTable, UpdateScalars
from nn.embedding.lookups import Lookup
from nn.layers.dot_interaction import DotInteraction
from nn.ops.embedding_layout import EmbeddingLayout, LayoutSegment
from tests.helpers.gpus import needs_no_gpu
from tests.nn.embedding.fixed_blocks import fixed_blocks

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


@needs_no_gpu
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


@pytest.mark.parametrize(
    ("dtype", "compute_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.float16, torch.float16),
        (torch.float32, torch.float16),
    ],
)
def test_the_interaction_that_takes_rows_itself_equals_lookup_and_interaction(dtype, compute_dtype):
    from nn.ops.triton.dot_interaction import dot_interaction_of_rows, fused_dot_interaction

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(1)
    rows, dim, num_samples = [40, 3, 17, 1000, 5], 20, 9
    tables = [
        LocalTable((Lookup(f"cat_{index}", 1),), torch.randn(count, dim, generator=generator), {})
        for index, count in enumerate(rows)
    ]
    tables = [replace(table, weight=table.weight.to(device)) for table in tables]
    config = OptimizerConfig()
    bags = LocalEmbeddingBags(
        tables,
        fixed_blocks({f"cat_{index}": 1 for index in range(len(rows))}, num_samples),
        num_samples,
        config,
        UpdateScalars(config, 1.0, device),
        dtype,
        device,
    )
    drawn = [torch.randint(count, (num_samples,), generator=generator) for count in rows]
    ids = torch.cat(drawn).to(device)
    values = torch.empty(num_samples, len(rows) * dim, dtype=dtype, device=device)
    bags.look_up(ids, values)
    bottom = torch.randn(num_samples, dim, generator=generator).to(device, compute_dtype)
    num_outputs = DotInteraction(len(rows), dim).num_outputs
    layout = EmbeddingLayout.dense((dim,) * len(rows), device)
    wanted = fused_dot_interaction(bottom, values.flatten(), layout, num_outputs)
    if bags._kernels is None:
        # Plain torch takes no rows; the kernel is interpreted.
        assert bags.table_rows(ids) is None
        vars(bags).pop("_row_offsets")
        bags._kernels = SimpleNamespace()
    rows = bags.table_rows(ids)
    assert torch.equal(dot_interaction_of_rows(bottom, rows, num_outputs), wanted)
    # In training it leaves the vectors for the backward pass.
    outcomes = []
    for room, rows_of in ((values, None), (torch.full_like(values, torch.nan), rows)):
        leaves = [bottom.clone().requires_grad_(), room.flatten().requires_grad_()]
        out = fused_dot_interaction(*leaves, layout, num_outputs, rows_of)
        outcomes.append([out, *torch.autograd.grad(out.float().square().sum(), leaves), leaves[1]])
    for one, other in zip(*outcomes, strict=True):
        assert torch.equal(one, other)
