"""Metrics of a training for Prometheus, as a file that node-exporter's textfile collector reads.

A file, not a port: a training is a batch job that moves between nodes, several share a node, and the file of a run that was
killed still says so: `training_running` is 1, and `training_updated_seconds` gets old.
"""

import time
from collections.abc import Mapping
from logging import Logger
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, write_to_textfile

from nn.observers.observer import Loop, Observer, PendingCheckpoint

EVERY_S = 5.0
"""Least time between two writes of training records."""
MEANINGS = {
    "running": "Whether the run trains.",
    "finished": "Whether training has come to its end.",
    "updated_seconds": "When this file was written, Unix time.",
    "step": "Updates made so far.",
    "last_step": "Updates of the run, or until the end of its day.",
    "epoch": "Epochs so far.",
    "loss": "Mean loss since the record before.",
    "samples_per_second": "Rows trained per second.",
    "step_seconds": "Time of a step.",
    "evaluation": "Metrics of the latest evaluation.",
    "checkpoint_step": "Step of the latest checkpoint.",
    "checkpoint_seconds": "When the latest checkpoint was seen to be complete, Unix time.",
}


class PrometheusFile(Observer):
    """Writer of the metrics of one run, on rank 0; a file that cannot be written is a warning, once."""

    def __init__(self, path: Path, run: str, logger: Logger) -> None:
        self._path, self._run, self._logger = path, run, logger
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        self._saving: Path | None = None
        self._has_warned = False
        self._next = 0.0  # of `time.monotonic`

    def on_start(self, loop: Loop) -> None:
        self._set("finished", 0)
        self._write(loop, is_running=True)

    def on_record(self, loop: Loop, record: Mapping[str, Any]) -> None:
        """Write loss and speed, at most every `EVERY_S`."""
        self._set("loss", record["loss"])
        if record["step_ms"] is not None:
            self._set("samples_per_second", record["samples_per_s"])
            self._set("step_seconds", record["step_ms"] / 1e3)
        if time.monotonic() >= self._next:
            self._write(loop, is_running=True)

    def on_evaluation(self, loop: Loop, record: Mapping[str, Any], *, is_final: bool) -> None:
        for key, value in record.items():
            if key.startswith("test_") and isinstance(value, float):
                self._set("evaluation", value, metric=key.removeprefix("test_"))
        self._write(loop, is_running=not is_final)

    def on_checkpoint(self, loop: Loop, checkpoint: PendingCheckpoint) -> None:
        """Remember a checkpoint, which exists once it is complete."""
        self._saving = checkpoint.directory

    def on_end(self, loop: Loop) -> None:
        self._set("finished", 1)
        self._write(loop, is_running=False)

    def on_error(self, loop: Loop) -> None:
        self._write(loop, is_running=False)

    def _write(self, loop: Loop, *, is_running: bool) -> None:
        self._next = time.monotonic() + EVERY_S
        self._set("running", int(is_running))
        self._set("updated_seconds", time.time())
        self._set("step", loop.num_steps)
        self._set("last_step", loop.last_step)
        self._set("epoch", loop.epoch())
        if self._saving is not None and self._saving.exists():
            self._set("checkpoint_step", int(self._saving.name.removeprefix("step_")))
            self._set("checkpoint_seconds", time.time())
            self._saving = None
        try:
            write_to_textfile(str(self._path), self._registry)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                problem = f"log.prometheus={self._path} cannot be written: {error.strerror}"
                self._logger.warning(f"{problem}. The run continues, and tries again")

    def _set(self, name: str, value: float, **labels: str) -> None:
        if name not in self._gauges:
            full, names = f"training_{name}", ["run", *labels]
            self._gauges[name] = Gauge(full, MEANINGS[name], names, registry=self._registry)
        self._gauges[name].labels(run=self._run, **labels).set(value)
