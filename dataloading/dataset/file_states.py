"""States of the files of a dataset, to tell whether they have changed: sizes, times and samples of their bytes."""

import os
import zlib
from pathlib import Path
from typing import Any

from dataloading.dataset.documents import open_regular
from dataloading.dataset.feature_spec import FeatureSpec

SAMPLE_BYTES = 4096
NUM_SAMPLES = 16


def file_states(spec: FeatureSpec) -> dict[str, list[int]]:
    """Return [bytes, modification time in ns] per file of a dataset, by relative path; empty for a synthetic stream."""
    return {
        name: [state.st_size, state.st_mtime_ns]
        for name, state in ((name, path.stat()) for name, path in _files(spec).items())
    }


def file_samples(spec: FeatureSpec) -> dict[str, list[int]]:
    """Return [bytes, CRC-32 of 16 evenly spaced samples of 4 KiB] per file; a copy of the dataset has the same."""
    return {name: [path.stat().st_size, _sample(path)] for name, path in _files(spec).items()}


def changed_files(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the names of files whose states differ, including missing and added ones, with the difference.

    A different time alone counts too: the file may be partly rewritten while a run reads it.
    """
    return _changes(before, now, "touched or rewritten")


def changed_samples(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the names of files whose samples differ, including missing and added ones, with the difference."""
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
    with open_regular(path) as stream:
        last = max(0, os.fstat(stream.fileno()).st_size - SAMPLE_BYTES)
        for index in range(NUM_SAMPLES):
            stream.seek(last * index // (NUM_SAMPLES - 1))
            crc32 = zlib.crc32(stream.read(SAMPLE_BYTES), crc32)
    return crc32
