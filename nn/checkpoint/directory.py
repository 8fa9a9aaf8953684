"""Directory of checkpoints: a checkpoint `step_N` is complete, and damage is detected.

step_N/              complete: every file was synced before the directory was renamed
.step_N.unfinished/  being written, or left by a killed run; never read, removed at the next start
step_N.damaged/      a checksum differs; kept for inspection, never read
best                 link to the step_N of the best evaluation

run.json describes the run and has the sizes of all files, with checksums of itself and of the index. The index
(`nn.checkpoint.tensor_index`) has checksums of all tensors. A network file system may show a new name late, so readers wait
for a file that another host has written.
"""

import json
import math
import os
import re
import shutil
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from configs.messages import shown
from dataloading.dataset.documents import check_regular, open_regular, read_json, read_regular
from dataloading.dataset.durable_files import (
    cut_incomplete_line,
    replace_directory,
    replace_link,
    sync_directory,
    write_synced,
)
from nn.checkpoint.holes import crc32_of, stored_pages
from nn.checkpoint.run_facts import check_facts
from nn.checkpoint.tensor_index import (
    CHECKSUM_BYTES,
    DTYPES,
    INDEX_FILE,
    THREADS,
    Chunk,
    UnreadableError,
    file_inside,
    parse_index,
    read_into,
)

CHECKPOINTS, DELTAS = "checkpoints", "deltas"
RUN_FILE = "run.json"
FORMAT_VERSION = 1
DELTA = "delta"
"""Entry of run.json that only deltas have."""
BEST = "best"
SAVED = "saved.jsonl"
"""One line per checkpoint."""
APPEARS_WITHIN_S = 60.0


class NewerFormatError(ValueError):
    """The checkpoint was written by a later version and is intact."""


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Convert an error of a read, which does not name its file, to `UnreadableError`; an absent file stays what it is."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise UnreadableError(f"{path} cannot be read ({error.strerror})") from None


def unfinished(directory: Path, num_steps: int) -> Path:
    return directory / f".step_{num_steps}.unfinished"


def list_checkpoints(directory: Path) -> list[Path]:
    """Return the checkpoints of a directory, if it exists, newest first; UnreadableError, where `Path.glob` sees nothing."""
    try:
        with _reading(directory):
            names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    paths = [directory / name for name in names if re.fullmatch(r"step_[0-9]+", name)]
    return sorted(paths, key=step_of, reverse=True)


def commit(directory: Path, num_steps: int, facts: dict[str, Any]) -> Path:
    """Write run.json and rename the directory of a step, which completes the checkpoint, whether or not `prune` syncs it."""
    source, target = unfinished(directory, num_steps), directory / f"step_{num_steps}"
    write_facts(source, facts, sorted(path.name for path in source.iterdir()))
    sync_directory(source)
    # A second checkpoint of a step replaces the first.
    try:
        replace_directory(source, target)
    except FileNotFoundError:
        # A network file system repeats a request whose answer was lost; the second rename then finds no source.
        if not (target / RUN_FILE).exists():
            raise
    return target


def finish_commits(directory: Path) -> None:
    """Complete the checkpoints that had every file when their run was killed, where no other one of their step is left."""
    for path in directory.glob(".step_*.unfinished"):
        target = directory / path.name.removeprefix(".").removesuffix(".unfinished")
        if target.exists():
            continue
        with suppress(ValueError):
            read_facts(path)
            replace_directory(path, target)


def write_facts(directory: Path, facts: dict[str, Any], files: Sequence[str]) -> None:
    """Write run.json of a directory that has all other files."""
    facts = facts | {
        "files": {name: (directory / name).stat().st_size for name in files},
        "index_crc32": zlib.crc32((directory / INDEX_FILE).read_bytes()),
    }
    facts["crc32"] = _crc32(facts)
    write_synced(directory / RUN_FILE, json.dumps(facts, indent=2) + "\n")


def prune(directory: Path, num_steps: int, keep: int, best_step: int | None) -> None:
    """Remove all checkpoints up to `num_steps` but the latest `keep` and the best; without one, `best` stays what it was."""
    if directory.exists():
        sync_directory(directory)
    present = [path for path in list_checkpoints(directory) if step_of(path) <= num_steps]
    best = directory / BEST
    linked = os.readlink(best) if best.is_symlink() else None
    target = linked if best_step is None else f"step_{best_step}"
    for path in present[keep:]:
        if path.name != target:
            remove(path)
    if target is not None and target != linked and any(path.name == target for path in present):
        replace_link(best, target)


def clear(directory: Path, num_steps: int) -> None:
    """Remove what a killed run left unfinished, and the checkpoints after step `num_steps`, to be written again."""
    for path in directory.glob(".step_*.unfinished"):
        shutil.rmtree(path, ignore_errors=True)
    for path in list_checkpoints(directory):
        if step_of(path) > num_steps:
            remove(path)
    if not (directory / BEST).exists():
        (directory / BEST).unlink(missing_ok=True)
    # After the last save no line follows that would remove it.
    cut_incomplete_line(directory / SAVED)


