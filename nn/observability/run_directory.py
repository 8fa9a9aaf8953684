"""Run directory: configuration, plan, metrics and result of a run.

config.yaml     resolved configuration
plan.json       one `TablePlan` per table
model.json      the model: options, features, layers (`nn.models.description`)
memory.json     estimated peak memory per GPU, one `RankMemory` per rank; only for training on GPUs
metrics.jsonl   environment in the first line, then one record per line, flushed at once
restarts.jsonl  one object per resume: checkpoint step and environment
mlperf.log      log of the benchmark (`nn/observability/mlperf_log.py`), with log.mlperf
tensorboard/    the numbers of the records, for TensorBoard (`nn.loggers`)
summary.json    result; exists only after the run has finished
ended.json      why the run ended before its last step, unless it was killed
curves.png      plot of the records
predictions.json  calibration, gain and lift of binary labels in the latest evaluation; predictions.png shows them
importance.json importance of features, with mode=importance; importance.csv is the same as a table
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict
from logging import Logger
from pathlib import Path
from typing import Any

from configs.messages import on_one_line, os_error_text
from dataloading.dataset.documents import parse_yaml, read_json
from dataloading.dataset.durable_files import AppendedFile, append_line, replace_json, replace_text
from nn.distributed.errors import StoppedError
from nn.distributed.process_group import is_lost_peer
from nn.loggers.background import Loggers
from nn.loggers.run_logger import LoggedRun
from nn.models.metric import Metric
from nn.observability.records import (
    CONFIG,
    CURVES,
    DAY,
    ENDED,
    FAILED,
    FINAL,
    METRICS,
    MODEL,
    PLAN,
    RESTARTS,
    STOPPED,
    SUMMARY,
    TRAIN,
    KeptRecords,
    has_records,
    read_run,
)
from nn.planning.memory_estimate import RankMemory
from nn.planning.plan import TablePlan
from nn.plots.curves import draw_curves
from nn.plots.predictions import draw_predictions

PREDICTIONS = "predictions.json"
PREDICTIONS_PNG = "predictions.png"

UNTRAINED_AUC = "untrained_test_auc"
RESTORED_AUC = "restored_test_auc"
FIRST_AUC = (UNTRAINED_AUC, RESTORED_AUC)
"""Keys of the AUC before the first step: of a new model, or of one that `checkpoint.restore` names."""

LOST_RANK = "another rank has exited; the same command with the same run_dir resumes from the latest checkpoint"
"""In the place of the text of gloo or NCCL."""
ALL_STEPS_DONE, ENDED_BY_CALLER = "all steps done", "ended by its caller before the last step"
NO_NEW_ROWS = "no new rows for data.watch_idle_s"
"""Why a run that was not stopped before has ended, under `stopped` of a summary."""

RESULT_STEP = "result_step"
LAST_AUC = "last_test_auc"
"""Keys of a summary whose metrics are those of a final evaluation: steps of its model, and the AUC of the last one before."""

LAUNCHED = "launched_steps"
"""Key of a summary: steps of this start that were launched operation by operation, and not as a CUDA graph."""

SUMMARY_KEYS = ("steps", "samples_per_s", "step_ms", "peak_hbm_bytes")
"""Keys of every summary, beside those of the metrics."""

# Float32 carries about 7 digits, and an AUC needs six decimals.
SIGNIFICANT_DIGITS = 7


def empty_summary(metrics: Iterable[Metric]) -> dict[str, Any]:
    steps, *others = SUMMARY_KEYS
    return dict.fromkeys([steps, *(metric.test_key for metric in metrics), *others])


def to_json_value(value: Any) -> Any:
    """Convert `value` for JSON: floats rounded to 7 significant digits, nan and infinity as None."""
    if isinstance(value, float):
        return float(f"{value:.{SIGNIFICANT_DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: to_json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(item) for item in value]
    return value


class RunDirectory(AbstractContextManager["RunDirectory"]):
    """Writer of the run directory; every method is a no-op on ranks other than 0.

    Every file is complete or absent: a start that is killed, or that fills the disk, leaves no part of a file. `run_dir`: an
    existing directory; `nn.observability.run_lock` keeps other runs out of it. `logger`: prints a warning if the curves cannot
    be drawn. `loggers`: get the records too; None for none. They are started here, and closed with the directory. `kept`: what
    a run that resumes keeps of its records. None starts from nothing, and removes what is there. Raises OSError: a file cannot
    be written.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        rank: int,
        config_yaml: str,
        environment: Mapping[str, Any],
        logger: Logger,
        loggers: Loggers | None = None,
        kept: KeptRecords | None = None,
    ) -> None:
        self.run_dir = run_dir
        self._logger = logger
        self._metrics: AppendedFile | None = None
        self._loggers = loggers
        self._has_training = kept is not None and kept.has_training
        if rank != 0:
            return
        # The configuration comes first: records without it would belong to an unknown run.
        replace_text(run_dir / CONFIG, config_yaml)
        stale = [SUMMARY, CURVES, PREDICTIONS_PNG, ENDED]
        for name in stale if kept is not None and kept.lines else [*stale, PREDICTIONS]:
            (run_dir / name).unlink(missing_ok=True)
        path = run_dir / METRICS
        lines = kept.lines if kept is not None else []
        replace_text(path, "".join(lines) or _line(environment) + "\n")
        if kept is not None and lines:
            append_line(run_dir / RESTARTS, _line({"step": kept.step, **environment}))
        self._metrics = AppendedFile(path, is_text=True)
        if loggers is not None:
            first_line = lines[0] if lines else _line(environment) + "\n"
            loggers.start(
                LoggedRun(
                    directory=run_dir,
                    key=hashlib.sha256((run_dir.name + first_line).encode()).hexdigest()[:16],
                    config=parse_yaml(config_yaml, CONFIG),
                    config_yaml=config_yaml,
                    environment=environment,
                    first_step=0 if kept is None else kept.step + 1,
                )
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *rest: object
    ) -> None:
        if isinstance(error, Exception | KeyboardInterrupt):
            self._write_end(error)
        self.close()

    def close(self) -> None:
        """Close the files; records written so far are kept."""
        if self._metrics is not None:
            self._metrics.close()
        if self._loggers is not None:
            self._loggers.close()

    def sync(self) -> None:
        """Sync the records to disk, so that they are as durable as a checkpoint that refers to them."""
        if self._metrics is not None:
            self._metrics.sync()

    def write_predictions(self, described: Mapping[str, Any]) -> None:
        """Write `predictions.json` of the latest evaluation; without any predictions, remove that of an earlier one."""
        if self._metrics is None:
            return
        if described:
            replace_json(self.run_dir / PREDICTIONS, to_json_value(described))
        else:
            (self.run_dir / PREDICTIONS).unlink(missing_ok=True)

    def write_importance(
        self, importance: Mapping[str, Any], table: str, draw: Callable[[Path], None] | None
    ) -> None:
        """Write `importance.json`, as a table `importance.csv` and, with `draw`, `importance.png`."""
        if self._metrics is None:
            return
        replace_json(self.run_dir / "importance.json", to_json_value(importance))
        replace_text(self.run_dir / "importance.csv", table)
        if draw is not None:
            path = self.run_dir / "importance.png"
            _try_to_draw(path, lambda: draw(path), self._logger)

    def finish(self, summary: Mapping[str, Any], *, pictures: bool = True) -> None:
        """Draw `curves.png`, after training, and `predictions.png`, then write `summary.json`: the results are complete.

        `summary`: with at least `SUMMARY_KEYS`; unmeasured values are None or nan. `pictures`: whether to draw (`log.pictures`).
        """
        missing = [key for key in SUMMARY_KEYS if key not in summary]
        assert not missing, f"summary without {missing}"
        if self._metrics is None:
            return
        if pictures and self._has_training:
            _draw_curves(self.run_dir, self._logger)
        if pictures:
            _draw_predictions(self.run_dir, self._logger)
        replace_json(self.run_dir / SUMMARY, to_json_value(summary))
        if self._loggers is not None:
            self._loggers.finish(to_json_value(summary))

    def _write_end(self, error: BaseException) -> None:
        """Write `ended.json`; the error that ends the run must not be replaced by one of writing."""
        # With a summary the results are complete, whatever failed after it.
        if self._metrics is None or (self.run_dir / SUMMARY).exists():
            return
        is_stop = isinstance(error, StoppedError | KeyboardInterrupt)
        is_lost = isinstance(error, RuntimeError) and is_lost_peer(error)
        content = {
            "state": STOPPED if is_stop else FAILED,
            "kind": type(error).__name__,
            "message": LOST_RANK if is_lost else on_one_line(str(error)),
        }
        with suppress(OSError):
            replace_json(self.run_dir / ENDED, content)

    def write(self, group: str, record: Mapping[str, Any]) -> None:
        """Append a record, whose `step` is the number of finished steps.

        `group`: `TRAIN`, or of an evaluation `TEST`, `FINAL`, or `DAY` on the rows of another day. With the key `FINAL` it
        follows the last checkpoint, of a run or of a day.
        """
        if self._metrics is None:
            return
        self._metrics.append(f"{_line(record)}\n".encode())
        self._has_training = self._has_training or group == TRAIN
        if self._loggers is not None:
            numbers = {
                name.removeprefix(f"{group}_").removeprefix("test_"): value
                for name, value in record.items()
                if isinstance(value, int | float)
                and math.isfinite(value)
                and name not in ("step", DAY, FINAL)
            }
            self._loggers.record(group, record["step"], numbers)


