"""Requests whose values become Python objects: a thread works on them, and the server answers others meanwhile."""

import asyncio
import gc
import json
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from serving.inference.requests import InputError
from serving.server.http_server import RequestError
from serving.server.lane import Lane
from serving.server.service import LARGE_BYTES, SMALL_BYTES
from tests.serving.handmade_model import some_rows, write_model
from tests.serving.served_models import Client, serving

INFER = "/v2/models/m/infer"
LARGE = LARGE_BYTES // 4 + 1
"""Rows of one text each."""


class Raw:
    """Raw values of one column, which become rows when `may_go` is set.

    Attributes:
        begun: rows of each request that it has begun with.
        may_go: set by the test.
    """

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.may_go = threading.Event()

    def rows(self, columns: dict, shapes: dict, num_rows: int):
        self.begun.append(num_rows)
        if num_rows > 100:
            assert self.may_go.wait(20)
        if "bad" in columns["city"]:
            raise InputError("a bad city")
        return some_rows(num_rows, 2)

    def describe_inputs(self) -> list:
        return []


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "1", "fp32")


@pytest.fixture
def raw(model) -> Iterator[tuple[Client, Raw]]:
    """Return a client of a server that takes raw values, and these."""
    with serving(model, max_queue=40_000, deadline_ms=400.0) as client:
        served = client.service._models[0].current.model
        served.manifest = replace(served.manifest, raw={"columns": {"city": 1}})
        served.raw = values = Raw()
        try:
            yield client, values
        finally:
            values.may_go.set()


def cities(count: int, value: str = "a") -> bytes:
    data = ["a"] * (count - 1) + [value]
    tensor = {"name": "city", "datatype": "BYTES", "shape": [count], "data": data}
    return json.dumps({"inputs": [tensor]}, separators=(",", ":")).encode()


def wait_until(condition, what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


def test_others_are_answered_while_a_large_request_is_worked_on(raw):
    client, values = raw
    with ThreadPoolExecutor(2) as pool:
        large: Future = pool.submit(client.call, INFER, cities(LARGE))
        wait_until(lambda: values.begun, "the large request has begun")
        started = time.monotonic()
        assert client.call("/v2/health/live")[0] == 200
        assert client.call(INFER, cities(1))[0] == 200
        assert time.monotonic() - started < 5
        assert not large.done()
        # One at a time: a second one waits, and is refused after the deadline.
        late: Future = pool.submit(client.call, INFER, cities(LARGE))
        time.sleep(0.6)
        assert values.begun.count(LARGE) == 1
        values.may_go.set()
        assert large.result()[0] == 200
        status, answer = late.result()
    assert status == 503
    assert b"has waited longer than 400 ms" in answer


def test_the_small_lane_does_not_wait_for_the_large_one(raw):
    client, values = raw
    with ThreadPoolExecutor(1) as pool:
        large: Future = pool.submit(client.call, INFER, cities(LARGE))
        wait_until(lambda: values.begun, "the large request has begun")
        text = cities(90).replace(b'"a"', b'"' + b"a" * 100 + b'"')
        assert SMALL_BYTES < len(text) < LARGE_BYTES
        assert client.call(INFER, text)[0] == 200
        assert not large.done()
        values.may_go.set()
        assert large.result()[0] == 200


@pytest.mark.parametrize("in_json", [True, False])
def test_rows_that_may_not_wait_are_refused_before_they_are_transformed(raw, in_json):
    client, values = raw
    if in_json:
        status, answer = client.call(INFER, cities(40_001))
    else:
        texts = (b"\1\0\0\0a") * 40_001
        parameters = {"binary_data_size": len(texts)}
        tensor = {"name": "city", "datatype": "BYTES", "shape": [40_001], "parameters": parameters}
        head = json.dumps({"inputs": [tensor]}).encode()
        headers = {"Inference-Header-Content-Length": str(len(head))}
        status, answer = client.call(INFER, head + texts, headers)
    assert (status, values.begun) == (413, [])
    assert b"40,001 rows, want at most 40,000 (max_queue)" in answer


def test_a_full_queue_is_noticed_before_rows_are_transformed(raw, monkeypatch):
    client, values = raw
    monkeypatch.setattr(type(client.service._batcher), "queued_rows", 30_000)
    status, answer = client.call(INFER, cities(LARGE))
    assert (status, values.begun) == (429, [])
    assert b"30,000 rows wait already" in answer


@pytest.mark.parametrize("count", [3, LARGE])
def test_a_bad_value_is_refused_wherever_it_is_found(raw, count):
    client, values = raw
    values.may_go.set()
    status, answer = client.call(INFER, cities(count, "bad"))
    assert (status, json.loads(answer)) == (400, {"error": "a bad city"})


def test_a_refused_request_leaves_nothing_to_the_collector(raw):
    """Its body and its texts are megabytes, and collections of circles are seldom."""
    client, values = raw
    values.may_go.set()
    kept: list[weakref.ref] = []

    def rows(columns: dict, shapes: dict, num_rows: int):
        array = np.zeros(9)
        kept.append(weakref.ref(array))
        raise InputError("refused")

    values.rows = rows
    gc.disable()
    try:
        for count in (3, 90, LARGE):
            assert client.call(INFER, cities(count))[0] == 400
        # The lane and the scorer let the last one go when its turn has ended.
        wait_until(lambda: not any(ref() is not None for ref in kept), "all arrays are freed")
    finally:
        gc.enable()
    assert len(kept) == 3


def test_a_lane_works_in_its_thread_and_restores_the_interval():
    async def work() -> list:
        lane = Lane("lane", 0.05, switch_s=1e-3)
        lane.start()
        before = sys.getswitchinterval()
        found = [
            await lane.run(lambda: threading.current_thread().name),
            await lane.run(sys.getswitchinterval),
        ]
        with pytest.raises(ZeroDivisionError):
            await lane.run(lambda: 1 // 0)
        long = asyncio.create_task(lane.run(lambda: time.sleep(0.2)))
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="has waited longer than 50 ms"):
            await lane.run(lambda: found.append("never"))
        await long
        lane.stop()
        assert sys.getswitchinterval() == before
        return found

    assert asyncio.run(work()) == ["lane", pytest.approx(1e-3)]


def test_an_answer_that_nobody_awaits_is_not_worked_on():
    async def work() -> list:
        found: list = []
        lane, hold = Lane("lane", 5.0), threading.Event()
        lane.start()
        first = asyncio.create_task(lane.run(hold.wait))
        gone = asyncio.create_task(lane.run(lambda: found.append("gone")))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(0)
        hold.set()
        await first
        await lane.run(lambda: None)
        lane.stop()
        return found

    assert asyncio.run(work()) == []
