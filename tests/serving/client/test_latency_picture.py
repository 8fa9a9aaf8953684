"""The picture of a latency measurement: every axis has plain numbers, and loads that were varied lie side by side."""

from collections.abc import Iterable
from contextlib import contextmanager

import pytest
from matplotlib.figure import Figure

from nn.plots import style
from serving.client.latency_picture import draw
from serving.client.results import LoadResult


def result(batch: int, concurrency: int | None, rate: float | None) -> LoadResult:
    p50 = 0.5 + batch / 200 * (concurrency or 1)
    speed = 98_000 + 40 * batch if rate is None else rate * batch
    return LoadResult(
        batch, concurrency, rate, 100, 0, speed, p50, p50, 2 * p50, 2 * p50, 2 * p50, 0.1, None
    )


def drawn(results: Iterable[LoadResult], monkeypatch, tmp_path) -> list:
    """Return the panels of a picture."""
    figure = Figure(figsize=(12, 5))

    @contextmanager
    def picture(*_):
        yield figure

    monkeypatch.setattr(style, "picture", picture)
    draw(list(results), "title", "facts", tmp_path / "x.png")
    figure.draw_without_rendering()
    return figure.axes


LOADS = {
    "two by two": [(256, 1, None), (256, 8, None), (1024, 1, None), (1024, 8, None)],
    "five rates": [(256, None, rate) for rate in (50.0, 100.0, 200.0, 400.0, 800.0)],
    "seven sizes": [(4**i, 1, None) for i in range(7)],
    "one load": [(256, 8, None)],
    "both kinds": [(256, 1, None), (512, 1, None), (256, None, 50.0), (256, None, 80.0)],
    "four at a time": [(256, n, None) for n in (1, 2, 4, 8)],
}


@pytest.mark.parametrize("name", LOADS)
def test_every_axis_has_plain_numbers(name, monkeypatch, tmp_path):
    panels = drawn([result(*load) for load in LOADS[name]], monkeypatch, tmp_path)
    assert len(panels) == (4 if name == "both kinds" else 2)
    for panel in panels:
        for axis, fewest in ((panel.xaxis, 1 if name == "one load" else 2), (panel.yaxis, 3)):
            low, high = axis.get_view_interval()
            labels = [
                tick.label1.get_text()
                for tick in axis.get_major_ticks()
                if low <= tick.get_loc() <= high
            ]
            assert len(labels) >= fewest
            numbers = [float(label.replace(",", "")) for label in labels]
            assert numbers == sorted(set(numbers)), "no two with the same text"
        # Values of one line are never on top of each other.
        for line in panel.lines:
            assert len(set(line.get_xdata())) == len(line.get_xdata())


def test_one_request_is_in_the_singular(monkeypatch, tmp_path):
    latency, _ = drawn([result(*load) for load in LOADS["two by two"]], monkeypatch, tmp_path)
    names = [text.get_text() for text in latency.get_legend().get_texts()]
    assert names == ["1 request at a time", "8 requests at a time"]


def test_rates_are_on_the_x_axis(monkeypatch, tmp_path):
    loads = [(size, None, rate) for size in (256, 512) for rate in (100.0, 50.0)]
    latency, speed = drawn([result(*load) for load in loads], monkeypatch, tmp_path)
    assert latency.get_xlabel() == speed.get_xlabel() == "requests per second"
    assert [list(line.get_xdata()) for line in speed.lines] == [[50.0, 100.0]] * 2
    names = [text.get_text() for text in latency.get_legend().get_texts()]
    assert names == ["256 rows per request", "512 rows per request"]
    # Every point has its value, and is hollow if too few requests tell its 99th percentile.
    assert len(latency.texts) == len(speed.texts) == 4
    points = [line.get_markerfacecolor() for line in latency.lines if line.get_marker() == "o"]
    assert points == ["white"] * 4
