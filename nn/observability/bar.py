"""A progress bar at the bottom of a terminal."""

from typing import Self

from rich.console import Console
from rich.progress import Progress, ProgressColumn


class WithBar:
    """Context manager that shows a bar on a terminal, and removes it at its end.

    `bar`: None where the output is a file, a pipe, or none.
    """

    def __init__(self, console: Console, *columns: ProgressColumn) -> None:
        self.bar: Progress | None = None
        if console.is_terminal and not console.is_dumb_terminal and not console.quiet:
            # Rendering holds the GIL and delays the work, so refresh only 4 times per second.
            self.bar = Progress(*columns, console=console, expand=True, refresh_per_second=4)

    def __enter__(self) -> Self:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.bar is not None:
            self.bar.stop()
