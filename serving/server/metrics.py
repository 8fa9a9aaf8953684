"""Metrics of the server for Prometheus."""

from collections.abc import Iterable, Mapping, Sequence, Set
from functools import partial

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

from serving.inference.versions import Version

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
ROWS = (1, 8, 32, 128, 256, 512, 1024, 2048, 4096, 16384, 65536)
CONTENT_TYPE = "text/plain; version=0.0.4"

Gauges = Mapping[str, tuple[str, float | Mapping[str, float]]]
"""Meaning and value by name, or values by model."""

disable_created_metrics()
LATE_VERSIONS = 8
"""Versions whose labels are counted; labels come later than answers."""


class Metrics:
    """Counts of requests and batches, and of the process.

    `by_version`: metrics with a label `version`, of which those of versions that no longer serve are forgotten. `of_late`:
    likewise, once `LATE_VERSIONS` others have served since.
    """

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.responses = Counter(
            "serving_responses", "Responses by status.", ["status"], registry=registry
        )
        for status in ("429", "503"):  # so that shares of them begin at zero
            self.responses.labels(status)
        histogram = partial(Histogram, registry=registry)
        meaning = "Time from a complete request to its scores."
        self.request_seconds = histogram(
            "serving_request_seconds", meaning, ["model", "version"], buckets=SECONDS
        )
        self.by_version: list[Counter | Histogram] = [self.request_seconds]
        self.of_late: list[Counter] = []
        self._served: dict[tuple[str, str], None] = {}
        self._batch_rows = histogram("serving_batch_rows", "Rows of a batch.", buckets=ROWS)
        meaning = "Time to score a batch."
        self._batch_seconds = histogram("serving_batch_seconds", meaning, buckets=SECONDS)
        meaning = "Share of the requests that a version answers."
        labels = ["model", "version", "identity"]
        self._version = Gauge("serving_version", meaning, labels, registry=registry)

    def response(self, status: int) -> None:
        self.responses.labels(str(status)).inc()

    def batch(self, num_rows: int, seconds: float) -> None:
        self._batch_rows.observe(num_rows)
        self._batch_seconds.observe(seconds)

    def text(self, shares: Sequence[tuple[Version, float]], gauges: Gauges) -> bytes:
        """Return all metrics; a gauge whose name ends with `_total` is a counter."""
        self._version.clear()
        serving = []
        for version, share in shares:
            names = version.model.manifest.name, version.name
            self._version.labels(*names, version.identity).set(share)
            self.request_seconds.labels(*names)  # so that it begins at zero
            self._served.pop(names, None)
            self._served[names] = None
            serving.append(names)
        latest = list(self._served)[-max(LATE_VERSIONS, len(serving)) :]
        self._served = dict.fromkeys(latest)
        _forget_all_but(set(serving), self.by_version)
        _forget_all_but(set(latest), self.of_late)
        return generate_latest(self.registry) + generate_latest(_Now(gauges))


def _forget_all_but(served: Set[tuple[str, str]], metrics: Sequence[Counter | Histogram]) -> None:
    """Forget what is of other versions than those `served`, (model, version); a metric of the only model does not name it."""
    versions = {version for _, version in served}
    for metric in metrics:
        labels = [sample.labels for family in metric.collect() for sample in family.samples]
        gone = [
            of
            for of in labels
            if of["version"] not in versions
            or ("model" in of and (of["model"], of["version"]) not in served)
        ]
        # A histogram has several samples with the same labels but `le`.
        for values in {tuple(of[n] for n in of if n != "le") for of in gone}:
            metric.remove(*values)


class _Now:
    def __init__(self, values: Gauges) -> None:
        self._values = values

    def collect(self) -> Iterable[Metric]:
        for name, (meaning, value) in self._values.items():
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            short = name.removesuffix("_total")
            if isinstance(value, float | int):
                yield kind(short, meaning, value=value)
                continue
            family = kind(short, meaning, labels=["model"])
            for model, of_model in value.items():
                family.add_metric([model], of_model)
            yield family
