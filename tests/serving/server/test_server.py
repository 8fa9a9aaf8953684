"""The server in this process: protocol, batching, versions under load, and clients that break every rule."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http import HTTPStatus
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest

from configs.serving_schema import ServerConfig
from serving.inference.model import ServedModel
from serving.inference.requests import IdInputs
from serving.inference.versions import Versions
from serving.manifest import MANIFEST, Manifest
from serving.run import open_service
from serving.server.batching import Batcher, BatchLimits
from serving.server.http_server import REST
from serving.versions import withdraw
from tests.helpers.command import ROOT
from tests.helpers.composed import TINY, ranks_of_cpu
from tests.helpers.forks import python
from tests.serving.served_models import Client, export, save_run, served_scores, serving, tensor

INFER = "/v2/models/dlrm/infer"
NUM_IDS = 5


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """Return two versions of one model, of different weights, and one of another interface."""
    root = tmp_path_factory.mktemp("models")
    with ranks_of_cpu():
        runs = {
            "one": save_run(root / "a", TINY, 1)[0],
            "two": save_run(root / "b", [*TINY, "seed=5"], 1)[0],
            "other": save_run(root / "c", [*TINY, "data.synthetic.num_numerical=2"], 1)[0],
        }
    for name, checkpoint in runs.items():
        export(checkpoint, root / name)
    checkpoints = {"checkpoint": runs["one"], "second_checkpoint": runs["two"]}
    return {name: root / name for name in runs} | checkpoints


@pytest.fixture(scope="module")
def client(models) -> "Client":
    with serving(
        models["one"], max_body_mib=1, max_memory_mib=2, timeout_s=2.0, max_batch=64
    ) as found:
        yield found


def rows(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return numbers and ids of the tables of TINY."""
    generator = np.random.default_rng(seed)
    ids = generator.integers(0, [500, 40, 7, 300, 1000], (count, NUM_IDS))
    return generator.normal(size=(count, 3)).astype(np.float32), ids


def inputs(numerical: np.ndarray, ids: np.ndarray) -> list[dict]:
    return [tensor("numerical", "FP32", numerical), tensor("ids", "INT64", ids)]


def scores(answer: dict) -> list[float]:
    return answer["outputs"][0]["data"]


def binary(numerical: np.ndarray, ids: np.ndarray) -> tuple[bytes, dict[str, str]]:
    """Return body and headers of a request of binary tensors."""
    blobs = [numerical.astype("<f4").tobytes(), ids.astype("<i4").tobytes()]
    entries = [
        {
            "name": name,
            "datatype": kind,
            "shape": list(array.shape),
            "parameters": {"binary_data_size": len(blob)},
        }
        for name, kind, array, blob in zip(
            ("numerical", "ids"), ("FP32", "INT32"), (numerical, ids), blobs, strict=True
        )
    ]
    head = json.dumps({"inputs": entries, "parameters": {"binary_data_output": True}}).encode()
    return head + b"".join(blobs), {"Inference-Header-Content-Length": str(len(head))}


def binary_scores(client: Client, numerical: np.ndarray, ids: np.ndarray) -> np.ndarray:
    body, headers = binary(numerical, ids)
    connection = HTTPConnection("127.0.0.1", client.port, timeout=20)
    connection.request("POST", INFER, body, headers)
    response = connection.getresponse()
    data = response.read()
    connection.close()
    assert response.status == 200, data
    length = int(response.headers["Inference-Header-Content-Length"])
    (output,) = json.loads(data[:length])["outputs"]
    assert output["parameters"]["binary_data_size"] == len(data) - length
    return np.frombuffer(data[length:], "<f4").reshape(output["shape"])


