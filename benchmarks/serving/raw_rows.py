"""Speed of raw values: rows of a file as JSON requests to the embedded server on loopback, at several loads.

    python -m benchmarks.serving.raw_rows --model MODEL --source FILE

MODEL takes raw values. FILE is a CSV file with the names of the columns in its first line, or a TSV file without, whose columns
are the label and then those of the model in their order. The client's own time, which is small, is part of a latency.
"""

import argparse
import asyncio
import csv
import json
from pathlib import Path

import numpy as np

from benchmarks.serving.faults import start
from serving.client.connection import Address
from serving.client.load import Body, closed_load
from serving.manifest import Manifest

BATCHES = (1, 256, 1024)
REQUESTS = 16
"""Distinct ones per batch size, if the file has as many rows."""
WARM_UP_S = 1.0


def main() -> None:
    """Measure the model of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="model directory")
    parser.add_argument("--source", type=Path, required=True, help="raw rows")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--seconds", type=float, default=3.0, help="of each load")
    args = parser.parse_args()
    manifest = Manifest.read(args.model)
    columns = (manifest.raw or {}).get("columns", {})
    if not columns or 2 in columns.values():
        raise SystemExit(f"{args.model} takes no raw values, or lists; want columns of one value")
    rows = read_rows(args.source, list(columns), BATCHES[-1] * REQUESTS)
    process, _, port = start(args.model)
    address, path = Address("127.0.0.1", port), f"/v2/models/{manifest.name}/infer"
    print(f"{'rows':>6} {'at a time':>9} {'p50 ms':>8} {'p99 ms':>8} {'rows/s':>9} {'KiB':>7}")
    try:
        for size in BATCHES:
            bodies = [
                Body(request_of(list(columns), rows[first : first + size]), None)
                for first in range(0, min(len(rows) - size + 1, size * REQUESTS), size)
            ]
            for concurrency in args.concurrency:
                for seconds in (WARM_UP_S, args.seconds):
                    found = asyncio.run(closed_load(address, path, bodies, concurrency, seconds))
                p50, p99 = np.quantile(np.array(found.latencies) * 1e3, [0.5, 0.99])
                speed = size * len(found.latencies) / found.seconds
                line = f"{size:6,} {concurrency:9} {p50:8.2f} {p99:8.2f} {speed:9,.0f}"
                print(f"{line} {len(bodies[0].content) / 1024:7.1f}", flush=True)
                if found.error:
                    print(f"{found.failed} failed: {found.error}")
    finally:
        process.terminate()
        process.wait(60)


def read_rows(path: Path, columns: list[str], count: int) -> list[list[str]]:
    """Return at most `count` rows of a file, with the columns of the model in their order."""
    with path.open(newline="") as stream:
        if path.suffix == ".tsv":
            lines = (line.rstrip("\n").split("\t")[1:] for line in stream)
            return [line for line, _ in zip(lines, range(count), strict=False)]
        named = csv.DictReader(stream)
        return [
            [row[name] for name in columns] for row, _ in zip(named, range(count), strict=False)
        ]


def request_of(columns: list[str], rows: list[list[str]]) -> bytes:
    """Return a request in JSON."""
    inputs = [
        {"name": name, "datatype": "BYTES", "shape": [len(rows)], "data": list(values)}
        for name, values in zip(columns, zip(*rows, strict=True), strict=True)
    ]
    return json.dumps({"inputs": inputs}).encode()


if __name__ == "__main__":
    main()
