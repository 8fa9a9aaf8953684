"""Output of preprocessing: names from files are shown as they are written, on one line, without control characters."""

import io

import pytest

from configs.console import LiteralConsole
from preproc.report.console import (
    ColumnSummary,
    LabelSum,
    Progress,
    SplitSummary,
    print_columns,
    print_splits,
)

HOSTILE = "[red]x[/y]\x1b[31m\nerror: all is well\r:smile:"
ESCAPED = r"[red]x[/y]\x1b[31m\nerror: all is well\r:smile:"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_names_reach_the_terminal_as_they_are_written_and_never_raw(is_terminal):
    stream = io.StringIO()
    console = LiteralConsole(
        file=stream, width=400, force_terminal=is_terminal, color_system=None, legacy_windows=False
    )
    progress = Progress(console)
    with progress.phase(f"counting {HOSTILE}") as phase:
        phase._shown = 0.0
        phase.update(1, 1)
    column = ColumnSummary(0.0, 1, 1, [], 1, table_rows=2)
    split = SplitSummary(1, {HOSTILE: LabelSum()}, {HOSTILE: 0})
    print_columns(console, {HOSTILE: column}, {HOSTILE: split}, HOSTILE)
    print_splits(console, {HOSTILE: split})
    text = stream.getvalue()
    assert text.count(ESCAPED) >= 7
    assert "\x1b[31m" not in text
    assert not [line for line in text.splitlines() if line.strip().startswith("error:")]


@pytest.mark.parametrize("width", [80, 120, 200])
def test_no_number_of_the_table_is_cut(width):
    stream = io.StringIO()
    console = LiteralConsole(file=stream, width=width, color_system=None, legacy_windows=False)
    names = ["scheduled_time", "a" * 30, "city"]
    columns = {
        name: ColumnSummary(0.1234, 123_456, 65_432, [], 1, table_rows=65_433) for name in names
    }
    splits = {name: SplitSummary(1000, {}, dict.fromkeys(names, 825)) for name in ("train", "test")}
    print_columns(console, columns, splits, "train rows")
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    for line in lines:
        if "12.34" in line:
            assert line.split()[-7:] == [
                "12.34",
                "123,456",
                "65,432",
                "65,433",
                "512",
                "82.50",
                "82.50",
            ]
    assert sum("12.34" in line for line in lines) == 3
