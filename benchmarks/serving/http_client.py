"""Closed load of one process on a server; imports little, so that its start takes no time from the server.

    python -m benchmarks.serving.http_client PORT MODEL CONCURRENCY SECONDS FILE...

Each FILE holds the length of a request's JSON in its first line, and the request behind it. Waits for a line on stdin, sends
requests for a second that is not counted, and prints latencies and CPU time as JSON.
"""

import asyncio
import json
import sys
from pathlib import Path
from urllib.parse import quote

from serving.client.connection import Address
from serving.client.load import Body, closed_load

WARM_UP_S = 1.0


async def main() -> None:
    """Run the load of the command line."""
    port, model, concurrency, seconds, *files = sys.argv[1:]
    bodies = []
    for file in files:
        length, _, content = Path(file).read_bytes().partition(b"\n")
        bodies.append(Body(content, int(length)))
    address, path = Address("127.0.0.1", int(port)), f"/v2/models/{quote(model, safe='')}/infer"
    print("ready", flush=True)
    sys.stdin.readline()
    await closed_load(address, path, bodies, int(concurrency), WARM_UP_S)
    found = await closed_load(address, path, bodies, int(concurrency), float(seconds))
    values = {"latencies": found.latencies, "failed": found.failed, "error": found.error}
    print(json.dumps(values | {"seconds": found.seconds, "cpu": found.client_seconds}), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
