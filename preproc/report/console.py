"""Console output of a run: one line per phase, tables at the end."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from configs.console import print_line
from configs.messages import printable, shortened, shown
from configs.table_schema import TableConfig
from dataloading.embedding_sizes import suggested_embedding_dim
from preproc.report.distributions import Distribution

# Root mean square of a numerical feature above which the report has a note. Values scaled by minmax, standardise or
# a logarithm lie far below: ln(x + 3) of the largest 64-bit integer is 44, and its mean is a fraction of that.
LARGE_NUMERICAL = 20.0
# Share of a feature's values in the test rows without an id from which on the report has a note.
MANY_NEW = 0.5
FAR_SECOND = 10**11  # of Unix time: milliseconds since 1973 are beyond it
TRAIN, TEST = "train", "test"
OTHER_WIDTH = 80
"""Columns that names leave to the rest of the table on a wide terminal."""
# Frequency limits for which the report shows the kept values and the rows that they cover.
COVERAGE_LIMITS = (1, 2, 3, 5, 10, 15, 20, 50, 100)


@dataclass(slots=True)
class LabelSum:
    """Sum of a label over the rows of a split: its ones, if it is binary."""

    total: float = 0
    is_binary: bool = True

    def add(self, values: np.ndarray) -> None:
        self.total += np.count_nonzero(values) if self.is_binary else float(values.sum(dtype=float))


@dataclass(slots=True)
class ListCounts:
    empty_items: int = 0  # items without a value
    cut_rows: int = 0  # rows with more items than the hotness, which are cut
    cut_items: int = 0  # items that they lose
    filled_rows: int = 0  # rows with fewer items, which are filled with id 0

    def add(self, lengths: np.ndarray, hotness: int | None) -> None:
        """Count rows of these lengths; none is cut or filled if they are ragged, of hotness None."""
        if hotness is None:
            return
        cut = lengths[lengths > hotness]
        self.cut_rows += len(cut)
        self.cut_items += int(cut.sum()) - len(cut) * hotness
        self.filled_rows += int(np.count_nonzero(lengths < hotness))


@dataclass(slots=True)
class SplitSummary:
    rows: int  # of the split
    # sum of every label; none if the rows have no labels
    labels: dict[str, LabelSum] = field(default_factory=dict)
    zero_ids: dict[str, int] = field(default_factory=dict)  # ids that are 0 per categorical feature
    num_ids: dict[str, int] = field(default_factory=dict)  # ids likewise; absent: one per row
    unseen: dict[str, int] = field(default_factory=dict)
    lists: dict[str, ListCounts] = field(default_factory=dict)  # what became of lists, per feature
    emptied: dict[str, int] = field(default_factory=dict)
    clipped: dict[str, int] = field(default_factory=dict)  # values that `clip` replaced, likewise

    @property
    def document(self) -> dict[str, Any]:
        """The statistics as plain JSON: of labels the ones and their rate, or the mean."""
        labels = {}
        for name, label in self.labels.items():
            mean = self.mean(name)
            ones = {"ones": int(label.total), "rate": mean}
            labels[name] = ones if label.is_binary else {"mean": mean}
        return asdict(self) | {"labels": labels}

    def zero_share(self, name: str) -> float:
        """Return the share of a categorical feature's ids that are 0."""
        return self.zero_ids[name] / max(self.num_ids.get(name, self.rows), 1)

    def rate(self, name: str) -> str:
        """Return the rate of a binary label in per cent, or the mean of another one."""
        mean = self.mean(name)
        return f"{100 * mean:.2f} %" if self.labels[name].is_binary else f"mean {mean:.4g}"

    def mean(self, label: str) -> float:
        return self.labels[label].total / max(self.rows, 1)


