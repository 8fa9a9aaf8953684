"""Memory of the embeddings, and the ids of padding rows."""

import pytest
import torch

from nn.distributed.process_group import process_group, ranks_from_environment
from nn.layers.pooled_embeddings import PooledEmbeddings
from nn.ops.embedding_layout import EmbeddingLayout, LayoutSegment
from nn.sharding.local_ids import Capacity
from tests.helpers.composed import build, compose_config
from tests.nn.sharding.test_sharded_embeddings import case


def test_padding_arrives_with_the_ids_of_the_first_row():
    """So that no row is updated, by a gradient of zero, that the batch does not look up: Adam would move it."""
    with process_group(ranks_from_environment("cpu")):
        built = build(compose_config(*case("dlrm", "multi_hot", "adam", "table_wise")))
        tables = built.step.runner.builder.lookup(4, Capacity())
        hotness = [3, 1, 2, 5, 1]
        ids = torch.arange(4 * sum(hotness), dtype=torch.int32)
        ids = torch.cat([each % 7 for each in ids.split([4 * each for each in hotness])])
        sent = tables.send_ids(ids, 4)[0].owned
        padded = tables.send_ids(ids, 3)[0].owned
    assert torch.equal(sent, ids)
    for before, after in zip(
        *(each.split([4 * each for each in hotness]) for each in (sent, padded)), strict=True
    ):
        before, after = before.view(4, -1), after.view(4, -1)
        assert torch.equal(after[:3], before[:3])
        assert torch.equal(after[3], before[0])


def scattered(num_samples: int, prefix_columns: int = 0) -> tuple[torch.Tensor, EmbeddingLayout]:
    """Three features of 4 columns, the second cut in two, in two blocks; or in one with room before it."""
    wanted = torch.arange(num_samples * 12.0).view(num_samples, 12)
    if prefix_columns:
        pieces = [
            LayoutSegment(f, 0, 4, prefix_columns + 4 * f, prefix_columns + 12) for f in range(3)
        ]
        values = torch.cat([torch.zeros(num_samples, prefix_columns), wanted], dim=1).flatten()
        return values, EmbeddingLayout(pieces, [4] * 3, torch.device("cpu"), prefix_columns)
    first, second = wanted[:, [4, 5, 8, 9, 10, 11]], wanted[:, [6, 7, 0, 1, 2, 3]]
    start = first.numel()
    pieces = [
        LayoutSegment(1, 0, 2, 0, 6),
        LayoutSegment(2, 0, 4, 2, 6),
        LayoutSegment(1, 2, 2, start, 6),
        LayoutSegment(0, 0, 4, start + 2, 6),
    ]
    values = torch.cat([first.flatten(), second.flatten()])
    return values, EmbeddingLayout(pieces, [4] * 3, torch.device("cpu"))


@pytest.mark.parametrize("prefix_columns", [0, 2])
@pytest.mark.parametrize("has_head", [True, False])
def test_scattered_embeddings_make_one_matrix_and_their_gradients_go_back(prefix_columns, has_head):
    values, layout = scattered(5, prefix_columns)
    leaf = values.clone().requires_grad_()
    head = torch.full((5, 2), -1.0, requires_grad=True) if has_head else None
    matrix = PooledEmbeddings(layout, lambda _: leaf.view_as(leaf)).matrix(head)
    wanted = torch.arange(60.0).view(5, 12)
    first = 2 if has_head else 0
    assert torch.equal(matrix[:, first:], wanted)
    weight = torch.randn(5, 12 + first)
    (matrix * weight).sum().backward()
    columns = weight[:, first:]
    back, _ = scattered(5, prefix_columns)
    # The value at each offset in memory names the element that lies there.
    for offset, element in enumerate(back.tolist()):
        if not (prefix_columns and offset % (prefix_columns + 12) < prefix_columns):
            assert leaf.grad[offset] == columns.flatten()[int(element)]
    if has_head:
        assert torch.equal(head.grad, weight[:, :2])


def test_a_second_matrix_has_a_prefix_of_its_own():
    """Only the first is the memory of the values itself, where there is room for a prefix."""
    values, layout = scattered(5, 2)
    leaf = values.clone().requires_grad_()
    embeddings = PooledEmbeddings(layout, lambda _: leaf.view_as(leaf))
    heads = [torch.full((5, 2), float(number), requires_grad=True) for number in (1, 2)]
    weights = torch.randn(2, 5, 14).unbind()
    matrices = [embeddings.matrix(head) for head in heads]
    sum(
        (matrix * weight).sum() for matrix, weight in zip(matrices, weights, strict=True)
    ).backward()
    for matrix, head, weight in zip(matrices, heads, weights, strict=True):
        assert torch.equal(matrix[:, :2], head)
        assert torch.equal(matrix[:, 2:], torch.arange(60.0).view(5, 12))
        assert torch.equal(head.grad, weight[:, :2])
    torch.testing.assert_close(leaf.grad.view(5, 14)[:, 2:], sum(weights)[:, 2:])


def test_columns_left_for_another_prefix_have_no_gradient():
    values, layout = scattered(5, 3)
    leaf = values.clone().requires_grad_()
    head = torch.zeros(5, 2)
    torch.use_deterministic_algorithms(True, warn_only=True)  # new memory holds NaN
    try:
        PooledEmbeddings(layout, lambda _: leaf.view_as(leaf)).matrix(head).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert leaf.grad.isfinite().all()
