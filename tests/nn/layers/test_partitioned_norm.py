"""Normalization of every domain's rows against torch's of one domain, in a batch with padding, and in parts."""

import pytest
import torch

from nn.layers.batch_norm import PartitionedNorm
from nn.layers.pass_state import PassState, attach

DOMAINS, COLUMNS, ROWS = 3, 4, 9  # the last two rows are padding, and domain 2 has none
NUMBERS = torch.tensor([0, 1, 0, 0, 1, 0, 1, 0, 0])
CHOSEN = torch.nn.functional.one_hot(NUMBERS, DOMAINS).float()


@pytest.mark.parametrize("parts", [[(0, 9, 7)], [(0, 4, 4), (4, 9, 3)]], ids=["whole", "parts"])
def test_running_values_are_those_of_torchs_layer_per_domain(parts):
    norm = PartitionedNorm(DOMAINS, COLUMNS)
    state = PassState(1, torch.device("cpu"))
    attach(norm, state)
    layers = [torch.nn.BatchNorm1d(COLUMNS) for _ in range(DOMAINS)]
    generator = torch.Generator().manual_seed(3)
    for step in range(3):
        x = torch.randn(ROWS, COLUMNS, generator=generator) * 3 + 1
        state.set(step, ROWS, 7, 7)
        for number, (first, end, valid) in enumerate(parts):
            state.set_chunk(number, first, valid, valid)
            out = norm(x[first:end], CHOSEN[first:end])
        norm.update()
        for domain in (0, 1):
            own = NUMBERS[:7] == domain
            wanted = layers[domain](x[:7][own])
            if len(parts) == 1:
                torch.testing.assert_close(out[:7][own], wanted, rtol=1e-6, atol=1e-6)
    for domain, layer in enumerate(layers):
        for ours, theirs in (
            (norm.running_mean, layer.running_mean),
            (norm.running_var, layer.running_var),
        ):
            torch.testing.assert_close(ours[domain], theirs, rtol=1e-6, atol=1e-6)
        layer.eval()
    norm.eval()
    wanted = torch.stack(
        [layers[number](row[None])[0] for number, row in zip(NUMBERS.tolist(), x, strict=True)]
    )
    torch.testing.assert_close(norm(x, CHOSEN), wanted, rtol=1e-5, atol=1e-5)
