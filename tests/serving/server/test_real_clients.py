"""Clients and proxies that others have written speak with the server: each kind of body, HEAD, connections that are kept."""

import asyncio
import json
import socket
import subprocess
import time
from collections.abc import Iterator

import numpy as np
import pytest

from nn.distributed.launcher import reserved_port
from tests.serving.handmade_model import FEATURES, write_raw_model
from tests.serving.served_models import Client, serving

pytestmark = pytest.mark.doors
INFER = "/v2/models/m/infer"
COLUMNS = {"a": ["0.5"], "b": ["0.25"], **{feature.name: ["x"] for feature in FEATURES}}
BODY = {
    "inputs": [
        {"name": name, "datatype": "BYTES", "shape": [1], "data": texts}
        for name, texts in COLUMNS.items()
    ]
}
INDEX = [{"name": "m", "version": "1", "state": "READY"}]
NGINX = """
daemon off; master_process off; user root; pid {here}/pid; error_log stderr;
events {{}}
http {{
  access_log off; client_body_temp_path {here}/body; proxy_temp_path {here}/proxy;
  fastcgi_temp_path {here}/1; uwsgi_temp_path {here}/2; scgi_temp_path {here}/3;
  upstream server {{ server 127.0.0.1:{port}; keepalive 4; }}
  server {{
    listen 127.0.0.1:{own};
    location / {{ proxy_pass http://server; proxy_http_version 1.1; proxy_set_header Connection ""; }}
    location /stream/ {{
      proxy_pass http://server/; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_request_buffering off;
    }}
    location /old/ {{ proxy_pass http://server/; proxy_http_version 1.0; }}
  }}
}}
"""


@pytest.fixture(scope="module")
def client(tmp_path_factory) -> Iterator[Client]:
    with serving(write_raw_model(tmp_path_factory.mktemp("model") / "1")) as found:
        yield found


@pytest.fixture(scope="module")
def scores(client) -> list[list[float]]:
    status, body = client.call(INFER, json.dumps(BODY).encode())
    assert status == 200, body
    return [output["data"] for output in json.loads(body)["outputs"]]


def parts() -> Iterator[bytes]:
    """Yield a body without a length."""
    body = json.dumps(BODY).encode()
    yield from (body[:50], body[50:])


def data_of(body: bytes) -> list[list[float]]:
    return [output["data"] for output in json.loads(body)["outputs"]]


@pytest.mark.parametrize("is_binary", [True, False])
def test_tritonclient(client, scores, is_binary):
    from tritonclient.http import (
        InferenceServerClient,
        InferenceServerException,
        InferInput,
        InferRequestedOutput,
    )

    inputs = [InferInput(name, [1], "BYTES") for name in COLUMNS]
    for one, texts in zip(inputs, COLUMNS.values(), strict=True):
        one.set_data_from_numpy(np.array(texts, object), binary_data=is_binary)
    with InferenceServerClient(f"127.0.0.1:{client.port}") as triton:
        assert triton.is_server_live()
        assert triton.is_server_ready()
        assert triton.is_model_ready("m", "1")
        assert triton.get_server_metadata()["version"] == "2"
        assert triton.get_model_repository_index() == INDEX
        metadata = triton.get_model_metadata("m")
        # What a client sends that fills all inputs.
        assert {one["name"]: one["datatype"] for one in metadata["inputs"]} == dict.fromkeys(
            COLUMNS, "BYTES"
        )
        outputs = metadata["outputs"]
        names = [output["name"] for output in outputs]
        wanted = [InferRequestedOutput(name, binary_data=is_binary) for name in names]
        for more in ({}, {"response_compression_algorithm": "gzip"}, {"request_id": "7"}):
            answer = triton.infer("m", inputs, outputs=wanted, **more)
            for name, score in zip(names, scores, strict=True):
                np.testing.assert_array_equal(answer.as_numpy(name), np.float32(score))
        for kind in ("gzip", "deflate"):
            with pytest.raises(InferenceServerException, match="send the body without compression"):
                triton.infer("m", inputs, request_compression_algorithm=kind)
        with pytest.raises(InferenceServerException, match="there is no '/v2/models/m/config'"):
            triton.get_model_config("m")
        assert triton.async_infer("m", inputs).get_result().as_numpy(names[0]) is not None


