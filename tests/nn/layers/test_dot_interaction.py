import itertools

import pytest
import torch

from nn.layers.dot_interaction import DotInteraction


def pairs_by_hand(vectors):
    """Strictly lower triangle, row by row, from the definition."""
    pairs = sorted((j, i) for i, j in itertools.combinations(range(vectors.shape[1]), 2))
    return torch.stack([(vectors[:, j] * vectors[:, i]).sum(1) for j, i in pairs], dim=1)


def test_bottom_comes_first_then_every_pair_then_zeros():
    torch.manual_seed(0)
    bottom, embeddings = torch.randn(5, 4), torch.randn(5, 3, 4)
    interaction = DotInteraction(3, 4)
    result = interaction(bottom, embeddings.flatten(1))
    vectors = torch.cat([bottom[:, None], embeddings], dim=1)
    assert result.shape == (5, interaction.num_outputs) == (5, 16)  # 4 + 6, padded
    torch.testing.assert_close(result[:, :4], bottom, rtol=0, atol=0)
    torch.testing.assert_close(result[:, 4:10], pairs_by_hand(vectors))
    assert not result[:, 10:].any()


def test_embeddings_interact_among_themselves_without_a_bottom_vector():
    torch.manual_seed(0)
    embeddings = torch.randn(5, 4, 8)
    result = DotInteraction(4, 8, has_bottom=False)(None, embeddings.flatten(1))
    assert result.shape == (5, 8)
    torch.testing.assert_close(result[:, :6], pairs_by_hand(embeddings))


def test_the_published_width_is_480():
    assert DotInteraction(26, 128).num_outputs == 480


@pytest.mark.parametrize("has_bottom", [True, False])
def test_gradients_are_those_of_finite_differences(has_bottom):
    torch.manual_seed(0)
    bottom = torch.randn(2, 3, dtype=torch.float64, requires_grad=True) if has_bottom else None
    embeddings = torch.randn(2, 9, dtype=torch.float64, requires_grad=True)
    interaction = DotInteraction(3, 3, has_bottom=has_bottom)
    assert torch.autograd.gradcheck(interaction, (bottom, embeddings))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_embeddings_take_the_dtype_of_the_bottom_vector(dtype):
    result = DotInteraction(2, 4)(torch.ones(1, 4, dtype=dtype), torch.ones(1, 8))
    assert result.dtype is dtype
    assert result[0].tolist() == [1, 1, 1, 1, 4, 4, 4, 0]


def test_indices_are_no_state_of_the_model():
    assert not DotInteraction(3, 4).state_dict()


def test_gradients_survive_products_narrower_than_their_vectors():
    torch.manual_seed(0)
    interaction = DotInteraction(3, 4, has_bottom=False)
    exact = torch.randn(5, 12, requires_grad=True)
    rounded = exact.detach().clone().requires_grad_()
    interaction(None, exact).square().sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        result = interaction(None, rounded)
    assert result.dtype is torch.bfloat16
    result.float().square().sum().backward()
    torch.testing.assert_close(rounded.grad, exact.grad, rtol=0.05, atol=0.05)
