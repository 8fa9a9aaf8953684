"""Load on the embedded server of a model that is loaded already, over HTTP on loopback, from processes of their own."""

import asyncio
import gc
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from serving.client.connection import Address, Connection
from serving.client.dataset_requests import encoded
from serving.client.server_time import SAMPLE
from serving.inference.model_rows import Rows
from serving.inference.versions import Model, Version, Versions
from serving.manifest import IDS, NUMERICAL
from serving.server.batching import BatchLimits
from serving.server.http_server import HttpLimits
from serving.server.service import Service

MAX_BATCH = 16_384
MIB = 2**20
HEAD = (
    f"{'batch':>7} {'at a time':>9} {'clients':>7} {'requests':>9} {'p50 ms':>8} {'p99 ms':>8} {'M rows/s':>9} {'client ms':>9} "
    f"{'server ms':>9} {'rows/batch':>10}"
)
"""Times of client and server are CPU time per request, all threads together."""


class OneVersion(Versions):
    """A model that is never replaced, in place of a directory of versions."""

    def __init__(self, model: Model) -> None:
        self.serving = [Version("1", model, model.manifest.identity)]
        self._canary_share = None
        self.refused = self.swaps = 0

    def update(self) -> bool:
        """Return that nothing has changed."""
        return False


async def measure(
    model: Model, batches: Sequence[Rows], concurrency: int, clients: int, seconds: float
) -> tuple[str, float]:
    """Serve a model, send it the batches in turns, and return a line below `HEAD`, and rows per second."""
    limits = BatchLimits(MAX_BATCH, 4 * MAX_BATCH, 0.0, 10.0)
    http = HttpLimits(64 * MIB, 512 * MIB, 1024, 30.0)
    # As the server does when it starts.
    gc.collect()
    gc.freeze()
    service = Service([OneVersion(model)], limits, http, 1.0, print)
    port = await service.start("127.0.0.1", 0)
    with tempfile.TemporaryDirectory() as folder:
        files = [_write(Path(folder) / str(i), rows) for i, rows in enumerate(batches)]
        command = [sys.executable, "-m", "benchmarks.serving.http_client", str(port)]
        command += [model.manifest.name, str(-(-concurrency // clients)), str(seconds), *files]
        started = [await _start(command) for _ in range(clients)]
        for process in started:
            assert process.stdout is not None
            await process.stdout.readline()
        before, cpu = await _counts(port), time.process_time()
        answers = await asyncio.gather(*(process.communicate(b"\n") for process in started))
        cpu, after = time.process_time() - cpu, await _counts(port)
    await service.stop(5.0)
    found = [json.loads(answer) for answer, _ in answers]
    change = {name: value - before[name] for name, value in after.items()}
    requests = change["serving_request_seconds_count"]
    rows_per_batch = change["serving_batch_rows_sum"] / change["serving_batch_rows_count"]
    return _line(found, len(batches[0]), concurrency, 1e3 * cpu / requests, rows_per_batch)


def _line(
    found: list[dict[str, Any]], batch: int, concurrency: int, server_ms: float, rows: float
) -> tuple[str, float]:
    error = next((one["error"] for one in found if one["error"]), None)
    if error is not None:
        raise ValueError(f"a request failed: {error}")
    ms = 1e3 * np.concatenate([one["latencies"] for one in found])
    p50, p99 = np.quantile(ms, [0.5, 0.99])
    speed = sum(len(one["latencies"]) / one["seconds"] for one in found) * batch
    client_ms = 1e3 * sum(one["cpu"] for one in found) / len(ms)
    line = (
        f"{batch:7,} {concurrency:9} {len(found):7} {len(ms):9,} {p50:8.3f} {p99:8.3f} {speed / 1e6:9.2f} {client_ms:9.3f} "
        f"{server_ms:9.3f} {rows:10,.0f}"
    )
    return line, speed


async def _start(command: Sequence[str]) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=256 * MIB)


async def _counts(port: int) -> dict[str, float]:
    connection = Connection(Address("127.0.0.1", port))
    text = (await connection.call("/metrics")).body.decode()
    connection.close()
    return {
        name: float(value)
        for name, _, value in SAMPLE.findall(text)
        if name.endswith(("_sum", "_count"))
    }


def _write(path: Path, rows: Rows) -> str:
    inputs = {NUMERICAL: rows.numerical.numpy(), IDS: rows.ids.numpy()}
    request = encoded(len(rows.ids), inputs, {NUMERICAL: "FP32", IDS: "INT32"})
    path.write_bytes(f"{request.header_length}\n".encode() + request.body)
    return str(path)