@dataclass(slots=True)
class RowEvents:
    rows: int
    without_events: int = 0  # rows that see none
    events: int = 0  # of all rows
    longest: int = 0  # events of a row
    latest: int = 0  # moment of a row, in seconds

    def add(self, lengths: np.ndarray, moments: np.ndarray) -> None:
        self.without_events += int(np.count_nonzero(lengths == 0))
        self.events += int(lengths.sum())
        self.longest = max(self.longest, int(lengths.max(initial=0)))
        self.latest = max(self.latest, int(moments.max(initial=0)))


@dataclass(slots=True)
class LogCounts:
    """Counts of the events of a log: `read` and `carried` are the sum of `events` and the three behind `read`."""

    read: int  # rows of the sources, or of the source of the events
    without_user_or_time: int
    filtered: int  # for which the filter is not true, or which are no training rows
    without_value: int
    carried: int = 0  # of the days before
    events: int = 0  # in the log
    splits: dict[str, RowEvents] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Rows of the sources: `read` is the sum of the others."""

    read: int  # lines of text files, rows of Parquet files, or rows of the query's result
    written: int  # to all splits
    bad: int = 0  # left out by `on_bad`
    without_split: int = 0  # that `table.split` leaves out


@dataclass(slots=True)
class ColumnSummary:
    """Statistics of one feature, over the rows that vocabularies are built on."""

    missing: float  # fraction of the rows without a value
    distinct: int | None = None  # values seen, of a categorical feature
    kept: int | None = None  # of these values, those with an id
    # of a categorical feature, per limit of `COVERAGE_LIMITS` the values seen at least that often and their rows
    coverage: list[list[int]] | None = None
    rows: int = 0  # rows of the statistics
    distribution: Distribution | None = None  # of a numerical feature, as it is stored
    table_rows: int | None = None  # of a categorical feature, over all days


@dataclass(slots=True)
class NumericalRange:
    """Range of a numerical feature over the training rows, after its transforms."""

    rows: int = 0
    smallest: float = float("inf")
    largest: float = float("-inf")
    total: float = 0.0
    total_square: float = 0.0

    def add(self, values: np.ndarray) -> None:
        exact = values.astype(np.float64)
        self.rows += len(exact)
        self.smallest = min(self.smallest, float(exact.min()))
        self.largest = max(self.largest, float(exact.max()))
        self.total += float(exact.sum())
        self.total_square += float(np.square(exact).sum())  # `exact @ exact` would wake threads


class Progress:
    """Prints a line at the end of each phase, and its progress while it runs: in one line of a terminal, per minute in a log."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._started = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._started

    @contextmanager
    def phase(self, name: str) -> Iterator["Phase"]:
        began = time.perf_counter()
        # A `str` would be read as rich's markup.
        with self.console.status(Text(printable(f"{name} ..."))) as status:

            def update(text: str) -> None:
                status.update(Text(printable(text)))

            is_terminal = self.console.is_terminal
            phase = Phase(name, update, 0.2) if is_terminal else Phase(name, self.say)
            yield phase
        seconds = time.perf_counter() - began
        self.console.print(f"{seconds:8.2f} s  {phase.name}", highlight=False, markup=False)

    def warn(self, text: str) -> None:
        self.say(f"warning: {text}")

    def say(self, text: str) -> None:
        print_line(self.console, text)


