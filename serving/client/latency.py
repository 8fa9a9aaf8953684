"""Loads of all sizes on a server, one after another, with real rows of a dataset."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np

from configs.serving_schema import LatencyConfig
from dataloading.dataset.source import read_with_keys
from serving.client.connection import ServerError
from serving.client.dataset_requests import EncodedRequest
from serving.client.load import Body, closed_load, open_load
from serving.client.results import HEAD, LoadResult, line
from serving.client.server_time import per_request, server_time
from serving.client.shared_memory import EXTENSION, shared_bodies
from serving.client.target import Target, open_target

MOST_REQUESTS = 64
MOST_BYTES = 256 << 20
"""Of the distinct requests of a load."""


async def measure(config: LatencyConfig, say: Callable[[str], None]) -> list[LoadResult]:
    """Measure all loads of the options, and say each result.

    Raises ValueError: server or dataset cannot be used, or a load has no answer.
    """
    target = await open_target(config)
    if config.shared_memory and EXTENSION not in target.extensions:
        raise ValueError(
            f"shared_memory=true: {config.url} has no extension {EXTENSION}; leave it out"
        )
    metrics = config.metrics_url or f"{config.url.rstrip('/')}/metrics"
    say(HEAD)
    results, model = [], str(config.model)
    loads: list[tuple[int | None, float | None]] = [(number, None) for number in config.concurrency]
    loads += [(None, rate) for rate in config.rates]
    for batch in config.batch_sizes:
        requests = some_requests(target, config.split, batch)
        plain = [Body(request.body, request.header_length) for request in requests]
        shared = shared_bodies(target.address, requests)
        async with shared if config.shared_memory else nullcontext(plain) as bodies:
            for concurrency, rate in loads:
                send: Any = closed_load if rate is None else open_load
                load = partial(send, target.address, target.path, bodies, rate or concurrency)
                if config.warmup_s:
                    await load(config.warmup_s)
                before = await server_time(metrics, model, target.address.token)
                measured = await load(config.seconds)
                after = await server_time(metrics, model, target.address.token)
                if not measured.latencies:
                    raise ServerError(f"batch {batch:,}: no request was answered: {measured.error}")
                own = per_request(before, after)
                result = LoadResult.of(measured, batch, concurrency, rate, own)
                results.append(result)
                say(line(result))
                if measured.error:
                    say(f"{measured.failed:,} failed, the first: {measured.error}")
    return results


def some_requests(target: Target, split: str, batch: int) -> list[EncodedRequest]:
    """Return distinct requests of a split; rows repeat only where the split is smaller than a request."""
    available = target.source.num_rows(split)
    requests: list[EncodedRequest] = []
    used = 0
    for index in range(MOST_REQUESTS):
        first, last = index * batch, (index + 1) * batch
        if requests and (last > available or used > MOST_BYTES):
            break
        rows = np.array([[first, min(last, available)]])
        requests.append(target.encoder.encode(read_with_keys(target.source, split, rows)))
        used += len(requests[-1].body)
    if requests[0].num_rows < batch:
        raise ValueError(f"batch_sizes: {batch:,} rows, and split {split} has {available:,}")
    return requests
