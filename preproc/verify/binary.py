"""Expected content per file of a dataset: size, checksum and valid values."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dataloading.dataset.documents import resolved
from dataloading.dataset.feature_spec import NO_KEY, CategoricalFeature, FeatureSpec
from dataloading.dataset.row_columns import RowColumn
from dataloading.dataset.split_files import OFFSET_DTYPE, SplitFiles, expect

_UNLISTED = (None, None)

Wrong = Callable[[np.ndarray], np.ndarray]
"""Items of a chunk -> bool per item, True where it is invalid."""


@dataclass(frozen=True, slots=True)
class Column:
    """Check of the items of a file."""

    dtype: np.dtype  # of one item
    wrong: Wrong  # function that marks invalid items
    kind: str  # description of such items, such as `ids outside [0, 10)`
    where: Callable[[int], str]  # index of an item -> where it is, for messages


@dataclass(frozen=True, slots=True)
class FileTask:
    path: Path  # of the file
    num_bytes: int | None = None  # its expected size; None if unknown
    crc32: str | None = None  # its expected CRC-32, hexadecimal; None if the spec lists none
    column: Column | None = None  # check of its items; None: only the checksum is compared
    parquet: FeatureSpec | None = None  # spec of its columns, if it is a Parquet file
    split: str | None = None  # split whose labels it has; None for other files
    label: RowColumn | None = None  # of the split, whose sum is reported


def file_tasks(spec: FeatureSpec) -> Iterator[FileTask]:
    """Yield every file that the spec names, or for which it lists a checksum."""
    listed = _listed_files(spec)
    for split, files in spec.splits.items():
        for path in files.parquet:
            num_bytes, crc32 = listed.pop(path, _UNLISTED)
            yield FileTask(path, num_bytes, crc32, parquet=spec, split=split)
        if files.parquet:
            continue
        num_rows = num_rows_of(spec, split, files)
        num_bytes_of = {path: num_rows * width for path, width in spec.row_bytes(files).items()}
        checks: dict[Path, Column] = {
            files.columns[c.name]: Column(c.stored, c.wrong, mistakes(spec, c), _row)
            for c in spec.row_columns
            if c.name in files.columns
        }
        if files.numerical is not None:
            checks[files.numerical] = _numerical(spec)
        for feature in spec.categorical:
            ids, ends = files.ids[feature.name], None
            if spec.group_of(feature.name) is not None:
                continue  # `preproc.verify.run.event_mistakes` reads them row by row
            if feature.hotness is None:
                offsets = files.offsets[feature.name]
                ends = _mapped(offsets)
                num_ids = int(ends[-1]) if len(ends) else 0
                num_bytes_of[ids] = num_ids * feature.dtype.itemsize
                num_bytes_of[offsets] = (num_rows + 1) * OFFSET_DTYPE.itemsize
                checks[offsets] = _offsets()
            checks[ids] = _ids(feature, ends)
        labels = {files.columns.get(label.name): label for label in spec.labels}
        for path, check in checks.items():
            crc32 = listed.pop(path, _UNLISTED)[1]
            label = labels.get(path)
            of_split = None if label is None else split
            yield FileTask(path, num_bytes_of[path], crc32, check, split=of_split, label=label)
    for path, (num_bytes, crc32) in listed.items():
        if not path.is_file():
            raise ValueError(
                f"{path} is missing, but metadata.files lists it; copy the dataset again"
            )
        yield FileTask(path, num_bytes, crc32)


def listed_in(spec: FeatureSpec, key: str) -> Mapping[str, Any]:
    """Return a mapping in the metadata of the spec; it is empty in NVIDIA's directories."""
    listed = spec.metadata.get(key) or {}
    expect(isinstance(listed, Mapping), f"{spec.root}: metadata.{key}", listed, "a mapping")
    return listed


def listed_rows(spec: FeatureSpec, split: str) -> int | None:
    """Return the rows of a split in the metadata of the spec, None if it has none."""
    rows = listed_in(spec, "rows").get(split)
    is_count = isinstance(rows, int) and not isinstance(rows, bool) and rows >= 0
    where = f"{spec.root}: metadata.rows.{split}"
    expect(rows is None or is_count, where, rows, "an integer that is not negative")
    return rows


