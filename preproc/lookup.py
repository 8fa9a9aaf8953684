"""A vocabulary of 32-bit codes as a lookup: the join of `sql.encode`, for columns of integers.

Codes are multiplied by an odd constant, which scrambles them and loses nothing, and sorted by the
product. The first bits of a product name a bucket of about one entry; the entries of a bucket are
compared one after another, for all rows at once.
"""

import numpy as np

# 2**32 / golden ratio, odd (Knuth, The Art of Computer Programming, volume 3, section 6.4).
SCRAMBLE = np.uint32(2654435769)
# Bytes an entry while a lookup is built and used: product, id, order and at most two bucket starts.
ENTRY_BYTES = 32
# Rows looked up at once, so that the arrays in between stay in the cache.
ROWS = 1 << 15
MAX_DEPTH = 24


class Lookup:
    """Maps codes to ids; a code that is not in it gets 0."""

    def __init__(self, codes: np.ndarray, ids: np.ndarray) -> None:
        """Build it from distinct uint32 `codes` and their int32 or int64 `ids`."""
        products = codes * SCRAMBLE
        order = np.argsort(products)
        # One entry more, which no bucket holds: an index past the end stays inside the arrays.
        self._products = np.append(products[order], np.uint32(0))
        self._ids = np.append(ids[order], ids.dtype.type(0))
        bits = max(1, len(codes).bit_length())
        self._shift = np.uint32(32 - min(bits, 31))
        buckets = (self._products[:-1] >> self._shift).astype(np.int64)
        sizes = np.bincount(buckets, minlength=2 ** min(bits, 31))
        self._depth = int(sizes.max(initial=0))
        self._starts = np.zeros(len(sizes) + 1, np.int64 if len(codes) >= 2**31 else np.int32)
        np.cumsum(sizes, out=self._starts[1:])

    def __call__(self, codes: np.ndarray) -> np.ndarray:
        """Return the ids of uint32 `codes` [n]."""
        ids = np.zeros(len(codes), self._ids.dtype)
        for start in range(0, len(codes), ROWS):
            part = slice(start, start + ROWS)
            self._look_up(codes[part], ids[part])
        return ids

    def _look_up(self, codes: np.ndarray, ids: np.ndarray) -> None:
        products = codes * SCRAMBLE
        if self._depth > MAX_DEPTH:  # codes made to collide; slower, but not without bound
            at = np.searchsorted(self._products[:-1], products)
            found = self._products[at] == products
            found &= at < len(self._products) - 1
            ids[found] = self._ids[at[found]]
            return
        buckets = products >> self._shift
        at = self._starts[buckets]
        ends = self._starts[1:][buckets]
        hit = (self._products[at] == products) & (at < ends)
        np.multiply(self._ids[at], hit, out=ids)
        left = np.flatnonzero(~hit & (at + 1 < ends))
        products, at, ends = products[left], at[left] + 1, ends[left]
        while len(left):
            hit = self._products[at] == products
            ids[left[hit]] = self._ids[at[hit]]
            at += 1
            open_ends = ~hit & (at < ends)
            left, products = left[open_ends], products[open_ends]
            at, ends = at[open_ends], ends[open_ends]
