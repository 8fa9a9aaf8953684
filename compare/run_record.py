"""One run as it lies on disk: options, records, result and state. Finished, running and crashed runs are read alike."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from statistics import median_high
from typing import Any

from configs.schema import RENAMED, Mode
from dataloading.dataset.documents import read_mapping
from nn.loggers.run_logger import flat_options
from nn.models.metric import METRIC_FACTS, Metric, best_of, metric_of_key, metrics_of_facts
from nn.observability.records import (
    CONFIG,
    DATA_IDENTITY,
    DAY,
    ENDED,
    FAILED,
    FINAL,
    METRICS,
    PRUNED,
    STOPPED,
    SUMMARY,
    UNSAVED,
    read_records,
    read_restarts,
)
from nn.observability.run_lock import is_running
from nn.plots.series import is_finite, like_the_last

SPLIT = "split"
"""Key of the environment: the split that is evaluated."""


class State(StrEnum):
    """States of a run: the last four ended before their last step."""

    running = "running"
    finished = "finished"
    stopped = STOPPED
    failed = FAILED
    pruned = PRUNED
    crashed = "crashed"


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run directory, read once.

    `options` of config.yaml are by their dotted names now, and empty if that is missing or damaged; `header` is the first line of
    metrics.jsonl; `message` says why the run was stopped or has failed.
    """

    path: Path
    state: State
    message: str
    options: dict[str, Any]
    header: dict[str, Any]
    records: list[dict[str, Any]]
    summary: dict[str, Any]
    restarts: list[dict[str, Any]]

    @classmethod
    def read(cls, path: Path) -> "RunRecord":
        """Read a run directory.

        Raises ValueError: a line of metrics.jsonl is no record. Raises OSError: a file cannot be read.
        """
        header: dict[str, Any] = {}
        records: list[dict[str, Any]] = []
        with suppress(FileNotFoundError):
            header, records = read_records(path / METRICS)
        summary, ended = (read_mapping(path / name) or {} for name in (SUMMARY, ENDED))
        return cls(
            path,
            _state(path, summary, ended),
            str(ended.get("message", "")),
            {
                RENAMED.get(option, option): v
                for option, v in flat_options(read_mapping(path / CONFIG) or {})
            },
            header,
            records,
            summary,
            read_restarts(path),
        )

    @property
    def steps(self) -> int:
        steps = (_number(record.get("step")) or 0 for record in self.records)
        return int(max(steps, default=0))

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """Records of evaluations while training, in order."""
        return [r for r in self.records if FINAL not in r and any(map(self.metric_of, r))]

    @property
    def comparable(self) -> list[dict[str, Any]]:
        """Those evaluations whose metrics can be compared with the last one's: of the same data, split, day and rows.

        As in training (`LoopState.compare_by`), the best one is chosen among them.
        """
        starts = [self.header, *self.restarts]
        changes = [
            int(now["step"])
            for before, now in pairwise(starts)
            if any(before.get(k) and now.get(k) != before[k] for k in (DATA_IDENTITY, SPLIT))
        ]
        since = max(changes, default=-1)
        found = self.evaluations
        later = [record for record in found if record.get("step", 0) > since]
        return [dict(record) for record in like_the_last(later or found[-1:])]

    @property
    def is_training(self) -> bool:
        """Return whether it trains: other modes evaluate what another run has trained."""
        return self.options.get("mode", Mode.train.value) == Mode.train.value

    @property
    def measured_on(self) -> dict[str, Any]:
        """Data, split and rows of the evaluations, and the day where the data do not tell it; None what is not known."""
        identity = (self.restarts or [self.header])[-1].get(DATA_IDENTITY)
        last = self.comparable[-1] if self.evaluations else {}
        data = self.options.get("data.path")
        if data is None:
            # The seed makes other clicks, and labels by another rule.
            seed = self.options.get("seed")
            data = f"synthetic clicks of seed {seed}"
            clicks = {k: v for k, v in self.options.items() if k.startswith("data.synthetic.")}
            clicks["seed"] = seed
            identity = hashlib.sha256(json.dumps(clicks, default=str).encode()).hexdigest()[:16]
        return {
            "data": str(data),
            DATA_IDENTITY: identity if isinstance(identity, str) else None,
            SPLIT: self.split,
            DAY: _number(last.get(DAY)) if identity is None else None,
            "rows": _number(last.get("test_rows")),
        }

    def metrics(self) -> list[Metric]:
        keys = dict.fromkeys(key for record in self.records for key in record)
        return [metric for metric in map(self.metric_of, keys) if metric is not None]

    def metric_of(self, key: str) -> Metric | None:
        starts = [self.header, *self.restarts]
        further = [m for start in starts for m in metrics_of_facts(start.get(METRIC_FACTS))]
        return metric_of_key(key, further)

    def main_metric(self) -> Metric | None:
        """Return the metric by which the run chooses its best checkpoint; None before the first evaluation."""
        with suppress(ValueError):
            return best_of(self.metrics(), self.options.get("eval.best_metric"))
        return None

    @property
    def split(self) -> str:
        return str(self.options.get("eval.split", "test"))

    def last(self, metric: Metric) -> float | None:
        """Return a metric of the last evaluation; None if it has no value."""
        evaluations = self.comparable
        return _number(evaluations[-1].get(metric.test_key)) if evaluations else None

    def best(self, metric: Metric) -> tuple[float | None, int | None]:
        """Return the best value of a metric over the comparable evaluations, and its step."""
        found = ((r, _number(r.get(metric.test_key))) for r in self.comparable)
        return metric.best((int(_number(r.get("step")) or 0), v) for r, v in found if v is not None)

    def speed(self) -> float | None:
        """Return samples/s: of the summary, or the median of the records."""
        measured = _number(self.summary.get("samples_per_s"))
        measured_at = self._values("samples_per_s")
        return measured or (median_high(measured_at) if measured_at else None)

    def memory_bytes(self) -> float | None:
        """Return the peak memory of tensors on the GPU of rank 0; None on CPUs."""
        values = [*self._values("hbm_bytes"), _number(self.summary.get("peak_hbm_bytes"))]
        return max((value for value in values if value is not None), default=None)

    def seconds(self) -> float | None:
        """Return the seconds of steps and evaluations; time between two starts and of checkpoints is left out."""
        total, before = 0.0, _number(self.header.get("start_step")) or 0
        for record in self.records:
            total += _number(record.get("eval_s")) or 0.0
            if "loss" in record:
                step = _number(record.get("step")) or before
                total += (_number(record.get("step_ms")) or 0.0) / 1e3 * max(step - before, 0)
                before = step
        return total if self.records else None

    def _values(self, key: str) -> list[float]:
        found = (_number(record.get(key)) for record in self.records)
        return [value for value in found if value is not None]


