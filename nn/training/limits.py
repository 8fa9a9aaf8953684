"""The steps after which a run evaluates and ends, as pure functions of configuration and counters; the days of a run.

A day is the steps of a run on one dataset directory; the next day continues on the dataset that follows it. The steps of a run
are counted over all days: the schedule and the optimizers' state continue. The position in a day's data is counted from the
first step of the day.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from configs.schema import Config
from nn.checkpoint.run_facts import DAY_FACTS
from nn.models.tasks import auc_key
from nn.observability.records import DAY, MAX_STEPS


def early_stop(
    config: Config, test: Mapping[str, Any], num_steps: int, evals_since_best: int
) -> str | None:
    """Return why the evaluation after `num_steps`, if there was one, ends the run; None if it does not.

    `test` is the record of the last evaluation, empty before the first; `evals_since_best` counts evaluations after the best one.
    """
    if test.get("step") != num_steps:
        return None
    threshold, patience = config.eval.auc_threshold, config.eval.patience
    auc = test.get(auc_key(test, config.eval.best_metric) or "")
    if threshold is not None and auc is not None and auc >= threshold:
        return "eval.auc_threshold reached"
    if patience is not None and evals_since_best >= patience:
        return "eval.patience exhausted"
    return None


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
    """The steps after which a run evaluates: every so many, or evenly spaced ones per epoch, from `first` on; and the last.

    Whether a step is one of them is computed, since a run may have more epochs than memory has room for.

    Epochs have `steps_per_epoch` with the partial last one; `per_epoch` holds without `every`.
    """

    last_step: int
    steps_per_epoch: int
    per_epoch: int
    every: int | None = None
    first: int = 0

    @classmethod
    def of(cls, config: Config, steps_per_epoch: int) -> Self:
        last_step = total_steps(config, steps_per_epoch)
        chosen = config.eval
        return cls(last_step, steps_per_epoch, chosen.per_epoch, chosen.every, chosen.first_step)

    def __contains__(self, step: object) -> bool:
        if not isinstance(step, int) or not 0 < step <= self.last_step:
            return False
        if step == self.last_step:
            return True
        if step < self.first:
            return False
        if self.every is not None:
            return step % self.every == 0
        if self.per_epoch >= self.steps_per_epoch:
            return True
        # From 1 to the steps of an epoch; the step of part p is about p * steps / per_epoch.
        of_epoch = (step - 1) % self.steps_per_epoch + 1
        near = of_epoch * self.per_epoch // self.steps_per_epoch
        return any(
            round(self.steps_per_epoch * part / self.per_epoch) == of_epoch
            for part in range(max(near - 1, 1), min(near + 2, self.per_epoch) + 1)
        )

    def remaining(self, step: int) -> int:
        """Return about how many evaluations are made after this step and all later ones."""
        every = self.every or max(self.steps_per_epoch / self.per_epoch, 1)
        before = max(step, min(self.first, self.last_step)) - 1
        return math.ceil(self.last_step / every) - math.floor(before / every + 1e-9)


NEXT, PREVIOUS = "next", "previous"
"""Beginnings of the keys of evaluations on another day: on the rows of a day before they are trained, and on the day before."""


@dataclass(frozen=True, slots=True)
class Day:
    """The steps of a run on one dataset.

    `number` is 0 for the first day, before which the run had `first_step` updates. `identity` is that of the fit of its dataset
    (`dataloading.lineage`), `previous` the data.path of the day before, both None for none. It `is_new` while the run has no
    checkpoint of it.
    """

    number: int = 0
    first_step: int = 0
    identity: str | None = None
    previous: str | None = None
    is_new: bool = False

    @classmethod
    def of_facts(cls, facts: Mapping[str, Any]) -> Self:
        """Return the day of a checkpoint, from its run.json; an export and a delta may have none."""
        return cls(**facts.get(DAY_FACTS, {}))

    def facts(self) -> dict[str, Any]:
        names = ("number", "first_step", "identity", "previous")
        return {name: getattr(self, name) for name in names}

    def position(self, step: int) -> int:
        """Return the steps of this day that a step of the run has behind it."""
        return step - self.first_step

    def last_step(self, config: Config, steps_per_epoch: int) -> int:
        return self.first_step + total_steps(config, steps_per_epoch)

    @property
    def label(self) -> dict[str, int]:
        return {DAY: self.number} if self.number else {}