def _listed_files(spec: FeatureSpec) -> dict[Path, tuple[int | None, str | None]]:
    """Return (bytes, CRC-32) of every file that the metadata of the spec lists; a file may lie in the dataset only."""
    assert spec.root is not None
    root, files = resolved(spec.root), {}
    for name, entry in listed_in(spec, "files").items():
        where = f"{spec.root}: metadata.files"
        inside = isinstance(name, str) and resolved(root / name).is_relative_to(root)
        expect(inside, where, name, "paths of files in the dataset directory")
        where = f"{where}.{name}"
        expect(isinstance(entry, Mapping), where, entry, "a mapping with bytes and crc32")
        num_bytes, crc32 = entry.get("bytes"), entry.get("crc32")
        is_count = isinstance(num_bytes, int) and not isinstance(num_bytes, bool)
        expect(num_bytes is None or is_count, f"{where}.bytes", num_bytes, "an integer")
        is_text = crc32 is None or isinstance(crc32, str)
        expect(is_text, f"{where}.crc32", crc32, "a text of eight hexadecimal digits")
        files[spec.root / name] = (num_bytes, crc32)
    return files


def num_rows_of(spec: FeatureSpec, split: str, files: SplitFiles) -> int:
    """Return the expected rows of a split: those in the spec, else those of most of its files."""
    written = listed_rows(spec, split)
    if written is not None:
        return written
    rows = [path.stat().st_size // width for path, width in spec.row_bytes(files).items()]
    rows += [p.stat().st_size // OFFSET_DTYPE.itemsize - 1 for p in files.offsets.values()]
    return Counter(rows).most_common(1)[0][0]


def _row(index: int) -> str:
    return f"row {index:,}"


def mistakes(spec: FeatureSpec, column: RowColumn) -> str:
    """Return what the invalid numbers of a label, weight or keep rate are, in words."""
    named = "" if spec.labels == (column,) else f" of '{column.name}'"
    if column.is_binary:
        return f"labels{named} other than 0 and 1"
    return f"{column.channel}s{named} other than {column.wanted}"


def _numerical(spec: FeatureSpec) -> Column:
    names = spec.numerical

    def where(index: int) -> str:
        row, column = divmod(index, len(names))
        return f"row {row:,} of {names[column]}"

    dtype = spec.numerical_dtype.newbyteorder("<")
    return Column(dtype, lambda items: ~np.isfinite(items), "numericals that are not finite", where)


def wrong_ids(feature: CategoricalFeature) -> str:
    """Return what to call the values that no id, or no key, may have."""
    if feature.is_dynamic:
        return f"keys of '{feature.name}' that are {NO_KEY}, which stands for no value"
    return f"ids of '{feature.name}' outside [0, {feature.cardinality})"


def _ids(feature: CategoricalFeature, offsets: np.ndarray | None) -> Column:
    """Return the check of the ids of `feature`; `offsets` are int64 [N + 1] for a ragged one."""

    def where(index: int) -> str:
        if offsets is None:
            return _row(index // (feature.hotness or 1))
        return _row(int(offsets.searchsorted(index, "right")) - 1)

    dtype = feature.dtype.newbyteorder("<")
    return Column(dtype, feature.wrong, wrong_ids(feature), where)


def _offsets() -> Column:
    last = 0
    begun = False

    def wrong(ends: np.ndarray) -> np.ndarray:
        nonlocal last, begun
        falls = np.diff(ends, prepend=last) < 0
        if not begun and len(ends):
            falls[0] = ends[0] != 0
            begun = True
        last = int(ends[-1]) if len(ends) else last
        return falls

    kind = "offsets that do not start at 0 or decrease"
    return Column(OFFSET_DTYPE, wrong, kind, lambda index: _row(max(index - 1, 0)))


def _mapped(path: Path) -> np.ndarray:
    count = path.stat().st_size // OFFSET_DTYPE.itemsize
    return (
        np.memmap(path, OFFSET_DTYPE, "r", shape=(count,)) if count else np.empty(0, OFFSET_DTYPE)
    )
