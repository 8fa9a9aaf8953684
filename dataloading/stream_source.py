"""A source whose training rows grow: those of a dataset, then those of further datasets in the order in which they were taken.

Rows are numbered from 0 over all of them, so that the step still says which rows are trained.
"""

import os
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from configs.messages import on_one_line
from dataloading.dataset.dataset_directory import checksums_of, verify_checksums
from dataloading.dataset.feature_spec import SPEC_NAME, FeatureSpec
from dataloading.dataset.file_states import data_identity
from dataloading.dataset.open_dataset import open_dataset
from dataloading.dataset.source import (
    EPOCH_ROWS,
    BatchTarget,
    Columns,
    DerivedSource,
    Keys,
    Source,
    joined,
)
from dataloading.held_out_source import TRAIN
from dataloading.lineage import vocabularies

OFFSETS = "offsets"
"""What the metadata of a part's spec may tell about the messages that it was made of."""
CHECKED_ROWS = 1 << 16
"""Rows that are read at once to check a part."""
MOST_OPEN = 32
"""Parts that are kept open: a batch may have rows of many small ones."""
LATEST = 24
"""Parts that are looked at for changes after they were taken."""


@dataclass(frozen=True, slots=True)
class Part:
    """A dataset whose training rows belong to a stream."""

    name: str  # of its directory
    rows: int
    identity: str | None  # of its bytes, as `data_identity` returns it
    offsets: Any = None  # `OFFSETS` of its spec


class StreamSource(DerivedSource):
    """Rows of a dataset and of the parts that were appended to it, in `directory`; nothing is read while one is appended."""

    def __init__(self, source: Source, directory: Path) -> None:
        super().__init__(source)
        self.directory = directory
        self.parts: list[Part] = []
        self._starts = [0, source.num_rows(TRAIN)]  # of the dataset and each part, and the end
        self._opened = lru_cache(MOST_OPEN)(self._open)

    @property
    def known_rows(self) -> int:
        """The training rows so far."""
        return self._starts[-1]

    def num_rows(self, split: str) -> int:
        """Return the rows of a split; of the training rows more than ever come."""
        return EPOCH_ROWS if split == TRAIN else self._source.num_rows(split)

    def grows(self, split: str) -> bool:
        return split == TRAIN

    def spec_of(self, name: str) -> FeatureSpec:
        """Return the spec of a part; ValueError unless it is whole, and its rows are such as those of the dataset."""
        spec, own = FeatureSpec.load(self.directory / name), self.spec
        spec.require_labels(TRAIN)
        if own.root is not None and own.root.samefile(self.directory / name):
            raise ValueError("it is data.path, whose rows are the first ones")
        columns = [[column.name for column in of.row_columns] for of in (spec, own)]
        mine, other = vocabularies(own.metadata), vocabularies(spec.metadata)
        if (
            spec.fingerprint() != own.fingerprint()
            or columns[0] != columns[1]
            or any(mine.get(feature, crc32) != crc32 for feature, crc32 in other.items())
        ):
            raise ValueError(
                f"it has other features or vocabularies than {own.root}; make it by mode=transform fitted={own.root}"
            )
        weights = {group.name: group.weight for group in own.sequences if group.weight is not None}
        return spec.with_means_of(own).with_event_weights(weights)

    def append(self, part: Part, trained_rows: int = 0) -> None:
        """Take the rows of a part as the next ones; ValueError if it has changed, and not all of its rows are trained."""
        self.parts.append(part)
        self._starts.append(self.known_rows + part.rows)
        if self.known_rows > trained_rows:
            self._opened(len(self.parts))

    def _open(self, number: int) -> Source:
        """Return the dataset, number 0, or the part of a number."""
        if not number:
            return self._source
        part = self.parts[number - 1]
        path = self.directory / part.name
        spec = self.spec_of(part.name) if path.is_dir() else None
        if spec is None or data_identity(spec) != part.identity:
            raise ValueError(
                f"{path} has changed or is gone since its rows were taken; restore its bytes, or go on in another run_dir with "
                "checkpoint.restore"
            )
        return open_dataset(spec)

    def begun(self, rows: int) -> list[dict[str, Any]]:
        """Return the parts that the first `rows` rows are of, as a checkpoint holds them."""
        starts = zip(self.parts, self._starts[1:], strict=False)
        return [asdict(part) for part, start in starts if start < rows]

    def read(self, split: str, runs: np.ndarray, into: BatchTarget | None = None) -> Columns:
        pieces = self._pieces(split, runs)
        if len(pieces) == 1:
            source, own = pieces[0]
            return source.read(split, own, into)
        read = [source.read(split, own) for source, own in pieces]
        return joined(self.spec, read, into)

    def read_keys(self, split: str, runs: np.ndarray, feature: int) -> Keys:
        read = [source.read_keys(split, own, feature) for source, own in self._pieces(split, runs)]
        lengths = [keys.lengths for keys in read if keys.lengths is not None]
        values = np.concatenate([keys.values() for keys in read])
        return Keys.of(values, np.concatenate(lengths) if lengths else None)

    def event_counts(self, split: str, runs: np.ndarray) -> np.ndarray | None:
        counts = [source.event_counts(split, own) for source, own in self._pieces(split, runs)]
        known = [of_piece for of_piece in counts if of_piece is not None]
        return np.concatenate(known) if len(known) == len(counts) else None

    def _pieces(self, split: str, runs: np.ndarray) -> list[tuple[Source, np.ndarray]]:
        """Return the runs of rows in the dataset and the parts that have them, in their order."""
        found = []
        for first, last in runs.tolist() if split == TRAIN else ():
            if last > self.known_rows:
                raise ValueError(f"row {last:,} of the stream has not come yet")
            while first < last:
                at = bisect_right(self._starts, first) - 1
                end = min(last, self._starts[at + 1])
                found.append((self._opened(at), np.array([[first, end]]) - self._starts[at]))
                first = end
        return found or [(self._source, runs)]


