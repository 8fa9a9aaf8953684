"""Accuracy of a split as a server scores it: AUC and log loss per output, throughput and latencies."""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from configs.serving_schema import AccuracyConfig
from dataloading.dataset.source import read_with_keys
from nn.metrics.ranking import roc_auc
from serving.client.connection import Connection
from serving.client.dataset_requests import scores_of
from serving.client.target import open_target

SMALLEST = 1e-7
"""Probabilities are kept this far from 0 and 1, as float32 tells no more."""


async def evaluate(config: AccuracyConfig) -> dict[str, Any]:
    """Score a split and return its numbers.

    Raises ValueError: server or dataset cannot be used, a request fails, or the split has no labels.
    """
    target = await open_target(config)
    spec = target.source.spec
    spec.require_labels(config.split)
    names = [label.name for label in spec.labels]
    if sorted(target.encoder.outputs) != sorted(names):
        raise ValueError(
            f"data_path={config.data_path} has the labels {', '.join(names)}, and the model the outputs "
            f"{', '.join(target.encoder.outputs)}"
        )
    num_rows = target.source.num_rows(config.split)
    size = min(num_rows, (config.max_steps or 1 << 62) * config.batch_size)
    labels = np.empty((size, len(names)), np.float32)
    scores = np.full_like(labels, np.nan)
    latencies: list[float] = []
    ranges = iter(range(0, size, config.batch_size))

    async def send(connection: Connection) -> None:
        for first in ranges:
            last = min(first + config.batch_size, size)
            columns = read_with_keys(target.source, config.split, np.array([[first, last]]))
            request = target.encoder.encode(columns)
            started = time.perf_counter()
            reply = await connection.call(target.path, request.body, request.header_length)
            latencies.append(time.perf_counter() - started)
            labels[first:last] = columns.labels.reshape(last - first, -1)
            for name, values in scores_of(reply, request.num_rows).items():
                scores[first:last, names.index(name)] = values

    connections = [Connection(target.address) for _ in range(config.concurrency)]
    started = time.perf_counter()
    try:
        await asyncio.gather(*map(send, connections))
    finally:
        for connection in connections:
            connection.close()
    seconds = time.perf_counter() - started
    ms = np.array(latencies) * 1e3
    quantiles = np.quantile(ms, [0.9, 0.95, 0.99]).tolist()
    return {
        "split": config.split,
        "rows": size,
        "outputs": {
            label.name: _accuracy(labels[:, i], scores[:, i], is_binary=label.is_binary)
            for i, label in enumerate(spec.labels)
        },
        "requests": len(ms),
        "batch_size": config.batch_size,
        "concurrency": config.concurrency,
        "rows_per_s": size / seconds,
        "mean_ms": float(ms.mean()),
        **dict(zip(("p90_ms", "p95_ms", "p99_ms"), quantiles, strict=True)),
    }


def _accuracy(labels: np.ndarray, scores: np.ndarray, *, is_binary: bool) -> dict[str, float]:
    """Return AUC and log loss of a binary label, or the root of the mean squared error of another."""
    scores = scores.astype(np.float64)
    if not is_binary:
        return {"rmse": float(np.sqrt(np.mean((scores - labels) ** 2)))}
    auc = roc_auc(torch.from_numpy(scores), torch.from_numpy(labels))
    chances = scores.clip(SMALLEST, 1 - SMALLEST)
    losses = np.where(labels > 0.5, -np.log(chances), -np.log1p(-chances))
    return {"auc": auc, "log_loss": float(losses.mean())}


def lines(found: Mapping[str, Any]) -> list[str]:
    head = [f"split      {found['split']}, {found['rows']:,} rows"]
    for name, values in found["outputs"].items():
        numbers = ", ".join(f"{key.replace('_', ' ')} {value:.6f}" for key, value in values.items())
        head.append(f"{name:<10} {numbers}")
    return [
        *head,
        f"speed      {found['rows_per_s']:,.0f} rows/s, {found['requests']:,} requests of {found['batch_size']:,} rows, "
        f"{found['concurrency']} at a time",
        f"latency    mean {found['mean_ms']:.2f} ms, p90 {found['p90_ms']:.2f}, p95 {found['p95_ms']:.2f}, "
        f"p99 {found['p99_ms']:.2f}",
    ]
