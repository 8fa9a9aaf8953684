"""The DuckDB file that raw logs are staged in: made for one run, and gone with it."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import duckdb

from configs.preproc_schema import PreprocConfig


def staging_directory(parent: Path, output: Path) -> Path:
    """Return the directory below `parent` that a run to `output` stages in."""
    return parent / f".{output.name}.preproc"


@contextmanager
def staging_database(config: PreprocConfig, output: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open an empty database in a directory of its own, which goes away with it.

    The directory's name follows from the output's, so a run that was killed leaves at most one
    behind, and the next run to the same output clears it.

    Raises:
        ValueError: another run holds the directory, `memory_limit` is no size, DuckDB runs out of
            memory or disk.
    """
    parent = Path(config.temp_directory) if config.temp_directory else output.parent
    directory = staging_directory(parent, output)
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
        for stale in directory.iterdir():
            shutil.rmtree(stale) if stale.is_dir() else stale.unlink()
        try:
            with _connect(config, directory) as connection:
                yield connection
        finally:
            shutil.rmtree(directory)
    except duckdb.OutOfMemoryException as error:
        raise ValueError(
            "DuckDB ran out of memory; raise memory_limit "
            f"(now {config.memory_limit or '80 % of all'}) or lower threads: {_first_line(error)}"
        ) from None
    except duckdb.IOException as error:
        raise ValueError(
            f"DuckDB could not read or write in {directory}, where it needs about as much free "
            f"space as the raw text has; temp_directory moves it: {_first_line(error)}"
        ) from None
    except RuntimeError as error:
        # DuckDB's answer to Ctrl-C while a query runs.
        if str(error) == "Query interrupted":
            raise KeyboardInterrupt from None
        raise
    finally:
        os.close(lock)


def _connect(config: PreprocConfig, directory: Path) -> duckdb.DuckDBPyConnection:
    settings: dict[str, str | bool | int] = {
        "temp_directory": str(directory / "spill"),
        "preserve_insertion_order": True,
        "autoinstall_known_extensions": False,
    }
    if config.threads:
        settings["threads"] = config.threads
    if config.memory_limit:
        settings["memory_limit"] = config.memory_limit
    try:
        return duckdb.connect(str(directory / "staging.duckdb"), config=settings)
    except (duckdb.InvalidInputException, duckdb.ParserException) as error:
        raise ValueError(
            f"memory_limit={config.memory_limit}: write it as 8GB or 512MB ({_first_line(error)})"
        ) from None


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
