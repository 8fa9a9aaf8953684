"""npy files of facebookresearch's and MLPerf's PyTorch DLRM, one set per day.

    day_0_labels.npy   int [N, 1] or [N]
    day_0_dense.npy    float32 [N, 13], transformed already
    day_0_sparse.npy   int [N, 26], one id per table; or instead of it
    day_0_sparse_multi_hot.npz   arrays `0` to `25`, int [N, hotness]

As in their loader, all days but the last are for training. The first half of the last day is for validation,
and the second half for testing. The files hold no table sizes, so all ids are read once to find the largest
one per table.
"""

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np

from dataloading.dataset.feature_spec import CategoricalFeature, FeatureSpec
from dataloading.dataset.split_files import SplitFiles
from preproc.convert.rows import CHUNK_ROWS, Chunk, natural_order


class NpyRows:
    """Rows of the npy files below a directory."""

    kind = "MLPerf's npy files"

    def __init__(self, root: Path) -> None:
        self._days = [
            _Day(path) for path in sorted(root.glob("day_*_labels.npy"), key=natural_order)
        ]
        if len(self._days) < 2:
            raise ValueError(
                f"{root}: {len(self._days)} day; want two at least, the last one to test on"
            )
        hotness = self._days[0].hotness
        for day in self._days:
            if day.hotness != hotness or day.num_numerical != self._days[0].num_numerical:
                raise ValueError(
                    f"{day.labels_path}: {len(day.hotness)} tables of {day.hotness} ids, want those of the first day: "
                    f"{hotness}"
                )
        largest = np.zeros(len(hotness), np.int64)
        for day in self._days:
            largest = np.maximum(largest, day.largest_ids())
        last = self._days[-1].num_rows
        half = (last + 1) // 2
        self._parts = {
            "train": [(day, 0, day.num_rows) for day in self._days[:-1]],
            "test": [(self._days[-1], half, last)],
            "validation": [(self._days[-1], 0, half)],
        }
        self.spec = FeatureSpec(
            root=root,
            numerical=tuple(f"num_{i}" for i in range(self._days[0].num_numerical)),
            numerical_dtype=np.dtype(np.float32),
            label="label",
            categorical=tuple(
                CategoricalFeature.of(f"cat_{i}", rows + 1, count)
                for i, (rows, count) in enumerate(zip(largest.tolist(), hotness, strict=True))
            ),
            splits={
                name: SplitFiles(sum(stop - start for _, start, stop in parts))
                for name, parts in self._parts.items()
            },
            metadata={},
        )

    def chunks(self, split: str) -> Iterator[Chunk]:
        """Yield the rows of `split` in order."""
        for day, start, stop in self._parts[split]:
            for rows, ids in day.ids(start, stop):
                yield Chunk(
                    day.labels[rows].reshape(-1),
                    day.dense[rows],
                    {f"cat_{i}": values for i, values in enumerate(ids)},
                    {},
                )


class _Day:
    """The three files of one day."""

    def __init__(self, labels: Path) -> None:
        self.labels_path = labels
        stem = labels.name.removesuffix("_labels.npy")
        self.labels = _mapped(labels)
        self.dense = _mapped(labels.with_name(f"{stem}_dense.npy"))
        self.num_rows = len(self.labels)
        self.num_numerical = self.dense.shape[1]
        self._sparse = labels.with_name(f"{stem}_sparse.npy")
        self._multi_hot = labels.with_name(f"{stem}_sparse_multi_hot.npz")
        if self._multi_hot.is_file():
            with zipfile.ZipFile(self._multi_hot) as archive:
                shapes = [_header(stream)[0] for stream in _streams(archive)]
        else:
            shape = _mapped(self._sparse).shape
            shapes = [(shape[0], 1)] * shape[1]
        self.hotness = [shape[1] for shape in shapes]
        for name, rows in [("dense", len(self.dense)), *[("ids", shape[0]) for shape in shapes]]:
            if rows != self.num_rows:
                raise ValueError(
                    f"{labels}: {self.num_rows} rows, but its {name} have {rows}; one of the two is truncated"
                )

    def ids(self, start: int, stop: int) -> Iterator[tuple[slice, list[np.ndarray]]]:
        """Yield (rows, ids per table [n, hotness]) of the rows [start, stop), in chunks."""
        if not self._multi_hot.is_file():
            sparse = _mapped(self._sparse)
            for first in range(start, stop, CHUNK_ROWS):
                rows = slice(first, min(first + CHUNK_ROWS, stop))
                yield rows, list(np.ascontiguousarray(sparse[rows].T)[:, :, None])
            return
        with zipfile.ZipFile(self._multi_hot) as archive:
            streams = list(_streams(archive))
            headers = [_header(stream) for stream in streams]
            for stream, (shape, dtype) in zip(streams, headers, strict=True):
                stream.seek(start * shape[1] * dtype.itemsize, 1)
            for first in range(start, stop, CHUNK_ROWS):
                count = min(CHUNK_ROWS, stop - first)
                read = [
                    np.frombuffer(stream.read(count * shape[1] * dtype.itemsize), dtype)
                    for stream, (shape, dtype) in zip(streams, headers, strict=True)
                ]
                yield (
                    slice(first, first + count),
                    [ids.reshape(count, -1) for ids in read],
                )

    def largest_ids(self) -> np.ndarray:
        """Return the largest id of each table, int64 [num_tables]."""
        largest = np.zeros(len(self.hotness), np.int64)
        for _, ids in self.ids(0, self.num_rows):
            largest = np.maximum(largest, [table.max() for table in ids])
        return largest


def _mapped(path: Path) -> np.ndarray:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise ValueError(
            f"{path}: no such file; want labels, dense and sparse of every day"
        ) from None
    except ValueError as error:
        raise ValueError(f"{path}: not a complete npy file ({error}); copy it again") from None


def _streams(archive: zipfile.ZipFile) -> Iterator[IO[bytes]]:
    """Open the members `0.npy`, `1.npy`, ... of an npz file."""
    names = sorted(archive.namelist(), key=lambda name: int(name.removesuffix(".npy")))
    return (archive.open(name) for name in names)


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], np.dtype]:
    """Read the header of an npy stream and return shape and dtype."""
    version = np.lib.format.read_magic(stream)
    read = (
        np.lib.format.read_array_header_1_0
        if version == (1, 0)
        else np.lib.format.read_array_header_2_0
    )
    shape, by_column, dtype = read(stream)
    assert not by_column
    return shape, dtype