def mark_damaged(path: Path) -> Path:
    """Rename a damaged checkpoint, so that no run resumes from it."""
    target = path.with_name(f"{path.name}.damaged")
    replace_directory(path, target)
    return target


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def wait_for(path: Path) -> bool:
    """Wait until a file that another host has written is visible here; return False after the time-out."""
    end = time.monotonic() + APPEARS_WITHIN_S
    while not path.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
        # Listing a directory makes NFS ask its server again.
        if path.parent.parent.is_dir():
            os.listdir(path.parent.parent)
    return True


def no_checkpoint(option: str, path: Path, reason: object = "") -> ValueError:
    """Return the error of an option that names no checkpoint; without a `reason`, since nothing is there."""
    if path.name == BEST and list_checkpoints(path.parent):
        reason = reason or "no evaluation was better than that of the untrained model"
    reason = reason or f"there is no {f'{RUN_FILE} in it' if path.is_dir() else 'such directory'}"
    wanted = "name a step_N directory in a run's checkpoints/"
    return ValueError(f"{option}={path} is not a checkpoint ({reason}); {wanted}")


def read_facts(path: Path, *, of_delta: bool = False) -> dict[str, Any]:
    """Return run.json of a checkpoint, an export or a delta, if all sizes are right; UnreadableError, or ValueError."""
    try:
        with _reading(path / RUN_FILE):
            facts = read_json(path / RUN_FILE)
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"there is no {RUN_FILE} in it") from None
    except UnreadableError:
        raise
    except ValueError as error:
        raise ValueError(f"{RUN_FILE} is damaged ({error})") from None
    if not isinstance(facts, dict) or type(facts.get("format_version")) is not int:
        raise ValueError(f"{RUN_FILE} is damaged (it has no format_version)")
    version = facts["format_version"]
    if version > FORMAT_VERSION:
        raise NewerFormatError(
            f"it has format {shown(version)}, and this version reads up to {FORMAT_VERSION}; use the version of "
            "this software that wrote it, or a later one"
        )
    if facts.pop("crc32", None) != _crc32(facts):
        raise ValueError(f"{RUN_FILE} is damaged (its checksum differs)")
    try:
        check_facts(facts)
    except ValueError as error:
        raise ValueError(f"{RUN_FILE} is no description of a checkpoint: {error}") from None
    if of_delta and DELTA not in facts:
        raise ValueError("it is no delta, but a checkpoint or an export")
    if DELTA in facts and not of_delta:
        raise ValueError("it is a delta; python -m nn.replay makes an export of it and of its base")
    for name, wanted in facts["files"].items():
        file = file_inside(path, name)
        try:
            with _reading(file):
                got = check_regular(file).st_size
        except (FileNotFoundError, NotADirectoryError):
            raise ValueError(f"{name} is missing") from None
        if got != wanted:
            state = "truncated" if got < wanted else "too long"
            raise ValueError(f"{name} is {state}: {got} bytes instead of {wanted}")
    return facts


def find_damage(path: Path, facts: dict[str, Any], rank: int, num_ranks: int) -> str | None:
    """Compare every `num_ranks`-th block from block `rank` on; return the first damage, or None. UnreadableError: no access."""
    try:
        with _reading(path / INDEX_FILE):
            data = read_regular(path / INDEX_FILE)
        if zlib.crc32(data) != facts["index_crc32"]:
            return f"{INDEX_FILE} is damaged (its checksum differs)"
        blocks = [
            (chunk, name, tensor.dtype, number, crc32)
            for name, tensor in parse_index(path, data).tensors.items()
            for chunk in tensor.chunks
            for number, crc32 in enumerate(chunk.crc32)
        ][rank::num_ranks]
        with ThreadPoolExecutor(THREADS) as pool:
            return next((damage for damage in pool.map(_damage_of_block, blocks) if damage), None)
    except (FileNotFoundError, NotADirectoryError) as error:
        return f"{Path(error.filename).name} is missing"
    except UnreadableError:
        raise
    except ValueError as error:
        # Its checksums are right, and it is no checkpoint all the same.
        return str(error)


def _damage_of_block(block: tuple[Chunk, str, str, int, int]) -> str | None:
    chunk, name, dtype, number, crc32 = block
    chunk_bytes = math.prod(chunk.sizes) * DTYPES[dtype].itemsize
    start = chunk.start + number * CHECKSUM_BYTES
    end = min(start + CHECKSUM_BYTES, chunk.start + chunk_bytes)
    with _reading(chunk.file), open_regular(chunk.file) as stream:
        if os.fstat(stream.fileno()).st_size < end:
            return f"{chunk.file.name} is truncated ({name} ends at byte {end})"

        def read(first: int, last: int) -> bytearray:
            data = bytearray(last - first)
            stream.seek(start + first)
            return data[: read_into(stream, data)]

        if crc32_of(stored_pages(stream.fileno(), start, end - start), read) == crc32:
            return None
    return f"{chunk.file.name} is damaged ({name}, bytes {start} to {end}: the checksum differs)"


def remove(path: Path) -> None:
    """Rename a checkpoint before removing it, so that a crash leaves no incomplete `step_N`."""
    target = unfinished(path.parent, step_of(path))
    replace_directory(path, target)
    shutil.rmtree(target, ignore_errors=True)
    if target.exists():  # the error may have been a passing one
        shutil.rmtree(target)


def _crc32(facts: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(facts, sort_keys=True).encode())
