"""Optimizers of the dense component, one record per optimizer: torch's own, or kernels of a GPU's own that are faster.

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
from configs.user_objects import load_user_object, one_line_if_it_fails
from nn.ops.host_copy import DeviceValues
from nn.training.lion_and_lamb import LAMB, Lion


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseRule:
    """The properties of a dense optimizer that step and estimates use.

    Attributes:
        name: name in messages.
        build: returns the optimizer for parameters and options. A step with a learning rate of 0 and gradients of 0 changes
            no weight, and all state are tensors of `optimizer.state`, which is what checkpoints hold.
        states_per_weight: state values per weight.
        reads_device: whether, on a GPU, `step` reads from device memory the learning rate (`lr` of the parameter groups, a
            tensor) and `found_inf`, an attribute that torch's fused optimizers have: if it is not 0, nothing changes. The step
            is then a part of the CUDA graph; otherwise it is launched behind it.
    """

    name: str
    build: Callable[[list[nn.Parameter], OptimizerConfig], torch.optim.Optimizer]
    states_per_weight: int
    reads_device: bool = False


class DenseUpdate:
    """The update of a dense component.

    Parameters have gradients. `is_in_pass` says that `apply` is a part of the pass, which needs no host; otherwise call
    `optimizer.step` afterwards. `learning_rate` is that of the latest update.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], config: OptimizerConfig, *, on_gpu: bool
    ) -> None:
        parameters = list(parameters)
        rule = dense_rule(config)
        self.optimizer = rule.build(parameters, config)
        self.learning_rate = config.lr
        self.is_in_pass = on_gpu and rule.reads_device
        device = parameters[0].device
        self._device_values = DeviceValues([config.lr], device)
        self._found_inf = torch.zeros((), device=device)
        if self.is_in_pass:
            vars(self.optimizer)["found_inf"] = self._found_inf
            for group in self.optimizer.param_groups:
                group["lr"] = self._device_values.floats[0]
                # Torch checks that its own Adam may be captured.
                if "capturable" in group:
                    group["capturable"] = True

    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate of the next update at once, outside of a captured pass."""
        self.write_learning_rate(rate)
        if self.is_in_pass:
            self._device_values.load_now()

    def write_learning_rate(self, rate: float) -> None:
        """Write the learning rate of the next update, for the next `load`; the device must have passed the one before."""
        if self.is_in_pass:
            self._device_values.write_float(0, rate)
        else:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
        self.learning_rate = rate

    def load(self) -> None:
        """Queue the copy of the learning rate to the device, if it is read there."""
        if self.is_in_pass:
            self._device_values.load()

    def allow(self, is_good: Tensor) -> None:
        """Let the next `apply` update the dense component, unless `is_good`, int32 [1] on the device, is 0."""
        torch.eq(is_good.view(()), 0, out=self._found_inf)

    def apply(self) -> None:
        """Update the dense component, if `allow` lets it."""
        self.optimizer.step()


def _are_on_gpu(parameters: list[nn.Parameter]) -> bool:
    """Return whether kernels may update them, whose modules are imported there: only CUDA builds of torch include Triton."""
    return all(parameter.device.type == "cuda" for parameter in parameters)


def _sgd(parameters: list[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    if not config.momentum and _are_on_gpu(parameters):
        from nn.ops.triton.dense_updates import FusedSGD

        return FusedSGD(parameters, lr=config.lr)
    optimizer = torch.optim.SGD(
        parameters, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, fused=True
    )
    if config.momentum:
        # Otherwise torch allocates it in the first step, and leaves it undefined where `found_inf` skips that one.
        for weight in parameters:
            optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
    return optimizer


def _adagrad(parameters: list[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    if _are_on_gpu(parameters):
        from nn.ops.triton.dense_updates import FusedAdagrad

        return FusedAdagrad(parameters, lr=config.lr, eps=config.eps)
    return torch.optim.Adagrad(parameters, lr=config.lr, eps=config.eps, fused=True)


def _adam(parameters: list[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    # Loshchilov and Hutter, Decoupled Weight Decay Regularization (2019), algorithm 2.
    names, betas = ("lr", "eps", "weight_decay"), (config.beta1, config.beta2)
    options: dict[str, Any] = {name: getattr(config, name) for name in names} | {"betas": betas}
    if _are_on_gpu(parameters):
        from nn.ops.triton.dense_updates import FusedAdam

        return FusedAdam(parameters, **options)
    kind = torch.optim.AdamW if config.weight_decay else torch.optim.Adam
    return kind(parameters, fused=True, **options)


ADAGRAD = DenseRule(name="adagrad", build=_adagrad, states_per_weight=1, reads_device=True)
DENSE_RULES: dict[str, DenseRule] = {
    OptimizerName.sgd: DenseRule(name="sgd", build=_sgd, states_per_weight=0, reads_device=True),
    OptimizerName.adagrad: ADAGRAD,
    # Row-wise Adagrad keeps one state per table row; the dense component has no such rows and uses Adagrad.
    OptimizerName.rowwise_adagrad: ADAGRAD,
    OptimizerName.adam: DenseRule(name="adam", build=_adam, states_per_weight=2, reads_device=True),
    OptimizerName.lion: DenseRule(name="lion", build=Lion, states_per_weight=1, reads_device=True),
    OptimizerName.lamb: DenseRule(name="lamb", build=LAMB, states_per_weight=2, reads_device=True),
}
MOMENTUM_SGD = DenseRule(
    name="sgd with momentum", build=_sgd, states_per_weight=1, reads_device=True
)


def dense_rule(config: OptimizerConfig) -> DenseRule:
    """Return the record of the dense component's optimizer.

    Raises ValueError: `package.module:NAME` cannot be imported, or is no `DenseRule`.
    """
    if config.name == OptimizerName.sgd and config.momentum:
        return MOMENTUM_SGD
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

    Raises ValueError: `optimizer.name` names no optimizer, or one that fails; or a step with a learning rate of 0 changes
    weights, or leaves state that is no tensor.
    """
    rule = dense_rule(config)
    if config.name in DENSE_RULES:
        return
    weights = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, 2))]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    with one_line_if_it_fails(f"optimizer.name={config.name}"):
        optimizer = rule.build(weights, config)
        groups = optimizer.param_groups
        held = [id(weight) for group in groups for weight in group["params"]]
        rates = {float(group["lr"]) for group in groups}
        for group in groups:
            group["lr"] = 0.0
        before = _facts(optimizer)
        optimizer.step()
    if sorted(held) != sorted(map(id, weights)):
        raise ValueError(
            f"optimizer.name={config.name} leaves out parameters that build() gets, which would never be trained; take all"
        )
    if len(rates) > 1:
        raise ValueError(
            f"optimizer.name={config.name} has groups of several rates, {shown(sorted(rates))}, and each step sets lr of all; "
            "keep a group's factor under another name, for step() to multiply by"
        )
    if not all(weight.eq(1).all() for weight in weights):
        raise ValueError(
            f"optimizer.name={config.name} changes weights in a step with a learning rate of 0 and gradients of 0, by which "
            "its state is created before a checkpoint is restored; scale every change by lr"
        )
    lost = [
        key
        for weight in weights
        for key, value in optimizer.state[weight].items()
        if value is not None and not isinstance(value, Tensor)
    ]
    now = _facts(optimizer)
    lost += [key[1] for key in now if key not in before or before[key] != now[key]]
    if lost:
        raise ValueError(
            f"optimizer.name={config.name} keeps {shown(lost[0])} as a number or in its parameter groups, and checkpoints hold "
            "the tensors of optimizer.state only, so a resumed run would differ; keep it there as a tensor"
        )


def _facts(optimizer: torch.optim.Optimizer) -> dict[tuple[int, str], Any]:
    """Return the settings of an optimizer's groups, and the numbers among its attributes, as those of a group -1."""
    numbers = {key: of for key, of in vars(optimizer).items() if isinstance(of, int | float)}
    groups = {-1: numbers} | dict(enumerate(optimizer.param_groups))
    return {
        (n, key): of for n, group in groups.items() for key, of in group.items() if key != "params"
    }
