"""Tab-separated lines to columns of numbers: one pass over the bytes, compiled by Numba.

The kernel parses good lines and stops before any other line. `preproc/line_blocks.py` then decides whether
that line is bad, and which field is wrong. The kernel releases the GIL, so several threads parse at once.
"""

import numpy as np

from dataloading.keys.kernels.compiled import kernel, lowest_bit, tab_bits
from preproc.vocabulary_sql import NUM_CATEGORICAL, NUM_NUMERICAL

# Two codes with a special meaning: a missing field, and a non-hex field, whose text is stored beside the codes. Non-hex is any
# field other than eight lower-case digits, or one that spells either of these two codes.
MISSING = 0xFFFFFFFF
NON_HEX = 0xFFFFFFFE
# Range of integers whose transformed value is looked up: nearly all of Criteo's. The table has one more
# entry, for a missing integer. Numbers of at most 18 digits always fit 64 bits.
LEAST, MOST = -16, (1 << 21) - 17
MAX_DIGITS = 18
# Reasons for which the kernel stops: end of the text, a line that it cannot parse, a full array.
END, OTHER_LINE, FULL = 0, 1, 2

TAB, LINE_END, RETURN = ord("\t"), ord("\n"), ord("\r")
PLUS, MINUS, ZERO = ord("+"), ord("-"), ord("0")
# Bytes of the bit set of missing integers in a row, in the order of numpy.packbits.
MISSING_BYTES = (NUM_NUMERICAL + 7) // 8


def _each(byte: int) -> np.uint64:
    return np.uint64(byte * 0x0101010101010101)


ONES, HIGH_BITS, LOW_NIBBLES = _each(0x01), _each(0x80), _each(0x0F)
# A digit is 0x30 to 0x39, a letter 0x61 to 0x66. Subtracting the lower bound clears the high bit (set before)
# of a byte that is too small. Adding to a byte that is too large sets its high bit.
LEAST_DIGIT, TO_LETTER = _each(0x30), np.uint64(0x61 - 0x30)
OVER_DIGIT, OVER_LETTER = _each(0x7F - 0x39), np.uint64((0x7F - 0x39) - (0x7F - 0x66))
PAIRS, QUADS = np.uint64(0x00FF00FF00FF00FF), np.uint64(0x0000FFFF0000FFFF)
NINE, SIX, BYTE, HALF = np.uint64(9), np.uint64(6), np.uint64(8), np.uint64(16)
NIBBLE, WHOLE, CODE = np.uint64(4), np.uint64(32), np.uint64(0xFFFFFFFF)
OVER_NINE, EVENS, TEN = _each(0x7F - 9), np.uint64(0x000000FF000000FF), np.uint64(10)
BY_PAIRS, BY_QUADS = np.uint64(100 + (1000000 << 32)), np.uint64(1 + (10000 << 32))
ZEROS, ONE = _each(ZERO), np.uint64(1)


@kernel
def _word(text, at):
    """Return eight bytes as a little-endian number; LLVM makes one load of it, if indices are unsigned."""
    word, first = np.uint64(0), np.uint64(at)
    for byte in range(8):
        word |= np.uint64(text[first + np.uint64(byte)]) << np.uint64(8 * byte)
    return word


@kernel
def _byte(text, at):
    """Return text[at]; Numba would check whether a signed index is negative."""
    return text[np.uint64(at)]


@kernel
def _hexadecimal(word):
    """Return the value of eight hexadecimal characters, or NON_HEX if one is no lower-case digit."""
    letters = (word >> SIX) & ONES
    enough = ((word | HIGH_BITS) - (LEAST_DIGIT + letters * TO_LETTER)) & HIGH_BITS
    wrong = (word | (word + (OVER_DIGIT - letters * OVER_LETTER))) & HIGH_BITS
    if enough != HIGH_BITS or wrong != 0:
        return np.uint32(NON_HEX)
    # Nibbles are joined to bytes, bytes to pairs, pairs to the number. The first character, in the lowest
    # byte, is the most significant.
    digits = (word & LOW_NIBBLES) + letters * NINE
    digits = ((digits << NIBBLE) | (digits >> BYTE)) & PAIRS
    digits = ((digits << BYTE) | (digits >> HALF)) & QUADS
    return np.uint32(((digits << HALF) | (digits >> WHOLE)) & CODE)


@kernel
def _decimal(digits):
    """Return the value of eight decimal digits, the first in the lowest byte."""
    pairs = digits * TEN + (digits >> BYTE)
    return np.int64(((pairs & EVENS) * BY_PAIRS + (pairs >> HALF & EVENS) * BY_QUADS) >> WHOLE)


@kernel
def _ends_field(byte):
    return byte in (TAB, LINE_END, RETURN)


