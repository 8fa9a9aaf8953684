"""Progress of a training on the terminal: a bar there, and one plain line per record in a file or a pipe."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from math import isfinite
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task
from rich.table import Column
from rich.text import Text

from nn.models.metric import Metric
from nn.observability.bar import WithBar

MAX_LEFT = timedelta(days=10_000)


class Progress(WithBar):
    """Progress of the training loop; a context manager that removes the bar at its end.

    `start_step`: step that the run resumes from; 0 for a new run. `has_training`: whether the bar of training is shown;
    that of an evaluation is in any case.
    """

    def __init__(
        self,
        console: Console,
        metrics: Sequence[Metric],
        total_steps: int,
        *,
        start_step: int = 0,
        has_training: bool = True,
    ) -> None:
        self.console = console
        self.metrics = metrics
        self.total_steps = total_steps
        self._has_shown_problem = False
        super().__init__(
            console,
            _Position(Column(no_wrap=True)),
            BarColumn(bar_width=None, complete_style="cyan", finished_style="green"),
            _Status(metrics, Column(no_wrap=True)),
        )
        if self.bar is not None:
            self._task = self.bar.add_task(
                "", total=total_steps, completed=start_step, record={}, visible=has_training
            )

    def advance(self, step: int) -> None:
        """Move the bar to `step`, the number of finished steps."""
        if self.bar is not None:
            self.bar.update(self._task, completed=step)

    @contextmanager
    def evaluation(self, num_batches: int) -> Iterator[Callable[[], None]]:
        """Show a bar of an evaluation while the block runs, and yield the function that moves it by a batch."""
        if self.bar is None:
            yield lambda: None
            return
        bar, task = self.bar, self.bar.add_task("eval", total=num_batches, record={})
        try:
            yield lambda: bar.advance(task)
        finally:
            bar.remove_task(task)
            # Otherwise the next line would be printed above the bar's last picture.
            bar.refresh()

    def show_train(self, record: Mapping[str, Any]) -> None:
        """Show a training record."""
        if self.bar is not None:
            self.bar.update(self._task, completed=record["step"], record=record)
        else:
            self._print(format_train(record, self.metrics, self.total_steps))

    def show_test(
        self, record: Mapping[str, Any], *, model: str = "", problem: str | None = None
    ) -> None:
        """Print an evaluation record, above the bar if there is one.

        `model`: the model before the first step, if it is that. `problem`: why the metrics are undefined, if they are;
        printed in a line of its own the first time.
        """
        self._print(format_test(record, self.metrics, model, problem))
        if problem is not None and not self._has_shown_problem:
            self._print(f"warning: {problem}")
            self._has_shown_problem = True

    def _print(self, line: str) -> None:
        self.console.print(line, soft_wrap=True)


def format_train(record: Mapping[str, Any], metrics: Sequence[Metric], total_steps: int) -> str:
    """Format a training record as one line."""
    return (
        f"step {record['step']:,}/{total_steps:,}  {_quality(record, metrics)}  {shown_speed(record)}  "
        f"{shown_number(record['step_ms'], '.1f')} ms/step  left {_left(record, total_steps)}"
    )


def format_test(
    record: Mapping[str, Any],
    metrics: Sequence[Metric],
    model: str = "",
    problem: str | None = None,
) -> str:
    """Format an evaluation record as one line, with the reason if a metric is undefined."""
    # Where predictions are not finite, they are to blame, not the labels.
    is_measured = problem is None and any(is_number(record[metric.test_key]) for metric in metrics)
    missing = "n/a" if problem is None else "undefined (predictions are not finite)"
    values = "  ".join(
        f"{metric.title} {shown_number(record[metric.test_key], missing=metric.undefined if is_measured else missing)}"
        for metric in metrics
    )
    which = f" ({model})" if model else ""
    return (
        f"eval step {record['step']:,}{which}: {values}  "
        f"({record['test_rows']:,} rows, {record['eval_s']:.1f} s)"
    )


class _Position(ProgressColumn):
    """Progress column: finished and total steps of training, or batches of an evaluation."""

    def render(self, task: Task) -> Text:
        position = f"{int(task.completed):,}/{int(task.total or 0):,}"
        return Text(f"{task.description} {position}".lstrip())


class _Status(ProgressColumn):
    """Progress column: the last training record, and the estimated time left."""

    def __init__(self, metrics: Sequence[Metric], column: Column) -> None:
        super().__init__(column)
        self._metrics = metrics

    def render(self, task: Task) -> Text:
        if task.description:
            seconds = task.time_remaining
            left = "" if seconds is None else f"  left {timedelta(seconds=round(seconds))}"
            return Text(f"evaluating{left}", style="dim")
        record = task.fields["record"]
        if not record:
            return Text("starting", style="dim")
        left = _left({**record, "step": int(task.completed)}, int(task.total or 0))
        return Text(f"{_quality(record, self._metrics)}  {shown_speed(record)}  left {left}")


def _quality(record: Mapping[str, Any], metrics: Sequence[Metric]) -> str:
    values = [
        f"{metric.key} {shown_number(record[metric.train_key])}"
        for metric in metrics
        if metric.while_training
    ]
    return "  ".join([f"loss {shown_number(record['loss'])}", *values])


def _left(record: Mapping[str, Any], total_steps: int) -> str:
    """Estimate the time to the last step from the record's speed, without evaluations."""
    if not is_number(record["step_ms"]):
        return "n/a"
    seconds = (total_steps - record["step"]) * record["step_ms"] / 1000
    if seconds > MAX_LEFT.total_seconds():
        return f"more than {MAX_LEFT.days:,} days"
    return str(timedelta(seconds=round(seconds)))


def is_number(value: float | None) -> bool:
    """Return whether a value was measured, and is finite."""
    return value is not None and isfinite(value)


def shown_number(value: float | None, form: str = ".4f", missing: str = "n/a") -> str:
    """Return a number as text, or what stands for a missing one."""
    return format(value, form) if is_number(value) else missing


def shown_speed(record: Mapping[str, Any]) -> str:
    """Return the speed of a record or a summary as text."""
    return f"{shown_number(record['samples_per_s'], ',.0f')} samples/s"
