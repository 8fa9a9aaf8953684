"""Loggers: destinations of a run's records beside its run directory, such as TensorBoard or a tracking server."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class LoggedRun:
    """The facts of a run that its loggers may use."""

    directory: Path  # the run directory
    key: str  # the same for all starts of a run, different between runs
    config: Mapping[str, Any]  # the options as values of JSON, by section
    config_yaml: str  # the same as text
    environment: Mapping[str, Any]  # the first line of metrics.jsonl
    # of the first record that may follow: 0, or of a run that resumes one more than its checkpoint has
    first_step: int = 0

    @property
    def name(self) -> str:
        return self.directory.resolve().name


class RunLogger(Protocol):
    """Logger of one run, which rank 0 makes without arguments.

    The methods are called in this order, in a thread that this logger has for itself, so training does not wait for them. After
    the first error the logger gets no more records, and the run prints one warning.
    """

    def start(self, run: LoggedRun) -> None:
        """Open the destination; a run that resumes continues what its earlier starts have logged."""

    def record(self, group: str, step: int, numbers: Mapping[str, float]) -> None:
        """Log finite numbers by name, such as `loss` and `auc`, after `step` steps.

        `group`: `train`, `test`, or `final` for the final evaluation.
        """

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Log the result of a run that has finished; a run that stops earlier has none."""

    def close(self) -> None:
        """Close the destination, also after an error of another method."""


METHODS = ("start", "record", "finish", "close")


def flat_options(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat_options(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
