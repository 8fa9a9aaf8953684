"""Optimizers of the dense component: equality with torch's, resuming, and refusals of ones from outside the project."""

from dataclasses import replace

import pytest
import torch

from configs.schema import OptimizerConfig, OptimizerName
from nn.training.dense_optimizer import (
    DenseRule,
    DenseUpdate,
    check_dense_rule,
    dense_rule,
)
from tests.helpers.composed import TINY, compose_config
from tests.nn.training.plain_training import resumes_bit_by_bit, train_and_compare


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


class SecretCount(torch.optim.SGD):
    """Keeps the number of its steps as an attribute."""

    steps = 0

    def step(self, closure=None):
        super().step()
        self.steps += 1


def rule_with(parameters) -> DenseRule:
    return DenseRule(
        name="sgd",
        build=lambda weights, config: torch.optim.SGD(parameters(weights), lr=config.lr),
        states_per_weight=0,
    )


COUNTING, AVERAGING, DECAYING, SECRET = map(rule_of, (Counting, Averaging, Decaying, SecretCount))
FIRST = rule_with(lambda weights: weights[:1])
COPIES = rule_with(lambda weights: [torch.nn.Parameter(weight.detach()) for weight in weights])
RATES = rule_with(lambda weights: [{"params": weights[:1], "lr": 3.0}, {"params": weights[1:]}])
ADAMW = replace(rule_of(torch.optim.AdamW), states_per_weight=2)


def named(name: str) -> OptimizerConfig:
    return OptimizerConfig(name=f"{__name__}:{name}", embedding_name=OptimizerName.sgd)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("COUNTING", "keeps 'count' as a number or in its parameter groups"),
        ("AVERAGING", "keeps 'weight_sum' as a number or in its parameter groups"),
        ("DECAYING", "changes weights in a step with a learning rate of 0"),
        ("SECRET", "keeps 'steps' as a number"),
        ("FIRST", "leaves out parameters that build"),
        ("COPIES", "leaves out parameters that build"),
        ("RATES", r"has groups of several rates, \[3.0, 24.0\], and each step sets lr of all"),
    ],
)
def test_an_optimizer_that_would_not_resume_exactly_is_refused(name, message):
    with pytest.raises(ValueError, match=message):
        check_dense_rule(named(name))


def test_an_optimizer_whose_state_are_tensors_is_accepted():
    check_dense_rule(named("ADAMW"))


MOMENTUM = ["optimizer.name=sgd", "optimizer.lr=0.05", "optimizer.momentum=0.9"]
NESTEROV = [*MOMENTUM, "optimizer.nesterov=true"]
DECAY = ["optimizer.name=adam", "optimizer.lr=0.005", "optimizer.eps=0.01"]
DECAY += ["optimizer.weight_decay=0.5", "optimizer.embedding_name=sgd"]
LION = ["optimizer.name=lion", "optimizer.lr=0.001", "optimizer.beta2=0.99"]
LION += ["optimizer.weight_decay=0.5", "optimizer.embedding_name=sgd"]
LAMB = ["optimizer.name=lamb", "optimizer.lr=0.005", "optimizer.eps=0.01"]
LAMB += ["optimizer.weight_decay=0.5", "optimizer.embedding_name=sgd"]
# No layer has padding, whose weights the run's norms count and the reference lacks.
LAMB += ["data.synthetic.num_numerical=8", "model.embedding_dim=9", "model.bottom_mlp=[16,9]"]


class PlainLion(torch.optim.Optimizer):
    """Program 2 of the paper."""

    @torch.no_grad()
    def step(self, closure=None):
        (group,) = self.param_groups
        for weight in group["params"]:
            mean = self.state[weight].get("mean", 0)
            direction = torch.sign(0.9 * mean + 0.1 * weight.grad)
            weight -= group["lr"] * (direction + 0.5 * weight)
            self.state[weight]["mean"] = 0.99 * mean + 0.01 * weight.grad


