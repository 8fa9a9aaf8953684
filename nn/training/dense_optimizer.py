"""Optimizers of the dense half, one record per optimizer: torch's own, fused where the device has it.

A new one is a `DenseRule` here, or in a module outside the project that `optimizer.name=package.module:NAME` names.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn

from configs.schema import OptimizerConfig, OptimizerName
from nn.user_objects import load_user_object


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseRule:
    """All that the step and the estimates know of a dense optimizer.

    Attributes:
        name: for people.
        build: makes it of the parameters and the options.
        states_per_weight: numbers of state that it keeps per weight.
    """

    name: str
    build: Callable[[list[nn.Parameter], OptimizerConfig], torch.optim.Optimizer]
    states_per_weight: int


def _sgd(parameters: list[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=config.lr, fused=True)


def _adagrad(parameters: list[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    # Torch 2.11 has no fused one for GPUs.
    on_cpu = all(parameter.device.type == "cpu" for parameter in parameters)
    return torch.optim.Adagrad(
        parameters, lr=config.lr, eps=config.eps, fused=on_cpu, foreach=not on_cpu
    )


def _adam(parameters: list[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    betas = (config.beta1, config.beta2)
    return torch.optim.Adam(parameters, lr=config.lr, betas=betas, eps=config.eps, fused=True)


DENSE_RULES: dict[str, DenseRule] = {
    OptimizerName.sgd: DenseRule(name="sgd", build=_sgd, states_per_weight=0),
    OptimizerName.adagrad: DenseRule(name="adagrad", build=_adagrad, states_per_weight=1),
    # Row-wise Adagrad keeps one state per table row; the dense half has no such rows and takes Adagrad.
    OptimizerName.rowwise_adagrad: DenseRule(name="adagrad", build=_adagrad, states_per_weight=1),
    OptimizerName.adam: DenseRule(name="adam", build=_adam, states_per_weight=2),
}


@cache
def dense_rule(name: str) -> DenseRule:
    """Return the record of a dense optimizer.

    Args:
        name: of a built-in one, or `package.module:NAME`.

    Raises:
        ValueError: `package.module:NAME` cannot be imported, or is no `DenseRule`.
    """
    if name in DENSE_RULES:
        return DENSE_RULES[name]
    found = load_user_object(name, "optimizer.name")
    if not isinstance(found, DenseRule):
        raise ValueError(
            f"optimizer.name={name} is a {type(found).__name__}, and the dense half requires a DenseRule "
            "(nn.training.dense_optimizer); name one, or a built-in optimizer, and the tables' own with "
            "optimizer.embedding_name"
        )
    return found


def build_dense_optimizer(
    parameters: Iterable[nn.Parameter], config: OptimizerConfig
) -> torch.optim.Optimizer:
    """Build the optimizer that `optimizer.name` names."""
    return dense_rule(config.name).build(list(parameters), config)