def find_runs(paths: Sequence[str]) -> list[Path]:
    """Return the run directories among `paths` and below them, sorted, without duplicates.

    Raises ValueError: a path is no directory, or there is no run below it.
    """
    found: dict[Path, Path] = {}
    for text in paths:
        path = Path(text)
        if not path.is_dir():
            raise ValueError(
                f"{text} is no directory; name run directories, or folders that have them"
            )
        below = sorted(_runs_below(path))
        if not below:
            raise ValueError(f"{text} holds no run: no directory there has {CONFIG} and {METRICS}")
        for run in below:
            found.setdefault(run.resolve(), run)
    return list(found.values())


def _runs_below(folder: Path) -> Iterator[Path]:
    """Yield the run directories below a folder; a run directory holds no others."""
    if (folder / CONFIG).is_file() and (folder / METRICS).is_file():
        yield folder
        return
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink() and not path.name.startswith("."):
            yield from _runs_below(path)


def differing(runs: Iterable[RunRecord]) -> list[str]:
    """Return the names of the options that are not equal in all runs, in the order of config.yaml."""
    all_options = [run.options for run in runs if run.options]
    found = dict.fromkeys(option for options in all_options for option in options)
    return [
        option
        for option in found
        if option not in ("run_dir", "config")
        and any(options.get(option) != all_options[0].get(option) for options in all_options)
    ]


def _state(path: Path, summary: dict[str, Any], ended: dict[str, Any]) -> State:
    if is_running(path):
        return State.running
    if ended.get("state") in (STOPPED, FAILED, PRUNED):
        return State(ended["state"])
    if summary:
        return State.failed if summary.get(UNSAVED) else State.finished
    return State.crashed


def _number(value: object) -> float | None:
    return value if is_finite(value) else None
