"""The steps after which a run evaluates and ends, as pure functions of configuration and counters."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from configs.schema import Config
from nn.models.tasks import AUC

MAX_STEPS = 2**53
"""Up to here floats count every step; at a thousand steps per second it takes 285,000 years."""


def is_good_enough(config: Config, test: Mapping[str, Any], num_steps: int) -> bool:
    """Tell whether the evaluation after `num_steps`, if any, reached `eval.auc_threshold`."""
    threshold = config.eval.auc_threshold
    auc = test.get(AUC.test_key)
    if threshold is None or test.get("step") != num_steps or auc is None:
        return False
    return auc >= threshold


def total_steps(config: Config, steps_per_epoch: int) -> int:
    """Return the steps of the complete run; ValueError if they are more than any run can count."""
    steps = config.train.epochs * steps_per_epoch
    steps = steps if config.train.max_steps is None else min(steps, config.train.max_steps)
    if steps > MAX_STEPS:
        raise ValueError(
            f"train.epochs={config.train.epochs} of {steps_per_epoch:,} steps are {steps:,} steps, and a run has at most "
            f"{MAX_STEPS:,}; lower train.epochs, or set train.max_steps"
        )
    return steps


@dataclass(frozen=True, slots=True)
class EvalSteps:
    """The steps after which a run evaluates: evenly spaced ones per epoch, and the last of the run.

    Whether a step is one of them is computed, since a run may have more epochs than memory has room for.

    Attributes:
        last_step: of the run.
        steps_per_epoch: with the partial last one.
        per_epoch: evaluations per epoch.
    """

    last_step: int
    steps_per_epoch: int
    per_epoch: int

    def __contains__(self, step: object) -> bool:
        if not isinstance(step, int) or not 0 < step <= self.last_step:
            return False
        if step == self.last_step or self.per_epoch >= self.steps_per_epoch:
            return True
        # From 1 to the steps of an epoch; the step of part p is about p * steps / per_epoch.
        of_epoch = (step - 1) % self.steps_per_epoch + 1
        near = of_epoch * self.per_epoch // self.steps_per_epoch
        return any(
            round(self.steps_per_epoch * part / self.per_epoch) == of_epoch
            for part in range(max(near - 1, 1), min(near + 2, self.per_epoch) + 1)
        )
