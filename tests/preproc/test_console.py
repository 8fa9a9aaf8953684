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
    column = ColumnSummary(0.0, 1, 1, [], 1)
    split = SplitSummary(1, {HOSTILE: LabelSum()}, {HOSTILE: 0})
    print_columns(console, {HOSTILE: column}, {HOSTILE: split}, HOSTILE)
    print_splits(console, {HOSTILE: split})
    text = stream.getvalue()
    assert text.count(ESCAPED) >= 7
    assert "\x1b[31m" not in text
    assert not [line for line in text.splitlines() if line.strip().startswith("error:")]
