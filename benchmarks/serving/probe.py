"""Requests of a patient client beside an attack, from a process of its own: what others do to it.

    python -m benchmarks.serving.probe PORT PATH JSON_LENGTH FILE

Asks for the server's health and sends the request in FILE, in turns, until a line comes on stdin. Prints, for both, the slowest
answer in seconds and the number of answers by status.
"""

import asyncio
import json
import sys
import time
from collections import Counter
from pathlib import Path

from serving.client.connection import Address, Connection, ServerError

PAUSE_S = 0.02


async def main() -> None:
    """Run the probe of the command line."""
    port, path, length, file = sys.argv[1:]
    connection, body = Connection(Address("127.0.0.1", int(port))), Path(file).read_bytes()
    slowest = {"health": 0.0, "good": 0.0}
    statuses: dict[str, Counter[str]] = {name: Counter() for name in slowest}
    calls = {"health": ("/v2/health/live", None, None), "good": (path, body, int(length))}
    end = asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    print("ready", flush=True)
    while not end.done():
        for name, call in calls.items():
            started = time.perf_counter()
            try:
                status = str((await connection.call(*call)).status)
            except ServerError:
                status = "none"
            slowest[name] = max(slowest[name], time.perf_counter() - started)
            statuses[name][status] += 1
        await asyncio.sleep(PAUSE_S)
    connection.close()
    print(json.dumps({"slowest": slowest, "statuses": statuses}), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