def write_model(directory: Path, description: Mapping[str, Any]) -> None:
    replace_json(directory / MODEL, description)


def write_plan(directory: Path, rows: Sequence[TablePlan], memory: Sequence[RankMemory]) -> None:
    """Write `plan.json` and, if there is an estimate for GPUs, `memory.json` to an existing directory."""
    replace_json(directory / PLAN, [asdict(row) for row in rows])
    if memory:
        content = [asdict(rank) | {"total": rank.total} for rank in memory]
        replace_json(directory / "memory.json", content)


def draw_missing_pictures(run_dir: Path, logger: Logger) -> None:
    """Draw the pictures of a finished run that has none, because it was killed or had no room for them."""
    if not (run_dir / CURVES).exists() and has_records(run_dir / METRICS):
        _draw_curves(run_dir, logger)
    if not (run_dir / PREDICTIONS_PNG).exists():
        _draw_predictions(run_dir, logger)


def _draw_curves(run_dir: Path, logger: Logger) -> None:
    path = run_dir / CURVES
    _try_to_draw(path, lambda: draw_curves(read_run(run_dir), path), logger)


def _draw_predictions(run_dir: Path, logger: Logger) -> None:
    source, path = run_dir / PREDICTIONS, run_dir / PREDICTIONS_PNG
    if source.exists():
        _try_to_draw(path, lambda: draw_predictions(read_json(source), path), logger)


def _try_to_draw(path: Path, draw: Callable[[], None], logger: Logger) -> None:
    """Draw a picture; a run does not lose its result because of it."""
    try:
        draw()
    except Exception as error:
        text = os_error_text(error) if isinstance(error, OSError) else str(error)
        logger.warning(f"{path} could not be drawn: {text}")


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(to_json_value(record), allow_nan=False)
