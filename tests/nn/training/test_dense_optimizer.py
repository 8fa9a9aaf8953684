"""Optimizers of the dense component from outside the project: what checkpoints would lose is refused."""

from dataclasses import replace

import pytest
import torch

from configs.schema import OptimizerConfig, OptimizerName
from nn.training.dense_optimizer import DenseRule, check_dense_rule


class Counting(torch.optim.SGD):
    """SGD that counts its steps, as a number."""

    def step(self, closure=None):
        super().step()
        for weight in self.param_groups[0]["params"]:
            state = self.state[weight]
            state["count"] = state.get("count", 0) + 1


class Averaging(torch.optim.SGD):
    """SGD that keeps a number beside the learning rate, as schedule-free optimizers do."""

    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            group["weight_sum"] = group.get("weight_sum", 0.0) + 1.0


class Decaying(torch.optim.SGD):
    """SGD whose weight decay does not scale with the learning rate."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for weight in self.param_groups[0]["params"]:
            weight.mul_(0.9)


def rule_of(optimizer: type[torch.optim.Optimizer]) -> DenseRule:
    return DenseRule(
        name=optimizer.__name__,
        build=lambda weights, config: optimizer(weights, lr=config.lr),
        states_per_weight=0,
    )


COUNTING, AVERAGING, DECAYING = map(rule_of, (Counting, Averaging, Decaying))
ADAMW = replace(rule_of(torch.optim.AdamW), states_per_weight=2)


def named(name: str) -> OptimizerConfig:
    return OptimizerConfig(name=f"{__name__}:{name}", embedding_name=OptimizerName.sgd)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("COUNTING", "keeps 'count' as a number or in its parameter groups"),
        ("AVERAGING", "keeps 'weight_sum' as a number or in its parameter groups"),
        ("DECAYING", "changes weights in a step with a learning rate of 0"),
    ],
)
def test_an_optimizer_that_would_not_resume_exactly_is_refused(name, message):
    with pytest.raises(ValueError, match=message):
        check_dense_rule(named(name))


def test_an_optimizer_whose_state_are_tensors_is_accepted():
    check_dense_rule(named("ADAMW"))