class PlainLAMB(torch.optim.Optimizer):
    """Algorithm 2 of the paper."""

    @torch.no_grad()
    def step(self, closure=None):
        (group,) = self.param_groups
        for weight in group["params"]:
            mean, square, count = self.state[weight].get("moments", (0, 0, 0))
            mean, square = 0.9 * mean + 0.1 * weight.grad, 0.999 * square + 0.001 * weight.grad**2
            count += 1
            self.state[weight]["moments"] = mean, square, count
            root = (square / (1 - 0.999**count)).sqrt() + 0.01
            ratio = mean / (1 - 0.9**count) / root + 0.5 * weight
            weight -= group["lr"] * weight.norm() / ratio.norm() * ratio


# options of the run, torch's optimizer of the dense component, its arguments
CASES = {
    "momentum": (MOMENTUM, torch.optim.SGD, {"momentum": 0.9}),
    "nesterov": (NESTEROV, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "weight decay": (DECAY, torch.optim.AdamW, {"eps": 0.01, "weight_decay": 0.5}),
    "lion": (LION, lambda dense, lr: PlainLion(dense, {"lr": lr}), {}),
    "lamb": (LAMB, lambda dense, lr: PlainLAMB(dense, {"lr": lr}), {}),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_it_trains_as_torch_does(case, num_ranks):
    overrides, optimizer, arguments = CASES[case]
    lr = compose_config(*overrides).optimizer.lr

    def updates(tables, dense):
        return [torch.optim.SGD(tables, lr=lr), optimizer(dense, lr=lr, **arguments)]

    train_and_compare([*TINY, *overrides], updates, num_ranks)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_a_restored_run_resumes_bit_by_bit(case, num_ranks, tmp_path):
    assert resumes_bit_by_bit(tmp_path, [*TINY, *CASES[case][0]], num_ranks)


def test_the_state_is_what_the_memory_estimate_counts():
    for overrides, _, _ in CASES.values():
        config = compose_config(*overrides).effective_optimizer
        weight = torch.nn.Parameter(torch.ones(2, 3))
        weight.grad = torch.ones_like(weight)
        optimizer = dense_rule(config).build([weight], config)
        optimizer.step()
        states = [value for value in optimizer.state[weight].values() if value.numel() == 6]
        assert len(states) == dense_rule(config).states_per_weight


@pytest.mark.parametrize("overrides", [MOMENTUM, DECAY])
def test_a_frozen_dense_component_has_no_state(overrides):
    config = compose_config(*TINY, *overrides, "train.freeze=[dense]").effective_optimizer
    assert dense_rule(config).states_per_weight == 0
    assert (config.name, config.momentum, config.weight_decay) == (OptimizerName.sgd, 0, 0)


def trained_in_pass(config: OptimizerConfig, *, on_gpu: bool) -> list[torch.Tensor]:
    """Return weights and optimizer state after three updates, of which one is skipped, at two learning rates."""
    weights = [torch.nn.Parameter(torch.linspace(-1, 1, size)) for size in (4, 7)]
    update = DenseUpdate(weights, config, on_gpu=on_gpu)
    for rate, is_good in ((0.5, 0), (0.5, 1), (0.25, 1), (0.25, 0), (0.25, 1)):
        for weight in weights:
            weight.grad = weight.detach().cos() if is_good else torch.full_like(weight, torch.nan)
        update.set_learning_rate(rate)
        if on_gpu:
            update.allow(torch.tensor([is_good], dtype=torch.int32))
            update.apply()
        elif is_good:
            update.optimizer.step()
    state = [value for weight in weights for value in update.optimizer.state[weight].values()]
    return [*(weight.detach() for weight in weights), *state]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9},
        *({"name": name, "embedding_name": "sgd"} for name in ("adam", "adagrad", "lion", "lamb")),
    ],
)
def test_an_update_that_is_a_part_of_the_pass_skips_what_is_not_finite(options):
    """As on a GPU, where learning rate and permission are read from the device."""
    name = OptimizerName[options.get("name", "sgd")]
    config = OptimizerConfig(**(options | {"name": name}))
    outcomes = [trained_in_pass(config, on_gpu=on_gpu) for on_gpu in (True, False)]
    for part, behind in zip(*outcomes, strict=True):
        assert torch.equal(part, behind)
