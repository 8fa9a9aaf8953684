"""The hash xxh64 of rows of integers (github.com/Cyan4973/xxHash, its specification), vectorised."""

from collections.abc import Sequence

import numpy as np

P1, P2, P3, P4, P5 = (
    np.uint64(prime)
    for prime in (
        11400714785074694791,
        14029467366897019727,
        1609587929392839161,
        9650029242287828579,
        2870177450012600261,
    )
)


def xxh64(columns: Sequence[np.ndarray]) -> np.ndarray:
    """Return the hash, of seed 0, of each row of one to three integers as little-endian int64, uint64 [rows]."""
    assert 1 <= len(columns) <= 3, "from 32 bytes on, the hash has another beginning"
    found = np.full(len(columns[0]), P5 + np.uint64(8 * len(columns)))
    for column in columns:
        found ^= _rotated(column.astype(np.int64).view(np.uint64) * P2, 31) * P1
        found = _rotated(found, 27) * P1 + P4
    for bits, prime in ((33, P2), (29, P3)):
        found = (found ^ (found >> np.uint64(bits))) * prime
    return found ^ (found >> np.uint64(32))


def _rotated(values: np.ndarray, bits: int) -> np.ndarray:
    return values << np.uint64(bits) | values >> np.uint64(64 - bits)
