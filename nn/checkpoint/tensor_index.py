"""Index and reader of the tensors in a checkpoint's files; nothing in a file is executed.

The files contain bare arrays, row-major and little-endian. `tensors.json` locates them (`nn.checkpoint.tensor_files`):

    {"format": 1,
     "tables": [names, in the order of the features],
     "tensors": {name: {"dtype": "float32", "size": [rows, columns],
                        "chunks": [{"offsets": [row, column], "sizes": [rows, columns],
                                    "file": name, "start": byte, "crc32": [number, ...]}]}}}

with one CRC-32 per 64 MiB of a chunk. Rows of a tensor are read block by block. Format 2 has a table whose rows lay on disk, with
"initial": {"seed": number, "table": name, "bound": number} beside its dtype: its file has the changes of these weights
(`nn.tiers.initial_rows`), and holes where there are none.
"""

import math
import os
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from configs.messages import os_error_text, shown
from dataloading.dataset.documents import open_regular, parse_json, read_regular, resolved
from nn.tiers.initial_rows import InitialRows

INDEX_FILE = "tensors.json"
FORMAT = 1
SPARSE_FORMAT = 2
BLOCK_BYTES = 2**24
"""Bytes per read."""
CHECKSUM_BYTES = 2**26
THREADS = 4
"""Threads that write files, or read them to compare checksums."""

# torch's name of a dtype -> numpy's dtype. numpy has no bfloat16; its bits are read as uint16.
DTYPES = {
    name: np.dtype(name).newbyteorder("<")
    for name in (
        *("float64", "float32", "float16"),
        *("int64", "int32", "int16", "int8", "uint8", "bool"),
    )
} | {"bfloat16": np.dtype("<u2")}

REMEDY = "copy it again, or take another checkpoint"

MAX_NUMBER = 2**62
"""Offsets in files, and the bytes of a tensor, are 64-bit integers."""
MAX_EMPTY_ROWS = 2**24
"""A tensor without elements has no checksum that bounds its size."""
TRAINER_ROWS = ("trainer.logits", "trainer.labels")
TRAINER_WEIGHTS = "trainer.weights"


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rectangular block of a tensor in one file, row-major."""

    offsets: tuple[int, ...]  # position of its first element in the tensor
    sizes: tuple[int, ...]
    file: Path
    start: int
    crc32: tuple[int, ...] = ()  # one checksum per `CHECKSUM_BYTES`; empty if unknown
    initial: InitialRows | None = None  # weights whose changes the file has


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Tensor on disk; its chunks cover every element once, and its dtype is a key of `DTYPES`."""

    dtype: str
    size: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.size) * DTYPES[self.dtype].itemsize

    def array(self) -> np.ndarray:
        """Return all elements, in memory of their own; for small tensors."""
        rows = list(self.blocks())
        complete = np.concatenate(rows) if rows else np.empty(0, DTYPES[self.dtype])
        return complete.reshape(self.size)

    def blocks(self, block_bytes: int = BLOCK_BYTES) -> Iterator[np.ndarray]:
        """Yield the rows in order, whatever the chunks, as arrays [n, ...] of about `block_bytes`."""
        num_rows = self.size[0] if self.size else 1
        rows_at_once = rows_per_block(self.size, self.dtype, block_bytes)
        reader = RowReader(self)
        for first in range(0, num_rows, rows_at_once):
            yield reader.rows(first, min(first + rows_at_once, num_rows))


class UnreadableError(ValueError):
    """A file or directory exists and cannot be read, for example without permission: nothing is known about its bytes."""


@dataclass(frozen=True, slots=True)
class TensorIndex:
    """Tables of a checkpoint, in the order of the features, and its tensors."""

    tables: tuple[str, ...]
    tensors: dict[str, StoredTensor]


def read_index(directory: Path) -> TensorIndex:
    """Read and check `tensors.json`; ValueError if it is missing, malformed or newer, UnreadableError without access."""
    path = directory / INDEX_FILE
    try:
        data = read_regular(path)
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"there is no {INDEX_FILE} in {directory}") from None
    except OSError as error:
        error.filename = str(path)
        raise UnreadableError(os_error_text(error)) from None
    return parse_index(directory, data)


