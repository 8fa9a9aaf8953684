"""State of a run, from the files and the lock of its directory; the run itself is not asked."""

import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from compare.run_record import RunRecord, State
from configs.messages import on_one_line
from dataloading.dataset.documents import read_json
from nn.observability.records import DAY, ENDED, METRICS, PROBLEM, SUMMARY, UNSAVED

DIVERGED, DIVERGED_ERROR = "diverged", "DivergedError"
"""State of a run that failed since its loss or a gradient was not finite, and the name of that error in `ended.json`."""
KILLED = (
    "no reason is recorded: the process was killed, or its machine ended; the same command resumes"
)
RATE_RECORDS = 5
"""Latest records of training whose median is the rate."""


@dataclass(frozen=True, slots=True)
class RunStatus:
    """A run at one moment; None is unknown or not there.

    Attributes:
        run: path of the directory.
        state: running, finished, stopped, failed, diverged, pruned (by a sweep), crashed (killed), unreadable (damaged).
        step: of the latest record.
        last_step: of the run, or of the day that it trains.
        left_s: seconds of the steps and evaluations that are left, at the rate of those so far.
        record_s: seconds since the latest record, evaluation or start.
        checkpoint: step of the latest complete one; `delta` alike.
        restarts: resumes so far, without the starts of days.
        error: why the run ended early, or what is wrong with its result.
    """

    run: str
    state: str
    step: int = 0
    last_step: int | None = None
    samples_per_s: float | None = None
    step_ms: float | None = None
    left_s: float | None = None
    record_s: float | None = None
    checkpoint: int | None = None
    delta: int | None = None
    restarts: int = 0
    error: str | None = None


def read_status(run_dir: Path) -> RunStatus:
    """Read a run directory; a damaged one has the state `unreadable`, and the problem as its error."""
    try:
        return _status(run_dir)
    except (ArithmeticError, LookupError, OSError, TypeError, ValueError) as error:
        # A file may have anything in the place of a number.
        text = str(error) if isinstance(error, OSError | ValueError) else f"damaged: {error!r}"
        return RunStatus(str(run_dir), "unreadable", error=on_one_line(text))


def _status(run_dir: Path) -> RunStatus:
    with suppress(FileNotFoundError):
        dict(read_json(run_dir / SUMMARY))  # a damaged one would look like that of a killed run
    run = RunRecord.read(run_dir)
    training = [record for record in run.records if "loss" in record][-RATE_RECORDS:]
    last_step = last_step_of(run)
    if last_step is None and run.state is State.finished:
        last_step = run.steps  # one record of a day tells no rate of epochs
    left_s = None
    seconds, trained = run.seconds(), run.steps - run.header.get("start_step", 0)
    if run.state is State.running and last_step is not None and seconds and trained > 0:
        left_s = (last_step - run.steps) * seconds / trained
    state = run.state.value
    has_end = run.state is State.failed and (run_dir / ENDED).exists()
    if has_end and read_json(run_dir / ENDED).get("kind") == DIVERGED_ERROR:
        state = DIVERGED
    error = run.message or run.summary.get(UNSAVED) or run.summary.get(PROBLEM)
    if run.state is State.crashed:
        error = error or KILLED
    return RunStatus(
        run=str(run_dir),
        state=state,
        step=run.steps,
        last_step=last_step,
        samples_per_s=_median(training, "samples_per_s"),
        step_ms=_median(training, "step_ms"),
        left_s=left_s,
        record_s=max(time.time() - (run_dir / METRICS).stat().st_mtime, 0.0),
        checkpoint=_latest_step(run_dir / "checkpoints"),
        delta=_latest_step(run_dir / "deltas"),
        restarts=sum(DAY not in start for start in run.restarts),
        error=str(error) if error else None,
    )


def last_step_of(run: RunRecord) -> int | None:
    """Return the last step of a run or of its latest day, from its options and the epochs of its records."""
    training = [record for record in run.records if "loss" in record]
    if not training:
        return None
    day, last = training[-1].get(DAY), training[-1]
    # The first day begins at step 0; of a later one the first record tells where.
    begins = {"step": 0, "epoch": 0.0} if day is None else None
    first = begins or next(record for record in training if record.get(DAY) == day)
    if first["epoch"] == last["epoch"]:
        return None
    steps_per_epoch = round((last["step"] - first["step"]) / (last["epoch"] - first["epoch"]))
    before = round(last["step"] - last["epoch"] * steps_per_epoch)
    limits = [run.options.get("train.max_steps")]
    epochs = run.options.get("train.epochs")
    limits += [None if epochs is None else int(epochs * steps_per_epoch)]
    known = [limit for limit in limits if limit is not None]
    return before + min(known) if known else None


def _latest_step(directory: Path) -> int | None:
    """Return the step of the latest `step_N`; one that is being written has another name."""
    found = [re.fullmatch(r"step_(\d+)", path.name) for path in directory.glob("step_*")]
    return max((int(match[1]) for match in found if match), default=None)


def _median(records: list[dict[str, Any]], key: str) -> float | None:
    values = [record[key] for record in records if isinstance(record.get(key), int | float)]
    return median(values) if values else None
