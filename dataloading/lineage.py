"""Days of a dataset that grows: the identity of a fit, and the fit that a day was extended from.

`python -m preproc mode=extend` writes a directory per day. Its spec names the day and the identity of the parent's fit,
so that a run which continues with a day knows that its ids continue those that it has learnt.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Self

FITTED = "preproc.json"
VOCABULARY = "vocabulary"
RARE = "rare"
DAY, PARENT = "day", "parent"
TRANSFORM = "transform"
"""`mode` of a dataset that was made with the vocabularies of another one."""
OF_FIT = "fitted_vocabularies"
"""Checksums of these, by feature."""
BEFORE_FORGETTING = "files_before_forgetting"
"""Records of files from which values were removed (`preproc.forgetting`) as they were: ids mean the same, so identities stay."""
FORGOTTEN, FORGOTTEN_BEFORE = "forgotten", "forgotten_before"
"""Entries of a checkpoint or model with rows that were overwritten, by table: in it, and in checkpoints that led to it."""
HEX = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Lineage:
    """Position of a dataset among the days of its vocabularies."""

    day: int = 0  # 0 for a fit, and one more per extension
    # of its fit; None for a dataset whose spec lists no checksums of one
    identity: str | None = None
    parent: str | None = None  # identity of the fit that it extends; None for day 0

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> Self:
        """Return the lineage that `metadata` of a spec tells; keys of these names that others wrote tell none."""
        day, parent = metadata.get(DAY), metadata.get(PARENT)
        identity = _identity(_files(metadata))
        if type(day) is not int or not 0 < day < 2**31:
            return cls(0, identity)
        is_identity = isinstance(parent, str) and HEX.fullmatch(parent) is not None
        return cls(day, identity, parent) if is_identity else cls(0, identity)


def vocabularies(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the checksum of each vocabulary of the fit that made a dataset, by feature, as `metadata` of its spec tells it.

    A day has none: its ids continue those of the day before, whose vocabularies have other bytes. A dataset of mode=transform
    tells those of its fit, since its own copies may have other bytes: engines write the same values differently. One of an
    earlier version tells nothing.
    """
    files = _files(metadata)
    if metadata.get("mode") == TRANSFORM:
        listed = metadata.get(OF_FIT)
        return {str(k): str(v) for k, v in listed.items()} if isinstance(listed, Mapping) else {}
    if not isinstance(files, Mapping) or Lineage.of(metadata).day:
        return {}
    found = {}
    for name, record in files.items():
        path = PurePosixPath(str(name))
        if str(path.parent) == VOCABULARY and isinstance(record, Mapping):
            found[path.stem] = str(record.get("crc32"))
    return found


def _files(metadata: Mapping[str, Any]) -> object:
    """Return the records of the files of a fit, as they were when it was made."""
    files, before = metadata.get("files"), metadata.get(BEFORE_FORGETTING, {})
    if isinstance(files, Mapping) and isinstance(before, Mapping):
        return {**files, **before}
    return files


def _identity(files: object) -> str | None:
    """Return the SHA-256 (hex) of names, bytes and checksums of the files of a fit; None if none are listed."""
    if not isinstance(files, Mapping) or FITTED not in files:
        return None
    of_fit = [
        [name, record.get("bytes"), record.get("crc32")]
        for name, record in sorted((str(name), record) for name, record in files.items())
        if name.split("/")[0] in (FITTED, VOCABULARY, RARE) and isinstance(record, Mapping)
    ]
    return hashlib.sha256(json.dumps(of_fit).encode()).hexdigest()
