"""Files of one split: their paths inside the dataset directory, and a check of their sizes."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from os.path import dirname, join, normpath
from pathlib import Path
from typing import Any

import numpy as np

from configs.messages import os_error_text, shown
from dataloading.dataset.documents import check_regular, is_file_list, read_file_list, resolved

OFFSET_DTYPE = np.dtype("<i8")
SPLITS = ("train", "test", "validation")
"""Names of splits; a dataset has one of them, and may have others."""
CHUNK_ROWS = 1 << 20
LONGEST = 1 << 20
"""Ids of a row beyond which its length does not matter."""
PARQUET = "parquet"
"""Type of a chunk in `source_spec` whose files are Parquet."""


class Lengths:
    """Numbers of ids of the rows of a ragged feature, added chunk by chunk."""

    def __init__(self) -> None:
        self._rows_of = np.zeros(1, np.int64)

    def add(self, lengths: np.ndarray) -> None:
        """Add rows by their numbers of ids, which are not negative."""
        counts = np.bincount(np.minimum(lengths, LONGEST), minlength=len(self._rows_of))
        counts[: len(self._rows_of)] += self._rows_of
        self._rows_of = counts

    @property
    def mean(self) -> float:
        """Mean ids per row, where the longest rows count as long as the next one, but for at least one id.

        The longest rows are one of every 1,000, and one of 100 rows or more: a single row does not set what is planned for
        all of them.
        """
        num_rows = int(self._rows_of.sum())
        longer = np.cumsum(self._rows_of[::-1])[::-1]  # rows with at least so many ids
        most = max(int(np.count_nonzero(longer > (num_rows + 900) // 1000)) - 1, 1)
        ids = int(self._rows_of @ np.minimum(np.arange(len(self._rows_of)), most))
        return ids / max(num_rows, 1)


@dataclass(frozen=True, slots=True)
class SplitFiles:
    """Files of one split; a synthetic stream has rows only."""

    num_rows: int  # rows of every file
    numerical: Path | None = None  # file of the numericals; None without numericals
    columns: dict[str, Path] = field(default_factory=dict)
    ids: dict[str, Path] = field(default_factory=dict)  # file of each categorical feature, by name
    offsets: dict[str, Path] = field(default_factory=dict)  # file of each ragged feature, by name
    # Parquet files that hold all columns, in order; the files above do not exist then
    parquet: tuple[Path, ...] = ()
    lists: tuple[Path, ...] = ()  # file lists that name the Parquet files
    # names of the labels, the weight, the keep rate and the teachers that it lacks, and of groups without moments, whose
    # times are ages: rows to be scored have no labels
    absent: frozenset[str] = frozenset()
    # by sequence group: int64 [N, 2], first event of each row and the one after its last, in the files of the
    # group's ids and numbers, which splits may share
    slices: dict[str, Path] = field(default_factory=dict)
    moments: dict[str, Path] = field(default_factory=dict)  # int64 [N], of groups with a time
    events: dict[str, Path] = field(default_factory=dict)  # numbers of events, by name

    def paths(self) -> list[Path]:
        numerical = [] if self.numerical is None else [self.numerical]
        of_rows = (*self.columns.values(), *numerical, *self.ids.values(), *self.offsets.values())
        of_events = (*self.slices.values(), *self.moments.values(), *self.events.values())
        return [*of_rows, *of_events, *self.parquet, *self.lists]

    def mean_hotness(self, name: str) -> float:
        """Return the mean ids per row of a ragged feature, or events of a group, as `Lengths.mean`."""
        lengths = Lengths()
        if name in self.slices:
            slices = mapped(self.slices[name], OFFSET_DTYPE).reshape(-1, 2)
            for start in range(0, len(slices), CHUNK_ROWS):
                lengths.add(np.diff(slices[start : start + CHUNK_ROWS])[:, 0].clip(0))
            return lengths.mean
        offsets = mapped(self.offsets[name], OFFSET_DTYPE)
        for start in range(0, len(offsets) - 1, CHUNK_ROWS):
            lengths.add(np.diff(offsets[start : start + CHUNK_ROWS + 1]).clip(0))
        return lengths.mean


def expect(condition: bool, where: str, got: object, want: str) -> None:
    """Raise `ValueError` with the key, its value and the expected value, unless `condition` is true."""
    if not condition:
        raise ValueError(f"{where}: got {shown(got)}, want {want}")


def names_of(value: object, where: str) -> tuple[str, ...]:
    good = isinstance(value, list) and all(isinstance(name, str) and name for name in value)
    expect(good, where, value, "a list of feature names")
    return tuple(value)  # type: ignore[arg-type]


def parse_chunks(
    root: Path,
    where: str,
    chunks: object,
    numericals: tuple[str, ...],
    columns: Mapping[str, str],
    ragged: Mapping[str, bool],
    group_of: Mapping[str, str],
    moment_names: Sequence[str],
) -> SplitFiles:
    """Return the files in the `source_spec` of one split, without row counts.

    `columns`: channels of labels, weight and keep rate. `ragged`: per categorical feature, whether it is ragged.
    `group_of`: sequence group of each column of events. `moment_names`: groups with moments.
    """
    numbers = [name for name in group_of if name not in ragged]
    wanted = [*ragged, *numbers, *moment_names]
    expect(isinstance(chunks, list), where, chunks, "a list of chunks")
    assert isinstance(chunks, list)
    if any(isinstance(chunk, Mapping) and chunk.get("type") == PARQUET for chunk in chunks):
        return _parquet_files(root, where, chunks, {*numericals, *wanted}, columns)
    numerical: Path | None = None
    single: dict[str, Path] = {}
    offsets: dict[str, Path] = {}
    slices: dict[str, Path] = {}
    of_wanted: dict[str, Path] = {}
    seconds = dict.fromkeys((name for name, several in ragged.items() if several), "offsets")
    seconds |= dict.fromkeys(group_of, "slices")
    for number, chunk in enumerate(chunks):
        here = f"{where}[{number}]"
        names, paths = _parse_chunk(root, here, chunk, seconds)
        if len(names) == 1 and names[0] in columns:
            channel = columns[names[0]]
            expect(names[0] not in single, here, names, f"the {channel} once in a split")
            single[names[0]] = paths[0]
        elif names == numericals and names:
            expect(numerical is None, here, names, "the numericals once in a split")
            numerical = paths[0]
        else:
            alone = len(names) == 1 and names[0] in wanted
            want = "all numericals in channel order, or the label alone, or one categorical feature alone"
            expect(alone, f"{here}.features", list(names), want)
            name = names[0]
            expect(name not in of_wanted, here, name, "every feature once in a split")
            of_wanted[name] = paths[0]
            if name in group_of:
                first = slices.setdefault(group_of[name], paths[1])
                same = f"{first}, the slices of all columns of '{group_of[name]}'"
                expect(paths[1] == first, f"{here}.files", str(paths[1]), same)
            elif len(paths) == 2:
                offsets[name] = paths[1]
    absent = _absent(single, columns)
    missing = [name for name in wanted if name not in of_wanted]
    missing += [name for name in columns if name not in {*single, *absent}]
    missing += [*numericals] * (numerical is None)
    expect(not missing, where, missing, "a chunk for every feature; these have none")
    held = {name: single[name] for name in columns if name in single}
    ids, events, moments = (
        {name: of_wanted[name] for name in listed} for listed in (ragged, numbers, moment_names)
    )
    return SplitFiles(0, numerical, held, ids, offsets, (), (), absent, slices, moments, events)


def _absent(held: Collection[str], columns: Mapping[str, str]) -> frozenset[str]:
    """Return the names of `columns` that a split lacks: any of teachers, and without a label, as rows to be scored, of all."""
    labels = {name for name, channel in columns.items() if channel == "label"}
    teachers = {name for name, channel in columns.items() if channel == "teacher"}
    return frozenset(teachers if labels.intersection(held) else columns).difference(held)


def _parse_chunk(
    root: Path, where: str, chunk: Any, seconds: Mapping[str, str]
) -> tuple[tuple[str, ...], list[Path]]:
    """Return the features of one chunk in split binary, and its files.

    `seconds`: names of the second file, by feature, of those that have one: ragged ones and columns of events.
    """
    expect(isinstance(chunk, Mapping), where, chunk, "a mapping with type, features and files")
    kind = chunk.get("type")
    expect(kind == "split_binary", f"{where}.type", kind, f"split_binary or {PARQUET}")
    names = names_of(chunk.get("features"), f"{where}.features")
    files = chunk.get("files")
    expect(isinstance(files, list), f"{where}.files", files, "a list of files")
    second = seconds.get(names[0] if names else "")
    kinds = {"offsets": "(ids, offsets) for a ragged feature", "slices": "(events, slices)"}
    want = "one file" if second is None else f"two files {kinds[second]}"
    expect(len(files) == 1 + (second is not None), f"{where}.files", files, want)
    try:
        return names, [find_file(root, name) for name in files]
    except ValueError as error:
        raise ValueError(f"{where}.files: {error}") from None


def _parquet_files(
    root: Path, where: str, chunks: list[Any], features: set[str], columns: Mapping[str, str]
) -> SplitFiles:
    """Return the files of a split in Parquet, whose one chunk holds every feature; a file list stands for its files."""
    expect(len(chunks) == 1, where, f"{len(chunks)} chunks", f"one chunk of type {PARQUET}, alone")
    [chunk] = chunks
    names = names_of(chunk.get("features"), f"{where}[0].features")
    absent = _absent(names, columns)
    wanted = features | (set(columns) - absent)
    same = set(names) == wanted and len(names) == len(wanted)
    expect(same, f"{where}[0].features", list(names), "every feature of the spec, once")
    files = chunk.get("files")
    expect(isinstance(files, list) and bool(files), f"{where}[0].files", files, "a list of files")
    lists: list[Path] = []
    named: list[Any] = []
    try:
        for name in files:
            if isinstance(name, str) and is_file_list(name):
                lists.append(find_file(root, name))
                for listed in read_file_list(lists[-1]):
                    if listed.startswith("/"):  # a dataset directory may move
                        raise ValueError(
                            f"{lists[-1]}: lists {shown(listed)}; want paths relative to the list"
                        )
                    named.append(join(dirname(name), listed))
            else:
                named.append(name)
        paths = tuple(find_file(root, name) for name in named)
    except ValueError as error:
        raise ValueError(f"{where}[0].files: {error}") from None
    twice = [name for name, times in Counter(map(normpath, named)).items() if times > 1]
    expect(not twice, f"{where}[0].files", twice, "every file once")
    return SplitFiles(0, parquet=paths, lists=tuple(lists), absent=absent)


def unnamed_validation(root: Path, test: SplitFiles) -> dict[str, SplitFiles]:
    """Return the split `validation` if its files exist beside those of `test`.

    NVIDIA's preprocessing writes the split but does not list it in the spec.
    """
    paths = test.paths()
    if not test.columns or test.slices:
        return {}
    beside: dict[Path, Path] = {}
    for path in paths:
        folder, *rest = path.relative_to(root).parts
        name = "/".join(["validation", *rest])
        if folder == "test" and rest and (root / name).is_file():
            beside[path] = find_file(root, name)
    if any(path not in beside for path in paths):
        return {}
    columns, ids, offsets = (
        {name: beside[path] for name, path in files.items()}
        for files in (test.columns, test.ids, test.offsets)
    )
    numerical = None if test.numerical is None else beside[test.numerical]
    return {"validation": SplitFiles(0, numerical, columns, ids, offsets)}


def find_file(root: Path, name: object) -> Path:
    """Return `root`/`name`; ValueError unless that is a file inside `root`, symbolic links followed."""
    if not isinstance(name, str) or not name:
        raise ValueError(f"file name {shown(name)}: want a path relative to the dataset directory")
    path = root / name
    if Path(name).is_absolute() or not resolved(path).is_relative_to(resolved(root)):
        raise ValueError(
            f"file {shown(name)} lies outside the dataset directory {root}: want a relative path that stays inside, "
            "symbolic links included"
        )
    if not path.is_file():
        raise ValueError(f"file {shown(name)} is missing from {root}, or is no plain file")
    return path


def mapped(path: Path, dtype: np.dtype) -> np.ndarray:
    """Return the numbers of a regular file through a memory map; ValueError if it cannot be mapped."""
    if check_regular(path).st_size == 0:  # a ragged feature without any ids
        return np.empty(0, dtype)
    try:
        return np.memmap(path, dtype.newbyteorder("<"), mode="r").view(np.ndarray)
    except (OSError, OverflowError, MemoryError, ValueError) as error:
        # Of opening it, not of mapping it.
        if isinstance(error, OSError) and error.filename is not None:
            raise ValueError(os_error_text(error)) from None
        raise ValueError(
            f"{path} of {path.stat().st_size:,} bytes cannot be mapped into memory ({error}); is it complete?"
        ) from None


def count_rows(files: SplitFiles, widths: Mapping[Path, int], id_bytes: Mapping[str, int]) -> int:
    """Return the rows of a split, by the size of the file of its first label; without labels, of another file.

    `widths`: bytes of a row, by file (`FeatureSpec.row_bytes`). `id_bytes`: bytes of an id, by feature. Raises
    ValueError: the split is empty, or the size of a file does not match the number of rows.
    """
    offsets = list(files.offsets.values())
    first = next(iter([*widths, *offsets]))
    width, more = (widths[first], 0) if widths else (OFFSET_DTYPE.itemsize, 1)
    num_rows = first.stat().st_size // width - more
    if num_rows <= 0:
        of_row = "one byte" if width == 1 else f"{width} bytes"
        raise ValueError(f"{first} is empty: want {of_row} per row; write the dataset again")
    items = [(path, width, num_rows) for path, width in widths.items()]
    items += [(path, OFFSET_DTYPE.itemsize, num_rows + 1) for path in offsets]
    for path, width, num_items in items:
        got, want = path.stat().st_size, width * num_items
        if got != want:
            state = "empty" if got == 0 else "truncated" if got < want else "too long"
            raise ValueError(
                f"{path} is {state}: got {got} bytes, want {want} = {num_items} x {width} bytes for the "
                f"{num_rows} rows of {first}; copy or write the dataset again"
            )
    for name, path in files.offsets.items():
        ids, ends = files.ids[name], mapped(path, OFFSET_DTYPE)
        num_bytes = ids.stat().st_size
        num_ids, rest = divmod(num_bytes, id_bytes[name])
        if ends[0] != 0 or ends[-1] != num_ids or rest:
            raise ValueError(
                f"{path} runs from {ends[0]} to {ends[-1]}: want 0 to the {num_ids} ids of {ids} ({num_bytes} bytes); "
                "one of the two is truncated or belongs elsewhere"
            )
    return num_rows


def check_events(widths: Mapping[Path, int]) -> None:
    """Raise ValueError unless the files of a group hold equally many events; `widths`: bytes of an event in each."""
    first = next(iter(widths))
    num_events = first.stat().st_size // widths[first]
    for path, width in widths.items():
        got, want = path.stat().st_size, num_events * width
        if got != want:
            raise ValueError(
                f"{path} has {got} bytes, want {want} = {num_events} x {width} bytes for the {num_events} events of "
                f"{first}; one of the two is truncated or belongs elsewhere"
            )
