"""The work directory of a run, and its record of completed steps, from which a killed run resumes.

The directory is `.OUT.preproc` beside the output, or below `temp_directory`. It holds the column store,
DuckDB's file and `state.json`. The state is replaced by rename once the work that it records is on disk, so
it is true at any moment. Data beyond the record is truncated or written again.

The state has a checksum of itself and of every file that it records. A run that resumes compares all of them first, and
restarts if one differs.
"""

import errno
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import duckdb

from configs.messages import first_line
from configs.preproc_schema import PreprocConfig
from dataloading.dataset.dataset_directory import check_output
from dataloading.dataset.documents import read_json
from dataloading.dataset.durable_files import (
    clear_leftovers,
    exclusive,
    partial_sibling,
    replace_text,
    sync_file,
)
from dataloading.dataset.feature_spec import SPEC_NAME
from preproc.column_store import size_and_crc32
from preproc.report.console import Phase, Progress

Settings = dict[str, str | bool | int | float | list[str]]
STATE = "state.json"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
BROKEN = (errno.EIO, errno.EROFS, errno.ESTALE, errno.ENODEV, errno.ENXIO)
UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
BINARY_UNITS = {"KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
DEFAULT_SHARE = 0.8
# With less memory, batches of rows are smaller, and columns are processed one after another.
SMALL_BYTES = 2 << 30


class Work:
    """Record of a run. `state` is plain JSON; call `save` after each step that is complete."""

    def __init__(self, directory: Path, dataset: Path, state: dict[str, Any]) -> None:
        self.directory = directory  # path of the work directory
        self.dataset = dataset
        # the record. Its `files` lists the complete files of the dataset, in the form of `metadata.files`, and `checked` the
        # files of the work directory, each as its parts in order: [bytes, CRC-32], or [bytes, null] for a part that is being
        # rewritten. A file of `growing` may be longer than its parts.
        self.state = state
        for key, empty in (("files", {}), ("checked", {}), ("growing", [])):
            state.setdefault(key, empty)

    def save(self) -> None:
        # Syncing the directory also covers the names of all files that the state lists.
        path = self.directory / STATE
        text = json.dumps(self.state)
        record = f'{{"crc32": {zlib.crc32(text.encode())}, "state": {text}}}'
        replace_text(path, record)

    def synced_records(
        self, path: Path, known: Mapping[str, dict[str, Any]] | None = None
    ) -> dict[str, list[list[int]]]:
        """Sync a file of the work directory, or a directory and all files in it; return their entries of `checked`.

        `known`: bytes and CRC-32 of some files of the directory, computed as these were written.
        """
        files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
        for written in {*files, path, *path.rglob("*"), path.parent}:
            sync_file(written)
        known_parts = {
            path / name: [record["bytes"], int(record["crc32"], 16)]
            for name, record in (known or {}).items()
        }
        return {
            file.relative_to(self.directory).as_posix(): [
                known_parts.get(file) or list(size_and_crc32(file))
            ]
            for file in files
        }

    def restart(self) -> None:
        """Drop the record and the files of the dataset, but not the identity of the run."""
        for key in set(self.state) - {"identity", "dataset"}:
            del self.state[key]
        self.state |= {"files": {}, "checked": {}, "growing": []}
        clear(self.dataset)

    def forget(self) -> None:
        """Drop the record of a run that cannot be resumed."""
        (self.directory / STATE).unlink(missing_ok=True)

    def record_complete(self, config: PreprocConfig) -> None:
        """Record the CRC-32 of the spec, just before the dataset is renamed to the output."""
        self.state["complete"] = {"spec": _crc32_of_spec(self.dataset), "options": _options(config)}
        self.save()

    @property
    def has_progress(self) -> bool:
        """Return whether a next run can resume from this record."""
        return (self.directory / STATE).exists()


def work_directory_of(config: PreprocConfig, output: Path) -> Path:
    parent = Path(config.temp_directory).absolute() if config.temp_directory else output.parent
    return parent / f".{output.name}.preproc"


@contextmanager
def work_directory(
    config: PreprocConfig, output: Path, identity: dict[str, Any], progress: Progress
) -> Iterator[Work]:
    """Open the work directory of `output`; it is removed when the run is complete.

    A run that fails leaves it if it has recorded something. The next run resumes from there if its output and its
    `identity` are the same and the recorded files are intact. Otherwise it restarts; a damaged record is reported. The
    identity is every option that the bytes of the dataset depend on. Raises ValueError: another run holds the directory
    or writes to `output`, DuckDB runs out of memory or disk.
    """
    directory = work_directory_of(config, output)
    try:
        # Runs to other outputs of the same name may share the work directory.
        with (
            exclusive(output, f"is writing {output}") as alone,
            exclusive(directory, f"is staging {output} in {directory}"),
        ):
            # Again: another process may have written it meanwhile.
            check_output(output, config.overwrite)
            if directory.is_symlink():  # its content, which may be anybody's, would be removed
                raise ValueError(
                    f"{directory} is a symbolic link; remove it, or set temp_directory"
                )
            directory.mkdir(exist_ok=True)
            work = _opened(directory, output, identity, progress)
            try:
                # Partial datasets of runs with another work directory: the last run to start counts.
                if alone and clear_leftovers(output, but=work.dataset):
                    raise ValueError(
                        f"another process is writing {output}; wait for it, or choose another output"
                    )
                yield work
            except BaseException:
                if not work.has_progress:
                    shutil.rmtree(directory)
                    shutil.rmtree(work.dataset, ignore_errors=True)
                raise
            _remove(directory, output)
    except duckdb.OutOfMemoryException as error:
        raise ValueError(
            "DuckDB ran out of memory; raise memory_limit "
            f"(now {config.memory_limit or '80 % of all'}) or lower threads: {first_line(error)}"
        ) from None
    except duckdb.Error as error:
        if not is_disk_error(error):
            raise
        is_full = any(os.strerror(code) in str(error) for code in FULL)
        remedy = "free some space there" if is_full else "check that disk"
        raise ValueError(
            f"DuckDB could not read or write in {directory}; {remedy} and rerun the same command (it resumes), or move "
            f"the directory with temp_directory: {first_line(error)}"
        ) from None
    except RuntimeError as error:
        # DuckDB's answer to Ctrl-C while a query runs.
        if str(error) == "Query interrupted":
            raise KeyboardInterrupt from None
        raise


def finish_killed_run(config: PreprocConfig, output: Path) -> bool:
    """Remove the work directory of a run killed after it had completed `output`; return whether it was of this command."""
    directory = work_directory_of(config, output)
    if not directory.is_dir():
        return False
    with (
        exclusive(output, f"is writing {output}"),
        exclusive(directory, f"is staging {output} in {directory}"),
    ):
        try:
            complete = _read_state(directory / STATE).get("complete", {})
        except (FileNotFoundError, ValueError):  # the output is complete, whatever this record was
            complete = {}
        is_its_output = complete.get("spec") == _crc32_of_spec(output)
        if not (is_its_output and complete.get("options") == _options(config)):
            with suppress(OSError):  # not empty: the record of another command
                directory.rmdir()
            return False
        _remove(directory, output)
    return True


def _remove(directory: Path, output: Path) -> None:
    """Remove the work directory of a complete run; its record last, by which the next start knows that it is complete."""
    try:
        clear(directory, but=STATE)
        (directory / STATE).unlink(missing_ok=True)
        directory.rmdir()
    except OSError as error:
        raise ValueError(
            f"{output} is complete, but {directory} could not be removed ({error}); rerun the same command, which removes it"
        ) from None


def _crc32_of_spec(directory: Path) -> int:
    return zlib.crc32((directory / SPEC_NAME).read_bytes())


def _options(config: PreprocConfig) -> dict[str, Any]:
    """Return all options as plain JSON, and the directory that relative paths begin at."""
    options = json.loads(json.dumps(asdict(config), default=str))
    return options | {"directory": os.getcwd()}


def _opened(directory: Path, output: Path, identity: dict[str, Any], progress: Progress) -> Work:
    """Return the record in `directory`, or a new one if it is of another run or its files are not intact."""
    identity = json.loads(json.dumps({**identity, "output": str(output)}))
    try:
        state = _read_state(directory / STATE)
        if state.get("identity") == identity:
            work = Work(directory, output.with_name(state["dataset"]), state)
            if not work.dataset.is_dir():
                raise ValueError(f"{work.dataset}, the files so far, is missing or no directory")
            with progress.phase(f"compare {directory} with its record") as phase:
                compare(work, phase)
            return work
    except FileNotFoundError:
        pass
    except ValueError as error:
        progress.warn(f"{error}; restarting from the beginning")
    _delete(directory / STATE)
    clear(directory)
    # A unique name, so that files of a run with another work directory are never mistaken for its own.
    dataset = partial_sibling(output)
    dataset.mkdir(parents=True)
    return Work(directory, dataset, {"identity": identity, "dataset": dataset.name})


def _read_state(path: Path) -> dict[str, Any]:
    """Return the state in `path`; ValueError unless it is as it was written, FileNotFoundError if there is none."""
    document = read_json(path)
    if not isinstance(document, dict) or not isinstance(document.get("state"), dict):
        raise ValueError(f"{path}: not a record of this version")
    state = document["state"]
    if document.get("crc32") != zlib.crc32(json.dumps(state).encode()):
        raise ValueError(f"{path} has changed since it was written")
    return state


def compare(work: Work, phase: Phase) -> None:
    """Compare all files of a record with it, several at a time; ValueError at the first that differs."""
    tasks: list[tuple[Path, list[list[Any]], bool]] = [
        (work.dataset / name, [[record["bytes"], int(record["crc32"], 16)]], False)
        for name, record in work.state["files"].items()
    ]
    tasks += [
        (work.directory / name, parts, name in work.state["growing"])
        for name, parts in work.state["checked"].items()
    ]
    for name in work.state.get("relations", []):
        for path in (path for path in (work.directory / name).rglob("*") if not path.is_dir()):
            if path.relative_to(work.directory).as_posix() not in work.state["checked"]:
                raise ValueError(f"{path} is not in the record")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        try:
            for done, _ in enumerate(pool.map(lambda task: _compare_file(*task), tasks), start=1):
                phase.total = len(tasks)
                phase.update(done)
        finally:
            pool.shutdown(cancel_futures=True)


def _compare_file(path: Path, parts: list[list[Any]], may_be_longer: bool) -> None:
    wanted_bytes = sum(num_bytes for num_bytes, _ in parts)
    if not wanted_bytes and not path.exists():
        return
    if not path.is_file():
        raise ValueError(f"{path} is missing, or not a regular file")
    got_bytes, start = path.stat().st_size, 0
    if got_bytes < wanted_bytes or (got_bytes > wanted_bytes and not may_be_longer):
        raise ValueError(f"{path} has {got_bytes:,} bytes, the record {wanted_bytes:,}")
    for num_bytes, wanted in parts:
        if wanted is not None and size_and_crc32(path, start, num_bytes)[1] != wanted:
            raise ValueError(f"{path} has changed since it was recorded")
        start += num_bytes


def clear(directory: Path, but: str | None = None) -> None:
    # The disk may be told of every free block, which takes time, but little of a core.
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(_delete, (path for path in directory.iterdir() if path.name != but)))


