"""What a run tells: a line a stage while it goes on, a table at the end."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table


@dataclass(slots=True)
class SplitSummary:
    """One split: its rows, those labelled 1, and how many ids of each categorical feature are 0."""

    rows: int
    clicks: int = 0
    zero_ids: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class ColumnSummary:
    """One feature over the rows that vocabularies are built on.

    Attributes:
        missing: part of the rows without a value.
        distinct: values seen, of a categorical feature.
        kept: values with an id of their own, of a categorical feature.
    """

    missing: float
    distinct: int | None = None
    kept: int | None = None


class Progress:
    """Prints a line as each stage ends; on a terminal the running stage is shown below it."""

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
        with self.console.status(f"{name} ...") as status:
            stage = Stage(name, status.update)
            yield stage
        seconds = time.perf_counter() - began
        self.console.print(f"{seconds:8.2f} s  {stage.name}", highlight=False, markup=False)


class Stage:
    """A stage that runs; `name` may be completed before it ends."""

    def __init__(self, name: str, show) -> None:
        self.name = name
        self._show = show

    def update(self, detail: str) -> None:
        """Show what the stage is busy with (on a terminal only)."""
        self._show(f"{self.name}: {detail} ...")


def print_columns(
    console: Console,
    columns: dict[str, ColumnSummary],
    splits: dict[str, SplitSummary],
    counted: str,
) -> None:
    """Print the table of feature columns.

    Args:
        console: where to.
        columns: one entry a feature.
        splits: the splits as they were written.
        counted: the rows that `columns` describes, in words.
    """
    table = Table(title=f"columns, counted on {counted}", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("column")
    for head in ("missing %", "distinct", "kept", "table rows"):
        table.add_column(head, justify="right")
    for split in splits:
        table.add_column(f"id 0 in {split} %", justify="right")
    for name, column in columns.items():
        cells = [name, f"{100 * column.missing:.2f}"]
        if column.distinct is not None and column.kept is not None:
            cells += [f"{column.distinct:,}", f"{column.kept:,}", f"{column.kept + 1:,}"]
            cells += [f"{100 * each.zero_ids[name] / each.rows:.2f}" for each in splits.values()]
        table.add_row(*cells)
    console.print(table)


def print_splits(console: Console, splits: dict[str, SplitSummary]) -> None:
    """Print the table of splits: rows and click rate."""
    table = Table(title="splits", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("split")
    for head in ("rows", "clicks", "click rate %"):
        table.add_column(head, justify="right")
    for name, split in splits.items():
        rate = f"{100 * split.clicks / split.rows:.3f}"
        table.add_row(name, f"{split.rows:,}", f"{split.clicks:,}", rate)
    console.print(table)


def print_result(console: Console, progress: Progress, output: Path, rows: int) -> None:
    """Print where the dataset stands, its size and the speed of the whole run."""
    size = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    console.print(
        f"{rows:,} rows in {progress.seconds:.2f} s ({rows / progress.seconds:,.0f} rows/s), "
        f"{size / 1e6:,.1f} MB written to {output}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
