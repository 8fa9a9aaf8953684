"""Ascending row numbers in about a byte each: their distances, seven bits per byte, lowest first.

The highest bit of a byte is set if another byte of the same number follows. A list begins with its first number itself.
"""

from collections.abc import Iterator

import numpy as np

from nn.checkpoint.tensor_index import ChunkReader, StoredTensor

PIECE_BYTES = 1 << 14
"""Encoded bytes that are decoded at a time: many deltas are read side by side."""
MOST_BYTES = 7
"""Bytes of a distance; row numbers are below 2 ** 49."""


def encode_ids(ids: np.ndarray) -> np.ndarray:
    """Return ascending numbers, int64 [n], as bytes, uint8."""
    gaps = np.diff(ids, prepend=0).astype(np.uint64)
    lengths = np.ones(len(gaps), np.int64)
    for number in range(1, MOST_BYTES):
        longer = gaps >= np.uint64(1 << 7 * number)
        if not longer.any():
            break
        lengths += longer
    ends = np.cumsum(lengths)
    data = np.empty(ends[-1] if len(ends) else 0, np.uint8)
    for number in range(int(lengths.max(initial=0))):
        has = lengths > number
        low = (gaps[has] >> np.uint64(7 * number)).astype(np.uint8) & np.uint8(127)
        follows = (lengths[has] > number + 1).astype(np.uint8) << np.uint8(7)
        data[(ends - lengths)[has] + number] = low | follows
    return data


def decode_ids(stored: StoredTensor) -> Iterator[np.ndarray]:
    """Yield the numbers of a tensor of encoded bytes, piece by piece, int64; each of its chunks is a list of its own.

    Raises ValueError: the numbers do not ascend, or the bytes are no list; or a file is damaged.
    """
    before = -1
    for chunk in sorted(stored.chunks, key=lambda chunk: chunk.offsets):
        reader, (size,) = ChunkReader(chunk, stored.dtype), chunk.sizes
        rest, last = np.empty(0, np.uint8), 0
        for first in range(0, size, PIECE_BYTES):
            pieces = [data for _, data in reader.read(first, min(first + PIECE_BYTES, size))]
            ids, rest = _decode(np.concatenate([rest, *pieces]), last)
            if len(ids):
                if (np.diff(ids, prepend=before) <= 0).any():
                    raise ValueError(f"{chunk.file}: row numbers do not ascend")
                before = last = int(ids[-1])
                yield ids
        if len(rest):
            raise ValueError(f"{chunk.file}: a list of row numbers ends within a number")


def _decode(data: np.ndarray, last: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of the complete distances in `data`, and the bytes behind them."""
    ends = np.flatnonzero(data < 128) + 1
    if not len(ends):
        if len(data) > MOST_BYTES:
            raise ValueError("a row number has too many bytes")
        return np.empty(0, np.int64), data
    starts = np.concatenate([[0], ends[:-1]])
    lengths = ends - starts
    if lengths.max() > MOST_BYTES:
        raise ValueError("a row number has too many bytes")
    number = np.arange(ends[-1]) - np.repeat(starts, lengths)
    parts = (data[: ends[-1]] & 127).astype(np.int64) << (7 * number)
    return last + np.cumsum(np.add.reduceat(parts, starts)), data[ends[-1] :]