def test_scores_are_those_of_the_model_directory(client, models):
    """JSON, binary tensors, and a request larger than the largest batch."""
    from serving.exporting.proof import proof_batches
    from serving.exporting.run import open_trained

    (batch,) = proof_batches(open_trained(models["checkpoint"], None).source, "test", 200)
    ids = np.stack([batch.ids[f"cat_{index}"].values().numpy() for index in range(5)], axis=1)
    wanted = served_scores(models["one"], models["checkpoint"])[:200, 0]
    numerical = batch.numerical.numpy()
    status, answer = client.infer(inputs(numerical, ids))
    assert (status, answer["model_version"]) == (200, "1")
    np.testing.assert_allclose(scores(answer), wanted, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(binary_scores(client, numerical, ids), np.float32(scores(answer)))


def test_endpoints(client):
    for path in (
        "/v2/health/live",
        "/v2/health/ready",
        "/v2",
        "/v2/models",
        "/v2/models/dlrm/ready",
    ):
        assert client.call(path)[0] == 200, path
    document = json.loads(client.call("/v2/models/dlrm/versions/1")[1])
    assert [entry["shape"] for entry in document["inputs"]] == [[-1, 3], [-1, 5]]
    assert client.call("/v2/models/dlrm/versions/2")[0] == 404
    assert client.call("/v2/models/x")[0] == client.call("/etc/passwd")[0] == 404
    assert client.call(INFER)[0] == client.call("/metrics", b"x")[0] == 405
    client.infer(inputs(*rows(3)))
    text = client.call("/metrics")[1].decode()
    assert 'serving_responses_total{status="200"}' in text
    assert re.search(r'serving_version{identity="\w+",model="dlrm",version="1"} 1', text)
    assert "process_resident_memory_bytes" in text
    for line in text.splitlines():
        assert line.startswith("#") or len(line.split()) == 2


NUMERICAL, IDS = rows(2)
WRONG = {
    "no JSON": (b"{", 400, "not JSON"),
    "nested": (b"[" * 100_000, 400, "not JSON"),
    "a list": (b"[]", 400, "want an object"),
    "no inputs": (b"{}", 400, "want a list of inputs"),
    "half an id": (
        json.dumps({"inputs": inputs(NUMERICAL, IDS), "id": "\ud800"}).encode(),
        400,
        "want a text in UTF-8 as id",
    ),
    "a text as a flag": (
        json.dumps(
            {"inputs": inputs(NUMERICAL, IDS), "parameters": {"binary_data_output": "false"}}
        ).encode(),
        400,
        "binary_data_output is 'false'; want true or false",
    ),
    "a list of parameters": (
        json.dumps({"inputs": inputs(NUMERICAL, IDS), "parameters": []}).encode(),
        400,
        "want an object",
    ),
    "one input": ([tensor("ids", "INT64", IDS)], 400, "no input 'numerical'"),
    "another": ([*inputs(NUMERICAL, IDS), tensor("x", "INT64", IDS)], 400, "no input 'x'"),
    "twice": (inputs(NUMERICAL, IDS) * 2, 400, "is there twice"),
    "columns": (inputs(NUMERICAL, IDS[:, :4]), 400, "shape [2, 4]; want [2, 5]"),
    "rows": (inputs(NUMERICAL[:1], IDS), 400, "1, 2 rows"),
    "no rows": (inputs(NUMERICAL[:0], IDS[:0]), 400, "no rows"),
    "shape": (
        [tensor("numerical", "FP32", NUMERICAL, [2**31, 2]), tensor("ids", "INT64", IDS)],
        400,
        "shape",
    ),
    "values": (
        [tensor("numerical", "FP32", NUMERICAL, [2, 4]), tensor("ids", "INT64", IDS)],
        400,
        "has 6 values",
    ),
    "too large an id": (
        inputs(NUMERICAL, IDS + np.array([0, 40, 0, 0, 0])),
        400,
        "feature 'cat_1', row 0: id",
    ),
    "negative id": (inputs(NUMERICAL, IDS - np.array([0, 0, 0, 0, 5000])), 400, "feature 'cat_4'"),
    "huge id": (inputs(NUMERICAL, IDS.astype(object) + 2**70), 400, "beyond INT64"),
    "NaN": (inputs(NUMERICAL * np.nan, IDS), 400, "is nan; want a finite number"),
    "lists of another shape": (
        [{**tensor("numerical", "FP32", NUMERICAL, [2, 3]), "data": [[1, 2], [3, 4], [5, 6]]}],
        400,
        "has 3 lists of 2 to 2 values, which do not form shape [2, 3]",
    ),
    "infinite": (inputs(NUMERICAL * np.inf, IDS), 400, "want a finite number"),
    "text": (
        [tensor("numerical", "BYTES", [["a"] * 3] * 2), tensor("ids", "INT64", IDS)],
        400,
        "is text",
    ),
    "text for a number": (inputs(NUMERICAL, IDS.astype(str)), 400, "which is no INT64"),
    "fraction for an id": (inputs(NUMERICAL, IDS + 0.5), 400, "which is no INT64"),
    "no name of a datatype": (
        [tensor("numerical", ["FP32"], NUMERICAL), tensor("ids", "INT64", IDS)],
        400,
        "has datatype ['FP32']",
    ),
    "half a character": (
        [tensor("numerical", "BYTES", [["\ud800"] * 3] * 2), tensor("ids", "INT64", IDS)],
        400,
        "is not UTF-8",
    ),
    "datatype": ([tensor("numerical", "FP8", NUMERICAL)], 400, "has datatype 'FP8'"),
    "too many rows": (inputs(*rows(3000)), 413, "want at most 2,048"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_requests_get_a_status_and_one_line(client, name, monkeypatch):
    body, status, message = WRONG[name]
    if isinstance(body, list):
        body = json.dumps({"inputs": body}).encode()
    batcher = client.service._batcher
    monkeypatch.setattr(batcher, "_limits", batcher._limits.__class__(64, 2048, 0.0, 10.0))
    got, answer = client.call(INFER, body)
    error = json.loads(answer)["error"]
    assert got == status, error
    assert message in error
    assert "\n" not in error
    assert client.infer(inputs(NUMERICAL, IDS))[0] == 200


def test_a_score_that_is_no_number_is_refused_and_not_sent(client, monkeypatch):
    async def scores(version, num_rows, read) -> np.ndarray:
        return np.array([[0.5], [np.nan]], np.float32)

    monkeypatch.setattr(client.service._batcher, "scores", scores)
    status, answer = client.call(INFER, json.dumps({"inputs": inputs(NUMERICAL, IDS)}).encode())
    assert status == 400
    assert "row 1: the score is not finite" in json.loads(answer)["error"]


def raw_answer(port: int, data: bytes, *, then_close: bool = False) -> bytes:
    """Send bytes; return all that comes back until the server closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(data)
        if then_close:
            connection.shutdown(socket.SHUT_WR)
        answer = b""
        while block := connection.recv(1 << 16):
            answer += block
    return answer


POST = f"POST {INFER} HTTP/1.1\r\nHost: x\r\n".encode()


HEAD = b"GET /v2 HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01 not HTTP\r\n\r\n", 400),
        (b"GET /v2\r\n\r\n", 505),
        (b"GET /v2 HTTP/3\r\n\r\n", 400),
        (b"GET /v2 HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"GET /v2 HTTP/1.1\r\n\r\n", 400),
        (HEAD + b"Host: y\r\n\r\n", 400),
        (HEAD + b"X: a\nContent-Length: 40\r\n\r\n", 400),
        (HEAD + b"X: a\rTransfer-Encoding: chunked\r\n\r\n", 400),
        (HEAD + b"X: a\0b\r\n\r\n", 400),
        (HEAD + b"X: " + b"a" * 20_000, 431),
        (POST + b"\r\n{}", 400),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n", 400),
        (POST + b"Content-Length: -1\r\n\r\n", 400),
        (POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 400),
        (POST + b"Content-Length: 1073741824\r\n\r\n", 413),
        (POST + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}", 415),
    ],
)
def test_broken_http_gets_a_status_and_the_server_lives(client, data, status):
    answer = raw_answer(client.port, data)
    assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer
    assert b'"error": ' in answer
    assert client.infer(inputs(NUMERICAL, IDS))[0] == 200


def test_a_client_that_goes_within_its_request_gets_no_answer(client):
    for data in (HEAD[:-5], POST + b"Content-Length: 1000\r\n\r\n{}"):
        assert raw_answer(client.port, data, then_close=True) == b""
    deadline = time.monotonic() + 5
    while client.service._http.app.body_bytes:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_heads_that_http_allows_are_answered(client):
    """HEAD has no body, so the next answer begins where a client looks for it; `ab -k` waits for the end of HTTP/1.0."""
    last = b"Connection: close\r\n\r\n"
    answer = raw_answer(client.port, HEAD.replace(b"GET", b"HEAD") + b"\r\n" + HEAD + last)
    first, second = answer.split(b"\r\n\r\n", 1)
    assert (first[:15], second[:15]) == (b"HTTP/1.1 200 OK", b"HTTP/1.1 200 OK")
    for head in (
        b"GET /v2 HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
        HEAD + b"Connection: close, TE\r\n\r\n",
        HEAD.replace(b" /v2", b" http://x/v2") + last,
        b"\r\n" + HEAD + last,
    ):
        assert raw_answer(client.port, head).startswith(b"HTTP/1.1 200 OK"), head


def test_a_body_in_chunks_is_a_body(client):
    data = json.dumps({"inputs": inputs(NUMERICAL, IDS)}).encode()
    parts = [b"%x\r\n%s\r\n" % (len(part), part) for part in (data[:100], data[100:])]
    head = POST + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    answer = raw_answer(client.port, head + b"".join(parts) + b"0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 OK")
    large = b"100000\r\n" + bytes(1 << 20) + b"\r\n"
    assert raw_answer(client.port, head + large * 3).startswith(b"HTTP/1.1 413 ")


def test_large_bodies_that_come_in_turns_are_read_whole(client):
    """All connections share the memory of a read, and a body has its own after the first one."""
    bodies = [
        json.dumps({"inputs": inputs(NUMERICAL, IDS), "id": f"{i}" * 300_000}).encode()
        for i in range(2)
    ]
    head = POST + f"Connection: close\r\nContent-Length: {len(bodies[0])}\r\n\r\n".encode()
    held = [socket.create_connection(("127.0.0.1", client.port), timeout=20) for _ in bodies]
    for first in range(0, len(head + bodies[0]), 70_001):
        for connection, body in zip(held, bodies, strict=True):
            connection.sendall((head + body)[first : first + 70_001])
            time.sleep(0.01)
    for i, connection in enumerate(held):
        with connection, connection.makefile("rb") as answer:
            found = json.loads(answer.read().partition(b"\r\n\r\n")[2])
        assert found["id"] == f"{i}" * 300_000
        assert scores(found) == scores(client.infer(inputs(NUMERICAL, IDS))[1])


def test_a_connection_that_waits_keeps_no_body(client):
    """`max_memory_mib` counts a body until its answer is written."""
    body = json.dumps({"inputs": inputs(NUMERICAL, IDS), "id": "x" * 500_000}).encode()
    connection = HTTPConnection("127.0.0.1", client.port, timeout=20)
    connection.request("POST", INFER, body)
    assert connection.getresponse().read()
    http = client.service._http
    # It is released behind the answer.
    deadline = time.monotonic() + 10
    while http.app.body_bytes and time.monotonic() < deadline:
        time.sleep(0.01)
    held = [waiting.cycle.scope for waiting in http._server.server_state.connections]
    assert http.app.body_bytes == 0
    assert held
    assert not [scope for scope in held if REST in scope]
    connection.close()


def test_half_a_head_and_a_pause_between_requests_end_after_the_time_limit(client):
    for data in (HEAD[:-5], HEAD + b"\r\n"):
        started = time.monotonic()
        answer = raw_answer(client.port, data)
        assert answer.count(b"HTTP/1.1 200") == (data[-2:] == b"\r\n")
        assert 1.5 < time.monotonic() - started < 8


def test_a_client_that_sends_a_refused_body_nevertheless_reads_why(client):
    """The connection is not reset while bytes of the client are unread."""
    for head in (POST + b"Content-Length: 8000000\r\n\r\n", b"no HTTP\r\n\r\n"):
        answer = raw_answer(client.port, head + bytes(8_000_000), then_close=True)
        assert b'"error": ' in answer


def test_requests_that_come_at_once_are_answered_in_turn(client):
    """More bytes than a connection keeps."""
    data = json.dumps({"inputs": inputs(NUMERICAL, IDS), "id": "X"}).encode()
    head = POST + f"Content-Length: {len(data)}\r\n\r\n".encode()
    bodies = [data.replace(b"X", f"{i:05}".encode()[-1:]) for i in range(100)]
    answer = raw_answer(client.port, b"".join(head + body for body in bodies), then_close=True)
    assert answer.count(b"HTTP/1.1 200 OK") == 100
    ids = re.findall(rb'"id": "(\d)"', answer)
    assert b"".join(ids) == b"0123456789" * 10


def test_a_body_that_never_comes_is_given_up(client):
    started = time.monotonic()
    answer = raw_answer(client.port, POST + b"Content-Length: 900000\r\n\r\n{")
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert raw_answer(client.port, b"") == b""
    assert time.monotonic() - started < 10


def test_bodies_are_counted_before_they_are_read(client):
    head = POST + b"Content-Length: 1000000\r\n\r\n{"
    held = [socket.create_connection(("127.0.0.1", client.port)) for _ in range(2)]
    for connection in held:
        connection.sendall(head)
    deadline = time.monotonic() + 5
    while client.service._http.app.body_bytes < 2_000_000 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert raw_answer(client.port, head).startswith(b"HTTP/1.1 503 ")
    for connection in held:
        connection.close()
    while client.service._http.app.body_bytes and time.monotonic() < deadline:
        time.sleep(0.01)
    assert client.infer(inputs(NUMERICAL, IDS))[0] == 200


def test_a_thousand_connections_are_served_or_refused(models):
    with serving(models["one"], max_connections=200) as client:
        connections = [
            socket.create_connection(("127.0.0.1", client.port), timeout=20) for _ in range(1000)
        ]
        deadline = time.monotonic() + 10
        while client.service._http.num_connections < 200 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert client.service._http.num_connections == 200
        for connection in connections:
            connection.close()
        # Closed connections that wait to be accepted take places once more.
        status = 503
        while status == 503:
            assert time.monotonic() < deadline + 20
            time.sleep(0.05)
            with suppress(ConnectionError):
                status = client.infer(inputs(NUMERICAL, IDS))[0]
        assert status == 200


def test_requests_share_batches_and_a_full_queue_refuses(models):
    options = {"max_batch": 8, "max_queue": 64, "batch_delay_ms": 20.0, "deadline_ms": 60_000.0}
    with serving(models["one"], **options) as client:
        data = [rows(1 + index % 5, index) for index in range(60)]
        # One that is refused leaves the others of its batch alone.
        for _, ids in data[::6]:
            ids[-1, 2] = 7
        with ThreadPoolExecutor(20) as pool:
            answers = list(pool.map(lambda pair: client.infer(inputs(*pair)), data))
        assert (400, "feature 'cat_2', row 0: id 7 is not in the table; want 0 to 6") in [
            (status, answer.get("error")) for status, answer in answers[::6]
        ]
        for (numerical, ids), (status, answer) in zip(data, answers, strict=True):
            assert status in ({200, 429} if (ids[:, 2] < 7).all() else {400, 429})
            if status == 200:
                alone = scores(client.infer(inputs(numerical, ids))[1])
                np.testing.assert_allclose(scores(answer), alone, rtol=0, atol=1e-6)
        text = client.call("/metrics")[1].decode()
        batches = float(text.split("serving_batch_rows_count ")[1].split()[0])
        scored = sum(status == 200 for status, _ in answers)
        assert batches < 2 * scored
        big = inputs(*rows(60))
        with ThreadPoolExecutor(8) as pool:
            found = [answer[0] for answer in pool.map(lambda _: client.infer(big), range(24))]
        assert 429 in found
        assert 200 in found


def test_parts_of_several_versions_in_turns_share_batches_in_order():
    batcher = Batcher(BatchLimits(3, 64, 0.0, 10.0), lambda rows, seconds: None)
    parts = [SimpleNamespace(version="ab"[i % 2], num_rows=1, arrived=i) for i in range(9)]
    for part in parts:
        batcher._waiting.put(part)
    batcher._rows_put = len(parts)
    found = [[part.arrived for part in batcher._next_batch()] for _ in range(4)]
    assert found == [[0, 2, 4], [1, 3, 5], [6, 8], [7]]
    assert batcher.queued_rows == 0


def test_a_request_that_waits_too_long_is_refused(models):
    with serving(models["one"], deadline_ms=0.001) as client:
        status, answer = client.infer(inputs(NUMERICAL, IDS))
    assert (status, answer["error"].partition(" longer")[0]) == (503, "the request has waited")


def test_a_token_is_wanted(models, tmp_path):
    (tmp_path / "token").write_text("s3cret\n")
    with serving(models["one"], token_file=str(tmp_path / "token")) as client:
        assert client.call("/v2/models")[0] == client.infer(inputs(NUMERICAL, IDS))[0] == 401
        assert client.call("/v2/models", headers={"Authorization": "Bearer s3cre"})[0] == 401
        assert client.call("/v2/models", headers={"Authorization": "Basic s3cret"})[0] == 401
        assert client.call("/v2/models", headers={"Authorization": "Bearer"})[0] == 401
        for scheme in ("Bearer", "bearer", "BEARER "):
            headers = {"Authorization": f"{scheme} s3cret"}
            assert client.call("/v2/models", headers=headers)[0] == 200
        assert client.call("/v2/health/ready")[0] == 200
        # A body would be held for somebody without the token, at the cost of those who have it.
        with socket.create_connection(("127.0.0.1", client.port), timeout=20) as stream:
            head = b"POST /v2/health/live HTTP/1.1\r\nHost: x\r\nContent-Length: 999999\r\n\r\nx"
            stream.sendall(head)
            assert stream.recv(100).startswith(b"HTTP/1.1 405 ")


def test_versions_are_swapped_under_load_and_rolled_back(models, tmp_path, capsys):
    """Every answer is that of the version it names; torn and other versions are refused; none fails."""
    root = tmp_path / "versions"
    root.mkdir()
    shutil.copytree(models["one"], root / "1")
    numerical, ids = rows(4)
    with serving(models["one"]) as one, serving(models["two"]) as two:
        wanted = [np.array(scores(c.infer(inputs(numerical, ids))[1])) for c in (one, two)]
    assert np.abs(wanted[0] - wanted[1]).max() > 1e-3
    with serving(root, poll_s=0.02, deadline_ms=20_000) as client:
        seen, failed, over = set(), [], threading.Event()

        def ask() -> None:
            while not over.is_set():
                status, answer = client.infer(inputs(numerical, ids))
                version = answer.get("model_version")
                right = wanted[1 - int(version) % 2] if status == 200 else None
                if right is None or np.abs(np.array(scores(answer)) - right).max() > 1e-6:
                    failed.append(answer)
                seen.add(version)

        def wait_for(version: str) -> None:
            deadline = time.monotonic() + 20
            while client.service._models[0].current.name != version:
                assert time.monotonic() < deadline, version
                time.sleep(0.01)

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        for number in range(2, 6):
            put(models["two" if number % 2 == 0 else "one"], root / str(number))
            wait_for(str(number))
        put(models["other"], root / "6")
        torn = put(models["one"], tmp_path / "torn")
        with (torn / "tables/cat_0.bin").open("r+b") as stream:
            stream.truncate(100)
        torn.rename(root / "7")
        (root / "8").mkdir()
        deadline = time.monotonic() + 20
        while client.service._models[0].refused < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert client.service._models[0].current.name == "5"
        assert withdraw(root, 4) == (["8", "7", "6", "5"], "4")
        wait_for("4")
        assert client.infer(inputs(numerical, ids))[1]["model_version"] == "4"
        over.set()
        for thread in threads:
            thread.join()
    assert failed == []
    assert seen == {"1", "2", "3", "4", "5"}
    printed = capsys.readouterr().err
    assert "version 6 is refused" in printed
    assert "version 7 is refused" in printed
    assert "5 serves on" in printed


def test_a_number_that_is_used_again_serves_what_it_names(models, tmp_path, capsys):
    """A withdrawn version is never served on because another one has its number before the server looks."""
    root = tmp_path / "versions"
    root.mkdir()
    put(models["one"], root / "1"), put(models["two"], root / "2")
    copy = put(models["one"], root / ".2.copy")
    identities = [Manifest.read(models[name]).identity for name in ("one", "two")]
    with serving(root, poll_s=0.05) as client:
        asked = inputs(NUMERICAL, IDS)
        first = client.infer(asked)[1]
        assert (first["model_version"], first["parameters"]["identity"]) == ("2", identities[1])
        with patch.object(Versions, "update", lambda self: False):
            withdraw(root, 1)
            copy.rename(root / "2")
        deadline = time.monotonic() + 20
        while (answer := client.infer(asked)[1])["parameters"]["identity"] == identities[1]:
            assert scores(answer) == scores(first)
            assert time.monotonic() < deadline
        assert (answer["model_version"], answer["parameters"]["identity"]) == ("2", identities[0])
        assert np.abs(np.array(scores(answer)) - scores(first)).max() > 1e-3
        metadata = json.loads(client.call("/v2/models/dlrm")[1])
        assert metadata["parameters"]["identity"] == identities[0]
    assert "version 2 replaces 2: its number is used again" in capsys.readouterr().err


def test_a_share_of_the_requests_goes_to_the_newest_version_and_the_answer_names_it(
    models, tmp_path
):
    root = tmp_path / "versions"
    root.mkdir()
    put(models["one"], root / "1"), put(models["two"], root / "2")
    with serving(models["one"]) as one, serving(models["two"]) as two:
        wanted = [np.array(scores(c.infer(inputs(NUMERICAL, IDS))[1])) for c in (one, two)]
    body = json.dumps({"inputs": inputs(NUMERICAL, IDS)}).encode()
    with serving(root, canary_share=0.5, poll_s=0.05) as client:
        found: dict[str, set[str]] = {}
        for key in [f"user {number % 20}" for number in range(60)]:
            answer = json.loads(client.call(INFER, body, {"Canary-Key": key})[1])
            found.setdefault(key, set()).add(answer["model_version"])
            right = wanted[int(answer["model_version"]) - 1]
            assert np.abs(np.array(scores(answer)) - right).max() < 1e-6
        assert {len(versions) for versions in found.values()} == {1}
        assert set.union(*found.values()) == {"1", "2"}
        for name in "12":
            asked = client.call(f"/v2/models/dlrm/versions/{name}/infer", body)
            assert json.loads(asked[1])["model_version"] == name
        status, answer = client.call("/v2/models/dlrm/versions/3/infer", body)
        assert (status, "what serves is 2 and 1" in answer.decode()) == (404, True)
        assert json.loads(client.call("/v2/models/dlrm")[1])["versions"] == ["2", "1"]
        text = client.call("/metrics")[1].decode()
        counts = re.findall(
            r'serving_request_seconds_count{model="dlrm",version="(.)"} (\S+)', text
        )
        assert sum(float(count) for _, count in counts) == 62
        assert sorted(name for name, _ in counts) == ["1", "2"]
        assert re.findall(r'serving_version{.*,version="(.)"} (\S+)', text) == [
            ("2", "0.5"),
            ("1", "0.5"),
        ]
        # What is withdrawn has no metrics.
        withdraw(root, 1)
        deadline = time.monotonic() + 20
        while len(client.service._models[0].serving) > 1:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert 'version="2"' not in client.call("/metrics")[1].decode()


def test_models_of_several_names_are_served_by_one_process(models, tmp_path, capsys):
    second = tmp_path / "second" / "3"
    export(models["checkpoint"], tmp_path / "same")
    export(models["second_checkpoint"], second, name="second")
    with pytest.raises(ValueError, match="two models are named dlrm; export one"):
        open_service(ServerConfig(model=str(models["one"]), others=[str(tmp_path / "same")]), None)
    wanted = {}
    for name, directory in (("dlrm", models["one"]), ("second", second)):
        rows_of_ids = IdInputs(Manifest.read(directory), {}).rows(
            {"numerical": NUMERICAL, "ids": IDS}, len(IDS)
        )
        wanted[name] = ServedModel.load(directory).scores(rows_of_ids)[:, 0].tolist()
    assert not np.allclose(wanted["dlrm"], wanted["second"], atol=1e-4)
    with (
        serving(models["one"], others=[str(second.parent)]) as client,
        ThreadPoolExecutor(8) as pool,
    ):
        asked = [*wanted] * 20
        answers = pool.map(lambda name: client.infer(inputs(NUMERICAL, IDS), name), asked)
        for name, (status, answer) in zip(asked, answers, strict=True):
            assert (status, answer["model_name"]) == (200, name)
            np.testing.assert_allclose(scores(answer), wanted[name], atol=1e-6)
        states = [
            {"name": name, "version": version, "state": "READY"}
            for name, version in (("dlrm", "1"), ("second", "3"))
        ]
        for path, body in (("/v2/models", None), ("/v2/repository/index", b"{}")):
            status, answer = client.call(path, body)
            assert (status, json.loads(answer)) == (200, states)
        status, answer = client.call("/v2/models/third")
        assert status == 404
        assert json.loads(answer)["error"] == "there is no model 'third', only 'dlrm' and 'second'"
        text = client.call("/metrics")[1].decode()
        for name, version in (("dlrm", "1"), ("second", "3")):
            labels = f'{{model="{name}",version="{version}"}}'
            assert f"serving_request_seconds_count{labels} 20.0" in text
        # A line of the log is one model's.
        put(second, second.parent / "4")
        deadline = time.monotonic() + 20
        while client.service._models[1].current.name != "4":
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert f"{second.parent}: version 4 replaces 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("others", "problem"),
    [("nope", "nope cannot be read"), ("same", "two models are named dlrm; export one of them")],
)
def test_another_model_that_cannot_be_served_is_refused_before_torch(
    models, tmp_path, others, problem
):
    export(models["checkpoint"], tmp_path / "same")
    command = [sys.executable, "-X", "importtime", "-m", "serving.run", f"model={models['one']}"]
    ended = subprocess.run(
        [*command, f"others=[{tmp_path / others}]"], cwd=ROOT, capture_output=True, text=True
    )
    lines = [line for line in ended.stderr.splitlines() if not line.startswith("import time:")]
    assert ended.returncode == 2
    assert len(lines) == 1
    assert problem in lines[0]
    assert "model=nope" not in lines[0]
    assert not re.search(r"\| +torch\n", ended.stderr)


def put(model: Path, target: Path) -> Path:
    """Copy a version as an export does: it appears complete."""
    partial = target.with_name(f".{target.name}.partial")
    shutil.copytree(model, partial)
    os.rename(partial, target)
    return target


def test_draining_answers_what_has_begun(models):
    with serving(models["one"], batch_delay_ms=300.0) as client:
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(client.infer, inputs(NUMERICAL, IDS))
            deadline = time.monotonic() + 5
            tasks = client.service._http._server.server_state.tasks
            while not tasks and time.monotonic() < deadline:
                time.sleep(0.005)
            client.stop(5.0)
            assert answer.result()[0] == HTTPStatus.OK
        with pytest.raises(OSError, match="refused"):
            client.call("/v2/health/live")


def test_the_command_ends_though_nobody_reads_what_it_says(models):
    command = [python(), "-m", "serving.run", f"model={models['one']}", "port=0"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr.readline().startswith("ready")
        process.stderr.close()
        process.send_signal(signal.SIGTERM)
        process.wait(20)
    finally:
        process.kill()


@pytest.mark.doors
def test_the_command_serves_until_sigterm(models):
    command = [sys.executable, "-m", "serving.run", f"model={models['one']}", "port=0"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        ready = process.stderr.readline()
        found = re.fullmatch(
            r"ready after [\d.]+ s, [\d.]+ s of them imports: model dlrm, version 1 on http://127.0.0.1:(\d+)\n",
            ready,
        )
        assert found, ready
        connection = HTTPConnection("127.0.0.1", int(found[1]), timeout=20)
        connection.request("GET", "/v2/health/ready")
        assert connection.getresponse().read() == b'{"ready": true}'
        process.send_signal(signal.SIGTERM)
        assert process.stderr.read() == "draining: accepted requests are answered\nended\n"
        assert process.wait(20) == 0
    finally:
        process.kill()


def test_a_manifest_says_what_a_client_depends_on(models):
    one, other = (Manifest.read(models[name]) for name in ("one", "other"))
    assert one.interface() == Manifest.read(models["two"]).interface() != other.interface()
    assert (models["one"] / MANIFEST).exists()
