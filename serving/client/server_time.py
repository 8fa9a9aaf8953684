"""Time that a server itself takes per request, from its Prometheus metrics: the embedded server's, or Triton's."""

import re
from contextlib import closing

from serving.client.connection import Address, Connection, ServerError

EMBEDDED = ("serving_request_seconds_sum", "serving_request_seconds_count", 1e3)
TRITON = ("nv_inference_request_duration_us", "nv_inference_request_success", 1e-3)
SAMPLE = re.compile(r"^(\w+)(?:\{([^}]*)\})? (\S+)$", re.MULTILINE)


Sums = tuple[float, float]
"""Milliseconds of all requests since a server's start, and their number."""


async def server_time(url: str, model: str, token: str | None) -> Sums | None:
    """Return the sums of a server; None if it has no such metrics, or cannot be reached."""
    try:
        with closing(Connection(Address.of(url, token))) as connection:
            reply = await connection.call("")
    except ServerError:
        return None
    found: dict[str, float] = {}
    for name, labels, value in SAMPLE.findall(reply.body.decode("utf-8", "replace")):
        if "model=" not in labels or f'model="{model}"' in labels:
            found[name] = found.get(name, 0.0) + float(value)
    for total, count, factor in (EMBEDDED, TRITON):
        if total in found and count in found:
            return found[total] * factor, found[count]
    return None


def per_request(before: Sums | None, after: Sums | None) -> float | None:
    """Return the milliseconds of a request between two sums; None if there was none."""
    if before is None or after is None or after[1] <= before[1]:
        return None
    return (after[0] - before[0]) / (after[1] - before[1])