def parse_index(directory: Path, data: bytes) -> TensorIndex:
    """Return the checked content of a `tensors.json`; ValueError if it is malformed, newer or leads out of the directory."""
    path = directory / INDEX_FILE
    document = parse_json(data, str(path))
    try:
        if document["format"] not in (FORMAT, SPARSE_FORMAT):
            raise ValueError(
                f"it has format {shown(document['format'])}, and this version reads up to {SPARSE_FORMAT}; use the version it "
                "was written with"
            )
        # Many chunks lie in few files, whose links are followed one folder after another.
        inside = cache(partial(file_inside, directory))
        tensors = {
            name: _stored_tensor(inside, name, entry) for name, entry in document["tensors"].items()
        }
        tables = tuple(_checked(name, str) for name in document["tables"])
        if len(set(tables)) < len(tables):
            raise ValueError("it lists a table twice")
        # The rows that the training loop has collected, if any, have a logit and a label per task.
        sizes = [tensors[name].size for name in TRAINER_ROWS if name in tensors]
        weights = tensors[TRAINER_WEIGHTS].size if TRAINER_WEIGHTS in tensors else None
        if sizes and (len(sizes) < 2 or sizes[0] != sizes[1] or len(sizes[0]) not in (1, 2)):
            raise ValueError(
                f"{' and '.join(TRAINER_ROWS)} have the sizes {sizes}; want one length"
            )
        if weights is not None and (not sizes or weights != sizes[0][:1]):
            raise ValueError(
                f"{TRAINER_WEIGHTS} have the size {weights} for rows of {sizes}; want one length"
            )
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no index of tensors: {shown(error)}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return TensorIndex(tables, tensors)


