"""The dense half's optimizer: torch's own, fused where the device has it."""

from collections.abc import Iterable

import torch
from torch import nn

from configs.schema import OptimizerConfig, OptimizerName


def build_dense_optimizer(
    parameters: Iterable[nn.Parameter], config: OptimizerConfig
) -> torch.optim.Optimizer:
    """Build the optimizer that `optimizer.name` names.

    Row-wise Adagrad means one state a table row; the dense half has no such rows and takes plain Adagrad.
    """
    parameters = list(parameters)
    match config.name:
        case OptimizerName.sgd:
            return torch.optim.SGD(parameters, lr=config.lr, fused=True)
        case OptimizerName.adagrad | OptimizerName.rowwise_adagrad:
            return torch.optim.Adagrad(parameters, lr=config.lr, eps=config.eps, foreach=True)
        case OptimizerName.adam:
            return torch.optim.Adam(
                parameters,
                lr=config.lr,
                betas=(config.beta1, config.beta2),
                eps=config.eps,
                fused=True,
            )
