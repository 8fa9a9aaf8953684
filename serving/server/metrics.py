"""Metrics of the server for Prometheus."""

from collections.abc import Iterable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
ROWS = (1, 8, 32, 128, 256, 512, 1024, 2048, 4096, 16384, 65536)
CONTENT_TYPE = "text/plain; version=0.0.4"

disable_created_metrics()


class Metrics:
    """Counts of requests and batches, and of the process.

    Attributes:
        responses: number of responses by status.
        request_seconds: time from the complete request to its response, of requests for scores.
    """

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.responses = Counter(
            "serving_responses", "Responses by status.", ["status"], registry=registry
        )
        self.request_seconds = Histogram(
            "serving_request_seconds",
            "Time from a complete request to its scores.",
            buckets=SECONDS,
            registry=registry,
        )
        self._batch_rows = Histogram(
            "serving_batch_rows", "Rows of a batch.", buckets=ROWS, registry=registry
        )
        self._batch_seconds = Histogram(
            "serving_batch_seconds", "Time to score a batch.", buckets=SECONDS, registry=registry
        )
        self._version = Gauge(
            "serving_version",
            "The version that serves.",
            ["model", "version", "identity"],
            registry=registry,
        )

    def response(self, status: int) -> None:
        """Count a response."""
        self.responses.labels(str(status)).inc()

    def batch(self, num_rows: int, seconds: float) -> None:
        """Count a batch."""
        self._batch_rows.observe(num_rows)
        self._batch_seconds.observe(seconds)

    def text(
        self, model: str, version: str, identity: str, gauges: dict[str, tuple[str, float]]
    ) -> bytes:
        """Return all metrics.

        Args:
            model: name of the model.
            version: that serves.
            identity: of its content.
            gauges: meaning and value by name; a name that ends with `_total` is a counter's.
        """
        self._version.clear()
        self._version.labels(model, version, identity).set(1)
        now = CollectorRegistry()
        now.register(_Now(gauges))
        return generate_latest(self._registry) + generate_latest(now)


class _Now:
    """Values that are read when somebody asks."""

    def __init__(self, values: dict[str, tuple[str, float]]) -> None:
        self._values = values

    def collect(self) -> Iterable[Metric]:
        for name, (meaning, value) in self._values.items():
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            yield kind(name.removesuffix("_total"), meaning, value=value)
