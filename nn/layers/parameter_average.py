"""Exponential moving average of a module's parameters, which evaluation uses instead of them."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class ParameterAverage:
    """The average of parameters over the steps: average = d * average + (1 - d) * parameter (Polyak averaging).

    It starts at the parameters as they are, and warms up: after n earlier updates d = min(decay, (1 + n) / (10 + n)), as in
    TensorFlow's ExponentialMovingAverage. With d = decay from the start, the initial weights
    would be 76 % of an average with decay 0.999 after 268 steps. Buffers are not averaged.

    `parameters`: by name, float32. `decay`: between 0 and 1; the average spans about 1 / (1 - decay) steps.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        self._parameters = {name: parameter.detach() for name, parameter in parameters.items()}
        self._others = {name: value.clone() for name, value in self._parameters.items()}
        self._decay = decay
        self._is_used = False

    def update(self, step: int) -> None:
        """Take the parameters of one more step into the average; call it after their update."""
        decay = min(self._decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(
            list(self._others.values()), list(self._parameters.values()), 1 - decay
        )

    def use(self, mode: bool) -> None:
        """Let the parameters have the values of the average, or their own again, bit by bit.

        Values are exchanged in place, so a captured CUDA graph reads them at the addresses that it knows.
        """
        if mode == self._is_used:
            return
        for name, parameter in self._parameters.items():
            own = parameter.clone()
            parameter.copy_(self._others[name])
            self._others[name].copy_(own)
        self._is_used = mode

    def state(self) -> dict[str, Tensor]:
        """Return the average by name, without copying it; not while it is used."""
        assert not self._is_used, "the memory of the average holds the parameters' own values"
        return dict(self._others)
