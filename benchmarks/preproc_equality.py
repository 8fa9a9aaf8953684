"""Comparison of the bytes that the pipelines for Criteo and for tables, Spark and a short reference in Python write.

It takes too long for the tests. `rare_counts=true` is what takes the pipeline for tables to Criteo's logs.

    python -m benchmarks.preproc_equality LOGS                 # Criteo logs, .gz or plain
    python -m benchmarks.preproc_equality 1000000              # this many generated rows
    python -m benchmarks.preproc_equality LOGS --without-spark

It prints one line per run with its wall and CPU seconds, and ends with exit code 1 at the first difference.
"""

import argparse
import gzip
import math
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

FREQUENCY_LIMIT = 3
DTYPES = ((127, "<i1"), (32767, "<i2"), (2**31 - 1, "<i4"))


def generate(path: Path, num_rows: int) -> None:
    """Write raw lines with power-law values: 26 columns of 3 to 3 million values, some missing."""
    draw = np.random.default_rng(0)
    cardinalities = np.geomspace(3, 3_000_000, 26).astype(int)
    with path.open("w") as stream:
        for start in range(0, num_rows, 10_000):
            rows = min(10_000, num_rows - start)
            columns = [draw.integers(0, 2, rows).astype(str)]
            for scale in np.geomspace(2, 50_000, 13):
                numbers = (draw.exponential(scale, rows) - 2).astype(int).astype(str)
                columns.append(np.where(draw.random(rows) < 0.2, "", numbers))
            for number, cardinality in enumerate(cardinalities):
                values = (cardinality ** draw.random(rows)).astype(np.uint64) * 2654435761 + number
                texts = np.array([f"{value % 2**32:08x}" for value in values])
                columns.append(np.where(draw.random(rows) < 0.05, "", texts))
            stream.writelines("\t".join(row) + "\n" for row in zip(*columns, strict=True))


def reference(source: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the files of the dataset, written from the description of the semantics."""
    with gzip.open(source, "rt") if source.suffix == ".gz" else source.open() as stream:
        columns = list(zip(*(line.rstrip("\n").split("\t") for line in stream), strict=True))
    num_train = len(columns[0]) * 9 // 10
    parts = {"train": slice(num_train), "test": slice(num_train, None)}
    numbers = np.array(
        [[math.log(int(x) + 3) if x and int(x) > -3 else 0.0 for x in c] for c in columns[1:14]],
        np.float32,
    ).T.astype("<f2")
    for split, part in parts.items():
        yield f"{split}/label.bin", bytes(map(int, columns[0][part]))
        yield f"{split}/numerical.bin", numbers[part].tobytes()
    for number, values in enumerate(columns[14:]):
        counts = Counter(value for value in values[:num_train] if value)
        ranked = sorted(counts, key=lambda value: (-counts[value], value))
        kept = [value for value in ranked if counts[value] >= FREQUENCY_LIMIT]
        ids = {value: rank for rank, value in enumerate(kept, start=1)}
        dtype = next(dtype for most, dtype in DTYPES if len(kept) + 1 < most)
        for split, part in parts.items():
            encoded = np.array([ids.get(value, 0) for value in values[part]], dtype)
            yield f"{split}/cat_{number}.bin", encoded.tobytes()


def cpu_seconds() -> float:
    """Return the CPU time of all commands so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Preprocess with every engine and compare the files."""
    parser = argparse.ArgumentParser()
    parser.add_argument("source", help="raw Criteo logs, or a number of rows to generate")
    parser.add_argument("--without-spark", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        source = Path(options.source).absolute()
        if options.source.isdigit():
            source = Path(directory) / "generated.tsv"
            generate(source, int(options.source))
        runs = {"threads 1": ["threads=1"], "threads 2": ["threads=2"]}
        runs |= {f"table, {name}": [*more, "rare_counts=true"] for name, more in runs.items()}
        if not options.without_spark:
            runs["spark"] = ["engine=spark", "threads=2", "memory_limit=4GB"]
        for name, more in runs.items():
            began, cpu_before = time.perf_counter(), cpu_seconds()
            command = [sys.executable, "-m", "preproc", f"source={source}", "plot=false", *more]
            command += [f"output={directory}/{name}", f"frequency_limit={FREQUENCY_LIMIT}"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            wall, cpu = time.perf_counter() - began, cpu_seconds() - cpu_before
            print(f"{name}: {wall:.1f} s, {cpu:.1f} CPU s", flush=True)
        num_files = 0
        for file, content in reference(source):
            for name in runs:
                if (Path(directory) / name / file).read_bytes() != content:
                    raise SystemExit(f"{file} of {name} differs from the reference")
            num_files += 1
        print(f"{num_files} files: {', '.join(runs)} and the reference wrote the same bytes")


if __name__ == "__main__":
    main()
