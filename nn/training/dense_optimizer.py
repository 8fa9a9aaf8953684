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
            # Torch 2.11 has no fused one for GPUs.
            on_cpu = all(each.device.type == "cpu" for each in parameters)
            return torch.optim.Adagrad(
                parameters, lr=config.lr, eps=config.eps, fused=on_cpu, foreach=not on_cpu
            )
        case OptimizerName.adam:
            return torch.optim.Adam(
                parameters,
                lr=config.lr,
                betas=(config.beta1, config.beta2),
                eps=config.eps,
                fused=True,
            )
