"""Logger to MLflow. Server, experiment and login are the library's own business: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME."""

import math
import time
from collections.abc import Mapping
from typing import Any

from nn.loggers.run_logger import LoggedRun, flat_options

KEY_TAG = "recsys.run"
MOST_PARAMS = 100
"""Parameters of one request."""
MOST_CHARS = 6000
"""Of a parameter's value."""


class MLflowLogger:
    """Logger to one run of an MLflow experiment, which a resumed training continues."""

    def __init__(self) -> None:
        self._client: Any = None
        self._run_id: str | None = None
        self._is_finished = False

    def start(self, run: LoggedRun) -> None:
        """Open or continue the run, and write the options as parameters."""
        from mlflow.entities import Param
        from mlflow.environment_variables import MLFLOW_EXPERIMENT_NAME
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient()
        name = MLFLOW_EXPERIMENT_NAME.get() or str(run.config.get("recipe") or "recsys")
        experiment = self._client.get_experiment_by_name(name)
        number = (
            self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        )
        known = self._client.search_runs([number], f"tags.`{KEY_TAG}` = '{run.key}'")
        if known:
            self._run_id = known[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
            return
        tags = {KEY_TAG: run.key, "run_dir": str(run.directory.resolve())}
        commit = run.environment.get("git_commit")
        if commit:
            tags["mlflow.source.git.commit"] = commit
        self._run_id = self._client.create_run(number, run_name=run.name, tags=tags).info.run_id
        params = [Param(key, str(value)[:MOST_CHARS]) for key, value in flat_options(run.config)]
        for first in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(self._run_id, params=params[first : first + MOST_PARAMS])

    def record(self, group: str, step: int, numbers: Mapping[str, float]) -> None:
        self._log({f"{group}/{name}": value for name, value in numbers.items()}, step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        numbers = {
            f"result/{name}": value
            for name, value in summary.items()
            if type(value) in (int, float) and math.isfinite(value)
        }
        self._log(numbers, int(summary["steps"] or 0))
        self._is_finished = True

    def close(self) -> None:
        """End the run; one that has not finished is shown as failed until it resumes."""
        if self._run_id is not None:
            self._client.set_terminated(self._run_id, "FINISHED" if self._is_finished else "FAILED")

    def _log(self, numbers: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, float(value), now, step) for name, value in numbers.items()]
        self._client.log_batch(self._run_id, metrics=metrics)
