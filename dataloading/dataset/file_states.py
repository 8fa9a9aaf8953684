"""States of the files of a dataset, to tell whether they have changed: sizes, times, samples, and checksums of its spec."""

import hashlib
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dataloading.dataset.dataset_directory import checksums_of, verify_checksums
from dataloading.dataset.documents import open_regular
from dataloading.dataset.feature_spec import FeatureSpec

SAMPLE_BYTES = 4096
NUM_SAMPLES = 16
WHOLE_BYTES = 256 << 20
"""Bytes that `verify_small_files` reads at most: a fraction of a second."""


def file_states(spec: FeatureSpec) -> dict[str, list[int]]:
    """Return [bytes, modification time in ns] per file of a dataset, by relative path; empty for a synthetic stream."""
    return {
        name: [state.st_size, state.st_mtime_ns]
        for name, state in ((name, path.stat()) for name, path in _files(spec).items())
    }


def file_samples(spec: FeatureSpec) -> dict[str, list[int]]:
    """Return [bytes, CRC-32 of 16 evenly spaced samples of 4 KiB] per file; a copy of the dataset has the same."""
    return {name: [path.stat().st_size, _sample(path)] for name, path in _files(spec).items()}


def listed_checksums(spec: FeatureSpec) -> dict[str, list[Any]]:
    """Return [bytes, CRC-32 in hex] per file as the spec lists them, without reading the files; empty where it lists none."""
    listed = checksums_of(spec.metadata, "metadata")
    return {
        name: [listed[name]["bytes"], listed[name]["crc32"]]
        for name in _files(spec)
        if name in listed
    }


def data_state(spec: FeatureSpec) -> dict[str, dict[str, list[Any]]]:
    """Return what tells data from other data wherever they lie: samples and listed checksums, for `changed_data`."""
    return {"data_samples": file_samples(spec), "data_checksums": listed_checksums(spec)}


def data_identity(spec: FeatureSpec) -> str | None:
    """Return a hash (hex) of `data_state`: equal for copies of a dataset; None for a synthetic stream."""
    text = json.dumps(data_state(spec), sort_keys=True)
    return None if spec.root is None else hashlib.sha256(text.encode()).hexdigest()[:16]


def changed_data(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the names of files whose samples or listed checksums differ, with the difference.

    `before`: with the entries of `data_state`; one of an earlier version has no checksums.
    """
    old, new = before.get("data_checksums", {}), now["data_checksums"]
    in_both = old.keys() & new.keys()  # the spec of a copy may list none
    return changed_samples(before["data_samples"], now["data_samples"]) or _changes(
        {name: old[name] for name in in_both},
        {name: new[name] for name in in_both},
        "another checksum in the spec",
    )


def verify_small_files(spec: FeatureSpec) -> None:
    """Compare every byte of the smallest files with the checksums that the spec lists, up to `WHOLE_BYTES` in total.

    Labels are among the smallest, and samples miss what changes between them. Raises ValueError: a file has changed.
    """
    names, left = [], WHOLE_BYTES
    for name, (num_bytes, _) in sorted(listed_checksums(spec).items(), key=lambda item: item[1]):
        left -= num_bytes
        if left < 0:
            break
        names.append(name)
    if names:
        verify_checksums(spec, names)


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
