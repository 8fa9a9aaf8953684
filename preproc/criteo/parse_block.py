"""A block of raw text to columns: labels, transformed numericals, their missing bits, codes.

A category of eight lower-case hexadecimal digits is its own code; all other texts are stored beside the
codes. Several threads may share one parser.
"""

from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import duckdb
import numpy as np

from preproc.criteo.tokenizer import LEAST, MISSING_BYTES, MOST, OTHER_LINE, parse_lines
from preproc.line_blocks import mistake_in
from preproc.vocabulary_sql import NUM_CATEGORICAL, NUM_NUMERICAL, numerical
from preproc.work_directory import Settings, connected

if TYPE_CHECKING:  # 25 MB of memory that only non-hex texts need
    import pyarrow as pa

KNOWN_PART = 1 << 17
# A small DuckDB: it transforms a few integers.
SMALL: Settings = {"threads": 1, "memory_limit": "64MB"}
# Integers up to this one have no ln(x + 3).
NO_LOGARITHM = -3
# Length of a line of empty fields. Memory for rows that a block does not have is never touched.
SHORTEST_LINE_BYTES = 1 + NUM_NUMERICAL + NUM_CATEGORICAL + 1
# Non-hex texts, and integers outside the lookup table, that the kernel collects before it stops.
MOST_FOUND = 1 << 13


@dataclass(slots=True)
class NonHexTexts:
    """Texts without a code, as Arrow arrays; Python strings would take ten times the memory."""

    columns: "pa.Array"  # uint8 [n], the number of the column
    rows: "pa.Array"  # int32 [n] within a block, int64 [n] over all rows
    texts: "pa.Array"  # string [n]

    def moved(self, rows: int) -> "NonHexTexts":
        """Return a copy whose row numbers are larger by `rows`."""
        import pyarrow as pa

        return NonHexTexts(
            self.columns, pa.array(self.rows.to_numpy() + np.int64(rows)), self.texts
        )

    @property
    def num_bytes(self) -> int:
        return self.columns.nbytes + self.rows.nbytes + self.texts.nbytes


class Arrays:
    """Memory for the columns of a block. Fresh pages would take the system as long as the kernel takes to fill them."""

    def __init__(self, rows: int, numerical_dtype: np.dtype) -> None:
        self.labels = np.empty(rows, np.uint8)
        # The kernel copies values as integers of the same width, since Numba has no float16.
        self.numericals = np.empty((rows, NUM_NUMERICAL), f"u{numerical_dtype.itemsize}")
        self.missing = np.empty((rows, MISSING_BYTES), np.uint8)
        self.codes = np.empty((NUM_CATEGORICAL, rows), np.uint32)
        self.far, self.far_values = np.empty((2, MOST_FOUND), np.int64)
        self.non_hex = np.empty((MOST_FOUND, 4), np.int64)


@dataclass(slots=True)
class Parsed:
    arrays: Arrays  # the memory of the columns
    columns: list[np.ndarray]  # arrays of the good lines, in the order of `ColumnStore.columns`
    non_hex: list[NonHexTexts]
    bad: list[tuple[int, str, bytes]]  # (index of the line within the block, reason, line)
    num_lines: int  # lines of the text, good, bad or blank
    num_bytes: int  # of the text

    @property
    def num_rows(self) -> int:
        return len(self.columns[0])


@cache
def _known(dtype: np.dtype) -> np.ndarray:
    """Return the stored values of the integers LEAST to MOST, then that of a missing one."""
    # In chunks: otherwise this query would use more memory than anything else.
    parts: list[np.ndarray] = [
        np.arange(start, min(start + KNOWN_PART, MOST + 1))
        for start in range(LEAST, MOST + 1, KNOWN_PART)
    ]
    parts.append(np.ma.masked_all(1, np.int64))
    with connected(SMALL) as connection:
        return np.concatenate([_transformed(connection, dtype, part) for part in parts])


