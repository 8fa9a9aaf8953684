"""Terminal output of `mode=predict`: progress as a bar, or as a line every ten seconds in a file or a pipe, and the result."""

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from configs.messages import printable
from configs.schema import Config
from nn.observability.bar import WithBar
from nn.observability.layout import grid, print_columns
from nn.scores.request import shown_output

LINE_EVERY_S = 10.0
MIB = 1 << 20


class RowProgress(WithBar):
    """Progress of a pass over rows; a context manager that removes the bar at its end.

    `total`: rows of the pass; None if they are not known.
    """

    def __init__(self, console: Console, total: int | None, done: int) -> None:
        self._console = console
        self._total = total
        self._first = done
        self._started = self._last_line = time.perf_counter()
        columns = (MofNCompleteColumn(), BarColumn(None), TextColumn("rows"), TimeRemainingColumn())
        super().__init__(console, *columns)
        if self.bar is not None:
            self._task = self.bar.add_task("", total=total, completed=done)

    def advance(self, done: int) -> None:
        if self.bar is not None:
            self.bar.update(self._task, completed=done)
            return
        now = time.perf_counter()
        if now - self._last_line >= LINE_EVERY_S:
            self._last_line = now
            speed = (done - self._first) / (now - self._started)
            total = "" if self._total is None else f"/{self._total:,}"
            self._console.print(f"row {done:,}{total}  {speed:,.0f} rows/s")


def print_scores(console: Console, config: Config, written: Mapping[str, Any]) -> None:
    seconds = written["seconds"]
    speed = written["scored_rows"] / seconds
    waited = [
        f"{written[key] / seconds:.0%} of it waiting for {what}"
        for key, what in (("data_wait_s", "the data"), ("file_wait_s", "the file"))
    ]
    earlier = written["rows"] - written["scored_rows"]
    of_earlier = f", {earlier:,} of them by an earlier start" if earlier else ""
    num_bytes = written["bytes"]
    size = f"{num_bytes / MIB:,.1f} MiB" if num_bytes >= MIB else f"{num_bytes:,} bytes"
    lines: dict[str, str | Text] = {
        "scores": f"{written['rows']:,} rows{of_earlier}",
        "speed": f"{speed:,.0f} rows/s, {seconds:.1f} s, {', '.join(waited)}",
        "written to": Text(f"{printable(shown_output(config))}, {size}"),
    }
    console.print(Text("\nresult", style="bold"))
    print_columns(console, grid(lines))