def _delete(path: Path) -> None:
    """Remove what lies at `path`, if anything does; a link, not its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def memory_bytes(config: PreprocConfig) -> int:
    """Return `memory_limit` in bytes, or 80 % of the machine's memory; ValueError if it is no size."""
    if config.memory_limit is None:
        return int(DEFAULT_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B", config.memory_limit.upper())
    factor = (UNITS | BINARY_UNITS).get(match[2]) if match else None
    if match is None or factor is None:
        raise ValueError(
            f"memory_limit={config.memory_limit}: write it as 8GB or 512MB (a number and a unit)"
        )
    return int(float(match[1]) * factor)


def is_small(config: PreprocConfig) -> bool:
    """Tell whether the memory allows nothing beside the work itself."""
    return memory_bytes(config) < SMALL_BYTES


def connected(settings: Settings, path: str = ":memory:") -> duckdb.DuckDBPyConnection:
    """Return a connection that computes in UTC, not in the zone of the machine, on which the hour of a timestamp would depend."""
    connection = duckdb.connect(path, config=settings)
    # Not one of the settings: `connect` reads these before the extension is there that knows time zones.
    connection.execute("SET GLOBAL TimeZone = 'UTC'")
    return connection


def small_database() -> duckdb.DuckDBPyConnection:
    """Return a connection with one thread and 512 MB."""
    return connected({"threads": 1, "memory_limit": "512MB"})


def connect(config: PreprocConfig, directory: Path, memory: int) -> duckdb.DuckDBPyConnection:
    """Return an empty database in `directory` that may use `memory` bytes and spills there."""
    for stale in (directory / "staging.duckdb", directory / "staging.duckdb.wal"):
        stale.unlink(missing_ok=True)
    shutil.rmtree(directory / "spill", ignore_errors=True)
    settings: Settings = {
        "temp_directory": str(directory / "spill"),
        "preserve_insertion_order": False,
        "autoinstall_known_extensions": False,
        "memory_limit": f"{memory}B",
    }
    if config.threads:
        settings["threads"] = config.threads
    return connected(settings, str(directory / "staging.duckdb"))


def check_disk(directory: Path, needed_bytes: float, what: str) -> None:
    """Raise ValueError, before anything is written, if `directory` has too little space for `what`."""
    directory = _existing(directory)
    free = shutil.disk_usage(directory).free
    if needed_bytes > free:
        raise ValueError(
            f"{what} needs about {needed_bytes / 1e9:,.2f} GB at {directory}, where "
            f"{free / 1e9:,.2f} GB are free; free some, or move output or temp_directory"
        )


def same_disk(one: Path, other: Path) -> bool:
    """Return whether two directories, which need not exist yet, are on one file system."""
    return _existing(one).stat().st_dev == _existing(other).stat().st_dev


def _existing(directory: Path) -> Path:
    while not directory.exists():
        directory = directory.parent
    return directory


def is_disk_error(error: duckdb.Error) -> bool:
    """Return whether DuckDB could not read or write a file; it has several exceptions for that."""
    signs = ("fsync failed", *map(os.strerror, (*FULL, *BROKEN)))
    return isinstance(error, duckdb.IOException) or any(sign in str(error) for sign in signs)
