"""Blocks of files with holes, of which only what is stored is read, and the checksums of what is not."""

import errno
import os
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from mmap import PAGESIZE
from typing import Any

Ranges = Sequence[tuple[int, int]]
"""First byte of some pages of a block, and the end."""


def stored_pages(descriptor: int, start: int, num_bytes: int) -> list[tuple[int, int]]:
    """Return the pages of a block, counted from its `start` in a file, that lie in no hole, and its last one in any case."""
    found, at, end = [], start, start + num_bytes
    last = (num_bytes - 1) // PAGESIZE * PAGESIZE
    while at < end:
        try:
            at = os.lseek(descriptor, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole
                break
            raise
        if at < end:
            first, at = at - start, os.lseek(descriptor, at, os.SEEK_HOLE)
            found.append((first // PAGESIZE * PAGESIZE, -(-(at - start) // PAGESIZE) * PAGESIZE))
    merged: list[tuple[int, int]] = []
    for first, stop in [*found, (last, num_bytes)]:
        if merged and first <= merged[-1][1]:
            first, _ = merged.pop()
        merged.append((first, min(stop, num_bytes)))
    return merged


def crc32_of(pages: Ranges, read: Callable[[int, int], Any]) -> int:
    """Return the CRC-32 of a block that `read` returns some bytes of, from its `stored_pages`."""
    crc = done = 0
    for first, end in pages:
        num_zeros = (first - done) // PAGESIZE
        for power in range(num_zeros.bit_length()):
            crc = _behind_zeros(crc, power) if num_zeros >> power & 1 else crc
        crc, done = zlib.crc32(read(first, end), crc), end
    return crc


def _behind_zeros(crc: int, power: int) -> int:
    """Return a CRC-32 after 2 ** power pages of zeros more: every bit of it adds its own part."""
    of_none, *of_bits = _parts(power)
    found = of_none
    for bit, part in enumerate(of_bits):
        found ^= (part ^ of_none) * (crc >> bit & 1)
    return found


@cache
def _parts(power: int) -> tuple[int, ...]:
    """Return `_behind_zeros` of 0 and of each bit."""
    if not power:
        return tuple(zlib.crc32(bytes(PAGESIZE), crc) for crc in (0, *(1 << b for b in range(32))))
    return tuple(_behind_zeros(crc, power - 1) for crc in _parts(power - 1))
