"""One trial while it runs: its process, its evaluations as they appear, and how it ends."""

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import TrialState

from compare.run_record import RunRecord, State
from configs.exit_codes import DIVERGED_EXIT_CODE, RESUME_EXIT_CODE
from nn.models.metric import Metric
from nn.observability.records import METRICS
from nn.observability.run_lock import is_running
from nn.plots.series import is_finite
from sweep.trial_process import TrialProcess, last_line

CHECKPOINTS = "checkpoints"


Ending = StrEnum("Ending", "complete pruned failed")


@dataclass(slots=True)
class RunningTrial:
    """A trial of which no end is recorded.

    `log` has its output over all starts, `process` is None before its first start by this command, `restarts` are those that
    it has left, and `num_reported` are the evaluations that the study has.
    """

    trial: optuna.Trial
    values: dict[str, Any]
    run_dir: Path
    log: Path
    gpu: str | None
    metric: Metric
    start: Callable[["RunningTrial"], TrialProcess]
    restarts: int
    process: TrialProcess | None = None
    problem: str = ""
    num_reported: int = 0
    _size: int = field(default=-1)

    def update(self, report: Callable[["RunningTrial", int, float], None]) -> Ending | None:
        """Start the process if it may start, report new evaluations, and return the ending if there is one.

        `report` is called with this trial, the step and the value of each new evaluation.
        """
        if self.process is None:
            return self._begin()
        exit_code = self.process.poll()
        if self._report_new(report) and exit_code is None:
            complete = self.trial.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
            most = max((len(trial.intermediate_values) for trial in complete), default=math.inf)
            # To end a trial with as many evaluations as complete ones would save nothing.
            if self.num_reported < most and self.trial.should_prune():
                return Ending.pruned
        return None if exit_code is None else self._after(exit_code)

    def result(self) -> tuple[float | None, int | None]:
        """Return the best value of the metric after the first step, and its step."""
        return self.metric.best(evaluations(RunRecord.read(self.run_dir), self.metric))

    def _begin(self) -> Ending | None:
        """Start the process, unless one of an earlier command still runs, or the run has ended already."""
        if is_running(self.run_dir):
            # A process of a command that was killed saves its checkpoint; it holds the run directory until then.
            return None
        if self.run_dir.exists():
            earlier = RunRecord.read(self.run_dir)
            if earlier.state is State.finished:
                return self._completed()
            if earlier.state is State.failed:
                self.problem = earlier.message
                return Ending.failed
        self.process = self.start(self)
        return None

    def _report_new(self, report: Callable[["RunningTrial", int, float], None]) -> bool:
        """Report the evaluations that metrics.jsonl has and the study lacks; return whether there was one."""
        path = self.run_dir / METRICS
        size = path.stat().st_size if path.exists() else 0
        if size == self._size:
            return False
        self._size = size
        found = evaluations(RunRecord.read(self.run_dir), self.metric)
        known = set(
            self.trial.study.get_trials(deepcopy=False)[self.trial.number].intermediate_values
        )
        has_new = False
        # By their number, not by steps: trials may differ in their batch sizes.
        for number, (step, value) in enumerate(found, start=1):
            if number not in known:
                self.trial.report(value, number)
                self.num_reported, has_new = number, True
                report(self, step, value)
        return has_new

    def _after(self, exit_code: int) -> Ending | None:
        """Return the ending of a trial whose process has ended; None if it was restarted."""
        if exit_code == 0:
            return self._completed()
        was_killed = exit_code < 0 or exit_code == RESUME_EXIT_CODE
        if was_killed and self.restarts:
            self.restarts -= 1
            self.process = self.start(self)
            return None
        if was_killed:
            self.problem = f"its process was killed (exit code {exit_code})"
        elif exit_code == DIVERGED_EXIT_CODE:
            self.problem = f"diverged: {last_line(self.log)}"
        else:
            self.problem = last_line(self.log) or f"exit code {exit_code}"
        return Ending.failed

    def _completed(self) -> Ending:
        if self.result()[0] is None:
            self.problem = f"no evaluation has a {self.metric.key}"
            return Ending.failed
        return Ending.complete


def evaluations(run: RunRecord, metric: Metric) -> list[tuple[int, float]]:
    """Return step and value of the evaluations after the first step of training that have a value."""
    found = []
    for record in run.evaluations:
        value = record.get(metric.test_key)
        if record.get("step", 0) > 0 and is_finite(value):
            found.append((int(record["step"]), float(value)))
    return found


def remove_checkpoints(run_dir: Path) -> None:
    """Remove the checkpoints of a trial that is not the best one."""
    shutil.rmtree(run_dir / CHECKPOINTS, ignore_errors=True)


def best_checkpoint(run_dir: Path) -> Path:
    """Return the checkpoint of a trial's best evaluation, or its latest where that was not saved.

    Raises ValueError: it has none.
    """
    summary = RunRecord.read(run_dir).summary
    name = summary.get("best_checkpoint") or summary.get("checkpoint")
    if name is None or not (run_dir / name).is_dir():
        raise ValueError(
            f"{run_dir} has no checkpoint to test; delete it and raise trials to train another"
        )
    return run_dir / name