@kernel
def _integers(text, at, row, known, numericals, missing, far, far_values, num_far):
    """Store the integers of a row; return the index of the next field or -1, and the number of entries of `far`."""
    missing_bits, begin, tabs = 0, at, np.uint64(0)
    if at + 64 + 8 <= len(text):  # the word of a field may begin at the last tab
        tabs = tab_bits(text, at)
    for column in range(NUM_NUMERICAL):
        tab, is_near = begin + lowest_bit(tabs), tabs != 0
        length = tab - at
        tabs &= tabs - ONE
        if is_near and length < 8:
            digits = (_word(text, at) ^ ZEROS) << np.uint64(56 - 8 * length) << BYTE
            is_missing = np.int64(length == 0)
            missing_bits |= is_missing << (8 * MISSING_BYTES - 1 - column)
            entry = _decimal(digits) - LEAST + (-is_missing & (MOST + 1))
            is_stored = entry - is_missing < len(known) - 1
            if ((digits + OVER_NINE) | digits) & HIGH_BITS == 0 and is_stored:
                numericals[row, column] = known[np.uint64(entry)]
                at = tab + 1
                continue
        byte = np.int64(text[at])
        if byte == TAB:
            missing_bits |= 1 << (8 * MISSING_BYTES - 1 - column)
            numericals[row, column] = known[MOST - LEAST + 1]
            at += 1
            continue
        negative = byte == MINUS
        if negative or byte == PLUS:
            at += 1
            byte = np.int64(text[at])
        first, value = at, 0
        while ZERO <= byte <= ZERO + 9:
            value = 10 * value + (byte - ZERO)
            at += 1
            byte = np.int64(text[at])
        if byte != TAB or at == first or at - first > MAX_DIGITS:
            return -1, num_far
        if negative:
            value = -value
        if LEAST <= value <= MOST:
            numericals[row, column] = known[value - LEAST]
        else:
            far[num_far] = row * NUM_NUMERICAL + column
            far_values[num_far] = value
            num_far += 1
        at += 1
    for byte in range(MISSING_BYTES):
        missing[row, byte] = missing_bits >> (8 * (MISSING_BYTES - 1 - byte)) & 0xFF
    return at, num_far


@kernel
def _categories(text, at, stop, trusted, row, codes, non_hex, num_non_hex):
    """Store the codes of a row; return the index of the next line or -1, and the number of entries of `non_hex`."""
    for column in range(NUM_CATEGORICAL):
        code, end = np.uint32(MISSING), at
        if not _ends_field(_byte(text, at)):
            code = np.uint32(NON_HEX)
            if at + 8 < stop and _ends_field(_byte(text, at + 8)):
                code, end = _hexadecimal(_word(text, at)), at + 8
            if code >= NON_HEX:
                code, end, beyond_ascii = np.uint32(NON_HEX), at, np.uint8(0)
                while not _ends_field(_byte(text, end)):
                    beyond_ascii |= text[end]
                    end += 1
                if beyond_ascii >= 0x80 and not trusted:
                    return -1, num_non_hex
                non_hex[num_non_hex, 0] = column
                non_hex[num_non_hex, 1] = row
                non_hex[num_non_hex, 2] = at
                non_hex[num_non_hex, 3] = end
                num_non_hex += 1
        codes[np.uint64(column), np.uint64(row)] = code
        if column < NUM_CATEGORICAL - 1:
            if _byte(text, end) != TAB:
                return -1, num_non_hex
        else:
            if _byte(text, end) == RETURN:
                end += 1
            if _byte(text, end) != LINE_END:
                return -1, num_non_hex
        at = end + 1
    return at, num_non_hex


@kernel
def parse_lines(
    text,
    at,
    stop,
    trusted,
    row,
    known,
    labels,
    numericals,
    missing,
    codes,
    far,
    far_values,
    non_hex,
):
    """Parse lines into the rows from `row`.

    Blank lines are skipped; a carriage return before the line end is left out. Return END, OTHER_LINE or FULL; the index
    of the first line that was not parsed; the parsed lines, blank ones included; the rows in the columns; the entries of
    `far` and of `non_hex`.

    - `text` is uint8, text[stop - 1] is a line end, and `at` is the start of a line.
    - `trusted`: text beyond ASCII is known to be UTF-8; if not, the kernel stops at such lines.
    - `known`: the stored value of the integers LEAST to MOST, then that of a missing one.
    - `labels` [rows] and `missing` [rows, MISSING_BYTES] are uint8, `codes` [NUM_CATEGORICAL, rows] uint32.
    - `far` and `far_values`, int64 [n]: indices in the flat `numericals` of integers outside `known`, and the integers.
    - `non_hex`, int64 [n, 4]: column, row, start and end of each text without a code.
    """
    num_lines = num_far = num_non_hex = 0
    while at < stop:
        if text[at] == LINE_END:
            at += 1
            num_lines += 1
            continue
        if text[at] == RETURN and text[at + 1] == LINE_END:
            at += 2
            num_lines += 1
            continue
        start, row_far, row_non_hex = at, num_far, num_non_hex
        full = row == len(labels) or num_far + NUM_NUMERICAL > len(far)
        if full or num_non_hex + NUM_CATEGORICAL > len(non_hex):
            return FULL, start, num_lines, row, num_far, num_non_hex
        label = np.int64(text[at]) - ZERO
        good = 0 <= label <= 1 and text[at + 1] == TAB
        if good:
            labels[row] = label
            at, row_far = _integers(
                text, at + 2, row, known, numericals, missing, far, far_values, num_far
            )
            good = at >= 0
        if good:
            at, row_non_hex = _categories(text, at, stop, trusted, row, codes, non_hex, num_non_hex)
            good = at >= 0
        if not good:
            return OTHER_LINE, start, num_lines, row, num_far, num_non_hex
        num_far, num_non_hex = row_far, row_non_hex
        num_lines += 1
        row += 1
    return END, at, num_lines, row, num_far, num_non_hex
