"""Tables of ad events, as a shop has them, for measurements of preprocessing.

    python -m benchmarks.peers.event_tables output=DIR files=4 rows=750000 format=parquet seed=1

The command writes `DIR/part_0.parquet`, `DIR/part_1.parquet`, ... (or `.csv`) with `rows` rows per file. A row is an
event: its time, which grows over 28 days; whether it was clicked; eleven texts that follow power laws, from 8 to
3,000,000 values, some of them missing; up to five tags in one text; and six numbers. Labels and columns are independent of
each other, so these files measure speed, not learning.

Every field is a function of (seed, column, row), so the files of both formats hold the same rows.
"""

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from time import perf_counter

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from benchmarks.launch import held_output, writer_options
from dataloading.randomness import power_law, stream_key, uniform

FORMATS = ("parquet", "csv")
CHUNK_ROWS = 1 << 18
DAYS = 28
FIRST_MS = 1_772_323_200_000  # 2026-03-01
CLICK_RATE = 0.031
MOST_TAGS = 5
NUM_TAGS = 2_000


def _hex(number: int) -> str:
    return f"{stream_key('event tables', number):016x}"


def _domain(number: int) -> str:
    return f"www.{_hex(number)[: 4 + number % 9]}-{number}.example.com"


def _path(number: int) -> str:
    return f"department {number % 23}/aisle {number % 211}/shelf {number}"


# Per column of text: values, exponent of their power law, part of the rows without one, text of a value.
TEXTS: dict[str, tuple[int, float, float, Callable[[int], str]]] = {
    "user": (3_000_000, 0.8, 0.0, _hex),
    "item": (500_000, 1.05, 0.0, "sku-{:07d}".format),
    "referrer": (60_000, 1.2, 0.3, _domain),
    "brand": (20_000, 1.1, 0.04, "Brand {}".format),
    "city": (8_000, 1.1, 0.05, "city of {}".format),
    "campaign": (5_000, 1.1, 0.0, "2026-03 campaign {}".format),
    "device": (4_000, 1.2, 0.02, "SM-{:04X}".format),
    "category": (1_500, 1.0, 0.0, _path),
    "country": (80, 1.3, 0.0, "C{:02d}".format),
    "slot": (12, 0.5, 0.0, "slot {}".format),
    "system": (8, 1.0, 0.0, "system {}".format),
}


def rows(seed: int, first: int, stop: int, total: int) -> pa.Table:
    """Return the rows `first` to `stop` of `total`."""
    counters = np.arange(first, stop, dtype=np.uint64)

    def numbers(column: str) -> np.ndarray:
        return uniform(stream_key("event tables", seed, column), counters)

    def numeric(column: str, values: np.ndarray, missing: float = 0.0) -> pa.Array:
        return pa.array(values, mask=numbers(f"{column} is missing") < missing)

    milliseconds = counters * np.uint64(DAYS * 86_400_000 // total)
    times = (milliseconds + np.uint64(FIRST_MS)).astype(np.int64)
    columns: dict[str, pa.Array] = {
        "time": pa.array(times // 1000 * 1000, pa.timestamp("ms")),
        "clicked": pa.array((numbers("clicked") < CLICK_RATE).astype(np.int8)),
    }
    for name, (cardinality, exponent, missing, _) in TEXTS.items():
        ids = power_law(numbers(name), cardinality, exponent).astype(np.int32)
        indices = pa.array(ids, mask=numbers(f"{name} is missing") < missing)
        columns[name] = _texts(name).take(indices)
    columns["tags"] = _tags(numbers)
    columns["price"] = numeric("price", np.round(np.exp(8 * numbers("price") - 1), 2))
    columns["age"] = numeric("age", (18 + 70 * numbers("age") ** 2).astype(np.int32), 0.12)
    columns["session_s"] = numeric("session_s", np.round(4000 * numbers("session_s") ** 3, 1))
    views = power_law(numbers("views"), 10_000, 1.3).astype(np.int32)
    columns["views"] = numeric("views", views, 0.01)
    columns["discount"] = numeric("discount", np.round(numbers("discount"), 3), 0.2)
    days = (600 * numbers("idle_days") ** 2).astype(np.int32)
    columns["idle_days"] = numeric("idle_days", days, 0.06)
    return pa.table(columns)


@cache
def _texts(name: str) -> pa.Array:
    cardinality, _, _, of_number = TEXTS[name]
    return pa.array(map(of_number, range(cardinality)), pa.string())


def _tags(numbers: Callable[[str], np.ndarray]) -> pa.Array:
    """Return up to five tags of every row, the missing text for none."""
    lengths = (numbers("tags") * (MOST_TAGS + 1)).astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids = [power_law(numbers(f"tag {i}"), NUM_TAGS, 1.1) for i in range(MOST_TAGS)]
    inside = np.arange(MOST_TAGS) < lengths[:, None]
    flat = np.stack(ids, axis=1)[inside].astype(np.int32)
    words = pa.array([f"tag{number}" for number in range(NUM_TAGS)]).take(pa.array(flat))
    lists = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), words)
    joined = pa.compute.binary_join(lists, "|")
    return pa.compute.if_else(pa.array(lengths > 0), joined, None)


def write_file(path: Path, seed: int, first: int, stop: int, total: int) -> int:
    """Write the rows `first` to `stop` to one file, in the format of its suffix; return its bytes."""
    schema = rows(seed, 0, 0, total).schema
    if path.suffix == ".parquet":
        writer = pq.ParquetWriter(path, schema, compression="snappy")
    else:
        options = pyarrow.csv.WriteOptions(quoting_style="needed")
        writer = pyarrow.csv.CSVWriter(path, schema, write_options=options)
    with writer:
        for start in range(first, stop, CHUNK_ROWS):
            writer.write_table(rows(seed, start, min(start + CHUNK_ROWS, stop), total))
    return path.stat().st_size


def write_files(
    directory: Path, files: int, num_rows: int, kind: str, seed: int = 1, processes: int = 1
) -> list[tuple[Path, int]]:
    """Write `part_0`, `part_1`, ... with `num_rows` rows per file; return their paths and bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / f"part_{number}.{kind}" for number in range(files)]
    starts = [number * num_rows for number in range(files)]
    stops = [start + num_rows for start in starts]
    with ProcessPoolExecutor(processes) as pool:
        sizes = pool.map(
            write_file, paths, [seed] * files, starts, stops, [files * num_rows] * files
        )
        return list(zip(paths, sizes, strict=True))


def main() -> None:
    """Write the files of the command line."""
    defaults = {"output": "", "files": "4", "rows": "750000", "format": "parquet", "seed": "1"}
    options = writer_options(__doc__, defaults, {"format": FORMATS})
    files, num_rows = int(options["files"]), int(options["rows"])
    began, output = perf_counter(), Path(options["output"])
    with held_output(output):
        made = write_files(
            output, files, num_rows, options["format"], int(options["seed"]), os.cpu_count() or 1
        )
    written = sum(size for _, size in made)
    print(f"{files * num_rows:,} rows, {written / 1e9:,.2f} GB in {perf_counter() - began:,.1f} s")


if __name__ == "__main__":
    main()