class Phase:
    """A running phase; `name` may be extended before its end. `interval`: seconds between two lines that it shows."""

    def __init__(self, name: str, show: Callable[[str], object], interval: float = 60) -> None:
        self.name = name  # text printed at its end
        self.detail = ""  # text about the current work
        self.total: float | None = None  # total work, in any unit; None if unknown
        self._show, self._interval = show, interval
        self._began = self._shown = time.monotonic()
        self._first: float | None = None

    def update(self, done: float, rows: int | None = None) -> None:
        """Show that `done` of `total` and `rows` rows are done, unless the last line is too recent."""
        now = time.monotonic()
        if self._first is None:
            self._first = done  # work of an earlier run took no time of this run
        if now - self._shown < self._interval:
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
    table = Table(
        title=f"columns, counted on {counted}",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=0,
    )
    # Names are never cut: they have their width, or at least 20 columns, and the words of a head stand below each other
    # where the terminal is narrow.
    longest = max((len(printable(name)) for name in columns), default=0)
    width = min(longest, max(20, console.width - OTHER_WIDTH))
    table.add_column("column", overflow="fold", width=max(width, len("column")))
    for head in ("missing %", "distinct", "kept", "table rows", "suggested dim"):
        table.add_column(head, justify="right")
    for split in splits:
        table.add_column(f"id 0 in {split} %", justify="right")
    for name, column in columns.items():
        # A name may hold control characters, or what Rich takes for markup.
        cells: list[Text | str] = [Text(printable(name)), f"{100 * column.missing:.2f}"]
        if column.table_rows is not None:
            cells += [f"{n:,}" for n in (column.distinct, column.kept, column.table_rows)]
            cells.append(f"{suggested_embedding_dim(column.table_rows):,}")
            cells += [f"{100 * split.zero_share(name):.2f}" for split in splits.values()]
        table.add_row(*cells)
    console.print(table)


def print_new_values(
    console: Console, splits: dict[str, SplitSummary], *, is_ordered: bool
) -> None:
    """Print one line per categorical feature of which most ids of the test rows, but not of the training rows, are 0."""
    if TRAIN not in splits or TEST not in splits:
        return
    train, test = splits[TRAIN], splits[TEST]
    for name in test.zero_ids:
        in_test, in_train = test.zero_share(name), train.zero_share(name)
        if in_test >= MANY_NEW and in_test >= 2 * in_train:
            advice = "If the files are sorted by it, set table.order_by to their time; "
            print_line(
                console,
                f"note: {100 * in_test:.1f} % of the values of {shown(name)} in the test rows, and {100 * in_train:.1f} % in the "
                f"training rows, have no id: they are new after the training rows. {advice * (not is_ordered)}"
                "split.by=random mixes values that are new in time, too",
            )


