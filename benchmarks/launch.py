"""Start of a benchmark: options, output, and a launcher with a clean end, since ranks left on a GPU would spoil the next one."""

import os
import re
import shlex
import signal
import subprocess
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median
from types import MappingProxyType

from dataloading.dataset.durable_files import exclusive


def command_parser(description: str | None) -> ArgumentParser:
    """Return a parser whose help begins with the docstring of a module, as it is written."""
    return ArgumentParser(description=description, formatter_class=RawDescriptionHelpFormatter)


@contextmanager
def held_output(directory: Path) -> Iterator[None]:
    """Create the directory of the results and keep other processes from writing it; one message if one does."""
    with ExitStack() as stack:
        try:
            stack.enter_context(exclusive(directory, f"is writing {directory}"))
            directory.mkdir(exist_ok=True)
        except (ValueError, OSError) as error:
            sys.exit(f"error: {error}")
        yield


def writer_options(
    description: str | None,
    defaults: Mapping[str, str],
    choices: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> dict[str, str]:
    """Return the options `KEY=VALUE` of a command that writes files."""
    options = dict(defaults)
    parser = command_parser(description)
    others = " ".join(key for key in options if key != "output")
    parser.add_argument("option", nargs="+", help=f"output=DIR {others}")
    for option in parser.parse_args().option:
        key, equals, value = option.partition("=")
        is_valid = key == "output" or (value in choices[key] if key in choices else value.isdigit())
        if key not in options or not equals or not is_valid:
            wanted = [f"{name}={'|'.join(choices.get(name, ['...']))}" for name in options]
            parser.error(f"got {option!r}, want one of {', '.join(wanted)}")
        options[key] = value
    if not options["output"]:
        parser.error("no output: set output=DIR")
    return options


@contextmanager
def launched(command: list[str], log: Path) -> Iterator[subprocess.Popen]:
    """Start a command whose output goes to `log`; at the end, kill it and all its descendants if it is still running.

    The signal is SIGKILL: ranks would save a checkpoint at SIGTERM, and a killed launcher does not end its ranks.
    """
    with log.open("a") as stream:
        launcher = subprocess.Popen(command, stdout=stream, stderr=stream)
    try:
        yield launcher
    finally:
        if launcher.poll() is None:
            # Stopped, so that it starts no process while its descendants are listed.
            launcher.send_signal(signal.SIGSTOP)
            pids = started_by(launcher.pid)
            launcher.kill()
            launcher.wait()
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def ends_well(command: list[str], log: Path, timeout_s: float) -> bool:
    """Run a command; return whether it ends well within the time, and print the errors of its log if not."""
    log.write_text(shlex.join(command) + "\n")
    with launched(command, log) as launcher:
        try:
            exit_code = launcher.wait(timeout_s)
        except subprocess.TimeoutExpired:
            print(f"no end within {timeout_s:g} s, see {log}", file=sys.stderr)
            return False
    if exit_code:
        print(f"exit code {exit_code}, see {log}", file=sys.stderr)
        lines = log.read_text().splitlines()
        # The last lines of the log are the launcher's own traceback.
        errors = [line for line in lines if re.match(r"error: |[\w.]+Error\b", line)]
        print("\n".join(errors or lines[-15:]), file=sys.stderr)
    return exit_code == 0


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"min": min(values), "median": median(values), "max": max(values)}


def started_by(pid: int) -> list[int]:
    """Return the ids of all descendants of a process."""
    own = children(pid)
    return own + [pid for child in own for pid in started_by(child)]


def children(pid: int) -> list[int]:
    """Return the ids of the children of a process in order of start; none if the process has ended."""
    pids: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the process has ended meanwhile
            pids += map(int, path.read_text().split())
    return sorted(pids)
