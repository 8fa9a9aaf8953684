"""Synthetic day files in Criteo's format, for measurements and tests.

    python -m benchmarks.day_files output=DIR days=3 rows=1000000 seed=1

The command writes `DIR/day_0`, `DIR/day_1`, ... with `rows` lines per file. A line holds a label, 13 integers and 26
categories of 8 hexadecimal digits, separated by tabs. A missing value is an empty field.

Tables have the sizes of Criteo 1TB, which are its distinct values over 24 days. Each column follows a power law; its exponent
gives as many distinct values in 10,000 lines as the first 10,000 lines of Criteo's day 0 have. Missing rates, quantiles of the
integers and the click rate come from the same lines. Labels and columns are independent of each other, so these files measure
speed, not learning.

Every field is a function of (seed, day, column, row). The same command therefore writes the same bytes with any number of
processes, and a longer file begins with the rows of a shorter one.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from time import perf_counter

import numpy as np

from benchmarks.launch import held_output, writer_options
from dataloading.randomness import power_law, stream_key, uniform

NUM_NUMERICAL = 13
CLICK_RATE = 0.0265
CHUNK_ROWS = 1 << 15
"""Rows generated at once: 12 MB of text."""

# Of the values that are not missing: minimum, 10 %, median, 90 %, 99 %, maximum.
QUANTILES = (
    (1, 1, 6, 51, 258, 9382),
    (1, 18, 207, 1073, 3597, 7969),
    (0, 0, 3, 16, 39, 129),
    (0, 2, 36, 323, 1907, 14285),
    (1, 1, 5, 42, 301, 2547),
    (0, 0, 0, 2, 20, 222),
    (0, 0, 0, 0, 2, 29),
    (-1, 0, 5, 221, 2275, 4851),
    (0, 0, 5, 27, 46, 59),
    (0, 0, 0, 1, 2, 5),
    (1, 1, 2, 9, 36, 108),
    (0, 30, 3602, 36119, 364349, 1293837),
    (0, 1, 4, 21, 67, 362),
)
NUMERICAL_MISSING = (
    *(0.239, 0.102, 0.254, 0.493, 0.465, 0.092, 0.031),
    *(0.0, 0.0, 0.092, 0.465, 0.015, 0.254),
)
CARDINALITIES = (
    *(227605431, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 130229466, 3067955, 405282, 10),
    *(2208, 11938, 154, 3, 976, 14, 292775613, 40790947, 187188509, 590151, 12973, 108, 36),
)
# 1.5 where the first lines hold fewer values than any exponent below 2 gives: they cover some seconds of 24 days.
EXPONENTS = (
    *(1.21, 1.24, 1.08, 1.46, 1.29, 1.0, 1.13, 1.51, 1.5, 1.23, 1.34, 1.15, 1.5),
    *(1.56, 1.34, 1.5, 1.0, 1.95, 1.5, 1.21, 1.26, 1.21, 1.26, 1.15, 1.5, 1.5),
)
CATEGORICAL_MISSING = (
    *(0.0258, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0258, 0.0258, 0.0, 0.0),
    *(0.4667, 0.0, 0.4667, 0.4667, 0.0, 0.0, 0.0258, 0.0258, 0.0258, 0.4667, 0.0, 0.0, 0.0),
)

# A line with every field at its maximum width. Unused bytes are zero and are dropped at the end.
LINE = np.dtype(
    [("label", "S1")]
    + [
        (f"{kind}{i}", "<u8" if kind == "field" else "S1")
        for i in range(39)
        for kind in ("tab", "field")
    ]
    + [("end", "S1")]
)
LABELS = np.array([b"0", b"1"])


def _integer_texts(quantiles: tuple[int, ...]) -> np.ndarray:
    """Return 65,536 equally likely integers as text, one per uint64, interpolated between `quantiles` as logarithms."""
    shares = (np.arange(65_536) + 0.5) / 65_536
    logs = np.interp(shares, (0, 0.1, 0.5, 0.9, 0.99, 1), np.log(np.array(quantiles) + 2.0))
    integers = np.rint(np.exp(logs) - 2).astype(np.int64)
    return np.array([str(integer).encode() for integer in integers], "S8").view("<u8")


INTEGERS = [_integer_texts(quantiles) for quantiles in QUANTILES]
HEX = np.array([b"%04x" % number for number in range(65_536)], "S4").view("<u4").astype(np.uint64)


def _scrambled(ranks: np.ndarray, key: int) -> np.ndarray:
    """Return a permutation of the 32-bit numbers (MurmurHash3's finaliser), one per key."""
    numbers = ranks.astype(np.uint32)
    numbers ^= np.uint32(key & 0xFFFFFFFF)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        numbers ^= numbers >> np.uint32(shift)
        numbers *= np.uint32(factor)
    numbers ^= numbers >> np.uint32(16)
    return numbers


def _present(key: int, rows: np.ndarray, missing: float) -> tuple[np.ndarray, np.ndarray]:
    """Return a uniform number per row, and per row 1 (present) or 0 (missing) as uint64."""
    numbers = uniform(key, rows)
    if not missing:
        return numbers, np.uint64(1)
    present = numbers >= missing
    numbers -= missing
    numbers /= 1 - missing
    np.maximum(numbers, 0, out=numbers)
    return numbers, present.astype(np.uint64)


def lines(seed: int, day: int, rows: range) -> bytes:
    """Return the lines `rows` of a day."""
    counters = np.arange(rows.start, rows.stop, dtype=np.uint64)
    table = np.zeros(len(rows), LINE)

    def key(column: int) -> int:
        return stream_key("day files", seed, day, column)

    table["label"] = LABELS[(uniform(key(39), counters) < CLICK_RATE).astype(np.intp)]
    for column in range(39):
        table[f"tab{column}"] = b"\t"
        index = column - NUM_NUMERICAL
        if index < 0:
            numbers, present = _present(key(column), counters, NUMERICAL_MISSING[column])
            text = INTEGERS[column].take((numbers * 65_536).astype(np.intp))
        else:
            numbers, present = _present(key(column), counters, CATEGORICAL_MISSING[index])
            ranks = power_law(numbers, CARDINALITIES[index], EXPONENTS[index])
            values = _scrambled(ranks, stream_key("day files", "values", column))
            text = HEX.take(values >> np.uint32(16))
            text |= HEX.take(values & np.uint32(0xFFFF)) << np.uint64(32)
        table[f"field{column}"] = text * present
    table["end"] = b"\n"
    return table.tobytes().translate(None, b"\0")


def write_day(path: Path, seed: int, day: int, num_rows: int) -> int:
    """Write the file of one day and return its bytes."""
    with path.open("wb") as stream:
        for start in range(0, num_rows, CHUNK_ROWS):
            stream.write(lines(seed, day, range(start, min(start + CHUNK_ROWS, num_rows))))
        return stream.tell()


def write_days(
    directory: Path, days: int, num_rows: int, seed: int = 1, processes: int = 1
) -> Iterator[tuple[Path, int]]:
    """Write `day_0`, `day_1`, ... with `num_rows` lines per file; yield (path, bytes) after each file."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / f"day_{day}" for day in range(days)]
    if processes == 1 or days == 1:
        yield from ((path, write_day(path, seed, day, num_rows)) for day, path in enumerate(paths))
        return
    with ProcessPoolExecutor(processes) as pool:
        sizes = pool.map(write_day, paths, [seed] * days, range(days), [num_rows] * days)
        yield from zip(paths, sizes, strict=True)


def main() -> None:
    """Write the files of the command line."""
    defaults = {"output": "", "days": "3", "rows": "1000000", "seed": "1", "processes": ""}
    options = writer_options(__doc__, defaults)
    days, num_rows = int(options["days"]), int(options["rows"])
    processes = int(options["processes"] or os.cpu_count() or 1)
    began, written = perf_counter(), 0
    output = Path(options["output"])
    if there := next(output.glob("day_*"), None):
        raise SystemExit(f"error: {there} exists, and may be real; set output to a new directory")
    with held_output(output):
        for path, size in write_days(output, days, num_rows, int(options["seed"]), processes):
            written += size
            print(f"{path}: {num_rows:,} rows, {size / 1e6:,.1f} MB", flush=True)
    seconds, rows = perf_counter() - began, days * num_rows
    print(
        f"{rows:,} rows, {written / 1e9:,.2f} GB in {seconds:,.1f} s, {rows / seconds:,.0f} rows/s"
    )


if __name__ == "__main__":
    main()
