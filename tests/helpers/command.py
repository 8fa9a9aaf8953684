"""Calls of the recipe's command line, in this process (which takes tenths of a second) or in a new one."""

import io
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Ended:
    """Exit code and output of a command."""

    exit_code: int
    out: str
    err: str


@contextmanager
def kept_signals() -> Iterator[None]:
    """Restore the handlers of signals, which a command replaces for its process."""
    signums = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = {signum: signal.getsignal(signum) for signum in signums}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def run_command(*arguments: str, recipe: str = "dlrm") -> Ended:
    """Run `<recipe>.py <arguments>` in this process, without the wait of a silent rank for its launcher."""
    out, err = io.StringIO(), io.StringIO()
    exit_code = 0
    with (
        kept_signals(),
        redirect_stdout(out),
        redirect_stderr(err),
        patch.object(sys, "argv", [f"{recipe}.py", *arguments]),
        patch.dict(os.environ, COLUMNS="200"),
        patch("main.SILENT_RANK_WAIT_S", 0),
    ):
        try:
            runpy.run_path(str(ROOT / f"{recipe}.py"), run_name="__main__")
        except SystemExit as end:
            exit_code = end.code
    return Ended(exit_code, out.getvalue(), err.getvalue())


def start_command(*command: str, directory: Path) -> Ended:
    """Run `python <command>` in `directory`, as a shell would."""
    environment = os.environ | {"COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return Ended(done.returncode, done.stdout, done.stderr)
