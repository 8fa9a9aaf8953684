"""The directory a run works in, and the record of what is done in it: a killed run goes on from there.

`.OUT.preproc` beside the output, or below `temp_directory`, holds staged columns, DuckDB's file and
`state.json`. The state is replaced by rename after what it says is done has reached the disk, so at
any moment it is true; what stands beyond it is cut off or written again.
"""

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb

from configs.preproc_schema import PreprocConfig

STATE = "state.json"
UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
BINARY_UNITS = {"KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
DEFAULT_SHARE = 0.8


class Work:
    """What a run has recorded. `state` is plain JSON; call `save` after each step that is complete."""

    def __init__(self, directory: Path, state: dict[str, Any]) -> None:
        self.directory = directory
        self.state = state

    def save(self) -> None:
        """Write the state by rename, synced."""
        temporary = self.directory / f"{STATE}.new"
        with temporary.open("w") as stream:
            stream.write(json.dumps(self.state))
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(self.directory / STATE)

    def forget(self) -> None:
        """Drop the record, for a run that cannot be gone on with."""
        (self.directory / STATE).unlink(missing_ok=True)

    @property
    def has_progress(self) -> bool:
        """Whether something is recorded that a next run can go on from."""
        return (self.directory / STATE).exists()


def work_directory_of(config: PreprocConfig, output: Path) -> Path:
    """Return the directory that a run to `output` works in."""
    parent = Path(config.temp_directory).absolute() if config.temp_directory else output.parent
    return parent / f".{output.name}.preproc"


def growing_dataset(output: Path) -> Path:
    """Return where the dataset grows until it is renamed to `output`: on the same file system."""
    return output.with_name(f".{output.name}.partial-preproc")


@contextmanager
def work_directory(config: PreprocConfig, output: Path, identity: dict[str, Any]) -> Iterator[Work]:
    """Open the work directory of `output`; it is removed when the run is complete.

    A run that ends otherwise leaves it if it has recorded something. The next one goes on from there
    if its `identity`, everything but files that the bytes of the dataset depend on, is the same, and
    starts anew otherwise.

    Raises:
        ValueError: another run holds the directory, DuckDB runs out of memory or disk.
    """
    directory = work_directory_of(config, output)
    directory.mkdir(parents=True, exist_ok=True)
    lock = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another run is staging {output} in {directory}; wait for it, or choose another "
                "output"
            ) from None
        work = Work(directory, _recorded(directory, identity))
        if not work.has_progress:
            clear(directory)
            shutil.rmtree(growing_dataset(output), ignore_errors=True)
        try:
            yield work
        except BaseException:
            if not work.has_progress:
                shutil.rmtree(directory)
                shutil.rmtree(growing_dataset(output), ignore_errors=True)
            raise
        shutil.rmtree(directory)
    except duckdb.OutOfMemoryException as error:
        raise ValueError(
            "DuckDB ran out of memory; raise memory_limit "
            f"(now {config.memory_limit or '80 % of all'}) or lower threads: {first_line(error)}"
        ) from None
    except duckdb.IOException as error:
        raise ValueError(
            f"DuckDB could not read or write in {directory}; free some space there, or move it with "
            f"temp_directory: {first_line(error)}"
        ) from None
    except RuntimeError as error:
        # DuckDB's answer to Ctrl-C while a query runs.
        if str(error) == "Query interrupted":
            raise KeyboardInterrupt from None
        raise
    finally:
        os.close(lock)


def _recorded(directory: Path, identity: dict[str, Any]) -> dict[str, Any]:
    """Return the state that stands in `directory`, or a new one; an old one that differs is removed."""
    identity = json.loads(json.dumps(identity))
    path = directory / STATE
    try:
        state = json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        state = {}
    if state.get("identity") != identity:
        path.unlink(missing_ok=True)
        state = {"identity": identity}
    return state


def clear(directory: Path) -> None:
    """Remove everything in `directory`."""
    for stale in directory.iterdir():
        shutil.rmtree(stale) if stale.is_dir() else stale.unlink()


def memory_bytes(config: PreprocConfig) -> int:
    """Return `memory_limit` in bytes; without one, 80 % of the machine's memory.

    Raises:
        ValueError: it is no size.
    """
    if config.memory_limit is None:
        return int(DEFAULT_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B", config.memory_limit.upper())
    factor = (UNITS | BINARY_UNITS).get(match[2]) if match else None
    if match is None or factor is None:
        raise ValueError(
            f"memory_limit={config.memory_limit}: write it as 8GB or 512MB (a number and a unit)"
        )
    return int(float(match[1]) * factor)


def connect(config: PreprocConfig, directory: Path, memory: int) -> duckdb.DuckDBPyConnection:
    """Return an empty database in `directory` that may use `memory` bytes and spills there."""
    for stale in (directory / "staging.duckdb", directory / "staging.duckdb.wal"):
        stale.unlink(missing_ok=True)
    shutil.rmtree(directory / "spill", ignore_errors=True)
    settings: dict[str, str | bool | int] = {
        "temp_directory": str(directory / "spill"),
        "preserve_insertion_order": False,
        "autoinstall_known_extensions": False,
        "memory_limit": f"{memory}B",
    }
    if config.threads:
        settings["threads"] = config.threads
    return duckdb.connect(str(directory / "staging.duckdb"), config=settings)


def check_disk(directory: Path, needed_bytes: float, what: str) -> None:
    """Raise ValueError, before anything is written, if `directory` has too little space for `what`."""
    while not directory.exists():
        directory = directory.parent
    free = shutil.disk_usage(directory).free
    if needed_bytes > free:
        raise ValueError(
            f"{what} needs about {needed_bytes / 1e9:,.2f} GB at {directory}, where "
            f"{free / 1e9:,.2f} GB are free; free some, or move output or temp_directory"
        )


def first_line(error: Exception | str) -> str:
    """Return the first line of a message of DuckDB's."""
    return str(error).splitlines()[0]
