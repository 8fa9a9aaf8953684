"""Counters of the server in Prometheus' text format."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
ROWS = (1, 8, 32, 128, 256, 512, 1024, 2048, 4096, 16384, 65536)
CONTENT_TYPE = "text/plain; version=0.0.4"


class Histogram:
    """Counts of values by upper bounds."""

    def __init__(self, name: str, meaning: str, bounds: Sequence[float]) -> None:
        self._name, self._meaning, self._bounds = name, meaning, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self) -> list[str]:
        """Return the lines of the metric."""
        lines, total = _head(self._name, self._meaning, "histogram"), 0
        for bound, count in zip([*self._bounds, "+Inf"], self._counts, strict=True):
            total += count
            lines.append(f'{self._name}_bucket{{le="{bound}"}} {total}')
        return [*lines, f"{self._name}_sum {self._sum:.9g}", f"{self._name}_count {total}"]


class Metrics:
    """Counts of requests and batches.

    `responses`: number of responses by status. `request_seconds`: time from the complete request to its response, of
    requests for scores. `batch_rows`: rows of each batch. `batch_seconds`: time of each batch.
    """

    def __init__(self) -> None:
        self.responses: Counter[int] = Counter()
        self.request_seconds = Histogram(
            "serving_request_seconds", "Time from a complete request to its scores.", SECONDS
        )
        self.batch_rows = Histogram("serving_batch_rows", "Rows of a batch.", ROWS)
        self.batch_seconds = Histogram("serving_batch_seconds", "Time to score a batch.", SECONDS)

    def batch(self, num_rows: int, seconds: float) -> None:
        """Count a batch."""
        self.batch_rows.add(num_rows)
        self.batch_seconds.add(seconds)

    def text(
        self, model: str, version: str, identity: str, gauges: dict[str, tuple[str, float]]
    ) -> str:
        """Return all metrics.

        `gauges`: meaning and value by name.
        """
        lines = _head("serving_responses_total", "Responses by status.", "counter")
        lines += [
            f'serving_responses_total{{status="{status}"}} {count}'
            for status, count in sorted(self.responses.items())
        ]
        for histogram in (self.request_seconds, self.batch_rows, self.batch_seconds):
            lines += histogram.lines()
        for name, (meaning, value) in gauges.items():
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [*_head(name, meaning, kind), f"{name} {value:.9g}"]
        lines += _head("serving_version", "The version that serves.", "gauge")
        labels = f'model="{_label(model)}",version="{version}",identity="{identity}"'
        lines.append(f"serving_version{{{labels}}} 1")
        return "\n".join(lines) + "\n"


def _head(name: str, meaning: str, kind: str) -> list[str]:
    return [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]


def _label(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
