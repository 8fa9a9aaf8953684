"""The dataset while it grows: files that are complete one by one, the spec last, then one rename.

Unlike `dataloading.dataset_directory.write_dataset` it survives the process: a file that is on
record is not written again by the next run.
"""

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dataloading.dataset_directory import write_spec
from dataloading.durable_files import put_in_place, sync_directory, sync_file, sync_stream
from dataloading.feature_spec import SPEC_NAME, CategoricalFeature, FeatureSpec
from dataloading.split_files import SplitFiles
from preproc.column_store import bytes_of


class GrowingFile:
    """One file of the dataset, written from its start; `record` tells its bytes and CRC-32 at the end."""

    def __init__(self, dataset: Path, name: str) -> None:
        self._path = dataset / name
        self._name = name
        self._bytes = 0
        self._crc32 = 0

    def __enter__(self) -> "GrowingFile":
        self._path.parent.mkdir(exist_ok=True)
        self._stream = self._path.open("wb", buffering=0)
        return self

    def append(self, values: np.ndarray) -> None:
        """Append an array's bytes."""
        data = bytes_of(values)
        self._crc32 = zlib.crc32(data, self._crc32)
        self._bytes += len(data)
        while data:
            data = data[self._stream.write(data) :]

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            sync_stream(self._stream)
            sync_directory(self._path.parent)
        self._stream.close()

    @property
    def record(self) -> dict[str, dict[str, Any]]:
        """The file's entry of `metadata.files`."""
        return {self._name: {"bytes": self._bytes, "crc32": f"{self._crc32:08x}"}}


def checksum(path: Path) -> dict[str, Any]:
    """Return the entry of `metadata.files` of a file that is complete."""
    num_bytes = crc32 = 0
    with path.open("rb") as stream:
        while data := stream.read(1 << 22):
            crc32 = zlib.crc32(data, crc32)
            num_bytes += len(data)
    return {"bytes": num_bytes, "crc32": f"{crc32:08x}"}


def finish_dataset(
    directory: Path,
    output: Path,
    *,
    categorical: list[CategoricalFeature],
    numerical: tuple[str, ...],
    numerical_dtype: str,
    label: str,
    rows: Mapping[str, int],
    files: Mapping[str, dict[str, Any]],
    metadata: Mapping[str, Any],
) -> None:
    """Write the spec of `directory`, whose files are complete, and rename it to `output`.

    Args:
        directory: holds every file.
        output: what stands there is replaced.
        categorical: features in the model's order.
        numerical: names in channel order.
        numerical_dtype: float16 or float32.
        label: name of the label.
        rows: rows of each split.
        files: bytes and CRC-32 of each file of a split; those of all others, if missing, are taken here.
        metadata: plain yaml values; `rows` and `files` are added.
    """
    splits = {}
    for split in rows:
        folder = directory / split
        splits[split] = SplitFiles(
            rows[split],
            folder / "numerical.bin" if numerical else None,
            folder / "label.bin",
            {feature.name: folder / f"{feature.name}.bin" for feature in categorical},
            {
                feature.name: folder / f"{feature.name}.offsets.bin"
                for feature in categorical
                if feature.hotness is None
            },
        )
    ordered = [
        path.relative_to(directory).as_posix()
        for split in splits.values()
        for path in [split.label, split.numerical, *split.ids.values(), *split.offsets.values()]
        if path is not None
    ]
    records = {name: dict(files[name]) for name in ordered}
    measured = tuple(
        CategoricalFeature(
            feature.name,
            feature.cardinality,
            feature.dtype,
            feature.hotness,
            feature.hotness or splits["train"].mean_hotness(feature.name, feature.dtype),
        )
        for feature in categorical
    )
    for path in sorted(directory.rglob("*")):  # vocabularies, report, bad rows
        name = path.relative_to(directory).as_posix()
        # A run that was killed at this very place may have left a spec, whole or in part.
        if path.is_file() and name not in records and not name.endswith((SPEC_NAME, ".partial")):
            sync_file(path)
            records[name] = dict(files.get(name) or checksum(path))
        elif path.is_dir():
            sync_directory(path)
    spec = FeatureSpec(
        directory,
        numerical,
        np.dtype(numerical_dtype),
        label,
        measured,
        splits,
        {**metadata, "rows": dict(rows), "files": records},
    )
    write_spec(spec, directory)
    sync_directory(directory)
    put_in_place(directory, output)
