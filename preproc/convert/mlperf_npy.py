"""npy files of facebookresearch's and MLPerf's PyTorch DLRM, one set per day.

    day_0_labels.npy   int [N, 1] or [N]
    day_0_dense.npy    float32 [N, 13], transformed already
    day_0_sparse.npy   int [N, 26], one id per table; or instead of it
    day_0_sparse_multi_hot.npz   arrays `0` to `25`, int [N, hotness]

As in their loader, all days but the last are for training. The first half of the last day is for validation, and the second half
for testing. The files hold no table sizes, so all ids are read once to find the largest one per table.
"""

import math
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tokenize import TokenError
from typing import IO

import numpy as np

from configs.messages import shortened, shown
from dataloading.dataset.documents import check_regular, open_regular
from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.dataset.row_columns import RowColumn
from dataloading.dataset.split_files import SplitFiles
from preproc.convert.rows import CHUNK_ROWS, Chunk, input_feature
from preproc.raw_files import natural_order

# NumPy's letters of kinds of dtypes.
INTEGERS = "iu"
NUMBERS = "biuf"
# What Python's parser of literals and NumPy's of dtypes raise for a header that is none.
_NO_HEADER = (
    *(ValueError, SyntaxError, TokenError, TypeError, LookupError, ArithmeticError),
    *(RecursionError, MemoryError),
)
# An archive that is damaged, encrypted (RuntimeError), or packed in another way.
_NO_ARCHIVE = (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, NotImplementedError)


class NpyRows:
    """Rows of the npy files below a directory; without `has_tables` ids are any integers."""

    kind = "MLPerf's npy files"

    def __init__(self, root: Path, *, has_tables: bool = True) -> None:
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
                    f"{day.labels_path}: {len(day.hotness)} tables of {shown(day.hotness)} ids and {day.num_numerical} "
                    f"numericals, want those of the first day: {shown(hotness)} and {self._days[0].num_numerical}"
                )
        rows: list[int | None] = [None] * len(hotness)
        if has_tables:
            largest = [0] * len(hotness)
            for day in self._days:
                for _, ids in day.ids(0, day.num_rows):
                    largest = list(map(max, largest, (int(table.max()) for table in ids)))
            rows = [most + 1 for most in largest]
        read = {path.name for day in self._days for path in day.paths}
        self.left_out: Sequence[str] = [
            f"{path.name} (not read)"
            for path in sorted(root.glob("*.np[yz]"), key=natural_order)
            if path.name not in read
        ]
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
            labels=(RowColumn("label"),),
            categorical=tuple(
                input_feature(f"cat_{i}", size, count)
                for i, (size, count) in enumerate(zip(rows, hotness, strict=True))
            ),
            splits={
                name: SplitFiles(sum(stop - start for _, start, stop in parts))
                for name, parts in self._parts.items()
            },
            metadata={},
        )

    def chunks(self, split: str) -> Iterator[Chunk]:
        for day, start, stop in self._parts[split]:
            for rows, ids in day.ids(start, stop):
                yield Chunk(
                    day.labels[rows].reshape(-1),
                    day.dense[rows] if day.num_numerical else None,
                    {f"cat_{i}": values for i, values in enumerate(ids)},
                    {},
                )


class _Day:
    def __init__(self, labels: Path) -> None:
        self.labels_path = labels
        stem = labels.name.removesuffix("_labels.npy")
        self.labels = _mapped(labels, NUMBERS)
        if self.labels.ndim != 1 and self.labels.shape[1:] != (1,):
            got = shown(self.labels.shape)
            raise ValueError(f"{labels}: got shape {got}, want [rows] or [rows, 1]")
        self.dense = _mapped(labels.with_name(f"{stem}_dense.npy"), NUMBERS, dimensions=2)
        self.num_rows = len(self.labels)
        self.num_numerical = self.dense.shape[1]
        self._sparse = labels.with_name(f"{stem}_sparse.npy")
        self._multi_hot = labels.with_name(f"{stem}_sparse_multi_hot.npz")
        ids = self._multi_hot if self._multi_hot.is_file() else self._sparse
        self.paths = (labels, labels.with_name(f"{stem}_dense.npy"), ids)
        if self._multi_hot.is_file():
            with _archive(self._multi_hot) as streams:
                shapes = [_header(stream)[0] for stream in streams]
        else:
            shape = _mapped(self._sparse, INTEGERS, dimensions=2).shape
            shapes = [(shape[0], 1)] * shape[1]
        if not shapes:
            raise ValueError(f"{labels}: its ids have no table; want one column per feature")
        self.hotness = [shape[1] for shape in shapes]
        for name, rows in [("dense", len(self.dense)), *[("ids", shape[0]) for shape in shapes]]:
            if rows != self.num_rows:
                raise ValueError(
                    f"{labels}: {self.num_rows} rows, but its {name} have {rows}; one of the two is truncated"
                )

    def ids(self, start: int, stop: int) -> Iterator[tuple[slice, list[np.ndarray]]]:
        """Yield (rows, ids per table [n, hotness]) of the rows [start, stop), in chunks."""
        if not self._multi_hot.is_file():
            sparse = _mapped(self._sparse, INTEGERS, dimensions=2)
            for first in range(start, stop, CHUNK_ROWS):
                rows = slice(first, min(first + CHUNK_ROWS, stop))
                yield rows, list(np.ascontiguousarray(sparse[rows].T)[:, :, None])
            return
        with _archive(self._multi_hot) as streams:
            headers = [_header(stream) for stream in streams]
            for stream, (shape, dtype) in zip(streams, headers, strict=True):
                stream.seek(start * shape[1] * dtype.itemsize, 1)
            for first in range(start, stop, CHUNK_ROWS):
                count = min(CHUNK_ROWS, stop - first)
                read = [
                    _read(stream, count, shape[1], dtype)
                    for stream, (shape, dtype) in zip(streams, headers, strict=True)
                ]
                yield slice(first, first + count), read


