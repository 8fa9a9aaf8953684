"""Files of arrays for other programs, written block by block: .npy and safetensors.

The location of every array in its file and its checksums are returned, so that a checkpoint's index can name it.
"""

import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from nn.checkpoint.tensor_index import CHECKSUM_BYTES, DTYPES, converted

SAFETENSORS_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


class ArraySource(Protocol):
    """A tensor of a checkpoint, or what becomes one: its dtype, a key of `DTYPES`, and its rows in order."""

    @property
    def dtype(self) -> str: ...
    @property
    def size(self) -> tuple[int, ...]: ...
    def blocks(self) -> Iterator[np.ndarray]: ...


@dataclass(frozen=True, slots=True)
class Array:
    """An array to write.

    `blocks`: values in the order of rows; can be iterated once.
    """

    dtype: str
    size: tuple[int, ...]
    blocks: Iterable[np.ndarray]

    @classmethod
    def of(cls, tensor: ArraySource) -> "Array":
        return cls(tensor.dtype, tensor.size, tensor.blocks())

    @property
    def num_bytes(self) -> int:
        return math.prod(self.size) * DTYPES[self.dtype].itemsize

    def as_float32(self) -> "Array":
        """Return 16-bit numbers as float32, which is exact."""
        blocks = (converted(block, self.dtype, "float32") for block in self.blocks)
        return Array("float32", self.size, blocks)


@dataclass(frozen=True, slots=True)
class WrittenArray:
    dtype: str
    size: tuple[int, ...]
    file: str
    start: int
    crc32: list[int]

    @property
    def entry(self) -> dict[str, Any]:
        chunk = {"offsets": [0] * len(self.size), "sizes": list(self.size)}
        location = {"file": self.file, "start": self.start, "crc32": self.crc32}
        return {"dtype": self.dtype, "size": list(self.size), "chunks": [chunk | location]}


def write_npy(path: Path, array: Array) -> WrittenArray:
    """Write a .npy file; bfloat16, which numpy lacks, becomes float32."""
    if array.dtype == "bfloat16":
        array = array.as_float32()
    with path.open("xb") as stream:
        header = {"descr": DTYPES[array.dtype].str, "fortran_order": False, "shape": array.size}
        np.lib.format.write_array_header_1_0(stream, header)
        start = stream.tell()
        return WrittenArray(
            array.dtype, array.size, path.name, start, write_blocks(stream, array.blocks)
        )


def write_safetensors(path: Path, arrays: Mapping[str, Array]) -> dict[str, WrittenArray]:
    """Write a safetensors file without its library, which needs all arrays in memory.

    The format is eight bytes with the length of the header, the header as JSON, and the arrays one after another. The
    header is padded, so that arrays start at a multiple of eight bytes. https://huggingface.co/docs/safetensors
    """
    header, end = {}, 0
    for name, array in arrays.items():
        start = end
        end += array.num_bytes
        header[name] = {
            "dtype": SAFETENSORS_DTYPES[array.dtype],
            "shape": list(array.size),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    written = {}
    with path.open("xb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name, array in arrays.items():
            start = stream.tell()
            checksums = write_blocks(stream, array.blocks)
            written[name] = WrittenArray(array.dtype, array.size, path.name, start, checksums)
    return written


def write_blocks(stream: BinaryIO, arrays: Iterable[np.ndarray]) -> list[int]:
    """Write arrays one after another; return a CRC-32 per `CHECKSUM_BYTES`."""
    checksums: list[int] = []
    crc32 = filled = 0
    for array in arrays:
        data = np.ascontiguousarray(array).data.cast("B") if array.size else memoryview(b"")
        stream.write(data)
        while data:
            piece, data = data[: CHECKSUM_BYTES - filled], data[CHECKSUM_BYTES - filled :]
            crc32, filled = zlib.crc32(piece, crc32), filled + len(piece)
            if filled == CHECKSUM_BYTES:
                checksums.append(crc32)
                crc32 = filled = 0
    return checksums + [crc32] * bool(filled)
