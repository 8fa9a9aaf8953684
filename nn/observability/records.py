"""Names of the files of a run directory, and its records, metrics.jsonl.

That file has the environment in the first line, then one record per line. This module imports no torch.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from configs.messages import shown
from dataloading.dataset.documents import parse_json, read_regular
from nn.models.metric import Metric
from nn.plots.curves import RunRecords

CONFIG = "config.yaml"
PLAN = "plan.json"
METRICS = "metrics.jsonl"
MAX_STEPS = 2**53
"""Steps of a run: up to here floats count every one; at a thousand per second it takes 285,000 years."""
SUMMARY = "summary.json"
MODEL = "model.json"
CURVES = "curves.png"
RESTARTS = "restarts.jsonl"
ENDED = "ended.json"
"""Why a run ended before its last step; a run that was killed has none."""

STOPPED, FAILED, PRUNED = "stopped", "failed", "pruned"
"""States in `ended.json`: by a signal, after which the same command resumes; by an error; or by the sweep of the trial."""

UNSAVED = "checkpoint_problem"
"""Key of a summary that says why the last checkpoint could not be written; the run is then unfinished."""

PROBLEM = "test_problem"
"""Key of an evaluation, and of the summary after it, that says why its metrics are undefined."""

TRAIN, TEST = "train", "test"
"""Groups of records: of training, and of evaluations."""

FINAL = "final"
"""Key of the record of a run's final evaluation, which follows the last checkpoint."""

BASELINE = "baseline_"
"""Before the key of a metric in the summary: that of a logistic regression on the same rows (`nn.baseline`)."""

DATA_IDENTITY = "data_identity"
"""Key of the environment: a hash of the run's dataset (`dataloading.dataset.file_states`); null for synthetic clicks."""

DAY = "day"
"""Key of the records of a later day: its number (`nn.training.limits`). Those of the first day have none."""


def baseline_text(summary: Mapping[str, Any], metrics: Iterable[Metric]) -> str:
    """Return the baseline of a summary in one line; empty without one."""
    values = {m.title: summary.get(f"{BASELINE}{m.test_key}") for m in metrics}
    text = "  ".join(f"{t} {v:.4f}" for t, v in values.items() if v is not None and isfinite(v))
    rows = summary.get(f"{BASELINE}rows")
    return f"{text}  (logistic regression on the ids of {rows:,} rows)" if text else ""


@dataclass(frozen=True, slots=True)
class KeptRecords:
    """Lines of metrics.jsonl that a run keeps when it resumes."""

    step: int  # of the checkpoint that the run resumes from
    # the environment and the records up to that step, with their line ends; empty without the file
    lines: list[str] = field(default_factory=list)
    last_step: int | None = None  # of the last record among them; None without any

    @property
    def has_training(self) -> bool:
        return any('"loss"' in line for line in self.lines[1:])


def read_records(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the environment (first line) and the training and evaluation records.

    A last line without a line end is left out: the run was killed while it wrote that line. Raises ValueError: a line is no
    record; the message names file and line. Raises OSError: the file cannot be read.
    """
    numbered = list(enumerate(_complete_lines(path), start=1))
    objects = [_parsed(path, number, line) for number, line in numbered]
    return (objects[0], objects[1:]) if objects else ({}, [])


def read_run(run_dir: Path) -> RunRecords:
    """Return what a picture of a run shows: its records without a final evaluation, the steps that it resumed from, and days.

    Raises ValueError: a record is no record; the message names file and line. Lines of restarts that are damaged are left
    out. Raises OSError: a file cannot be read.
    """
    header, records = read_records(run_dir / METRICS)
    starts = read_restarts(run_dir)
    days = [start for start in starts if DAY in start]
    if days:
        header["data"] = days[-1].get("data")
    return RunRecords(
        header,
        [record for record in records if FINAL not in record],
        [start["step"] for start in starts if DAY not in start],
        [day["step"] for day in days],
    )


def read_restarts(run_dir: Path) -> list[dict[str, Any]]:
    """Return the step and the environment of every resume; damaged lines are left out.

    Raises OSError: the file cannot be read.
    """
    restarts = []
    path = run_dir / RESTARTS
    for line in _complete_lines(path) if path.exists() else []:
        with suppress(ValueError):
            restarts.append(_parsed(path, 2, line))
    return restarts


def has_records(path: Path) -> bool:
    """Return whether anything follows the environment; the file may be missing. Raises OSError: the file cannot be read."""
    try:
        return len(_complete_lines(path)) > 1
    except FileNotFoundError:
        return False


def records_until(
    path: Path, step: int, last_record: int | None, day: int = 0, *, is_new_day: bool = False
) -> KeptRecords:
    """Return the lines up to a step, and all of the days before.

    Damaged lines behind them are left out: a power cut may damage what was written after the latest checkpoint. `path`:
    metrics.jsonl; may be missing. `last_record`: step of the last record before that checkpoint; None if unknown.
    `is_new_day`: whether the checkpoint is of the day before. Raises ValueError: a line that should be kept is no record;
    the message names file and line. Raises OSError: the file cannot be read.
    """
    try:
        lines = _complete_lines(path)
    except FileNotFoundError:
        return KeptRecords(step)
    kept: list[str] = []
    last_step, problem = None, None
    for number, line in enumerate(lines, start=1):
        try:
            record = _parsed(path, number, line)
        except ValueError as error:
            # Harmless only if nothing that is kept follows, and nothing is missing before.
            problem = problem or error
            continue
        # A final evaluation is repeated, at the end of the run that resumes.
        is_final = FINAL in record
        is_of_day = number > 1 and record.get(DAY, 0) >= day
        if is_of_day and (record["step"] > step or is_final or is_new_day):
            break
        if problem is not None:
            raise problem
        kept.append(line.decode())
        if number > 1 and not is_final:
            last_step = record["step"]
    if problem is not None and (last_record is None or last_step != last_record):
        raise problem
    return KeptRecords(step, kept, last_step)


def _complete_lines(path: Path) -> list[bytes]:
    return [line + b"\n" for line in read_regular(path).split(b"\n")[:-1]]


def _parsed(path: Path, number: int, line: bytes) -> dict[str, Any]:
    where = f"{path}, line {number}"
    remedy = "restore the file from a copy, or remove this line to do without it"
    try:
        content = parse_json(line.decode("utf-8"), where)
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 text: {error}; {remedy}") from None
    except ValueError as error:
        raise ValueError(f"{error}; {remedy}") from None
    is_record = isinstance(content, dict) and (
        number == 1 or (type(content.get("step")) is int and 0 <= content["step"] <= MAX_STEPS)
    )
    if not is_record:
        wanted = "the run's environment" if number == 1 else "a record with its step"
        raise ValueError(f"{where}: got {shown(content)}, want {wanted}; {remedy}")
    return content
