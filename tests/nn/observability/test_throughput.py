"""Samples per second, with a fake clock."""

import math

import pytest

from nn.observability.throughput import ThroughputMeter


class Clock:
    """Fake of the module `time`."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("nn.observability.throughput.time", clock)
    return clock


def window(speed: ThroughputMeter, clock: Clock, steps: int, rows: int, seconds: float) -> dict:
    for _ in range(steps):
        speed.count(rows)
        clock.now += seconds
    return speed.window()


def test_a_window_counts_its_own_steps(clock):
    speed = ThroughputMeter()
    assert window(speed, clock, 4, 100, 0.5) == {"samples_per_s": 200, "step_ms": 500}
    assert window(speed, clock, 2, 100, 0.25) == {"samples_per_s": 400, "step_ms": 250}


def test_the_run_leaves_its_first_window_out(clock):
    speed = ThroughputMeter()
    window(speed, clock, 4, 100, 9.0)
    window(speed, clock, 3, 100, 0.5)
    window(speed, clock, 1, 50, 0.5)
    assert speed.run() == {"samples_per_s": 350 / 2, "step_ms": 500}


def test_a_run_of_one_window_reports_that(clock):
    speed = ThroughputMeter()
    window(speed, clock, 4, 100, 0.5)
    assert speed.run() == {"samples_per_s": 200, "step_ms": 500}


def test_the_clock_stands_during_an_evaluation(clock):
    speed = ThroughputMeter()
    speed.count(100)
    clock.now += 0.5
    speed.pause()
    clock.now += 60
    speed.resume()
    assert window(speed, clock, 1, 100, 0.5) == {"samples_per_s": 200, "step_ms": 500}


def test_steps_of_a_pause_are_not_counted_and_a_window_of_them_has_no_speed(clock):
    speed = ThroughputMeter()
    speed.count(100)
    clock.now += 0.5
    speed.pause()
    speed.count(100)
    clock.now += 60
    assert speed.window() == {"samples_per_s": 200, "step_ms": 500}
    assert all(math.isnan(value) for value in window(speed, clock, 2, 100, 9.0).values())
    speed.resume()
    window(speed, clock, 2, 100, 0.25)
    assert speed.run() == {"samples_per_s": 400, "step_ms": 250}
