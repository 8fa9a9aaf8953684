"""The steps after which a run evaluates and ends, as pure functions of configuration and counters."""

import math
from collections.abc import Mapping
from typing import Any

from configs.schema import Config
from nn.models.tasks import AUC


def is_good_enough(config: Config, test: Mapping[str, Any], num_steps: int) -> bool:
    """Tell whether the evaluation after `num_steps`, if any, reached `eval.auc_threshold`."""
    threshold = config.eval.auc_threshold
    auc = test.get(AUC.test_key)
    if threshold is None or test.get("step") != num_steps or auc is None:
        return False
    return auc >= threshold


def total_steps(config: Config, steps_per_epoch: int) -> int:
    """Steps of the complete run."""
    steps = config.train.epochs * steps_per_epoch
    return steps if config.train.max_steps is None else min(steps, config.train.max_steps)


def eval_steps(last_step: int, steps_per_epoch: int, per_epoch: int) -> set[int]:
    """Return the steps after which to evaluate: `per_epoch` evenly spaced ones per epoch, and the last of the run."""
    epochs = math.ceil(last_step / steps_per_epoch)
    points = {
        epoch * steps_per_epoch + round(steps_per_epoch * part / per_epoch)
        for epoch in range(epochs)
        for part in range(1, per_epoch + 1)
    }
    return {point for point in points if 0 < point < last_step} | {last_step}
