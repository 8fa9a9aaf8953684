"""Fixtures of the tests of models on a GPU."""

import threading

import pytest

from serving.gpu import lookup


@pytest.fixture
def one_lookup_at_a_time(monkeypatch) -> None:
    """Triton interprets in one thread only."""
    look_up, lock = lookup.ServedLookup.__call__, threading.Lock()

    def alone(self, block, out) -> None:
        with lock:
            look_up(self, block, out)

    monkeypatch.setattr(lookup.ServedLookup, "__call__", alone)
