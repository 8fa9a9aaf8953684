"""The loop of a sweep: keep as many trials running as may run at once, until all have ended."""

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from optuna.trial import FrozenTrial, Trial, TrialState

from configs.many_runs_schema import SweepConfig
from dataloading.dataset.durable_files import replace_json
from nn.multirun import named, on_stop
from nn.observability.records import ENDED, PRUNED
from sweep.plan import TrialPlan
from sweep.space import Space, as_override
from sweep.study import Study
from sweep.trial import Ending, RunningTrial, remove_checkpoints
from sweep.trial_process import Start, TrialProcess, environment_of, stop

POLL_SECONDS = 0.25
TRIALS, LOGS = "trials", "logs"
RUN_DIR, PROBLEM, BEST_STEP, IDLE = "run_dir", "problem", "best_step", "idle"
"""Attributes of a trial in the study."""
STATES = {
    Ending.complete: TrialState.COMPLETE,
    Ending.pruned: TrialState.PRUNED,
    Ending.failed: TrialState.FAIL,
}


class StoppedSweepError(Exception):
    """A signal stopped the sweep; its trials have saved checkpoints."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}; the same command resumes")
        self.signum = signum


@dataclass(slots=True)
class Driver:
    """The running trials of a sweep; `gpus` has the id of a GPU per trial that may run at once, or None for each on CPUs."""

    directory: Path
    config: SweepConfig
    space: Space
    plan: TrialPlan
    study: Study
    gpus: Sequence[str | None]
    say: Callable[[str], None]
    start_process: Start
    _running: list[RunningTrial] = field(default_factory=list)
    _signum: int = 0

    def run(self) -> None:
        """Run all trials that have not ended; StoppedSweepError after a signal: all have stopped, and resume."""
        (self.directory / TRIALS).mkdir(exist_ok=True)
        (self.directory / LOGS).mkdir(exist_ok=True)
        unfinished = self.study.trials(TrialState.RUNNING)
        with on_stop(self._request_stop):  # between two polls
            try:
                while not self._signum:
                    self._fill(unfinished)
                    if not self._running:
                        break
                    for running in list(self._running):
                        ending = running.update(self._report)
                        if ending is not None:
                            self._running.remove(running)
                            self._end(running, ending)
                    time.sleep(POLL_SECONDS)
            finally:
                stop([t.process for t in self._running if t.process is not None])
        if self._signum:
            raise StoppedSweepError(self._signum)
        # A killed command may have left checkpoints.
        best = self.study.best()
        for trial in () if self.config.keep_checkpoints else self.study.trials():
            if best is None or trial.number != best.number:
                remove_checkpoints(self.directory / trial.user_attrs[RUN_DIR])

    def _fill(self, unfinished: list[FrozenTrial]) -> None:
        """Start trials until no more may run at once: first those that a killed command has left."""
        while len(self._running) < len(self.gpus):
            if unfinished:
                self._add(self.study.resume(unfinished.pop(0)), "resumes")
            elif self.study.has_more():
                self._add(self.study.ask(), "starts")
            else:
                return

    def _add(self, trial: Trial, how: str) -> None:
        suggested = {option: trial.params[option] for option in self.space}
        values = self.plan.effective(suggested)
        short = {k: f"{v:.4g}" if isinstance(v, float) else str(v) for k, v in values.items()}
        name = named(trial.number, short)
        if trial.user_attrs.get(RUN_DIR) is None:
            trial.set_user_attr(RUN_DIR, f"{TRIALS}/{name}")
            trial.set_user_attr(IDLE, sorted(suggested.keys() - values.keys()))
        run_dir = self.directory / trial.user_attrs[RUN_DIR]
        taken = {running.gpu for running in self._running}
        gpu = next((gpu for gpu in self.gpus if gpu is None or gpu not in taken), None)
        log = self.directory / LOGS / f"{trial.number:02d}.log"
        self._running.append(
            RunningTrial(
                *(trial, values, run_dir, log, gpu, self.plan.metric, self._start),
                restarts=self.config.restarts,
            )
        )
        texts = " ".join(as_override(option, value) for option, value in values.items())
        self.say(f"trial {trial.number} {how}: {texts}{'' if gpu is None else f' (GPU {gpu})'}")

    def _start(self, running: RunningTrial) -> TrialProcess:
        if running.process is not None:
            self.say(f"trial {running.trial.number}: its process was killed; it resumes")
        command = self.plan.command(running.values, running.run_dir)
        environment = environment_of(running.gpu, self.config.parallel)
        return self.start_process(command, environment, running.log)

    def _report(self, running: RunningTrial, step: int, value: float) -> None:
        self.say(f"trial {running.trial.number} step {step:,}: {self.plan.metric.key} {value:.4f}")

    def _end(self, running: RunningTrial, ending: Ending) -> None:
        """Record the end of a trial before its process is ended, so that a killed command does not resume it."""
        trial, number = running.trial, running.trial.number
        value, step = running.result() if running.run_dir.exists() else (None, None)
        trial.set_user_attr(BEST_STEP, step)
        if ending is Ending.failed:
            trial.set_user_attr(PROBLEM, running.problem)
        before = self.study.best()
        self.study.tell(trial, STATES[ending], value if ending is Ending.complete else None)
        if ending is Ending.pruned and running.process is not None:
            # The GPU is free for the next trial only after this one has ended.
            stop([running.process])
            # The signal that stopped it says that it could resume.
            replace_json(running.run_dir / ENDED, {"state": PRUNED, "message": ""})
        best = self.study.best()
        is_best = best is not None and best.number == number
        how = f"is {ending.value}: {'no value' if value is None else f'{value:.4f}'}"
        how = f"failed: {running.problem}" if ending is Ending.failed else how
        self.say(f"trial {number} {how}{', the best' * is_best}")
        if not self.config.keep_checkpoints:
            if not is_best:
                remove_checkpoints(running.run_dir)
            elif before is not None:
                remove_checkpoints(self.directory / before.user_attrs[RUN_DIR])

    def _request_stop(self, signum: int, frame: FrameType | None) -> None:
        self._signum = signum
