"""Scores that a killed `mode=predict` has left beside its output, so that the same command resumes after them."""

import json
import os
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from dataloading.dataset.documents import parse_json, read_json
from dataloading.dataset.durable_files import AppendedFile, replace_text

FACTS = "scores.json"
CHUNKS = "chunks.jsonl"
SCORES = "scores.bin"


class KeptScores:
    """Scores of the first rows of a split, float64, in a directory.

    Each chunk has a line with its rows and its CRC-32, so the bytes need no sync: after a power cut, chunks count up to the
    first one that is damaged. `directory`: exists; what it holds of other scores is removed. `is_other`: whether scores of
    another model or other data were removed.
    """

    def __init__(self, directory: Path, facts: dict[str, Any], num_tasks: int) -> None:
        self._directory = directory
        self._num_tasks = num_tasks
        before = None
        with suppress(FileNotFoundError, ValueError):
            before = read_json(directory / FACTS)
        self.is_other = before not in (None, facts)
        if before != facts:
            for name in (FACTS, CHUNKS, SCORES):
                (directory / name).unlink(missing_ok=True)
            replace_text(directory / FACTS, json.dumps(facts, indent=1))
        self._lines: AppendedFile | None = None
        self._scores: AppendedFile | None = None

    def restore(self) -> Iterator[np.ndarray]:
        """Yield the intact chunks, [n, tasks] each; then forget the rest, and let `append` follow."""
        lines, scores = self._directory / CHUNKS, self._directory / SCORES
        intact: list[str] = []
        num_bytes = 0
        if lines.exists() and scores.exists():
            with scores.open("rb") as stream:
                for line in lines.read_text(encoding="utf-8", errors="replace").splitlines():
                    rows = self._intact_rows(line, stream)
                    if rows is None:
                        break
                    intact.append(line)
                    num_bytes += rows.nbytes
                    yield rows
        replace_text(lines, "".join(f"{line}\n" for line in intact))
        with scores.open("ab") as stream:
            stream.truncate(num_bytes)
        self._lines = AppendedFile(lines, is_text=True)
        self._scores = AppendedFile(scores, is_text=False)

    def append(self, scores: np.ndarray) -> None:
        """Keep a chunk, [n, tasks]; call it after `restore` has ended."""
        assert self._lines is not None
        assert self._scores is not None
        # Without a copy, which would take as long as all else here.
        piece = np.ascontiguousarray(scores, "<f8").data.cast("B")
        self._scores.append(piece)
        line = json.dumps({"bytes": len(piece), "crc32": zlib.crc32(piece)})
        self._lines.append(f"{line}\n".encode())

    def close(self) -> None:
        for file in (self._lines, self._scores):
            if file is not None:
                file.close()

    def _intact_rows(self, line: str, scores: BinaryIO) -> np.ndarray | None:
        """Read the chunk that a line describes, [n, tasks]; None if either is damaged."""
        try:
            chunk = parse_json(line, SCORES)
        except ValueError:
            return None
        num_bytes = chunk.get("bytes") if isinstance(chunk, dict) else None
        row = 8 * self._num_tasks
        # A damaged line may say any number.
        most = os.fstat(scores.fileno()).st_size
        if type(num_bytes) is not int or num_bytes % row or not row <= num_bytes <= most:
            return None
        piece = scores.read(num_bytes)
        if chunk != {"bytes": len(piece), "crc32": zlib.crc32(piece)}:
            return None
        return np.frombuffer(piece, "<f8").reshape(-1, self._num_tasks)