def test_httpx(client, scores):
    import httpx

    with httpx.Client(base_url=f"http://127.0.0.1:{client.port}") as http:
        for path in ("/v2/health/ready", INFER, "/nothing"):
            assert http.head(path).content == b""
            assert http.get("/v2/health/live").json() == {"live": True}
        assert data_of(http.post(INFER, json=BODY).content) == scores
        assert data_of(http.post(INFER, content=parts()).content) == scores
        assert http.post("/v2/repository/index", json={}).json() == INDEX


def test_aiohttp(client, scores):
    import aiohttp

    async def talk() -> None:
        connector = aiohttp.TCPConnector(limit=1)
        url = f"http://127.0.0.1:{client.port}"
        async with aiohttp.ClientSession(url, connector=connector) as session:
            for path in ("/v2/health/ready", INFER, "/nothing"):
                async with session.head(path) as answer:
                    assert await answer.read() == b""
                async with session.get("/v2/health/live") as answer:
                    assert await answer.json() == {"live": True}
            async with session.post(INFER, json=BODY) as answer:
                assert data_of(await answer.read()) == scores
            async with session.post(INFER, json=BODY, chunked=True) as answer:
                assert data_of(await answer.read()) == scores
            async with session.post(INFER, json=BODY, compress="gzip") as answer:
                assert answer.status == 415
                assert await answer.json() == {"error": "send the body without compression"}
            async with session.post(INFER, json=BODY) as answer:
                assert data_of(await answer.read()) == scores

    asyncio.run(talk())


def test_ab_keeps_its_connections(client, tmp_path):
    (tmp_path / "body").write_text(json.dumps(BODY))
    url = f"http://127.0.0.1:{client.port}{INFER}"
    # -l, since rows of other requests in a batch change the last digit of a score, and so the length.
    command = ["ab", "-qkl", *["-s", "5", "-n", "200", "-c", "2", "-p"], tmp_path / "body", url]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(":", 1) for line in done.stdout.splitlines() if ":" in line)
    assert (lines["Complete requests"].strip(), lines["Failed requests"].strip()) == ("200", "0")
    assert "Non-2xx responses" not in lines


def test_nginx_in_front(client, scores, tmp_path):
    import httpx

    own = reserved_port()
    config = tmp_path / "nginx.conf"
    config.write_text(NGINX.format(here=tmp_path, port=client.port, own=own))
    command = ["nginx", "-p", tmp_path, "-e", "stderr", "-c", config]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as nginx:
        try:
            deadline = time.monotonic() + 20
            while True:
                try:
                    socket.create_connection(("127.0.0.1", own)).close()
                    break
                except ConnectionRefusedError:
                    assert nginx.poll() is None, nginx.stderr.read()
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
            with httpx.Client(base_url=f"http://127.0.0.1:{own}", timeout=20) as http:
                for prefix in ("", "/stream", "/old"):
                    assert http.head(f"{prefix}/v2/health/ready").status_code == 200
                    assert http.get(f"{prefix}/v2").json()["name"] == "hybrid-parallel-recsys"
                    assert data_of(http.post(prefix + INFER, json=BODY).content) == scores
                    assert data_of(http.post(prefix + INFER, content=parts()).content) == scores
                assert b"serving_responses_total" in http.get("/metrics").content
        finally:
            nginx.terminate()


def test_promtool_takes_the_metrics_of_a_server_that_has_answered(client, scores):
    _, text = client.call("/metrics")
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")
    assert b"process_resident_memory_bytes" in text
