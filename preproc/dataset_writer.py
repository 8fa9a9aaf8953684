"""Writer of a dataset that a killed run resumes: one file after another, then the spec, then one rename.

`dataloading.dataset.dataset_directory.write_dataset` starts from the beginning after a failure. Here the next
run keeps every recorded file.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from isal.isal_zlib import crc32

from dataloading.dataset.column_files import column_file_name
from dataloading.dataset.counted_file import CountedFile
from dataloading.dataset.dataset_directory import write_spec
from dataloading.dataset.durable_files import put_in_place, sync_directory, sync_file
from dataloading.dataset.feature_spec import SPEC_NAME, FeatureSpec, mean_hotness
from dataloading.dataset.sequences import EVENTS
from dataloading.dataset.split_files import SplitFiles
from preproc.column_store import bytes_of, size_and_crc32

NO_DATA = ("report.png", "bad_rows.tsv")
"""Files with times of the run, or paths of its input. The spec does not list them: the same data have the same spec."""


def sync_named(path: Path) -> None:
    """Make a written file and its name survive a power cut."""
    sync_file(path)
    sync_directory(path.parent)


class RecordedFile(CountedFile):
    """A file written from its start; the end of the block calls `sync` with its path. `record` is by its name."""

    checksum = staticmethod(crc32)

    def __init__(self, dataset: Path, name: str, sync: Callable[[Path], Any] = sync_named) -> None:
        path = dataset / name
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)  # of a killed run
        super().__init__(path)
        self._name, self._sync = name, sync

    def append(self, values: np.ndarray) -> None:
        self.write(bytes_of(values))

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        self.close()
        if kind is None:
            self._sync(self.path)

    @property
    def record(self) -> dict[str, dict[str, Any]]:
        return {self._name: super().record}


def checksum(path: Path) -> dict[str, Any]:
    """Return the entry of `metadata.files` for a complete file."""
    num_bytes, crc32 = size_and_crc32(path)
    return {"bytes": num_bytes, "crc32": f"{crc32:08x}"}


def finish_dataset(
    spec: FeatureSpec,
    files: Mapping[str, dict[str, Any]],
    output: Path,
    before_rename: Callable[[], None] = lambda: None,
) -> None:
    """Write the spec of a directory whose files are complete, and rename the directory to `output`.

    `spec`: names, rows per split and metadata of the dataset in its `root`; files per split, mean hotness and the
    metadata `rows` and `files` are filled in. `files`: bytes and CRC-32 per file of a split. Those of other files are
    computed here unless they are listed.
    """
    directory = spec.root
    assert directory is not None
    splits = {name: _files_of(spec, name) for name in spec.splits}
    first = splits.get("train") or next(iter(splits.values()))
    categorical = tuple(
        replace(f, mean_hotness=f.hotness or mean_hotness(first, spec, f.name))
        for f in spec.categorical
    )
    metadata = {
        **spec.metadata,
        "rows": {name: split.num_rows for name, split in splits.items()},
        "files": _synced_files(directory, splits, files),
    }
    complete = replace(spec, categorical=categorical, splits=splits, metadata=metadata)
    write_spec(complete, directory)
    sync_directory(directory)
    before_rename()
    put_in_place(directory, output)


def _files_of(spec: FeatureSpec, split: str) -> SplitFiles:
    assert spec.root is not None
    folder, absent = spec.root / split, spec.splits[split].absent
    events = {
        # Those of a log are shared by the splits.
        name: next(
            d / f"{name}.bin" for d in (folder, spec.root / EVENTS) if (d / f"{name}.bin").exists()
        )
        for group in spec.sequences
        for name in group.columns
    }
    return SplitFiles(
        spec.splits[split].num_rows,
        folder / "numerical.bin" if spec.numerical else None,
        {
            c.name: folder / column_file_name(spec.labels, c)
            for c in spec.row_columns
            if c.name not in absent
        },
        {f.name: events.get(f.name, folder / f"{f.name}.bin") for f in spec.categorical},
        {
            feature.name: folder / f"{feature.name}.offsets.bin"
            for feature in spec.categorical
            if feature.hotness is None and feature.name not in events
        },
        absent=absent,
        slices={g.name: folder / f"{g.name}.slices.bin" for g in spec.sequences},
        moments={g.name: folder / f"{g.name}.moments.bin" for g in spec.sequences if g.time},
        events={c.name: events[c.name] for c in spec.event_columns},
    )


def _synced_files(
    directory: Path, splits: Mapping[str, SplitFiles], files: Mapping[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Sync the files that are not synced yet and return `metadata.files`, files of the splits first."""
    records = {}
    for split in splits.values():
        for path in split.paths():
            name = path.relative_to(directory).as_posix()
            records[name] = dict(files[name])
    for path in sorted(directory.rglob("*")):  # vocabularies, fitted state, report
        name = path.relative_to(directory).as_posix()
        # A run killed at this point may have left a spec, complete or partial.
        if path.is_file() and name not in records and not name.endswith((SPEC_NAME, ".tmp")):
            sync_file(path)
            if name not in NO_DATA:
                records[name] = dict(files.get(name) or checksum(path))
        elif path.is_dir():
            sync_directory(path)
    return records
