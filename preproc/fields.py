"""Tab-separated lines to columns of numbers: one pass over the bytes, compiled by Numba.

The kernel takes good lines as they come and stops in front of any other; which of its fields is
wrong, and whether that is the whole truth, is for `preproc/lines.py` to say. It holds no lock of
Python's, so several threads parse at once.
"""

import numpy as np
from numba import njit

from preproc.sql import NUM_CATEGORICAL, NUM_NUMERICAL

# Codes of a hexadecimal column that stand for no number: a missing field, and a field that is not
# exactly eight lower-case digits (or is one of these two), whose text is kept beside the codes.
MISSING = 0xFFFFFFFF
ODD = 0xFFFFFFFE
# Integers whose transformed value is looked up, nearly all of Criteo's; the table holds one more
# value, that of a missing integer. Numbers of at most 18 digits always fit 64 bits.
LEAST, MOST = -16, (1 << 21) - 17
MAX_DIGITS = 18
# Why the kernel stops: the text is at its end, the line is not one it takes, an array is full.
END, OTHER_LINE, FULL = 0, 1, 2

TAB, LINE_END, RETURN = ord("\t"), ord("\n"), ord("\r")
PLUS, MINUS, ZERO = ord("+"), ord("-"), ord("0")
# Fields of the bit set that says which integers of a row are missing, as numpy.packbits has them.
MISSING_BYTES = (NUM_NUMERICAL + 7) // 8


def _each(byte: int) -> np.uint64:
    """Return a word of eight equal bytes."""
    return np.uint64(byte * 0x0101010101010101)


ONES, HIGH_BITS, LOW_NIBBLES = _each(0x01), _each(0x80), _each(0x0F)
# A digit is 0x30 to 0x39, a letter 0x61 to 0x66: what to take away from each byte, so that its high
# bit (set before) goes if it is too small, and what to add, so that its high bit comes if too large.
LEAST_DIGIT, TO_LETTER = _each(0x30), np.uint64(0x61 - 0x30)
OVER_DIGIT, OVER_LETTER = _each(0x7F - 0x39), np.uint64((0x7F - 0x39) - (0x7F - 0x66))
PAIRS, QUADS = np.uint64(0x00FF00FF00FF00FF), np.uint64(0x0000FFFF0000FFFF)
NINE, SIX, BYTE, HALF = np.uint64(9), np.uint64(6), np.uint64(8), np.uint64(16)
NIBBLE, WHOLE, CODE = np.uint64(4), np.uint64(32), np.uint64(0xFFFFFFFF)


@njit(nogil=True, cache=True)
def _word(text, at):
    """Return eight bytes as a little-endian number; LLVM makes one load of it."""
    word = np.uint64(0)
    for byte in range(8):
        word |= np.uint64(text[at + byte]) << np.uint64(8 * byte)
    return word


@njit(nogil=True, cache=True)
def _hexadecimal(word):
    """Return the number that eight characters stand for, or ODD if one is no lower-case digit."""
    letters = (word >> SIX) & ONES
    enough = ((word | HIGH_BITS) - (LEAST_DIGIT + letters * TO_LETTER)) & HIGH_BITS
    wrong = (word | (word + (OVER_DIGIT - letters * OVER_LETTER))) & HIGH_BITS
    if enough != HIGH_BITS or wrong != 0:
        return np.uint32(ODD)
    # Nibbles join their neighbours to bytes, these to pairs, these to the number; the first
    # character, in the lowest byte, is the most significant.
    digits = (word & LOW_NIBBLES) + letters * NINE
    digits = ((digits << NIBBLE) | (digits >> BYTE)) & PAIRS
    digits = ((digits << BYTE) | (digits >> HALF)) & QUADS
    return np.uint32(((digits << HALF) | (digits >> WHOLE)) & CODE)


