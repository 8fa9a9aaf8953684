"""Tensors in the files of a checkpoint: where each lies, and its numbers, without executing anything of a file.

torch.distributed.checkpoint keeps its index in `.metadata`, a pickle, which runs code when it is read. Here the same
facts stand in `tensors.json`, written beside it; `.metadata` stays for other tools and is never opened. The numbers are
read as they lie in the shards, block by block, so that reading part of a tensor costs that part, and memory for a block.

    {"format": 1,
     "tables": [names, in the order of the features],
     "tensors": {name: {"dtype": "float32", "size": [rows, columns],
                        "chunks": [{"offsets": [row, column], "sizes": [rows, columns],
                                    "file": name, "start": byte, "length": bytes}]}}}

A chunk's bytes are what `torch.save` writes: a zip archive whose member `data/0` is the array, uncompressed, row-major,
little-endian.
"""

import io
import json
import math
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

INDEX_FILE = "tensors.json"
FORMAT = 1
BLOCK_BYTES = 2**24
"""Bytes that are read at a time."""

# torch's names of dtypes -> what numpy reads them as; it has no bfloat16, whose bits are kept.
DTYPES = {
    name: np.dtype(name).newbyteorder("<")
    for name in (
        "float64",
        "float32",
        "float16",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint8",
        "bool",
    )
} | {"bfloat16": np.dtype("<u2")}

ZIP_LOCAL_HEADER_BYTES = 30
REMEDY = "copy it again, or take another checkpoint"


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor that lies in one file, row-major.

    Attributes:
        offsets: of its first element in the tensor, one a dimension.
        sizes: one a dimension.
        file: where it lies.
        start: byte in the file at which the array begins, or at which the archive with the array begins.
        archive_bytes: length of that archive; 0 if the array lies there bare.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Path
    start: int
    archive_bytes: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor on disk; its chunks cover it.

    Attributes:
        dtype: a key of `DTYPES`.
        size: one number a dimension.
        chunks: in any order.
    """

    dtype: str
    size: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def num_bytes(self) -> int:
        """Of the whole tensor."""
        return math.prod(self.size) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class TensorIndex:
    """What a checkpoint holds.

    Attributes:
        tables: their names, in the order of the features.
        tensors: by name, as `nn.checkpoint` names them.
    """

    tables: tuple[str, ...]
    tensors: dict[str, StoredTensor]


def write_index(directory: Path, metadata: Any, tables: Sequence[str]) -> None:
    """Write `tensors.json`; call it on one rank, when all shards are there.

    Args:
        directory: of the checkpoint.
        metadata: `torch.distributed.checkpoint.metadata.Metadata`, as `save` returns it.
        tables: their names, in the order of the features.
    """
    tensors = {}
    places = {(index.fqn, tuple(index.offset)): at for index, at in metadata.storage_data.items()}
    for name, stored in metadata.state_dict_metadata.items():
        chunks = []
        for chunk in stored.chunks:
            place = places[name, tuple(chunk.offsets)]
            chunks.append(
                {
                    "offsets": list(chunk.offsets),
                    "sizes": list(chunk.sizes),
                    "file": place.relative_path,
                    "start": place.offset,
                    "length": place.length,
                }
            )
        dtype = str(stored.properties.dtype).removeprefix("torch.")
        tensors[name] = {"dtype": dtype, "size": list(stored.size), "chunks": chunks}
    index = {"format": FORMAT, "tables": list(tables), "tensors": tensors}
    (directory / INDEX_FILE).write_text(json.dumps(index) + "\n")


def read_index(directory: Path) -> TensorIndex:
    """Read and check `tensors.json`.

    Raises:
        ValueError: it is missing, malformed, of a newer format, or names a file that does not lie in the directory.
    """
    path = directory / INDEX_FILE
    try:
        document = json.loads(path.read_text())
        if document["format"] != FORMAT:
            raise ValueError(
                f"it has format {document['format']}, and this version reads {FORMAT}; use the version it "
                "was written with"
            )
        tensors = {
            _checked(name, str): _stored_tensor(directory, name, entry)
            for name, entry in document["tensors"].items()
        }
        tables = tuple(_checked(name, str) for name in document["tables"])
    except (OSError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is no index of tensors: {error!r}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return TensorIndex(tables, tensors)


def _stored_tensor(directory: Path, name: str, entry: Mapping[str, Any]) -> StoredTensor:
    dtype, size = entry["dtype"], _counts(entry["size"])
    if dtype not in DTYPES:
        raise ValueError(f"{name}: got dtype {dtype!r}, want one of {', '.join(DTYPES)}")
    chunks = []
    for each in entry["chunks"]:
        offsets, sizes = _counts(each["offsets"]), _counts(each["sizes"])
        if len(offsets) != len(size) or any(
            offset + length > whole
            for offset, length, whole in zip(offsets, sizes, size, strict=True)
        ):
            raise ValueError(f"{name}: a chunk of {sizes} at {offsets} lies outside of {size}")
        (start, length) = _counts([each["start"], each["length"]])
        file = file_inside(directory, each["file"])
        chunks.append(Chunk(offsets, sizes, file, start, length))
    return StoredTensor(dtype, size, tuple(chunks))


def _counts(values: Any) -> tuple[int, ...]:
    """Return a list of integers that are not negative as a tuple."""
    if not isinstance(values, list) or not all(type(each) is int and each >= 0 for each in values):
        raise ValueError(f"got {values!r}, want integers that are not negative")
    return tuple(values)


def _checked(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"got {value!r}, want {kind.__name__}")
    return value


def file_inside(directory: Path, name: object) -> Path:
    """Return the file `name` of `directory`.

    Raises:
        ValueError: a name with a folder in it, or a link that leads out of the directory.
    """
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"got file {name!r}, want the plain name of a file in {directory}")
    path = directory / name
    if not path.resolve().is_relative_to(directory.resolve()):
        raise ValueError(f"file {name!r} is a link that leads out of {directory}")
    return path


class ChunkReader:
    """A chunk that is being read. The checksum that its archive carries is compared once all rows were read in order.

    Rows are those of the chunk; a number without dimensions has one.

    Args:
        chunk: to read.
        dtype: of its tensor.
    """

    def __init__(self, chunk: Chunk, dtype: str) -> None:
        self._chunk, self._dtype = chunk, DTYPES[dtype]
        self._rows, *self._rest = chunk.sizes or (1,)
        self._row_bytes = math.prod(self._rest) * self._dtype.itemsize
        self._start: int | None = None
        self._wanted_crc: int | None = None
        self._crc = self._rows_in_order = 0

    def read(self, first: int = 0, last: int | None = None) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (row, array [n, ...]) for the rows from `first` to before `last` (None: all), a block at a time.

        Raises:
            ValueError: the file is shorter than it should be, or its bytes are not those that were written.
        """
        last = self._rows if last is None else last
        if first >= last or not self._row_bytes:
            return
        rows_at_once = max(1, BLOCK_BYTES // self._row_bytes)
        with self._chunk.file.open("rb") as stream:
            if self._start is None:
                num_bytes = self._rows * self._row_bytes
                self._start, self._wanted_crc = _find_array(stream, self._chunk, num_bytes)
            stream.seek(self._start + first * self._row_bytes)
            for row in range(first, last, rows_at_once):
                count = min(rows_at_once, last - row)
                data = bytearray(count * self._row_bytes)
                if stream.readinto(data) != len(data):
                    raise ValueError(f"{self._chunk.file} is truncated; {REMEDY}")
                self._check(row, count, data)
                yield row, np.frombuffer(data, self._dtype).reshape(count, *self._rest)

    def _check(self, row: int, count: int, data: bytearray) -> None:
        if row != self._rows_in_order:
            return
        self._crc = zlib.crc32(data, self._crc)
        self._rows_in_order += count
        if self._rows_in_order == self._rows and self._wanted_crc not in (None, self._crc):
            raise ValueError(
                f"{self._chunk.file} has changed since it was written (checksum {self._crc:08x} instead "
                f"of {self._wanted_crc:08x}); {REMEDY}"
            )


def _find_array(stream: BinaryIO, chunk: Chunk, num_bytes: int) -> tuple[int, int | None]:
    """Return where a chunk's array begins, and its CRC-32 if that is known."""
    if not chunk.archive_bytes:
        return chunk.start, None
    try:
        with zipfile.ZipFile(_Slice(stream, chunk.start, chunk.archive_bytes)) as archive:
            (member,) = [each for each in archive.infolist() if each.filename.endswith("/data/0")]
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise ValueError(f"{chunk.file} is truncated or damaged ({error}); {REMEDY}") from None
    if member.compress_type != zipfile.ZIP_STORED or member.file_size != num_bytes:
        raise ValueError(
            f"{chunk.file} holds {member.file_size} bytes at {chunk.start}, want {num_bytes}; it belongs to "
            "another checkpoint"
        )
    header = chunk.start + member.header_offset
    stream.seek(header)
    fields = stream.read(ZIP_LOCAL_HEADER_BYTES)
    # The local header's last two numbers: lengths of the name and of the extra field that follow it.
    name_bytes, extra_bytes = (int.from_bytes(fields[at : at + 2], "little") for at in (26, 28))
    return header + ZIP_LOCAL_HEADER_BYTES + name_bytes + extra_bytes, member.CRC


class _Slice(io.RawIOBase):
    """Part of a file, as a file of its own."""

    def __init__(self, stream: BinaryIO, start: int, length: int) -> None:
        self._stream, self._start, self._length, self._at = stream, start, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = max(0, origin + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self._length - self._at)]
        self._stream.seek(self._start + self._at)
        count = self._stream.readinto(view)
        self._at += count
        return count


