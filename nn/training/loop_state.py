"""The state of the training loop as one record: a checkpoint holds it whole, and a run that resumes loads it whole."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum, auto
from typing import Any, Self

from nn.checkpoint.run_facts import ENDS_DAY, LOOP, NOT_OF_ALL
from nn.models.metric import AUC, GAUC, Metric
from nn.observability.run_directory import FIRST_AUC
from nn.training.limits import Day


class Origin(Enum):
    """The model that this start of a run began with."""

    NEW = auto()
    RESTORED = auto()  # the model of another run
    RESUMED = auto()


@dataclass(slots=True, kw_only=True)
class LoopState:
    """Counters, the running sums of the next record, and the evaluations so far.

    The first three fields are not among the facts of the loop in `run.json` (`LOOP`): it has the steps and the day beside them,
    and a start knows its own origin.
    """

    num_steps: int = 0
    day: Day = field(default_factory=Day)
    origin: Origin = Origin.NEW

    first_step: int = 0
    loss_sum: float = 0.0  # since the latest record
    loss_steps: int = 0
    key_counts: dict[str, int] | None = None  # of raw keys, since the latest record
    # for distinct rows (`RequestCapacity.facts`); shapes of a step, and so its bits, depend on it
    row_capacity: dict[str, Any] | None = None
    parts: list[dict[str, Any]] | None = None  # of a stream, whose rows were trained
    last_record: int | None = None
    first_auc: dict[str, float | None] = field(default_factory=lambda: dict.fromkeys(FIRST_AUC))
    test: dict[str, Any] = field(default_factory=dict)  # the latest evaluation
    other_days: dict[str, Any] = field(default_factory=dict)  # metrics of other days' rows
    # The best evaluation so far, by which metric and of which rows; nan before the first.
    best_metric: str = AUC.name
    best_rows: dict[str, Any] = field(default_factory=dict)
    best_value: float = math.nan
    best_step: int | None = None
    evals_since_best: int = 0
    ends_day: bool | None = None  # in a loaded checkpoint

    def facts(self, *, ends_day: bool) -> dict[str, Any]:
        facts = asdict(self) | self.first_auc | {"best_auc": self.best_value, ENDS_DAY: ends_day}
        facts = plain_numbers(facts | {"test": plain_numbers(self.test)})
        return {
            name: facts[name] for name in LOOP if facts[name] is not None or name not in NOT_OF_ALL
        }

    @classmethod
    def of_facts(cls, facts: Mapping[str, Any], num_steps: int, day: Day) -> Self:
        """Return the state of a run that resumes.

        A new day starts without evaluations and sums, since metrics of different days cannot be compared.
        """
        names = ("first_step", "last_record") if day.is_new else LOOP
        known = {name: facts[name] for name in names if name in facts}
        best = known.pop("best_auc", None)
        return cls(
            num_steps=num_steps,
            day=day,
            origin=Origin.RESUMED,
            first_auc={name: known.pop(name, None) for name in FIRST_AUC},
            best_value=math.nan if best is None else best,
            ends_day=known.pop(ENDS_DAY, None),
            **known,
        )

    @property
    def first_model(self) -> str:
        """Return what the model is before the first step of a run; empty after it."""
        if self.origin is Origin.RESUMED or self.num_steps > self.first_step:
            return ""
        return "restored model" if self.origin is Origin.RESTORED else "untrained model"

    def best_so_far(self, metric: Metric) -> str:
        """Return the best evaluation by `metric`, for the terminal; empty if none has it."""
        if self.best_step is None:
            return ""
        if self.best_step == self.num_steps:
            return "best so far"
        title = metric.title.removeprefix("test ")
        return f"best {title} {self.best_value:.4f} at step {self.best_step:,}"

    def compare_by(self, metric: Metric, scored: Mapping[str, Any]) -> str | None:
        """Choose the best evaluation by `metric` among those of the rows `scored` from now on.

        If those before were by another metric or of other rows, the choice starts over, and the note that is returned says so.
        """
        before = {**scored, **self.best_rows}
        best_metric, best_step = self.best_metric, self.best_step
        self.best_metric, self.best_rows = metric.key, dict(scored)
        if before != scored:
            self.test = {}
        # Groups of rows matter to GAUC alone.
        names = scored if metric.name == GAUC.name else scored.keys() - {"group"}
        if best_metric == metric.key and all(before[name] == scored[name] for name in names):
            return None
        self.best_step, self.best_value, self.evals_since_best = None, math.nan, 0
        if best_step is None:
            return None
        group = before["group"]
        groups = "" if group in (None, scored["group"]) else f" in groups by {group}"
        return (
            f"evaluations score {scored['rows']:,} rows of split '{scored['split']}' by {metric.key}, those before "
            f"were by {best_metric} of {before['rows']} rows of split '{before['split']}'{groups}: the best one is chosen among "
            "the coming ones"
        )

    def take_evaluation(self, record: Mapping[str, Any], metric: Metric) -> None:
        """Count an evaluation after the latest step, which may be the best so far."""
        self.test = dict(record)
        self.evals_since_best += 1
        value = record[metric.test_key]
        if metric.improves(value, self.best_value):
            self.best_value, self.best_step, self.evals_since_best = value, self.num_steps, 0


def plain_numbers(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record with None instead of nan, which JSON does not have."""
    return {
        key: None if isinstance(value, float) and math.isnan(value) else value
        for key, value in record.items()
    }
