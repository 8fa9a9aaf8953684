"""A piece of raw text to columns: labels, transformed numericals, their missing bits, codes.

A category of eight lower-case hexadecimal digits is its own code; the texts of all others go beside
the codes. This is what a parsing process runs; it keeps nothing from one piece to the next.
"""

from dataclasses import dataclass

import duckdb
import numpy as np

from preproc.fields import (
    NO_INTEGER,
    ODD,
    PADDING,
    BadBlockError,
    find_fields,
    hexadecimal,
    integers,
    labels,
)
from preproc.lines import BLOCK_BYTES, Sorted, sort_lines
from preproc.sql import CATEGORICAL, COLUMNS, NUMERICAL, numerical

INTEGERS = slice(1, 1 + len(NUMERICAL))
CATEGORIES = slice(1 + len(NUMERICAL), len(COLUMNS))
# Integers whose transformed value is looked up: nearly all of Criteo's, in a table of 128 KiB.
LEAST, MOST = -16, (1 << 16) - 17


@dataclass(slots=True)
class OddTexts:
    """Texts that have no code: the number of their column, their row, themselves."""

    columns: np.ndarray
    rows: np.ndarray
    texts: list[str]

    @classmethod
    def joined(cls, parts: "list[OddTexts]") -> "OddTexts":
        """Return one after another."""
        nothing = [np.empty(0, np.int64)]
        return cls(
            np.concatenate(nothing + [part.columns for part in parts]),
            np.concatenate(nothing + [part.rows for part in parts]),
            [text for part in parts for text in part.texts],
        )

    def moved(self, rows: int) -> "OddTexts":
        """Return them with row numbers that are larger by `rows`."""
        return OddTexts(self.columns, self.rows + rows, self.texts)


@dataclass(slots=True)
class Parsed:
    """A piece of text as columns.

    Attributes:
        columns: arrays of the good lines, in the order of `Staged.columns`.
        odd: texts without a code, by row within the piece.
        bad: index of the line within the piece, reason, line.
        num_lines: lines of the text, good, bad or blank.
        num_bytes: of the text.
    """

    columns: list[np.ndarray]
    odd: OddTexts
    bad: list[tuple[int, str, bytes]]
    num_lines: int
    num_bytes: int

    @property
    def num_rows(self) -> int:
        """Good lines."""
        return len(self.columns[0])


class PieceParser:
    """Parses pieces of whole lines, in blocks that stay in the processor's cache."""

    def __init__(self, numerical_dtype: str) -> None:
        self._connection = duckdb.connect(config={"threads": 1})
        self._dtype = np.dtype(numerical_dtype)
        # The last entry is that of a missing integer.
        known = np.append(np.arange(LEAST, MOST + 1), NO_INTEGER)
        self._known = self._transformed(known)

    def __call__(self, text: bytes) -> Parsed:
        """Return the columns of `text`, which ends with a line end."""
        parts, odd, bad = [], [], []
        start = rows = lines = 0
        while start < len(text):
            stop = text.rfind(b"\n", start, start + BLOCK_BYTES) + 1 or text.find(b"\n", start) + 1
            found = _parse_block(text[start:stop], bad, lines)
            start = stop
            lines += found[-1]
            parts.append(found[:3])
            odd.append(found[3].moved(rows))
            rows += len(found[0])
        label = np.concatenate([part[0] for part in parts])
        values = np.concatenate([part[1] for part in parts], axis=1)
        codes = np.concatenate([part[2] for part in parts], axis=1)
        missing = np.packbits((values == NO_INTEGER).T, axis=1)
        if missing.shape[1] == 1:
            missing = missing[:, 0]
        columns = [label, self._numericals(values), missing, *codes]
        return Parsed(columns, OddTexts.joined(odd), bad, lines, len(text))

    def _numericals(self, values: np.ndarray) -> np.ndarray:
        """Return the transformed integers [13, rows] as [rows, 13] in the dtype that is stored."""
        # As unsigned numbers those below LEAST are large too.
        index = (values - LEAST).view(np.uint64)
        unknown = index > MOST - LEAST
        index[unknown] = len(self._known) - 1
        stored = self._known.take(index.view(np.int64))
        unknown &= values != NO_INTEGER
        if unknown.any():
            stored[unknown] = self._transformed(values[unknown])
        return np.ascontiguousarray(stored.T)

    def _transformed(self, integers: np.ndarray) -> np.ndarray:
        """Apply the SQL of `preproc/sql.py`."""
        found = self._connection.execute(
            f"SELECT {numerical('x')} AS y FROM "
            f"(SELECT nullif(given, {NO_INTEGER}) AS x FROM integers AS t(given))"
        )
        return found.fetchnumpy()["y"].astype(self._dtype)


def _parse_block(block: bytes, bad: list, line: int) -> tuple:
    """Return labels, integers, codes, odd texts and lines; append what is bad, by line of the text."""
    try:
        if not block.isascii():
            block.decode()
        good = _fields(block)
        return *good, len(good[0])
    except (BadBlockError, UnicodeDecodeError):
        found: Sorted = sort_lines(block)
    num_lines = block.count(b"\n")
    bad += [(line + index, reason, text) for index, reason, text in found.bad]
    if not found.good:
        nothing = np.empty((len(NUMERICAL), 0), np.int64)
        codes = np.empty((len(CATEGORICAL), 0), np.uint32)
        return np.empty(0, np.uint8), nothing, codes, OddTexts.joined([]), num_lines
    return *_fields(found.good), num_lines


def _fields(block: bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray, OddTexts]:
    """Return labels [n], integers [13, n], codes [26, n] and the odd texts."""
    fields = find_fields(block, len(COLUMNS))
    codes = hexadecimal(fields, CATEGORIES)
    odd = codes == ODD
    columns, rows = np.nonzero(odd) if odd.any() else np.empty((2, 0), np.int64)
    at = (columns + CATEGORIES.start, rows)
    places = zip(fields.starts[at].tolist(), fields.ends[at].tolist(), strict=True)
    # A place counts from before the block, where eight more bytes stand.
    texts = [block[start - PADDING : end - PADDING].decode() for start, end in places]
    return labels(fields, 0), integers(fields, INTEGERS), codes, OddTexts(columns, rows, texts)
