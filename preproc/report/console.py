"""Console output of a run: one line per stage, tables at the end."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from configs.messages import printable, shown
from preproc.report.distributions import Distribution
from preproc.report.embedding_sizes import suggested_embedding_dim

# Root mean square of a numerical feature above which the report has a note. Values scaled by minmax, standardise or
# a logarithm lie far below: ln(x + 3) of the largest 64-bit integer is 44, and its mean is a fraction of that.
LARGE_NUMERICAL = 20.0
# Share of the test rows without an id of a feature from which on the report has a note.
MANY_NEW = 0.5
TRAIN, TEST = "train", "test"
# Frequency limits for which the report shows the kept values and the rows that they cover.
COVERAGE_LIMITS = (1, 2, 3, 5, 10, 15, 20, 50, 100)


@dataclass(slots=True)
class SplitSummary:
    """Statistics of one split: rows, rows labelled 1, and ids that are 0 per categorical feature.

    The label is the first binary one; `clicks` stays 0 without any. `unseen` counts values without an id, if the run counts
    them. Without labels nothing is known of clicks.
    """

    rows: int
    clicks: int = 0
    zero_ids: dict[str, int] = field(default_factory=dict)
    unseen: dict[str, int] = field(default_factory=dict)
    has_labels: bool = True

    @property
    def document(self) -> dict[str, Any]:
        """The statistics as plain JSON; the clicks are null without labels."""
        values = asdict(self)
        return values | {"clicks": self.clicks if values.pop("has_labels") else None}


@dataclass(slots=True)
class ColumnSummary:
    """Statistics of one feature, over the rows that vocabularies are built on.

    Attributes:
        missing: fraction of the rows without a value.
        distinct: values seen, of a categorical feature.
        kept: values with an id of their own, of a categorical feature.
        coverage: of a categorical feature, per limit of `COVERAGE_LIMITS` the values seen at least that often
            and their rows.
        rows: rows of the statistics.
        distribution: of a numerical feature, as it is stored.
    """

    missing: float
    distinct: int | None = None
    kept: int | None = None
    coverage: list[list[int]] | None = None
    rows: int = 0
    distribution: Distribution | None = None


@dataclass(slots=True)
class NumericalRange:
    """Range of a numerical feature over the training rows, after its transforms."""

    rows: int = 0
    smallest: float = float("inf")
    largest: float = float("-inf")
    total: float = 0.0
    total_square: float = 0.0

    def add(self, values: np.ndarray) -> None:
        """Add the values of some rows."""
        exact = values.astype(np.float64)
        self.rows += len(exact)
        self.smallest = min(self.smallest, float(exact.min()))
        self.largest = max(self.largest, float(exact.max()))
        self.total += float(exact.sum())
        self.total_square += float(exact @ exact)

    @property
    def mean(self) -> float:
        """Return the mean."""
        return self.total / max(self.rows, 1)

    @property
    def mean_square(self) -> float:
        """Return the mean of the squares."""
        return self.total_square / max(self.rows, 1)

    @property
    def deviation(self) -> float:
        """Return the standard deviation."""
        return max(self.mean_square - self.mean**2, 0.0) ** 0.5


class Progress:
    """Prints one line at the end of each stage, and its progress, rate and remaining time while it runs.

    A terminal shows the progress in one line that changes; a log gets a new line per minute.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._started = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self._started

    @contextmanager
    def stage(self, name: str) -> Iterator["Stage"]:
        """Time the block as a stage called `name`."""
        began = time.perf_counter()
        with self.console.status(_literal(f"{name} ...")) as status:

            def update(text: str) -> None:
                status.update(_literal(text))

            stage = Stage(name, update if self.console.is_terminal else self.say)
            yield stage
        seconds = time.perf_counter() - began
        self.console.print(f"{seconds:8.2f} s  {stage.name}", highlight=False, markup=False)

    def warn(self, text: str) -> None:
        """Print a warning in one line."""
        self.say(f"warning: {text}")

    def say(self, text: str) -> None:
        """Print one line."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


def _literal(text: str) -> Text:
    """Return a text for rich's spinner, which would read markup in a `str`."""
    return Text(printable(text))


