"""Tab-separated lines to numbers, a block at a time, in NumPy: no string is made for a good field.

The tabs and line ends of a block are found in one pass. A field is then the 8 bytes that end where
it ends, read as one uint64 (little-endian: its first character is the lowest byte). Decimals are
decoded by arithmetic on all eight bytes at once, hexadecimals by a table of pairs of digits.
"""

from dataclasses import dataclass

import numpy as np

# Codes of a hexadecimal column that stand for no number: a missing field, and a field that is not
# exactly eight lower-case digits (or is one of these two), whose text is kept beside the codes.
MISSING = 0xFFFFFFFF
ODD = 0xFFFFFFFE
# A missing integer; integers have at most 18 digits.
NO_INTEGER = np.iinfo(np.int64).min

PADDING = 8
TAB, LINE_END, RETURN = 9, 10, 13


def _each(byte: int) -> np.uint64:
    return np.uint64(byte * 0x0101010101010101)


# Mask of the last n of eight bytes.
LAST_BYTES = np.array([(2**64 - 1) ^ (2 ** (64 - 8 * n) - 1) for n in range(9)], np.uint64)


def _digit_pairs() -> np.ndarray:
    """Return, for two characters as a little-endian uint16, the value of both digits, or 0xFF00 if one is none."""
    values = np.full(256, -1)
    for value, digit in enumerate(b"0123456789abcdef"):
        values[digit] = value
    second, first = values[:, None], values[None, :]
    pairs = np.where((first < 0) | (second < 0), 0xFF00, first * 16 + second)
    return pairs.astype(np.uint16).ravel()


DIGIT_PAIRS = _digit_pairs()


class BadBlockError(Exception):
    """Some line of a block is not as it should be; which one has to be found line by line."""


@dataclass(slots=True)
class Fields:
    """Where the fields of a block are: `text` with 8 bytes before it, `starts` and `ends` [columns, rows]."""

    text: np.ndarray
    starts: np.ndarray
    ends: np.ndarray

    @property
    def num_rows(self) -> int:
        """Lines of the block."""
        return self.ends.shape[1]


def find_fields(block: bytes, num_columns: int) -> Fields:
    """Return the fields of whole lines.

    Raises:
        BadBlockError: a line with another number of fields, a carriage return, a blank line.
    """
    text = np.frombuffer(bytes(PADDING) + block, np.uint8)
    body = text[PADDING:]
    if not len(block) or body[-1] != LINE_END:
        raise BadBlockError
    is_line_end = body == LINE_END
    num_lines = np.count_nonzero(is_line_end)
    is_end = body == TAB
    is_end |= is_line_end
    ends = np.flatnonzero(is_end)
    num_rows, rest = divmod(len(ends), num_columns)
    if rest or b"\r" in block:
        raise BadBlockError
    ends = ends.reshape(num_rows, num_columns)
    # As many line ends as rows, each behind the last field of its row: no other line is short or long.
    if num_lines != num_rows or not is_line_end[ends[:, -1]].all():
        raise BadBlockError
    ends = np.ascontiguousarray(ends.T)
    ends += PADDING
    starts = np.empty_like(ends)
    starts[1:] = ends[:-1]
    starts[0, 0] = PADDING - 1
    starts[0, 1:] = ends[-1, :-1]
    starts += 1
    return Fields(text, starts, ends)


def _words(fields: Fields, columns: slice) -> np.ndarray:
    """Return the 8 bytes before the end of each field as uint64."""
    text = fields.text
    words = np.ndarray((len(text) - 7,), "<u8", buffer=text, strides=(1,))
    return words[fields.ends[columns] - 8]


def hexadecimal(fields: Fields, columns: slice) -> np.ndarray:
    """Return uint32 [columns, rows]: the value of eight lower-case digits, or MISSING, or ODD."""
    words = _words(fields, columns)
    lengths = fields.ends[columns] - fields.starts[columns]
    # Two digits at a time: [columns, rows, 4], each with a value in its low byte if it is one.
    pairs = DIGIT_PAIRS.take(words.view("<u2"))
    wrong = pairs.view(np.uint64) & np.uint64(0xFF00FF00FF00FF00)
    codes = pairs.astype(np.uint8).view(">u4").astype(np.uint32)
    codes = codes.reshape(lengths.shape)
    good = wrong.reshape(lengths.shape) == 0
    good &= lengths == 8
    good &= codes < ODD
    codes[~good] = ODD
    codes[lengths == 0] = MISSING
    return codes


def integers(fields: Fields, columns: slice) -> np.ndarray:
    """Return int64 [columns, rows]: digits with an optional sign, or NO_INTEGER for an empty field.

    Raises:
        BadBlockError: a field that is neither.
    """
    starts, ends = fields.starts[columns], fields.ends[columns]
    lengths = ends - starts
    first = fields.text[starts]
    negative = (first == ord("-")) & (lengths > 0)
    digits = lengths - (negative | ((first == ord("+")) & (lengths > 0)))
    if ((digits == 0) & (lengths > 0)).any() or (digits > 18).any():
        raise BadBlockError
    short = np.minimum(digits, 8)
    words = _words(fields, columns)
    words ^= _each(0x30)
    words &= LAST_BYTES[short]
    if (((words + _each(0x76)) | words) & _each(0x80)).any():
        raise BadBlockError
    words *= np.uint64(10 * 256 + 1)
    words >>= np.uint64(8)
    words &= np.uint64(0x00FF00FF00FF00FF)
    words *= np.uint64(100 * 2**16 + 1)
    words >>= np.uint64(16)
    words &= np.uint64(0x0000FFFF0000FFFF)
    words *= np.uint64(10000 * 2**32 + 1)
    words >>= np.uint64(32)
    values = words.astype(np.int64)
    long = np.nonzero(digits > 8) if digits.max(initial=0) > 8 else ((), ())
    for column, row in zip(*long, strict=True):
        field = fields.text[starts[column, row] : ends[column, row]].tobytes()
        unsigned = field[1:] if field[:1] in (b"+", b"-") else field
        if not unsigned.isdigit():
            raise BadBlockError
        values[column, row] = int(unsigned)
    np.negative(values, where=negative, out=values)
    values[lengths == 0] = NO_INTEGER
    return values


def labels(fields: Fields, column: int) -> np.ndarray:
    """Return uint8 [rows]; BadBlockError unless each is `0` or `1`."""
    starts, ends = fields.starts[column], fields.ends[column]
    values = fields.text[starts] - np.uint8(ord("0"))
    if (ends - starts != 1).any() or (values > 1).any():
        raise BadBlockError
    return values