def _transformed(
    connection: duckdb.DuckDBPyConnection, dtype: np.dtype, integers: np.ndarray
) -> np.ndarray:
    """Apply the SQL of `preproc/vocabulary_sql.py` to int64 [n]; no logarithm is -0.0, and a store of integers has them as is."""
    if dtype.kind == "i":
        raw = np.ma.filled(integers, 0)
        if raw.size and (raw.max() > np.iinfo(dtype).max or raw.min() < np.iinfo(dtype).min):
            largest = raw[np.abs(raw).argmax()]
            raise ValueError(f"the integer {largest} of a line is beyond {dtype.name}")
        return raw.astype(dtype)
    result = connection.execute(f"SELECT {numerical('x')} AS y FROM integers AS t(x)")
    values = result.fetchnumpy()["y"].astype(dtype)
    # As the zeros that they become, and still distinct from others, for the report.
    values[np.ma.filled(integers, 0) <= NO_LOGARITHM] = -0.0
    return values


class BlockParser:
    """Parses blocks of complete lines; it keeps nothing between blocks but memory."""

    def __init__(self, numerical_dtype: str) -> None:
        self._connection = connected(SMALL)
        self._dtype = np.dtype(numerical_dtype)
        self._known = _known(self._dtype).view(f"u{self._dtype.itemsize}")
        self._free: list[Arrays] = []

    def reuse(self, arrays: Arrays) -> None:
        """Let a later block have the memory of one whose columns are written."""
        self._free.append(arrays)

    def _memory(self, rows: int) -> Arrays:
        with suppress(IndexError):  # another thread may have taken the last
            if len((arrays := self._free.pop()).labels) >= rows:
                return arrays
        return Arrays(rows, self._dtype)

    def __call__(self, text: bytes) -> Parsed:
        """Return the columns of `text`, which ends with a line end."""
        # An odd number of cache lines per column of codes: columns a multiple of 4 KiB apart would evict each
        # other from the cache.
        rows = len(text) // SHORTEST_LINE_BYTES // 32 * 32 + 48
        arrays = self._memory(rows)
        data = np.frombuffer(text, np.uint8)
        non_hex_texts: list[NonHexTexts] = []
        bad: list[tuple[int, str, bytes]] = []
        is_utf8 = text.isascii() or _is_utf8(text)
        at = num_rows = num_lines = 0
        stop, trusted = len(text), is_utf8
        while at < len(text):
            why, at, lines, num_rows, num_far, num_non_hex = parse_lines(
                *(data, at, stop, trusted, num_rows, self._known),
                *(arrays.labels, arrays.numericals, arrays.missing, arrays.codes),
                *(arrays.far, arrays.far_values, arrays.non_hex),
            )
            num_lines += lines
            if num_far:
                with self._connection.cursor() as cursor:
                    values = _transformed(cursor, self._dtype, arrays.far_values[:num_far])
                flat = arrays.numericals.reshape(-1)
                flat[arrays.far[:num_far]] = values.view(flat.dtype)
            if num_non_hex:
                non_hex_texts.append(_non_hex_texts(text, arrays.non_hex[:num_non_hex]))
            stop, trusted = len(text), is_utf8
            if why == OTHER_LINE:
                end = text.index(b"\n", at)
                line = text[at:end].removesuffix(b"\r")
                reason = mistake_in(line)
                if reason is None:  # text beyond ASCII: only this line has been validated
                    assert not trusted, line
                    stop, trusted = end + 1, True
                else:
                    bad.append((num_lines, reason, line))
                    num_lines += 1
                    at = end + 1
        numericals = arrays.numericals.view(self._dtype)
        columns = [array[:num_rows] for array in (arrays.labels, numericals, arrays.missing)]
        columns += [column[:num_rows] for column in arrays.codes]
        return Parsed(arrays, columns, non_hex_texts, bad, num_lines, len(text))


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _non_hex_texts(text: bytes, non_hex: np.ndarray) -> NonHexTexts:
    """Return the texts at `non_hex`, int64 [n, 4]: column, row, start and end."""
    import pyarrow as pa

    data = b"".join([text[start:end] for start, end in non_hex[:, 2:].tolist()])
    ends = np.zeros(len(non_hex) + 1, np.int32)
    np.cumsum(non_hex[:, 3] - non_hex[:, 2], out=ends[1:])
    return NonHexTexts(
        pa.array(non_hex[:, 0].astype(np.uint8)),
        pa.array(non_hex[:, 1].astype(np.int32)),
        pa.StringArray.from_buffers(len(non_hex), pa.py_buffer(ends), pa.py_buffer(data)),
    )
