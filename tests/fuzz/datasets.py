"""Files of a dataset directory, damaged: split binaries, offsets of ragged features, Parquet."""

import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import yaml
from hypothesis import strategies as st

from tests.fuzz.commands import as_preproc, as_recipe
from tests.fuzz.harness import Fuzzer
from tests.fuzz.mutations import INTEGERS, BytesEdit, apply_bytes, bytes_edits
from tests.fuzz.specs import SPEC, Dataset, make_dataset, read_epoch
from tests.fuzz.tables import TableEdit, apply_table, table_edits


@dataclass(frozen=True, slots=True)
class FileChange:
    """A change of one file of a dataset.

    Attributes:
        file: its path below the dataset.
        edits: of its bytes.
        items: (part of the file, value): values of its dtype to write.
        without_metadata: leave out rows and checksums, as NVIDIA's directories do.
        with_checksum: make the checksum in the spec that of the changed file.
        verify: read with `mode=verify` instead of the loader.
    """

    file: str
    edits: list[BytesEdit]
    items: list[tuple[float, int]]
    without_metadata: bool
    with_checksum: bool
    verify: bool


def _item_dtype(name: str) -> np.dtype:
    if "offset" in name:
        return np.dtype("<i8")
    return np.dtype({"numerical": "<f4", "tags": "<i2"}.get(Path(name).stem, "i1"))


def _binary_changes(dataset: Dataset) -> st.SearchStrategy[FileChange]:
    files = sorted(str(p.relative_to(dataset.root)) for p in dataset.root.rglob("*.bin"))
    offsets = [name for name in files if "offset" in name] or files
    part = st.floats(0, 1)
    return st.builds(
        FileChange,
        st.one_of(st.sampled_from(files), st.sampled_from(offsets)),
        st.one_of(st.just([]), bytes_edits()),
        st.lists(st.tuples(part, INTEGERS), max_size=3),
        st.booleans(),
        st.booleans(),
        st.booleans(),
    )


def _change_binary(dataset: Dataset, change: FileChange, room: Path) -> None:
    root = dataset.copy_to(room)
    path = root / change.file
    dtype = _item_dtype(change.file)
    items = np.frombuffer(path.read_bytes(), dtype).copy()
    for at, value in change.items:
        if dtype.kind == "f":
            items[int(at * (len(items) - 1))] = max(min(value, 10**38), -(10**38))
        else:
            info = np.iinfo(dtype)
            items[int(at * (len(items) - 1))] = min(max(value, info.min), info.max)
    data = apply_bytes(items.tobytes(), change.edits)
    path.write_bytes(data)
    rewrite_metadata(root, change, data)
    _read(root, verify=change.verify)


def rewrite_metadata(root: Path, change: FileChange, data: bytes) -> None:
    """Drop rows and checksums from the spec, or correct the checksum of the changed file."""
    spec = yaml.safe_load((root / SPEC).read_text())
    if change.without_metadata:
        spec["metadata"] = {}
    elif change.with_checksum:
        entry = {"bytes": len(data), "crc32": f"{zlib.crc32(data):08x}"}
        spec["metadata"]["files"][change.file] = entry
    (root / SPEC).write_text(yaml.safe_dump(spec, sort_keys=False))


def _read(root: Path, *, verify: bool) -> None:
    if verify:
        as_preproc("mode=verify", f"path={root}")
    else:
        as_recipe(lambda: read_epoch(root))


def _make_parquet(root: Path) -> Dataset:
    return make_dataset(root, "parquet")


def _parquet_files(dataset: Dataset) -> list[str]:
    return sorted(str(path.relative_to(dataset.root)) for path in dataset.root.rglob("*.parquet"))


def _parquet_bytes(dataset: Dataset) -> st.SearchStrategy[FileChange]:
    return st.builds(
        FileChange,
        st.sampled_from(_parquet_files(dataset)),
        bytes_edits(),
        st.just([]),
        st.booleans(),
        st.just(True),
        st.booleans(),
    )


def _change_parquet_bytes(dataset: Dataset, change: FileChange, room: Path) -> None:
    root = dataset.copy_to(room)
    data = apply_bytes((root / change.file).read_bytes(), change.edits)
    (root / change.file).write_bytes(data)
    rewrite_metadata(root, change, data)
    _read(root, verify=change.verify)


def _parquet_tables(dataset: Dataset) -> st.SearchStrategy[tuple[FileChange, list[TableEdit]]]:
    change = st.builds(
        FileChange,
        st.sampled_from(_parquet_files(dataset)),
        st.just([]),
        st.just([]),
        st.booleans(),
        st.just(True),
        st.booleans(),
    )
    columns = pq.read_schema(dataset.root / _parquet_files(dataset)[0]).names
    return st.tuples(change, table_edits(columns))


def _change_parquet_table(
    dataset: Dataset, changes: tuple[FileChange, list[TableEdit]], room: Path
) -> None:
    change, edits = changes
    root = dataset.copy_to(room)
    path = root / change.file
    apply_table(pq.read_table(path), edits, path)
    rewrite_metadata(root, change, path.read_bytes())
    _read(root, verify=change.verify)


FUZZERS = [
    Fuzzer("dataset: binaries", make_dataset, _binary_changes, _change_binary, 60, (1,)),
    Fuzzer(
        "dataset: Parquet bytes", _make_parquet, _parquet_bytes, _change_parquet_bytes, 40, (1,)
    ),
    Fuzzer(
        "dataset: Parquet schema", _make_parquet, _parquet_tables, _change_parquet_table, 60, (1,)
    ),
]
