"""Results of loads: a table for the terminal, and a CSV file."""

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from dataloading.dataset.durable_files import replace_bytes
from serving.client.load import Measured


@dataclass(frozen=True, slots=True)
class LoadResult:
    batch: int
    concurrency: int | None  # requests at a time; None of a load at a rate
    rate: float | None  # requests per second; None of the others
    requests: int
    failed: int
    rows_per_s: float
    mean_ms: float  # of the latency, likewise the quantiles
    p50_ms: float
    p90_ms: float
    p95_ms: float
    p99_ms: float
    client_ms: float  # CPU time of this client per request, which is part of the latency
    server_ms: float | None  # time of the server per request, from its metrics; None if it has none

    @classmethod
    def of(
        cls,
        measured: Measured,
        batch: int,
        concurrency: int | None,
        rate: float | None,
        server_ms: float | None,
    ) -> "LoadResult":
        latencies = np.array(measured.latencies) * 1e3
        count = len(latencies)
        p50, p90, p95, p99 = np.quantile(latencies, [0.5, 0.9, 0.95, 0.99]).tolist()
        return cls(
            batch=batch,
            concurrency=concurrency,
            rate=rate,
            requests=count,
            failed=measured.failed,
            rows_per_s=count * batch / measured.seconds,
            mean_ms=float(latencies.mean()),
            p50_ms=p50,
            p90_ms=p90,
            p95_ms=p95,
            p99_ms=p99,
            client_ms=measured.client_seconds * 1e3 / (count + measured.failed),
            server_ms=server_ms,
        )

    @property
    def load(self) -> str:
        return f"{self.concurrency} at a time" if self.rate is None else f"{self.rate:g}/s"


HEAD = (
    f"{'batch':>7}  {'load':<14} {'requests':>9} {'failed':>6} {'rows/s':>11} {'mean ms':>8} {'p50':>8} {'p90':>8} "
    f"{'p95':>8} {'p99':>8} {'client ms':>9} {'server ms':>9}"
)


def line(result: LoadResult) -> str:
    server = "-" if result.server_ms is None else f"{result.server_ms:.2f}"
    return (
        f"{result.batch:7,}  {result.load:<14} {result.requests:9,} {result.failed:6,} {result.rows_per_s:11,.0f} "
        f"{result.mean_ms:8.2f} {result.p50_ms:8.2f} {result.p90_ms:8.2f} {result.p95_ms:8.2f} {result.p99_ms:8.2f} "
        f"{result.client_ms:9.2f} {server:>9}"
    )


def write_csv(results: Sequence[LoadResult], path: Path) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(LoadResult)])
    writer.writeheader()
    writer.writerows(map(asdict, results))
    replace_bytes(path, text.getvalue().encode())
