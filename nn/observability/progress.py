"""Progress of a training on the terminal: a bar there, and one plain line per record in a file or a pipe."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from math import isfinite
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task
from rich.table import Column, Table
from rich.text import Text

from configs.messages import printable
from nn.models.metric import Metric
from nn.observability.bar import WithBar
from nn.observability.layout import print_columns
from nn.observability.time_left import TimeLeft

MAX_LEFT = timedelta(days=10_000)
WIDE = 100
"""Columns from which the bar shows the best evaluation and the time of a step."""


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
        time_left: TimeLeft | None = None,
    ) -> None:
        self.console = console
        self.metrics = metrics
        self.total_steps = total_steps
        self.time_left = time_left or TimeLeft(total_steps)
        self._has_shown_problem = False
        super().__init__(
            console,
            _Position(Column(no_wrap=True)),
            BarColumn(bar_width=None, complete_style="cyan", finished_style="green"),
            _Status(metrics, self.time_left, console.width >= WIDE),
        )
        if self.bar is not None:
            self._task = self.bar.add_task(
                "", total=total_steps, completed=start_step, record={}, visible=has_training
            )

    def advance(self, step: int) -> None:
        """Move the bar to `step`, the number of finished steps."""
        self.time_left.count(step)
        if self.bar is not None:
            self.bar.update(self._task, completed=step)

    def move_end(self, total_steps: int) -> None:
        """Count to another last step than before: further rows have come."""
        self.total_steps = self.time_left.last_step = total_steps
        if self.bar is not None:
            self.bar.update(self._task, total=total_steps)

    @contextmanager
    def evaluation(self, num_batches: int) -> Iterator[Callable[[], None]]:
        """Show a bar of an evaluation while the block runs, and yield the function that moves it by a batch."""
        self.time_left.begin_evaluation()
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
        if self.bar is not None:
            self.bar.update(self._task, completed=record["step"], record=record)
        else:
            left = self.time_left.seconds()
            self._print(format_train(record, self.metrics, self.total_steps, left))

    def show_test(
        self,
        record: Mapping[str, Any],
        *,
        model: str = "",
        problem: str | None = None,
        best: str = "",
    ) -> None:
        """Print an evaluation record, above the bar if there is one: a line, or of several tasks a table with a line each.

        `model`: the model before the first step, if it is that. `problem`: why the metrics are undefined, if they are;
        printed in a line of its own the first time. `best`: the best evaluation so far.
        """
        if self.bar is not None and best:
            self.bar.update(self._task, best=best)
        has_table = any(metric.task for metric in self.metrics)
        line = format_test(record, [] if has_table else self.metrics, model, problem)
        self._print("  ".join(filter(None, [line, best])))
        if has_table:
            print_columns(self.console, _table_of_tasks(record, self.metrics, problem))
        if problem is not None and not self._has_shown_problem:
            self._print(f"warning: {problem}")
            self._has_shown_problem = True

    def _print(self, line: str) -> None:
        # A terminal would break a line within a number.
        self.console.print(line, soft_wrap=not self.console.is_terminal)


def format_train(
    record: Mapping[str, Any], metrics: Sequence[Metric], total_steps: int, left_s: float | None
) -> str:
    return (
        f"step {record['step']:,}/{total_steps:,}  {_quality(record, metrics)}  {shown_speed(record)}  "
        f"{shown_number(record['step_ms'], '.1f')} ms/step  left {shown_left(left_s)}"
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
    rows = f"({record['test_rows']:,} rows, {record['eval_s']:.1f} s)"
    return f"eval step {record['step']:,}{which}: {'  '.join(filter(None, [values, rows]))}"


def _table_of_tasks(
    record: Mapping[str, Any], metrics: Sequence[Metric], problem: str | None
) -> Table:
    named = dict.fromkeys(metric.name for metric in metrics)
    titles = {m.name: m.title.removeprefix(f"{m.task} ") for m in metrics}
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("  label", overflow="fold")
    for name in named:
        table.add_column(titles[name], justify="right", overflow="fold")
    of_task = {(metric.task, metric.name): metric.test_key for metric in metrics}
    missing = "n/a" if problem is None else "not finite"
    for task in dict.fromkeys(metric.task for metric in metrics):
        keys = [of_task.get((task, name)) for name in named]
        cells = ["" if key is None else shown_number(record[key], missing=missing) for key in keys]
        table.add_row(Text(f"  {printable(str(task))}"), *cells)
    return table


class _Position(ProgressColumn):
    """Progress column: finished and total steps of training, or batches of an evaluation."""

    def render(self, task: Task) -> Text:
        position = f"{int(task.completed):,}/{int(task.total or 0):,}"
        return Text(f"{task.description} {position}".lstrip())


class _Status(ProgressColumn):
    """Progress column: the last training record, the estimated time left, and on a wide terminal the best evaluation.

    It has its width from the start, so that the bar keeps its own.
    """

    def __init__(self, metrics: Sequence[Metric], time_left: TimeLeft, is_wide: bool) -> None:
        self._metrics = metrics
        self._time_left = time_left
        self._is_wide = is_wide
        # Whatever else the text shows is a small number.
        usual = defaultdict[str, float](float, samples_per_s=1e6, step_ms=100.0)
        width = len(self._text(usual, "best so far 0.0000"))
        super().__init__(Column(no_wrap=True, min_width=width))

    def render(self, task: Task) -> Text:
        if task.description:
            seconds = task.time_remaining
            left = "" if seconds is None else f"  left {timedelta(seconds=round(seconds))}"
            return Text(f"evaluating{left}", style="dim")
        record = task.fields["record"]
        if not record:
            return Text("starting", style="dim")
        return Text(self._text(record, task.fields.get("best", "")))

    def _text(self, record: Mapping[str, Any], best: str) -> str:
        wide = [best, f"{shown_number(record['step_ms'], ',.1f')} ms/step"] if self._is_wide else []
        left = f"left {shown_left(self._time_left.seconds())}"
        parts = [_quality(record, self._metrics), *wide[:1], shown_speed(record), *wide[1:], left]
        return "  ".join(filter(None, parts))


def _quality(record: Mapping[str, Any], metrics: Sequence[Metric]) -> str:
    values = [
        f"{metric.key} {shown_number(record[metric.train_key])}"
        for metric in metrics
        if metric.while_training
    ]
    return "  ".join([f"loss {shown_number(record['loss'])}", *values])


def shown_left(seconds: float | None) -> str:
    if seconds is None:
        return "n/a"
    if seconds > MAX_LEFT.total_seconds():
        return f"more than {MAX_LEFT.days:,} days"
    return str(timedelta(seconds=round(seconds)))


def is_number(value: float | None) -> bool:
    """Return whether a value was measured, and is finite."""
    return value is not None and isfinite(value)


def shown_number(value: float | None, form: str = ".4f", missing: str = "n/a") -> str:
    return format(value, form) if is_number(value) else missing


def shown_speed(record: Mapping[str, Any]) -> str:
    """Return the rows per second, and how far a run is behind rows that grow."""
    behind = ""
    if "rows_behind" in record:
        behind = f"  {record['rows_behind']:,} rows and {record['parts_behind']:,} parts behind"
    return f"{shown_number(record['samples_per_s'], ',.0f')} samples/s{behind}"
