"""Rows of a checkpoint, or of an export of one, that are overwritten with zeros, since what they are of must be forgotten.

The directory is replaced by a copy, so that it is never partial; files without such rows are hard links. The copy stays the same
state of a chain of deltas: run.json names the rows (`FORGOTTEN`), and the next delta of a run that resumes has them. A row of
zero bytes has the value 0, or the seed's weights in the file of a table that lay on disk (`nn.tiers.initial_rows`).
"""

import json
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dataloading.dataset.durable_files import edited_copy, write_synced
from dataloading.keys.rekeyed import KEYS
from dataloading.lineage import FORGOTTEN, FORGOTTEN_BEFORE
from nn.checkpoint.directory import write_facts
from nn.checkpoint.saved import SavedModel
from nn.checkpoint.tensor_index import (
    CHECKSUM_BYTES,
    DTYPES,
    INDEX_FILE,
    REMEDY,
    Chunk,
    StoredTensor,
)

CANDIDATE = "candidate_"


def keyed_rows(saved: SavedModel, name: str, keys: np.ndarray) -> dict[str, np.ndarray]:
    """Return the rows of raw keys in a map, and the slots of those that wait for admission, by the prefix of their tensors."""
    found: dict[str, np.ndarray] = {}
    for prefix in (f"keys.{name}.", f"keys.{name}.{CANDIDATE}"):
        stored = saved.index.tensors.get(f"{prefix}{KEYS}")
        if stored is not None:
            rows = np.flatnonzero(np.isin(stored.array(), keys))
            found |= {prefix: rows} if len(rows) else {}
    return found


def forget_rows(saved: SavedModel, rows: Mapping[str, np.ndarray]) -> None:
    """Overwrite rows in the files of a checkpoint or an export.

    `rows`: ascending, int64, by the prefix of their tensors: `tables.<table>.`, or as `keyed_rows` has them. Raises ValueError:
    the directory is damaged or being written.
    """
    tensors = {
        name: (tensor, numbers)
        for prefix, numbers in rows.items()
        for name, tensor in saved.index.tensors.items()
        if name.startswith(prefix) and _has_rows(name.removeprefix(prefix), prefix, tensor, saved)
    }
    files = {chunk.file.name for tensor, _ in tensors.values() for chunk in tensor.chunks}
    own = {prefix[:-1]: some for prefix, some in rows.items() if not prefix.endswith(CANDIDATE)}
    forgotten = noted_rows(saved.facts.get(FORGOTTEN, {}), own)
    document = json.loads((saved.path / INDEX_FILE).read_text())
    with edited_copy(saved.path, files) as copy:
        for name, (tensor, numbers) in tensors.items():
            entries = document["tensors"][name]["chunks"]
            for chunk, entry in zip(tensor.chunks, entries, strict=True):
                entry["crc32"] = _overwrite(copy / chunk.file.name, chunk, tensor, numbers)
        for name in (INDEX_FILE, "run.json"):  # links to those of the original
            (copy / name).unlink()
        write_synced(copy / INDEX_FILE, json.dumps(document) + "\n")
        write_facts(copy, saved.facts | {FORGOTTEN: forgotten}, sorted(saved.facts["files"]))


def noted_rows(
    noted: Mapping[str, Sequence[int]], rows: Mapping[str, Iterable[int]]
) -> dict[str, Sequence[int]]:
    """Return a note (`FORGOTTEN`) with further rows, ascending."""
    more = {name: sorted({*noted.get(name, ()), *map(int, of)}) for name, of in rows.items()}
    return {**noted, **more}


def all_forgotten(facts: Mapping[str, Any]) -> dict[str, Sequence[int]]:
    """Return the note of a checkpoint with those of the checkpoints that its run has continued."""
    return noted_rows(facts.get(FORGOTTEN_BEFORE, {}), facts.get(FORGOTTEN, {}))


def _has_rows(kind: str, prefix: str, tensor: StoredTensor, saved: SavedModel) -> bool:
    """Return whether a tensor below a prefix has the rows of its weights or keys."""
    if not prefix.startswith("tables."):
        return kind in (KEYS, "facts")
    weight = saved.index.tensors[f"{prefix}weight"]
    return "." not in kind and tensor.size[:1] == weight.size[:1]


def _overwrite(path: Path, chunk: Chunk, tensor: StoredTensor, rows: np.ndarray) -> list[int]:
    """Overwrite the rows of a tensor in one of its chunks; return the chunk's new checksums."""
    row_bytes = math.prod(chunk.sizes[1:]) * DTYPES[tensor.dtype].itemsize
    inside = rows - chunk.offsets[0]
    inside = inside[(inside >= 0) & (inside < chunk.sizes[0])]
    checksums = list(chunk.crc32)
    # A row is shorter than what a checksum is of, so it lies in one or two of them.
    first = inside * row_bytes // CHECKSUM_BYTES
    last = (inside * row_bytes + row_bytes - 1) // CHECKSUM_BYTES
    with path.open("r+b") as stream:
        for number in np.unique(np.concatenate([first, last])).tolist():
            start = number * CHECKSUM_BYTES
            stream.seek(chunk.start + start)
            data = stream.read(min(CHECKSUM_BYTES, chunk.sizes[0] * row_bytes - start))
            if zlib.crc32(data) != checksums[number]:
                raise ValueError(f"{chunk.file} has changed since it was written; {REMEDY}")
            block = np.frombuffer(data, np.uint8).copy()
            for row in inside[(first <= number) & (number <= last)].tolist():
                block[max(row * row_bytes - start, 0) : (row + 1) * row_bytes - start] = 0
            stream.seek(chunk.start + start)
            stream.write(block.data)
            checksums[number] = zlib.crc32(block.data)
    return checksums