def _stored_tensor(
    inside: Callable[[str], Path], name: str, entry: Mapping[str, Any]
) -> StoredTensor:
    dtype, size = entry["dtype"], _counts(entry["size"])
    if dtype not in DTYPES:
        raise ValueError(f"{name}: got dtype {shown(dtype)}, want one of {', '.join(DTYPES)}")
    initial = _initial_rows(name, entry["initial"]) if "initial" in entry else None
    if initial is not None and (len(size) != 2 or dtype not in ("float32", "float16", "bfloat16")):
        raise ValueError(f"{name}: {shown(size)} {dtype} are no weights of a table")
    is_huge = math.prod(size) * DTYPES[dtype].itemsize >= MAX_NUMBER
    if is_huge or (0 in size and max(size) >= MAX_EMPTY_ROWS):
        raise ValueError(f"{name}: no tensor has the size {shown(size)}")
    chunks = []
    for chunk in _checked(entry["chunks"], list):
        offsets, sizes = _counts(chunk["offsets"]), _counts(chunk["sizes"])
        if not len(offsets) == len(sizes) == len(size) or any(
            offset + length > total
            for offset, length, total in zip(offsets, sizes, size, strict=True)
        ):
            raise ValueError(
                f"{name}: a chunk of {shown(sizes)} at {shown(offsets)} lies outside of {shown(size)}"
            )
        (start,) = _counts([chunk["start"]])
        file = inside(check_plain_name(chunk["file"]))
        num_bytes = math.prod(sizes) * DTYPES[dtype].itemsize
        checksums = _counts(chunk["crc32"])[: -(-num_bytes // CHECKSUM_BYTES)]
        if len(checksums) * CHECKSUM_BYTES < num_bytes:
            raise ValueError(f"{name}: got {len(checksums)} checksums for {num_bytes} bytes")
        chunks.append(Chunk(offsets, sizes, file, start, checksums, initial))
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(size) or _any_overlap(chunks):
        raise ValueError(
            f"{name}: its {len(chunks)} chunks do not cover {shown(size)}, each element once"
        )
    return StoredTensor(dtype, size, tuple(chunks))


def _initial_rows(name: str, entry: Mapping[str, Any]) -> InitialRows:
    kinds = {"seed": int, "table": str, "bound": float}
    initial = InitialRows(**{key: _checked(entry[key], kind) for key, kind in kinds.items()})
    if name != f"tables.{initial.table}.weight" or not 0 <= initial.bound < math.inf:
        raise ValueError(f"{name}: {shown(entry)} are no initial weights of it")
    return initial


def _any_overlap(chunks: Sequence[Chunk]) -> bool:
    """Return whether two chunks share an element.

    A table has a chunk per rank, so not all pairs are compared: chunks begin and end in the order of rows, and those of the same
    rows are kept in the order of columns.
    """
    chunks = [chunk for chunk in chunks if math.prod(chunk.sizes)]
    if not chunks or len(chunks[0].sizes) not in (1, 2):
        return len(chunks) > 1  # tensors of more dimensions are not sharded
    # End before begin: neighbours do not overlap.
    events = [(chunk.offsets[0], 1, index) for index, chunk in enumerate(chunks)]
    events += [(chunk.offsets[0] + chunk.sizes[0], 0, i) for i, chunk in enumerate(chunks)]
    columns: list[tuple[int, int]] = []
    for _, begins, index in sorted(events):
        first = chunks[index].offsets[1] if len(chunks[index].sizes) > 1 else 0
        last = first + (chunks[index].sizes[1] if len(chunks[index].sizes) > 1 else 1)
        at = bisect_left(columns, (first, last))
        if not begins:
            del columns[at]
            continue
        if (at and columns[at - 1][1] > first) or (at < len(columns) and columns[at][0] < last):
            return True
        columns.insert(at, (first, last))
    return False


def _counts(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(
        type(value) is int and 0 <= value < MAX_NUMBER for value in values
    ):
        raise ValueError(f"got {shown(values)}, want integers that are not negative")
    return tuple(values)


def _checked(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"got {shown(value)}, want {kind.__name__}")
    return value


def check_plain_name(name: object) -> str:
    """Return a name of a file in a checkpoint; ValueError if it is a path, or if no file can have it."""
    if not isinstance(name, str) or name in ("", ".", "..") or {"/", "\0"} & set(name):
        raise ValueError(f"got file {shown(name)}, want the plain name of a file")
    return name


def file_inside(directory: Path, name: object) -> Path:
    """Return the file `name` of `directory`; ValueError if the name has a folder, or the file links out of the directory."""
    path = directory / check_plain_name(name)
    if not resolved(path).is_relative_to(resolved(directory)):
        raise ValueError(f"file {shown(name)} is a link that leads out of {directory}")
    return path


class ChunkReader:
    """Reader of the rows of a chunk; compares the checksum of every block that is read completely. A scalar has one row.

    `as_stored`: whether rows are read as the file has them, if these are changes of initial weights.
    """

    def __init__(self, chunk: Chunk, dtype: str, *, as_stored: bool = False) -> None:
        self._chunk, self._dtype = chunk, DTYPES[dtype]
        self._name, self._initial = dtype, None if as_stored else chunk.initial
        self._rows, *self._rest = chunk.sizes or (1,)
        self._row_bytes = math.prod(self._rest) * self._dtype.itemsize
        self._crc = 0
        # Range of the chunk's bytes that the running checksum covers.
        self._crc_begin = self._crc_end = 0

    def read(self, first: int = 0, last: int | None = None) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (row, array [n, ...]) block by block for the rows `first` to `last` - 1; ValueError if a checksum differs."""
        last = self._rows if last is None else last
        if first >= last or not self._row_bytes:
            return
        rows_at_once = max(1, BLOCK_BYTES // self._row_bytes)
        end = self._chunk.start + last * self._row_bytes
        with open_regular(self._chunk.file) as stream:
            # Before memory is allocated for what a file declares.
            if os.fstat(stream.fileno()).st_size < end:
                raise ValueError(f"{self._chunk.file} is truncated; {REMEDY}")
            stream.seek(self._chunk.start + first * self._row_bytes)
            for row in range(first, last, rows_at_once):
                count = min(rows_at_once, last - row)
                data = bytearray(count * self._row_bytes)
                if read_into(stream, data) != len(data):
                    raise ValueError(f"{self._chunk.file} is truncated; {REMEDY}")
                self._check(row * self._row_bytes, memoryview(data))
                block = np.frombuffer(data, self._dtype).reshape(count, *self._rest)
                if self._initial is not None:
                    import torch

                    first_row, first_column = self._chunk.offsets
                    rows = torch.arange(first_row + row, first_row + row + count)
                    values = torch.from_numpy(block).view(getattr(torch, self._name))
                    self._initial.toggle(values, rows, first_column)
                yield row, block

    def _check(self, begin: int, data: memoryview) -> None:
        """Compare the checksums that end in `data`, the chunk's bytes from `begin` on."""
        chunk_bytes = self._rows * self._row_bytes
        while data:
            index = begin // CHECKSUM_BYTES
            end = min((index + 1) * CHECKSUM_BYTES, chunk_bytes)
            block, data = data[: end - begin], data[end - begin :]
            if begin != self._crc_end:
                self._crc, self._crc_begin = 0, begin
            self._crc = zlib.crc32(block, self._crc)
            self._crc_end = begin = begin + len(block)
            if begin == end:
                is_complete = self._crc_begin <= index * CHECKSUM_BYTES
                if is_complete and self._chunk.crc32 and self._chunk.crc32[index] != self._crc:
                    raise ValueError(
                        f"{self._chunk.file} has changed since it was written (checksum {self._crc:08x} "
                        f"instead of {self._chunk.crc32[index]:08x}); {REMEDY}"
                    )
                self._crc, self._crc_begin = 0, begin


def read_into(stream: BinaryIO, data: bytearray) -> int:
    """Fill `data` from a stream without a buffer, which may return less than it is asked for; return the bytes read."""
    view, done = memoryview(data), 0
    while done < len(data) and (count := stream.readinto(view[done:])):  # type: ignore[attr-defined]
        done += count
    return done


class RowReader:
    """Reader of rows of a tensor, whatever its chunks; rows that are read in order are compared with their checksums."""

    def __init__(self, tensor: StoredTensor) -> None:
        self._tensor = tensor
        self._readers = [ChunkReader(chunk, tensor.dtype) for chunk in tensor.chunks]

    def rows(self, first: int, last: int) -> np.ndarray:
        """Return the rows `first` to `last` - 1, [n, ...]. Raises ValueError: a file is truncated, or a checksum differs."""
        block = np.empty((last - first, *self._tensor.size[1:]), DTYPES[self._tensor.dtype])
        for chunk, reader in zip(self._tensor.chunks, self._readers, strict=True):
            offset, *columns = chunk.offsets or (0,)
            chunk_rows, *widths = chunk.sizes or (1,)
            begin, end = max(first, offset), min(last, offset + chunk_rows)
            where = tuple(slice(at, at + width) for at, width in zip(columns, widths, strict=True))
            for row, values in reader.read(begin - offset, end - offset):
                start = row + offset - first
                block[(slice(start, start + len(values)), *where)] = values
        return block


def rows_per_block(size: Sequence[int], dtype: str, block_bytes: int = BLOCK_BYTES) -> int:
    """Return the rows of a tensor that make a block of about `block_bytes`."""
    return max(1, block_bytes // max(1, math.prod(size[1:]) * DTYPES[dtype].itemsize))


def converted(values: np.ndarray, dtype: str, wanted: str) -> np.ndarray:
    """Return numbers in another dtype, rounded to the nearest; bfloat16 is uint16, as in files."""
    if dtype == wanted:
        return values
    if dtype == "bfloat16":
        return converted((values.astype(np.uint32) << 16).view(np.float32), "float32", wanted)
    if wanted == "bfloat16":
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        # To the nearest, and to the even one of two; a NaN must not become an infinity.
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16)
    return values.astype(DTYPES[wanted])
