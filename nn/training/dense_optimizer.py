"""Optimizers of the dense component, one record per optimizer: torch's own, fused where the device has it.

A new optimizer is a `DenseRule` here, or one outside the project with `optimizer.name=package.module:NAME`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from configs.messages import shown
from configs.schema import OptimizerConfig, OptimizerName
from nn.user_objects import load_user_object


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseRule:
    """The properties of a dense optimizer that step and estimates use.

    Attributes:
        name: name in messages.
        build: returns the optimizer for parameters and options. A step with a learning rate of 0 and gradients of 0 changes
            no weight, and all state are tensors of `optimizer.state`, which is what checkpoints hold.
        states_per_weight: state values per weight.
    """

    name: str
    build: Callable[[list[nn.Parameter], OptimizerConfig], torch.optim.Optimizer]
    states_per_weight: int


def _sgd(parameters: list[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        parameters,
        lr=config.lr,
        momentum=config.momentum,
        nesterov=config.nesterov,
        fused=True,
    )


def _adagrad(parameters: list[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    if all(parameter.device.type == "cuda" for parameter in parameters):
        # Torch 2.11 has no fused Adagrad for GPUs. Only CUDA builds of torch include Triton.
        from nn.ops.triton.dense_adagrad import FusedAdagrad

        return FusedAdagrad(parameters, lr=config.lr, eps=config.eps)
    return torch.optim.Adagrad(parameters, lr=config.lr, eps=config.eps, fused=True)


def _adam(parameters: list[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    betas = (config.beta1, config.beta2)
    return torch.optim.Adam(parameters, lr=config.lr, betas=betas, eps=config.eps, fused=True)


def _adamw(parameters: list[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        parameters,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


DENSE_RULES: dict[str, DenseRule] = {
    OptimizerName.sgd: DenseRule(name="sgd", build=_sgd, states_per_weight=0),
    OptimizerName.adagrad: DenseRule(name="adagrad", build=_adagrad, states_per_weight=1),
    # Row-wise Adagrad keeps one state per table row; the dense component has no such rows and uses Adagrad.
    OptimizerName.rowwise_adagrad: DenseRule(name="adagrad", build=_adagrad, states_per_weight=1),
    OptimizerName.adam: DenseRule(name="adam", build=_adam, states_per_weight=2),
}
MOMENTUM_SGD = DenseRule(name="sgd with momentum", build=_sgd, states_per_weight=1)
# Loshchilov and Hutter, Decoupled Weight Decay Regularization (2019), algorithm 2.
ADAMW = DenseRule(name="adamw", build=_adamw, states_per_weight=2)


def dense_rule(config: OptimizerConfig) -> DenseRule:
    """Return the record of the dense component's optimizer.

    Raises:
        ValueError: `package.module:NAME` cannot be imported, or is no `DenseRule`.
    """
    if config.name == OptimizerName.sgd and config.momentum:
        return MOMENTUM_SGD
    if config.name == OptimizerName.adam and config.weight_decay:
        return ADAMW
    return _rule_named(config.name)


@cache
def _rule_named(name: str) -> DenseRule:
    if name in DENSE_RULES:
        return DENSE_RULES[name]
    rule = load_user_object(name, "optimizer.name")
    if not isinstance(rule, DenseRule):
        raise ValueError(
            f"optimizer.name={name} is a {type(rule).__name__}, and the dense component requires a DenseRule "
            "(nn.training.dense_optimizer); name one, or a built-in optimizer, and the tables' own with "
            "optimizer.embedding_name"
        )
    return rule


def check_dense_rule(config: OptimizerConfig) -> None:
    """Refuse an optimizer from outside the project whose state a checkpoint would lose; it takes a step on two weights.

    Raises:
        ValueError: `optimizer.name` names no optimizer; or a step with a learning rate of 0 changes weights, or leaves state
            that is no tensor.
    """
    rule = dense_rule(config)
    if config.name in DENSE_RULES:
        return
    weight = nn.Parameter(torch.ones(2))
    optimizer = rule.build([weight], config)
    weight.grad = torch.zeros(2)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    settings = [_settings(group) for group in optimizer.param_groups]
    optimizer.step()
    if not torch.equal(weight, torch.ones(2)):
        raise ValueError(
            f"optimizer.name={config.name} changes weights in a step with a learning rate of 0 and gradients of 0, by which "
            "its state is created before a checkpoint is restored; scale every change by lr"
        )
    lost = [
        key
        for key, value in optimizer.state[weight].items()
        if value is not None and not isinstance(value, Tensor)
    ]
    for before, group in zip(settings, optimizer.param_groups, strict=True):
        now = _settings(group)
        lost += [key for key in now if key not in before or before[key] != now[key]]
    if lost:
        raise ValueError(
            f"optimizer.name={config.name} keeps {shown(lost[0])} as a number or in its parameter groups, and checkpoints hold "
            "the tensors of optimizer.state only, so a resumed run would differ; keep it there as a tensor"
        )


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def build_dense_optimizer(
    parameters: Iterable[nn.Parameter], config: OptimizerConfig
) -> torch.optim.Optimizer:
    """Build the optimizer that the options name."""
    return dense_rule(config).build(list(parameters), config)
