"""Command `python -m status`: what runs are doing, one or a directory of them; for people, and with `--json` for programs."""

if __name__ == "__main__":
    # First, since the imports below take a moment.
    from configs.stop_signals import end_at_once_on_signals

    end_at_once_on_signals()

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta

from rich import box
from rich.table import Table

from compare.run_record import find_runs
from configs.command_line import errors_end_command
from configs.console import command_console, print_line
from status.run_status import RunStatus, read_status

COLUMNS = ("run", "state", "step", "samples/s", "left", "checkpoint", "delta", "last record")
PIPE_WIDTH = 200
"""Columns of a table in a file or a pipe: runs have long paths."""


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m status",
        description="State, step, rate, time left, last checkpoint, delta and error of runs.",
    )
    parser.add_argument("runs", nargs="*", default=["runs"], help="run directories, or folders")
    parser.add_argument("--json", action="store_true", help="one JSON list of objects")
    arguments = parser.parse_args()
    with errors_end_command():
        found = [read_status(path) for path in find_runs(arguments.runs)]
        if arguments.json:
            print(json.dumps([asdict(status) for status in found], indent=2))
        else:
            print_status(found)


def print_status(found: Sequence[RunStatus]) -> None:
    """Print a line per fact of one run, or a row per run of several, and their errors."""
    console = command_console(PIPE_WIDTH)
    if len(found) == 1:
        for name, value in zip(COLUMNS, _cells(found[0]), strict=True):
            print_line(console, f"{name:<12}{value}")
    else:
        table = Table(*COLUMNS, box=box.SIMPLE_HEAD)
        for status in found:
            table.add_row(*_cells(status))
        console.print(table)
    for status in found:
        if status.error is not None:
            name = "error       " if len(found) == 1 else f"{status.run}: {status.state}: "
            print_line(console, f"{name}{status.error}")


def _cells(status: RunStatus) -> list[str]:
    rate = "-" if status.samples_per_s is None else f"{status.samples_per_s:,.0f}"
    left = "-" if status.left_s is None else str(timedelta(seconds=round(status.left_s)))
    restarts = f", {status.restarts} restart{'s' * (status.restarts > 1)}" * bool(status.restarts)
    return [
        status.run,
        status.state + restarts,
        f"{status.step:,}/{'?' if status.last_step is None else f'{status.last_step:,}'}",
        rate,
        left,
        "-" if status.checkpoint is None else f"step {status.checkpoint:,}",
        "-" if status.delta is None else f"step {status.delta:,}",
        "-" if status.record_s is None else f"{timedelta(seconds=round(status.record_s))} ago",
    ]


if __name__ == "__main__":
    main()
