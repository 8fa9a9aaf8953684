"""A vocabulary in a mapped file: ids of values without a database, in memory for the values that are asked for.

The file holds, for V values, little-endian:

    int64 [V + 1]   where the text of id 1, 2, ... begins in the texts, and the end
    uint32 [V]      CRC-32 of the texts, ascending
    uint32 [V]      the ids in that order
    the texts in UTF-8, in the order of the ids; of an id without a value, the byte 0xff and its number

UTF-8 has no byte 0xff, so no value is found under an id without one, and such ids have different CRC-32s.

A value is found by its CRC-32, and compared with the texts of that CRC-32. Values that are missing or not in it have id 0.
"""

import mmap
import os
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from serving.manifest import ModelError

WRITTEN = 1 << 24
BATCH_TEXTS = 1 << 16


def write_vocabulary(path: Path, batches: Iterable[Sequence[str | None]]) -> int:
    """Write the texts of ids 1, 2, ... in this order, None for an id without a value; return their number.

    Takes 20 bytes of memory per text.
    """
    num_ids = 0
    lengths: list[np.ndarray] = []
    hashes: list[np.ndarray] = []
    texts = path.with_name(f"{path.name}.texts")
    with texts.open("xb") as stream:
        for batch in batches:
            encoded = [
                b"\xff%d" % number if text is None else text.encode()
                for number, text in enumerate(batch, start=num_ids + 1)
            ]
            num_ids += len(batch)
            lengths.append(np.fromiter(map(len, encoded), np.int64, len(encoded)))
            hashes.append(np.fromiter(map(zlib.crc32, encoded), np.uint32, len(encoded)))
            stream.write(b"".join(encoded))
    offsets = np.concatenate([np.zeros(1, np.int64), *lengths]).cumsum()
    crc = np.concatenate([np.zeros(0, np.uint32), *hashes])
    order = np.argsort(crc, kind="stable").astype(np.uint32)
    with path.open("xb") as stream, texts.open("rb") as source:
        for array in (offsets, crc[order], order + np.uint32(1)):
            stream.write(array.astype(array.dtype.newbyteorder("<")).data)
        while block := source.read(WRITTEN):
            stream.write(block)
    texts.unlink()
    return len(crc)


class Vocabulary:
    """Ids of the values of one vocabulary. Raises ModelError: the file has not the size of so many values."""

    def __init__(self, path: Path, size: int) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            num_bytes = os.fstat(descriptor).st_size
            head = 16 * size + 8
            if not 0 <= head <= num_bytes:
                raise ModelError(f"{path} has {num_bytes} bytes, too few for {size} values")
            self._data = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        self._offsets = np.frombuffer(self._data, "<i8", size + 1)
        self._hashes = np.frombuffer(self._data, "<u4", size, 8 * size + 8)
        self._ids = np.frombuffer(self._data, "<u4", size, 12 * size + 8)
        self._texts = head
        if int(self._offsets[-1]) != num_bytes - head:
            raise ModelError(f"{path} has texts of another length than it says")
        # Checksums prove no intent: an id beyond the table would be an error at a request, and a read outside a GPU's table.
        if size and not 1 <= int(self._ids.min()) <= int(self._ids.max()) <= size:
            raise ModelError(f"{path} has ids that are not 1 to {size}; export the model again")
        if int(self._offsets[0]) or (self._offsets[1:] < self._offsets[:-1]).any():
            raise ModelError(
                f"{path} has texts that do not follow one another; export the model again"
            )

    def __len__(self) -> int:
        return len(self._ids)

    def ids(self, values: Sequence[str | None]) -> np.ndarray:
        """Return the id of every value, int64; 0 if it is missing or unknown."""
        found = np.zeros(len(values), np.int64)
        encoded = [b"" if value is None else value.encode() for value in values]
        hashes = np.fromiter(map(zlib.crc32, encoded), np.uint32, len(encoded))
        positions = np.searchsorted(self._hashes, hashes)
        inside = np.minimum(positions, max(len(self._hashes) - 1, 0))
        if not len(self._hashes):
            return found
        same = np.nonzero(self._hashes[inside] == hashes)[0]
        ids = self._ids[inside[same]].astype(np.int64)
        begins = (self._offsets[ids - 1] + self._texts).tolist()
        ends = (self._offsets[ids] + self._texts).tolist()
        data = self._data
        for row, number, begin, end in zip(same.tolist(), ids.tolist(), begins, ends, strict=True):
            if values[row] is None:
                continue
            if data[begin:end] == encoded[row]:
                found[row] = number
            else:
                found[row] = self._next(int(positions[row]) + 1, encoded[row])
        return found

    def texts_without(self, left_out: Collection[int]) -> Iterator[list[str | None]]:
        """Yield the texts in the order of their ids, None of ids without one and of those in `left_out`."""
        for first in range(0, len(self), BATCH_TEXTS):
            ends = (self._offsets[first : first + BATCH_TEXTS + 1] + self._texts).tolist()
            data = [self._data[begin:end] for begin, end in pairwise(ends)]
            yield [
                None if text[:1] == b"\xff" or number in left_out else text.decode()
                for number, text in enumerate(data, first + 1)
            ]

    def is_kept_by(self, later: "Vocabulary") -> bool:
        """Return whether a later vocabulary gives all values their ids: it may have more values, and have retired some."""
        count = len(self)
        if len(later) < count:
            return False
        lengths, is_value = zip(*(v._texts_of(count) for v in (self, later)), strict=True)
        in_both = is_value[0] & is_value[1]
        if (lengths[0] != lengths[1])[in_both].any():
            return False
        # Texts of neighbouring ids are neighbours, so that few long parts are compared.
        edges = np.flatnonzero(np.diff(in_both, prepend=False, append=False))
        for first, last in edges.reshape(-1, 2).tolist():
            begin, end = (int(self._offsets[at]) + self._texts for at in (first, last))
            shift = int(later._offsets[first]) + later._texts - begin
            for at in range(begin, end, WRITTEN):
                to = min(at + WRITTEN, end)
                if self._data[at:to] != later._data[at + shift : to + shift]:
                    return False
        return True

    def _texts_of(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the bytes of the texts of ids 1 to `count`, and whether each is a value."""
        begins = self._offsets[:count]
        data = np.frombuffer(self._data, np.uint8)
        first = data[np.minimum(begins + self._texts, len(data) - 1)]
        return self._offsets[1 : count + 1] - begins, first != 0xFF

    def _next(self, position: int, text: bytes) -> int:
        """Return the id of a text whose CRC-32 several texts have, from a position on."""
        crc = zlib.crc32(text)
        while position < len(self._hashes) and self._hashes[position] == crc:
            number = int(self._ids[position])
            begin, end = (int(self._offsets[at]) + self._texts for at in (number - 1, number))
            if self._data[begin:end] == text:
                return number
            position += 1
        return 0
