"""States of the files of a dataset, to tell whether they have changed: sizes, times and samples of their bytes."""

import os
import zlib
from pathlib import Path
from typing import Any

from dataloading.dataset.feature_spec import FeatureSpec

SAMPLE_BYTES = 4096
NUM_SAMPLES = 16


def file_states(spec: FeatureSpec) -> dict[str, list[int]]:
    """Return [bytes, modification time in ns] of every file of a dataset, by its path in it; a synthetic stream has none."""
    return {
        name: [state.st_size, state.st_mtime_ns]
        for name, state in ((name, path.stat()) for name, path in _files(spec).items())
    }


def file_samples(spec: FeatureSpec) -> dict[str, list[int]]:
    """Return [bytes, CRC-32 of 16 evenly spaced pieces of 4 KiB] of every file: a copy elsewhere has the same."""
    return {name: [path.stat().st_size, _sample(path)] for name, path in _files(spec).items()}


def changed_files(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the names whose states differ, missing and further ones among them, each with what differs.

    A file whose time alone differs is among them: while a run reads it, it may be half rewritten.
    """
    return _changes(before, now, "touched or rewritten")


def changed_samples(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the names whose samples differ, missing and further ones among them, each with what differs."""
    return _changes(before, now, "the same size, other bytes")


def _changes(before: dict[str, Any], now: dict[str, Any], of_one_size: str) -> list[str]:
    def change(name: str) -> str:
        if name not in now:
            return "gone"
        if name not in before:
            return "new"
        got, wanted = now[name][0], before[name][0]
        return of_one_size if got == wanted else f"{got:,} bytes instead of {wanted:,}"

    return [
        f"{name} ({change(name)})"
        for name in sorted(before | now)
        if before.get(name) != now.get(name)
    ]


def _files(spec: FeatureSpec) -> dict[str, Path]:
    if spec.root is None:
        return {}
    paths = [path for split in spec.splits.values() for path in split.paths()]
    return {path.relative_to(spec.root).as_posix(): path for path in paths}


def _sample(path: Path) -> int:
    crc32 = 0
    with path.open("rb") as stream:
        last = max(0, os.fstat(stream.fileno()).st_size - SAMPLE_BYTES)
        for index in range(NUM_SAMPLES):
            stream.seek(last * index // (NUM_SAMPLES - 1))
            crc32 = zlib.crc32(stream.read(SAMPLE_BYTES), crc32)
    return crc32