@njit(nogil=True, cache=True)
def parse_lines(
    text, at, stop, trusted, row, known, labels, numericals, missing, codes, far, far_values, odd
):
    """Parse lines into row `row` and those behind it.

    Blank lines are skipped; a carriage return before the line end is left out.

    Args:
        text: uint8; text[stop - 1] is a line end.
        at: where a line begins.
        stop: where to end, behind a line end.
        trusted: whether text beyond ASCII is known to be UTF-8; if not, its lines are not taken.
        row: rows that stand in the columns already.
        known: the stored value of the integers LEAST to MOST, then that of a missing one.
        labels: uint8 [rows].
        numericals: stored values [rows, NUM_NUMERICAL].
        missing: uint8 [rows, MISSING_BYTES], a bit an integer.
        codes: uint32 [NUM_CATEGORICAL, rows].
        far: int64 [n], index in the flat `numericals` of an integer that `known` does not hold.
        far_values: int64 [n], that integer.
        odd: int64 [n, 4]: column, row, start and end of a text that has no code.

    Returns:
        END, OTHER_LINE or FULL; the beginning of the first line that was not parsed; the number of
        lines, blank ones included, that were; rows in the columns; entries of `far`, of `odd`.
    """
    num_lines = num_far = num_odd = 0
    while at < stop:
        if text[at] == LINE_END:
            at += 1
            num_lines += 1
            continue
        if text[at] == RETURN and text[at + 1] == LINE_END:
            at += 2
            num_lines += 1
            continue
        start, row_far, row_odd = at, num_far, num_odd
        full = row == len(labels) or num_far + NUM_NUMERICAL > len(far)
        if full or num_odd + NUM_CATEGORICAL > len(odd):
            return FULL, start, num_lines, row, num_far, num_odd
        label = np.int64(text[at]) - ZERO
        good = (label == 0 or label == 1) and text[at + 1] == TAB
        labels[row] = label
        at += 2

        column = 0
        missing_bits = 0
        while good and column < NUM_NUMERICAL:
            byte = np.int64(text[at])
            if byte == TAB:
                missing_bits |= 1 << (8 * MISSING_BYTES - 1 - column)
                numericals[row, column] = known[MOST - LEAST + 1]
            else:
                negative = byte == MINUS
                if negative or byte == PLUS:
                    at += 1
                    byte = np.int64(text[at])
                first = at
                value = 0
                while byte >= ZERO and byte <= ZERO + 9:
                    value = 10 * value + (byte - ZERO)
                    at += 1
                    byte = np.int64(text[at])
                good = byte == TAB and at > first and at - first <= MAX_DIGITS
                if negative:
                    value = -value
                if LEAST <= value <= MOST:
                    numericals[row, column] = known[value - LEAST]
                else:
                    far[num_far] = row * NUM_NUMERICAL + column
                    far_values[num_far] = value
                    num_far += 1
            at += 1
            column += 1
        for byte in range(MISSING_BYTES):
            missing[row, byte] = missing_bits >> (8 * (MISSING_BYTES - 1 - byte)) & 0xFF

        column = 0
        while good and column < NUM_CATEGORICAL:
            is_last = column == NUM_CATEGORICAL - 1
            byte = text[at]
            if byte == TAB or byte == LINE_END or byte == RETURN:
                code, end = np.uint32(MISSING), at
            else:
                code = np.uint32(ODD)
                end = at + 8
                if end < stop:
                    code = _hexadecimal(_word(text, at))
                    byte = text[end] if code < ODD else byte
                if code >= ODD or not (byte == TAB or byte == LINE_END or byte == RETURN):
                    code, end, beyond_ascii = np.uint32(ODD), at, np.uint8(0)
                    byte = text[at]
                    while not (byte == TAB or byte == LINE_END or byte == RETURN):
                        beyond_ascii |= byte
                        end += 1
                        byte = text[end]
                    good = trusted or beyond_ascii < 0x80
                    odd[num_odd, 0] = column
                    odd[num_odd, 1] = row
                    odd[num_odd, 2] = at
                    odd[num_odd, 3] = end
                    num_odd += 1
            codes[column, row] = code
            if is_last and byte == RETURN:
                end += 1
                byte = text[end]
            good = good and byte == (LINE_END if is_last else TAB)
            at = end + 1
            column += 1
        if not good:
            return OTHER_LINE, start, num_lines, row, row_far, row_odd
        num_lines += 1
        row += 1
    return END, at, num_lines, row, num_far, num_odd
