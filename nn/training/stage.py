"""A stage of a run: its steps on one dataset directory, such as the logs of a day; the next stage continues with the next day.

The steps of a run are counted over all stages: the schedule and the optimizers' state continue. The place in a day's data is
counted from the first step of its stage.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from configs.schema import Config
from nn.observability.records import DAY
from nn.training.limits import total_steps

NEXT, PREVIOUS = "next", "previous"
"""Beginnings of the keys of evaluations on another day: on the rows of a day before they are trained, and on the day before."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Stage of a run.

    Attributes:
        number: 0 for the first day.
        first_step: updates of the run before it.
        identity: of the fit of its dataset (`dataloading.lineage`); None for one without.
        previous: data.path of the stage before; None for the first, and for synthetic clicks.
        is_new: whether the run has no checkpoint of it yet.
    """

    number: int = 0
    first_step: int = 0
    identity: str | None = None
    previous: str | None = None
    is_new: bool = False

    @classmethod
    def of_facts(cls, facts: Mapping[str, Any]) -> Self:
        """Return the stage of a checkpoint, from its run.json; checkpoints of earlier versions have one stage."""
        return cls(**facts.get("stage", {}))

    def facts(self) -> dict[str, Any]:
        """Return what run.json records."""
        names = ("number", "first_step", "identity", "previous")
        return {name: getattr(self, name) for name in names}

    def place(self, step: int) -> int:
        """Return the steps of this stage behind a step of the run."""
        return step - self.first_step

    def last_step(self, config: Config, steps_per_epoch: int) -> int:
        """Return the step of the run at which the stage is complete."""
        return self.first_step + total_steps(config, steps_per_epoch)

    @property
    def label(self) -> dict[str, int]:
        """Return the entry of its records."""
        return {DAY: self.number} if self.number else {}
