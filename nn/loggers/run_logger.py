"""Loggers: destinations of a run's records beside its run directory, such as TensorBoard or a tracking server."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class LoggedRun:
    """The facts of a run that its loggers may use.

    Attributes:
        directory: the run directory.
        key: text that is the same for all starts of a run, and differs between runs.
        config: the options as values of JSON, by section.
        config_yaml: the same as text.
        environment: the first line of metrics.jsonl.
        first_step: steps of the first record that may follow: 0, or of a run that resumes one more than its checkpoint has.
    """

    directory: Path
    key: str
    config: Mapping[str, Any]
    config_yaml: str
    environment: Mapping[str, Any]
    first_step: int = 0

    @property
    def name(self) -> str:
        """Name of the run, as of its directory."""
        return self.directory.resolve().name

    @property
    def is_continuation(self) -> bool:
        """Return whether the run resumes."""
        return self.first_step > 0


class RunLogger(Protocol):
    """Logger of one run, which rank 0 makes without arguments.

    The methods are called in this order, in a thread that this logger has for itself, so training does not wait for them. After
    the first error the logger gets no more records, and the run prints one warning.
    """

    def start(self, run: LoggedRun) -> None:
        """Open the destination; a run that resumes continues what its earlier starts have logged."""

    def record(self, group: str, step: int, numbers: Mapping[str, float]) -> None:
        """Log a record.

        Args:
            group: `train`, `test`, or `final` for the final evaluation.
            step: number of finished steps.
            numbers: finite numbers by name, such as `loss` and `auc`.
        """

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Log the result of a run that has finished; a run that stops earlier has none."""

    def close(self) -> None:
        """Close the destination, also after an error of another method."""


METHODS = ("start", "record", "finish", "close")