def blocks(tensor: StoredTensor, block_bytes: int = BLOCK_BYTES) -> Iterator[np.ndarray]:
    """Yield a whole tensor, rows in order, however it was sharded: arrays [n, ...] of about `block_bytes`.

    Raises:
        ValueError: a file cannot be read, or the chunks do not cover the tensor.
    """
    rows, *rest = tensor.size or (1,)
    row_items = math.prod(rest)
    rows_at_once = max(1, block_bytes // max(1, row_items * DTYPES[tensor.dtype].itemsize))
    readers = [ChunkReader(chunk, tensor.dtype) for chunk in tensor.chunks]
    for first in range(0, rows, rows_at_once):
        last = min(first + rows_at_once, rows)
        block = np.empty((last - first, *rest), DTYPES[tensor.dtype])
        num_read = 0
        for chunk, reader in zip(tensor.chunks, readers, strict=True):
            offset, *columns = chunk.offsets or (0,)
            chunk_rows, *widths = chunk.sizes or (1,)
            begin, end = max(first, offset), min(last, offset + chunk_rows)
            where = tuple(slice(at, at + width) for at, width in zip(columns, widths, strict=True))
            for row, part in reader.read(begin - offset, end - offset):
                start = row + offset - first
                block[(slice(start, start + len(part)), *where)] = part
                num_read += part.size
        if num_read != block.size:
            raise ValueError(
                f"the chunks in {tensor.chunks[0].file.parent if tensor.chunks else 'the checkpoint'} do not "
                f"cover a tensor of {tensor.size}; it is damaged"
            )
        yield block