def _mapped(path: Path, kinds: str, dimensions: int | None = None) -> np.ndarray:
    """Map an npy file of so many dimensions, None for one or two; ValueError if there is none, or it has another content."""
    try:
        with open_regular(path) as stream:
            shape, by_column, dtype = _read_header(stream)
            start, num_bytes = stream.tell(), path.stat().st_size - stream.tell()
    except FileNotFoundError:
        raise ValueError(
            f"{path}: no such file; want labels, dense and sparse of every day"
        ) from None
    except _NO_HEADER as error:
        reason = shortened(str(error))
        raise ValueError(f"{path}: not a complete npy file ({reason}); copy it again") from None
    is_known = len(shape) in ((1, 2) if dimensions is None else (dimensions,))
    if dtype.kind not in kinds or not is_known:
        number = "integers" if kinds == INTEGERS else "numbers"
        raise ValueError(
            f"{path}: got {shortened(str(dtype))} {shown(shape)}, want {number} in {dimensions or 'one or two'} dimensions"
        )
    wanted = math.prod(shape) * dtype.itemsize
    if min(shape) < 0 or num_bytes < wanted:
        raise ValueError(
            f"{path}: not a complete npy file (its shape is {shown(shape)}, and {num_bytes:,} bytes follow); copy it again"
        )
    return np.memmap(path, dtype, "r", start, shape, "F" if by_column else "C")


@contextmanager
def _archive(path: Path) -> Iterator[list[IO[bytes]]]:
    """Open the members `0.npy`, `1.npy`, ... of an npz file; errors while they are read become ValueErrors with its path."""
    try:
        check_regular(path)
        with ExitStack() as stack:
            archive = stack.enter_context(zipfile.ZipFile(path))
            names = [f"{index}.npy" for index in range(len(archive.namelist()))]
            if sorted(archive.namelist()) != sorted(names):
                got = shown(archive.namelist())
                raise ValueError(f"it has the arrays {got}, want 0.npy, 1.npy, ..., one per table")
            yield [stack.enter_context(archive.open(name)) for name in names]
    except (*_NO_HEADER, *_NO_ARCHIVE) as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise
        reason = shortened(str(error).removeprefix(f"{path}: "))
        raise ValueError(f"{path}: not a complete npz file ({reason}); copy it again") from None


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], np.dtype]:
    """Read the header of an npy stream with two dimensions, and return shape and dtype."""
    shape, by_column, dtype = _read_header(stream)
    if by_column or len(shape) != 2 or min(shape) < 0 or shape[1] < 1 or dtype.kind not in INTEGERS:
        order = " in column order" if by_column else ""
        raise ValueError(
            f"an array is {shortened(str(dtype))} {shown(shape)}{order}, want row-major integers [rows, hotness]"
        )
    return shape, dtype


def _read_header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Return shape, whether the order is by columns, and dtype; numpy's parser of headers evaluates literals only."""
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(stream)
    if version != (2, 0):
        raise ValueError(f"its format has version {version}")
    return np.lib.format.read_array_header_2_0(stream)


def _read(stream: IO[bytes], rows: int, hotness: int, dtype: np.dtype) -> np.ndarray:
    """Read the next rows of an array, [rows, hotness]."""
    data = stream.read(rows * hotness * dtype.itemsize)
    if len(data) < rows * hotness * dtype.itemsize:
        raise ValueError("an array ends before its last row")
    return np.frombuffer(data, dtype).reshape(rows, hotness)
