"""Lion of tables against its paper, and the options that are the tables' optimizer's own."""

import math

import pytest
import torch
from torch import nn

from configs.schema import OptimizerConfig
from nn.checks import check_optimizers
from nn.embedding.optimizer import update_settings
from nn.embedding.torch_optimizer import TableOptimizer
from tests.helpers.composed import TINY, build, compose_config, ranks_of_cpu

RATE, BETA1, BETA2 = 0.01, 0.9, 0.99
LION = ["optimizer.embedding_name=lion", f"optimizer.embedding_lr={RATE}"]


def lion(**own: float) -> OptimizerConfig:
    return OptimizerConfig(embedding_name="lion", embedding_lr=RATE, embedding_options=own)


def program_2(gradients: list[float], beta2: float) -> float:
    """Return the weight after all gradients of one coordinate that starts at zero, as the paper computes it."""
    weight = mean = 0.0
    for gradient in gradients:
        mix = BETA1 * mean + (1 - BETA1) * gradient
        weight -= RATE * (math.copysign(1, mix) if mix else 0)
        mean = beta2 * mean + (1 - beta2) * gradient
    return weight


@pytest.mark.parametrize("beta2", [BETA2, 0.8])
def test_a_weight_follows_the_paper(beta2):
    gradients = torch.randn(20, 4, 3, generator=torch.Generator().manual_seed(0))
    table = nn.Parameter(torch.zeros(4, 3))
    optimizer = TableOptimizer([table], lion() if beta2 == BETA2 else lion(beta2=beta2))
    for gradient in gradients:
        table.grad = gradient.clone()
        optimizer.step()
    for row in range(4):
        for column in range(3):
            wanted = program_2(gradients[:, row, column].tolist(), beta2)
            assert table[row, column].item() == pytest.approx(wanted, abs=1e-6)


def test_a_row_that_is_not_looked_up_stays():
    table = nn.Parameter(torch.zeros(2, 3))
    optimizer = TableOptimizer([table], lion())
    for gradient in ([[1.0] * 3, [1.0] * 3], [[1.0] * 3, [0.0] * 3]):
        table.grad = torch.tensor(gradient)
        optimizer.step()
    assert torch.equal(table[1], torch.full((3,), -RATE))
    assert torch.equal(table[0], torch.full((3,), -2 * RATE))


def test_the_rule_has_its_own_default_and_the_dense_component_keeps_its():
    config = OptimizerConfig(name="adam", embedding_name="lion")
    assert (config.beta2, update_settings(config)["beta2"]) == (0.999, BETA2)
    assert update_settings(OptimizerConfig(name="adam"))["beta2"] == 0.999
    chosen = OptimizerConfig(name="adam", eps=1e-8, embedding_options={"eps": 1e-4})
    assert (chosen.eps, update_settings(chosen)["eps"]) == (1e-8, 1e-4)


def test_a_run_trains_with_options_from_the_command_line():
    config = compose_config(*TINY, *LION, "optimizer.embedding_options={beta2: 0.98}")
    assert update_settings(config.optimizer)["beta2"] == 0.98
    with ranks_of_cpu():
        losses = build(config).train(0, 16)
    assert sum(losses[-4:]) < sum(losses[:4])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ftrl_l1": 0.1}, "lion has no option ftrl_l1, expected one of eps, beta1, beta2"),
        ({"beta2": 1.0}, r"embedding_options.beta2 must lie in \[0, 1\), got 1.0"),
        ({"beta2": "high"}, "embedding_options.beta2 must be a number, got high"),
        ({"nesterov": 0.5}, "embedding_options.nesterov must be 0 or 1, got 0.5"),
        ([0.9], "embedding_options must be a mapping such as {beta2: 0.98}, got"),
    ],
)
def test_other_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        update_settings(OptimizerConfig(embedding_name="lion", embedding_options=options))


def test_options_of_no_rule_are_refused_before_the_run():
    config = compose_config(*TINY, *LION, "optimizer.embedding_options={momentum: 0.9}")
    with pytest.raises(ValueError, match="lion has no option momentum"):
        check_optimizers(config)