class PartFinder:
    """Finds the part of a stream that comes next, for the rank that decides.

    A part is a dataset in the directory of the stream, whole with all bytes and checksums that its spec lists. Of those
    that are there the first by name comes next.
    """

    def __init__(self, source: StreamSource, warn: Callable[[str], object]) -> None:
        self._source, self._warn = source, warn
        self._taken: dict[str, object] = {}  # state of the files of each part
        # That of a part that is left out, and whether it was said.
        self._left_out: dict[str, tuple[object, bool]] = {}

    def look(self) -> tuple[Part | None, int]:
        """Return the part to take next, None if none is there, and the number of those behind it; OSError: no directory."""
        stream, found, behind = self._source, None, 0
        taken = {part.name for part in stream.parts}
        for name in [*self._taken][-LATEST:]:
            path = stream.directory / name
            now = _state(path)
            if now not in ([], self._taken[name]):
                self._taken[name] = now
                self._warn(
                    f"{path} has changed since its rows were taken: changed rows are not trained; give them another name"
                )
        for name in sorted(os.listdir(stream.directory)):
            is_known = name in taken or name.startswith(".")
            if is_known or not (stream.directory / name / SPEC_NAME).is_file():
                continue
            if found is None:
                found = self._whole(name)
            else:
                behind += name not in self._left_out
        if found is not None and found.name < (latest := max(taken, default="")):
            path = stream.directory / found.name
            self._warn(f"{path} came late, after {latest}; its rows come next")
        return found, behind

    def _whole(self, name: str) -> Part | None:
        """Return a part if every row of it can be trained; say why not once it is no longer written."""
        path = self._source.directory / name
        state, was_said = self._left_out.get(name, (None, False))
        now = _state(path)
        if was_said and now == state:
            return None
        try:
            spec = self._source.spec_of(name)
            if checksums_of(spec.metadata, "metadata"):
                verify_checksums(spec)
            source, rows = open_dataset(spec), spec.rows_of(TRAIN)
            for first in range(0, rows, CHECKED_ROWS):
                source.read(TRAIN, np.array([[first, min(first + CHECKED_ROWS, rows)]]))
            part = Part(name, rows, data_identity(spec), spec.metadata.get(OFFSETS))
            for other in self._source.parts:
                if (other.identity, other.offsets) == (part.identity, part.offsets):
                    raise ValueError(f"it has the bytes of {other.name}, whose rows were taken")
        except (ValueError, OSError) as error:
            if now == state:
                self._warn(f"{path} is left out until it changes: {on_one_line(str(error))}")
            self._left_out[name] = now, now == state
            return None
        self._left_out.pop(name, None)
        self._taken[name] = now
        return part


def _state(path: Path) -> list[object]:
    """Return names, sizes and times of the files of a part; empty if it is gone."""
    try:
        files = [(file, file.stat()) for file in sorted(path.rglob("*")) if file.is_file()]
    except FileNotFoundError:  # it is removed while it is read
        return []
    return [(str(file), found.st_size, found.st_mtime_ns) for file, found in files]