class Stage:
    """A running stage; `name` may be extended before its end.

    Attributes:
        name: text printed at its end.
        detail: text about the current work.
        total: total work, in any unit; None if unknown.
    """

    def __init__(self, name: str, show: Callable[[str], object]) -> None:
        self.name = name
        self.detail = ""
        self.total: float | None = None
        self._show = show
        self._began = self._shown = time.monotonic()
        self._first: float | None = None

    def update(self, done: float, rows: int | None = None) -> None:
        """Show that `done` of `total` and `rows` rows are done, at most a few times per second."""
        now = time.monotonic()
        if self._first is None:
            self._first = done  # work of an earlier run took no time of this run
        interval = 0.2 if getattr(self._show, "__name__", "") == "update" else 60
        if now - self._shown < interval:
            return
        self._shown = now
        self._show(self.describe(done, now - self._began, rows))

    def describe(self, done: float, seconds: float, rows: int | None = None) -> str:
        """Return the line to show: rows and their rate, percentage done, time left."""
        text = f"{self.name}: {self.detail}" if self.detail else self.name
        if rows:
            text += f", {rows:,} rows ({rows / max(seconds, 1e-9):,.0f} rows/s)"
        if self.total:
            text += f", {100 * done / self.total:.1f} %"
            advanced = done - (self._first or 0)
            if advanced > 0:
                left = int(seconds * (self.total - done) / advanced)
                text += f", {left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"
        return text


def print_columns(
    console: Console,
    columns: dict[str, ColumnSummary],
    splits: dict[str, SplitSummary],
    counted: str,
) -> None:
    """Print the table of feature columns.

    Args:
        console: destination.
        columns: one entry per feature.
        splits: summaries of the written splits.
        counted: description of the rows of the statistics.
    """
    table = Table(
        title=f"columns, counted on {counted}",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=0,
    )
    # Names are never cut; the words of a head stand below each other where the terminal is narrow.
    table.add_column(
        "column", overflow="fold", min_width=min(20, max(map(len, columns), default=0))
    )
    for head in ("missing %", "distinct", "kept", "table rows", "suggested dim"):
        table.add_column(head, justify="right")
    for split in splits:
        table.add_column(f"id 0 in {split} %", justify="right")
    for name, column in columns.items():
        # A name may hold control characters, or what Rich takes for markup.
        cells: list[Text | str] = [Text(printable(name)), f"{100 * column.missing:.2f}"]
        if column.distinct is not None and column.kept is not None:
            num_rows = column.kept + 1
            cells += [f"{column.distinct:,}", f"{column.kept:,}", f"{num_rows:,}"]
            cells.append(f"{suggested_embedding_dim(num_rows):,}")
            cells += [f"{100 * split.zero_ids[name] / split.rows:.2f}" for split in splits.values()]
        table.add_row(*cells)
    console.print(table)


def print_new_values(console: Console, splits: dict[str, SplitSummary]) -> None:
    """Print one line per categorical feature whose values are mostly others in the test rows than in the training rows."""
    if TRAIN not in splits or TEST not in splits:
        return
    train, test = splits[TRAIN], splits[TEST]
    for name, zeros in test.zero_ids.items():
        in_test = zeros / max(test.rows, 1)
        in_train = train.zero_ids[name] / max(train.rows, 1)
        if in_test >= MANY_NEW and in_test >= 2 * in_train:
            console.print(
                f"note: {100 * in_test:.1f} % of the test rows, and {100 * in_train:.1f} % of the training rows, have no id "
                f"for {shown(name)}: their values are new after the training rows. If the files are sorted by it, set "
                "table.order_by to their time; split.by=random mixes values that are new in time, too",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )


def print_splits(console: Console, splits: dict[str, SplitSummary]) -> None:
    """Print the table of splits: rows and click rate."""
    table = Table(title="splits", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("split")
    for head in ("rows", "clicks", "click rate %"):
        table.add_column(head, justify="right")
    for name, split in splits.items():
        clicks = ["no labels", "-"]
        if split.has_labels:
            clicks = [f"{split.clicks:,}", f"{100 * split.clicks / split.rows:.3f}"]
        table.add_row(name, f"{split.rows:,}", *clicks)
    console.print(table)


def print_equal_labels(console: Console, label: str, splits: dict[str, SplitSummary]) -> None:
    """Print one line per split whose binary labels are all the same; `label` is their title."""
    for name, split in splits.items():
        if split.has_labels and split.rows and split.clicks in (0, split.rows):
            console.print(
                f"note: every {label} of the {name} rows is {int(split.clicks > 0)}: nothing to "
                f"{'learn' if name == TRAIN else 'score'}; check the column or expression of the label",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )


def print_notes(console: Console, ranges: dict[str, NumericalRange]) -> None:
    """Print one line per numerical feature that is large for a model."""
    for name, found in ranges.items():
        if found.mean_square > LARGE_NUMERICAL**2:
            console.print(
                f"note: numerical feature {shown(name)} is not scaled: {found.smallest:g} to {found.largest:g}, "
                f"mean {found.mean:.4g}, standard deviation {found.deviation:.4g} in the training rows, which makes "
                "training unstable; add standardise, minmax or {log: 1} to its transforms",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )


def print_result(console: Console, progress: Progress, output: Path, rows: int) -> None:
    """Print the path of the dataset, its size and the speed of the run."""
    size = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    console.print(
        f"{rows:,} rows in {progress.seconds:.2f} s ({rows / progress.seconds:,.0f} rows/s), "
        f"{size / 1e6:,.1f} MB written to {output}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