def print_splits(console: Console, splits: dict[str, SplitSummary]) -> None:
    """Print the table of splits: rows, and the rate or the mean of every label."""
    table = Table(title="splits", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("split")
    table.add_column("rows", justify="right")
    table.add_column("label", overflow="fold")
    table.add_column("ones", justify="right")
    table.add_column("rate %", justify="right")
    for name, split in splits.items():
        cells = [name, f"{split.rows:,}"]
        for label, found in split.labels.items():
            mean = split.mean(label)
            numbers = ["-", f"mean {mean:.4g}"]
            if found.is_binary:
                numbers = [f"{int(found.total):,}", f"{100 * mean:.3f}"]
            table.add_row(*cells, Text(printable(label)), *numbers)
            cells = ["", ""]
        if not split.labels:
            table.add_row(*cells, "no labels", "-", "-")
    console.print(table)


def print_rows(console: Console, rows: RowCounts, unused: Sequence[str]) -> None:
    """Print what became of the rows that were read, and the columns that no part of the dataset reads."""
    parts = [f"{rows.written:,} written"]
    parts += [f"{rows.bad:,} bad"] if rows.bad else []
    parts += [f"{rows.without_split:,} without a split"] if rows.without_split else []
    print_line(console, f"rows: {rows.read:,} read = {' + '.join(parts)}")
    if unused:
        listed = shortened(", ".join(map(shown, unused)), 400)
        print_line(console, f"columns that are not used: {listed}")


def print_equal_labels(
    console: Console, name: str, label: str, splits: dict[str, SplitSummary]
) -> None:
    """Print one line per split whose binary labels `name` are all the same; `label` is their title."""
    for split_name, split in splits.items():
        if name in split.labels and split.rows and split.labels[name].total in (0, split.rows):
            print_line(
                console,
                f"note: every {label} of the {split_name} rows is {int(split.labels[name].total > 0)}: nothing to "
                f"{'learn' if split_name == TRAIN else 'score'}; check the column or expression of the label",
            )


def print_changes(console: Console, table: TableConfig, splits: Mapping[str, SplitSummary]) -> None:
    """Print one line per feature whose values or items were left out, emptied, cut or filled."""
    rows = sum(split.rows for split in splits.values())
    for numerical in table.numerical:
        lost = sum(split.emptied.get(numerical.name, 0) for split in splits.values())
        if lost:
            print_line(
                console,
                f"note: log is not defined for {lost:,} of {rows:,} values of {shown(numerical.name)}, which are missing from "
                "there on: 0, or what a fill after it says; clip before it, or raise its shift",
            )
    for feature in table.categorical:
        counts = [
            split.lists[feature.name] for split in splits.values() if feature.name in split.lists
        ]
        empty, cut, lost, filled = (
            sum(getattr(count, key) for count in counts)
            for key in ("empty_items", "cut_rows", "cut_items", "filled_rows")
        )
        if empty:
            rule = (
                "are no ids"
                if table.drops_empty(feature.name)
                else "have id 0"
                + ", as in the fit of an earlier version; fit again to leave them out"
                * (table.empty_items == "unknown")
            )
            print_line(console, f"note: {empty:,} empty items of {shown(feature.name)} {rule}")
        if cut or filled:
            end = "last" if feature.take == "first" else "first"
            print_line(
                console,
                f"note: {shown(feature.name)} has hotness {feature.hotness}: {cut:,} of {rows:,} rows are longer and lose "
                f"their {end} items, {lost:,} in total; {filled:,} are shorter and end with id 0",
            )


def print_events(console: Console, logs: Mapping[str, LogCounts]) -> None:
    """Print two lines per log: what became of the events, and what the rows of each split see."""
    for name, log in logs.items():
        of_splits = [
            f"{split}: mean {seen.events / max(seen.rows, 1):.1f}, at most {seen.longest:,}, none in "
            f"{100 * seen.without_events / max(seen.rows, 1):.1f} % of the rows"
            for split, seen in log.splits.items()
        ]
        print_line(console, f"{shown(name)}: events per row of {'; '.join(of_splits)}")
        latest = max(seen.latest for seen in log.splits.values())
        if latest >= FAR_SECOND:
            print_line(
                console,
                f"note: times of {shown(name)} count seconds, and one is {latest:,}, after the year 5000; if they are "
                "milliseconds, divide them in order_by, as CAST(time AS BIGINT) / 1000",
            )
        if not log.read:  # lists of the rows
            continue
        parts = [f"{log.events:,} events"]
        parts += [
            f"{count:,} {what}"
            for count, what in (
                (log.without_user_or_time, "without a user or a time"),
                (log.filtered, "that the filter leaves out"),
                (log.without_value, "without a value"),
            )
            if count
        ]
        carried = f" + {log.carried:,} carried from the days before" * bool(log.carried)
        print_line(console, f"{shown(name)}: {log.read:,} rows read{carried} = {' + '.join(parts)}")


def print_notes(console: Console, ranges: dict[str, NumericalRange]) -> None:
    """Print one line per numerical feature that is large for a model."""
    for name, found in ranges.items():
        mean, square = (total / max(found.rows, 1) for total in (found.total, found.total_square))
        if square > LARGE_NUMERICAL**2:
            deviation = max(square - mean**2, 0.0) ** 0.5
            print_line(
                console,
                f"note: numerical feature {shown(name)} is not scaled: {found.smallest:g} to {found.largest:g}, "
                f"mean {mean:.4g}, standard deviation {deviation:.4g} in the training rows, which makes "
                "training unstable; add standardise, minmax or {log: 1} to its transforms",
            )


def print_result(progress: Progress, output: Path, rows: int) -> None:
    size = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    print_line(
        progress.console,
        f"{rows:,} rows in {progress.seconds:.2f} s ({rows / progress.seconds:,.0f} rows/s), "
        f"{size / 1e6:,.1f} MB written to {output}",
    )
