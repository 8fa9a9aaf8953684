"""Latency and throughput of a served model on a GPU, from rows in host memory to scores in host memory.

    python -m benchmarks.serving.in_process --experiment dlrm_criteo_t15 --concurrency 8
    python -m benchmarks.serving.in_process --experiment dlrm_criteo_t3 --dtype bf16 --hot-share 0.1

The tables have the sizes of an experiment and random numbers, the ids are uniform. Every score of some rows is compared with
the path of the CPU in float32 first. With `--concurrency` the same model then answers requests of the first batch size over
HTTP on loopback, and the last line of each load has rows/s in process, over HTTP, and their ratio. `--device cpu` measures the
CPU's path. Results with date, machine and commit are in docs/serving.md.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.launch import command_parser
from benchmarks.rows import compose_row
from benchmarks.serving.over_http import HEAD, measure
from benchmarks.serving.synthetic_model import CHECKED_ROWS, DENSE_TYPES, prepare, some_rows
from serving.gpu.model import GpuModel
from serving.inference.model import ServedModel
from serving.inference.model_rows import Rows
from serving.loading import COPYING_THREADS
from serving.manifest import TABLE_BITS

BATCHES = 8
SECONDS = 3.0
FEWEST_CALLS = 200


def main() -> None:
    """Measure the batches of the command line."""
    args = arguments()
    torch.set_num_threads(args.threads)
    config = compose_row("dlrm", f"experiment={args.experiment}")
    with tempfile.TemporaryDirectory() as folder:
        model, reference = prepare(args, config, Path(folder))
    if args.device == "cpu":
        report(reference, args)
        return
    rows = [some_rows(model.manifest, CHECKED_ROWS, seed) for seed in range(2)]
    worst = max(float((model.scores(part) - reference.scores(part)).abs().max()) for part in rows)
    print(f"largest difference from the CPU in float32, {2 * CHECKED_ROWS:,} rows: {worst:.1e}")
    report(model, args)


def report(model: GpuModel | ServedModel, args: argparse.Namespace) -> None:
    """Measure a model and print a line per batch."""
    print(f"{'batch':>7} {'p50 ms':>8} {'p99 ms':>8} {'M rows/s':>9}")
    speeds = []
    for size in args.batches:
        batches = [some_rows(model.manifest, size, seed) for seed in range(BATCHES)]
        seconds = timed(model.scores, batches, args.seconds)
        p50, p99 = np.quantile(seconds, [0.5, 0.99]) * 1e3
        speeds.append(size / np.mean(seconds))
        print(f"{size:7,} {p50:8.3f} {p99:8.3f} {speeds[-1] / 1e6:9.2f}", flush=True)
    if args.concurrency is None:
        return
    print(HEAD)
    batches = [some_rows(model.manifest, args.batches[0], seed) for seed in range(BATCHES)]
    for clients in args.clients:
        load = measure(model, batches, args.concurrency, clients, args.seconds)
        line, speed = asyncio.run(load)
        print(line)
        print(
            f"{args.batches[0]:,} rows per request: {speeds[0]:,.0f} rows/s in process, {speed:,.0f} over HTTP on loopback, "
            f"ratio {speed / speeds[0]:.2f}",
            flush=True,
        )


def arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = command_parser(__doc__)
    parser.add_argument("--experiment", default="dlrm_criteo_t15", help="of configs/experiment")
    parser.add_argument("--dtype", default="fp32", choices=TABLE_BITS, help="of the tables")
    parser.add_argument("--dense", default="bf16", choices=DENSE_TYPES, help="dense component")
    parser.add_argument("--hot-share", type=float, default=1.0, help="of the tables' bytes")
    parser.add_argument("--batches", type=int, nargs="+", default=[1024, 16384, 65536])
    parser.add_argument("--concurrency", type=int, help="requests over HTTP at a time")
    parser.add_argument("--clients", type=int, nargs="+", default=[2], help="their processes")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each load")
    parser.add_argument("--threads", type=int, default=COPYING_THREADS, help="that copy rows")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--shrink", type=int, default=1, help="divide the tables' rows")
    return parser.parse_args()


def timed(scores: Callable[[Rows], Tensor], batches: list[Rows], duration: float) -> list[float]:
    """Return the seconds of single calls, one after another."""
    for batch in batches:
        scores(batch)
    seconds: list[float] = []
    end = time.perf_counter() + duration
    while time.perf_counter() < end or len(seconds) < FEWEST_CALLS:
        started = time.perf_counter()
        scores(batches[len(seconds) % len(batches)])
        seconds.append(time.perf_counter() - started)
    return seconds


if __name__ == "__main__":
    main()
