"""Reports to a service that tunes hyperparameters, as Vertex AI: each evaluation as a line of JSON in a file that it reads.

The format is that of the package cloudml-hypertune, whose service starts a run per trial and sets the variables below.
"""

import json
import os
import time
from collections.abc import Mapping
from logging import Logger
from pathlib import Path
from typing import Any

from dataloading.dataset.durable_files import append_line
from nn.models.metric import AUC, Metric
from nn.observers.observer import Loop, Observer

METRIC_FILE, TRIAL_ID = "CLOUD_ML_HP_METRIC_FILE", "CLOUD_ML_TRIAL_ID"
DEFAULT_FILE = "/var/hypertune/output.metrics"


class HypertuneReport(Observer):
    def __init__(self, path: Path, trial: str, logger: Logger) -> None:
        self._path = path
        self._trial = trial
        self._logger = logger

    def on_evaluation(self, loop: Loop, record: Mapping[str, Any], *, is_final: bool) -> None:
        """Report an evaluation of a model that this run has trained."""
        if record["step"] > loop.first_step:
            self.write(loop.best_metric, record[loop.best_metric.test_key], record["step"])

    def write(self, metric: Metric, value: float | None, step: int) -> None:
        """Append the value of a metric after `step` steps; a run is not ended by a file that cannot be written."""
        if value is None or value != value:
            return
        # The service knows the metric by this name, as `metric_spec={"AUC": "maximize"}`.
        tag = "AUC" if metric.key == AUC.key else metric.key
        line = {
            "timestamp": time.time(),
            "trial": self._trial,
            tag: str(float(value)),
            "global_step": str(step),
        }
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            append_line(self._path, json.dumps(line, sort_keys=True))
        except OSError as error:
            self._logger.warning(
                f"{self._path} could not be written for the tuning service: {error.strerror}"
            )


def hypertune_report(logger: Logger) -> HypertuneReport | None:
    """Return the writer if a tuning service has started this run; None otherwise."""
    trial = os.environ.get(TRIAL_ID)
    path = os.environ.get(METRIC_FILE) or (DEFAULT_FILE if trial else None)
    return None if path is None else HypertuneReport(Path(path), trial or "0", logger)
