"""Layout of terminal output: titles beside texts, tables without trailing blanks, numbers as ranges."""

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text


def grid(lines: Mapping[str, str | Text]) -> Table:
    """Return two columns: titles, and texts that are folded at the width of the terminal."""
    columns = Table.grid(padding=(0, 2))
    columns.add_column(style="dim", no_wrap=True)
    columns.add_column(overflow="fold")
    for title, text in lines.items():
        columns.add_row(title, text)
    return columns


def bare_table(texts: Sequence[str] = (), numbers: Sequence[str] = ()) -> Table:
    """Return a table without lines but that below its titles: columns of texts, which are folded, and of numbers."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for name in texts:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def print_columns(console: Console, columns: Table) -> None:
    """Print a table; strip rich's trailing blanks unless the output is a terminal."""
    if console.is_terminal:
        console.print(columns)
        return
    with console.capture() as captured:
        console.print(columns)
    for line in captured.get().splitlines():
        console.print(line.rstrip(), soft_wrap=True)


def ranges(numbers: Sequence[int]) -> str:
    """Format integers as ranges: (0, 1, 2, 3, 6) as `0-3, 6`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)
