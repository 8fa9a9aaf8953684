"""Clients of a server: the AUC that training found, and loads whose numbers fit together; refusals are one line."""

import asyncio
import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from configs.serving_schema import AccuracyConfig, LatencyConfig
from nn.build import open_source
from nn.metrics.ranking import roc_auc
from serving.client.accuracy import evaluate, lines
from serving.client.connection import Address, Connection, Reply
from serving.client.dataset_requests import EncodedRequest
from serving.client.latency import measure
from serving.client.latency_picture import draw
from serving.client.load import Body, closed_load
from serving.client.results import write_csv
from serving.client.shared_memory import shared_bodies
from serving.http_address import authority
from tests.helpers.composed import compose_config, ranks_of_cpu
from tests.helpers.datasets import write_clicks
from tests.nn.training.test_ragged import dataset as ragged_data  # noqa: F401
from tests.nn.training.test_ragged import overrides_of as ragged_case
from tests.serving.served_models import Client, export, save_run, serving


@pytest.fixture(scope="module")
def served(tmp_path_factory, ragged_data):  # noqa: F811
    """Return a server of a model with a ragged feature, its dataset, and its logits and labels of the test split."""
    root = tmp_path_factory.mktemp("served")
    case = ragged_case(ragged_data, "adagrad", "planned")
    with ranks_of_cpu():
        checkpoint, logits = save_run(root / "run", case)
    export(checkpoint, root / "model", name="m")
    source = open_source(compose_config(*case))
    rows = source.num_rows("test")
    labels = source.read("test", np.array([[0, rows]])).labels
    (root / "token").write_text("abc\n")
    with serving(root / "model", token_file=str(root / "token")) as client:
        yield client, ragged_data, root / "token", logits, labels


def options(served, **more) -> dict:
    client, data, token, *_ = served
    url = f"http://127.0.0.1:{client.port}"
    return {"model": "m", "data_path": str(data), "url": url, "token_file": str(token)} | more


def test_the_accuracy_is_that_of_the_training_path(served):
    *_, logits, labels = served
    found = asyncio.run(evaluate(AccuracyConfig(**options(served, batch_size=50, concurrency=2))))
    (values,) = found["outputs"].values()
    wanted = roc_auc(torch.from_numpy(logits), torch.from_numpy(labels))
    assert values["auc"] == pytest.approx(wanted, abs=1e-6)
    losses = np.log1p(np.exp(-np.where(labels > 0.5, logits, -logits).astype(np.float64)))
    assert values["log_loss"] == pytest.approx(losses.mean(), abs=1e-6)
    assert found["rows"] == len(labels)
    assert found["requests"] == math.ceil(len(labels) / 50)
    assert found["mean_ms"] <= found["p99_ms"]
    assert f"auc {values['auc']:.6f}" in "\n".join(lines(found))
    first = asyncio.run(evaluate(AccuracyConfig(**options(served, batch_size=30, max_steps=2))))
    assert first["rows"] == 60


def test_loads_are_measured_and_written(served, tmp_path):
    config = LatencyConfig(
        **options(
            served, batch_sizes=[1, 16], concurrency=[2], rates=[40.0], seconds=0.5, warmup_s=0
        )
    )
    printed: list[str] = []
    results = asyncio.run(measure(config, printed.append))
    assert [(r.batch, r.concurrency, r.rate) for r in results] == [
        *((1, 2, None), (1, None, 40.0), (16, 2, None), (16, None, 40.0)),
    ]
    for result in results:
        assert result.failed == 0
        assert 0 < result.p50_ms <= result.p90_ms <= result.p99_ms
        assert result.server_ms is not None
        assert 0 < result.server_ms < result.mean_ms
    assert results[1].requests == 20, "half a second of 40 requests per second"
    assert len(printed) == 1 + len(results)
    write_csv(results, tmp_path / "latency.csv")
    with (tmp_path / "latency.csv").open() as stream:
        assert [int(row["batch"]) for row in csv.DictReader(stream)] == [1, 1, 16, 16]
    draw(results, "Latency of m", "facts", tmp_path / "latency.png")
    assert (tmp_path / "latency.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": "other"}, "the server answers 404, there is no model 'other'"),
        ({"token_file": None}, "the server answers 401"),
        ({"split": "nowhere"}, "has no rows of it"),
        ({"url": "localhost:8000"}, "want http://HOST:PORT"),
        ({"url": "http://127.0.0.1:9"}, "no answer from 127.0.0.1:9"),
        ({"shared_memory": True}, "has no extension system_shared_memory"),
        ({"batch_sizes": [60_000]}, "batch_sizes: 60,000 rows, and split test has"),
    ],
)
def test_what_cannot_be_measured_is_said_in_one_line(served, changed, message):
    config = LatencyConfig(**(options(served) | changed))
    with pytest.raises(ValueError, match=message) as refused:
        asyncio.run(measure(config, print))
    assert "\n" not in str(refused.value)


def test_a_number_of_ipv6_has_brackets():
    address = Address.of("http://[::1]:8000/there")
    assert (address.host, address.port) == ("::1", 8000)
    head = Connection(address).head("/v2", None)
    assert head == b"GET /there/v2 HTTP/1.1\r\nHost: [::1]:8000\r\n\r\n"
    assert authority("localhost", 8000) == "localhost:8000"


def test_a_dataset_of_other_features_is_refused(served, tmp_path):
    data = write_clicks(tmp_path / "data")
    with pytest.raises(ValueError, match=r"the served model|has no input"):
        asyncio.run(evaluate(AccuracyConfig(**(options(served) | {"data_path": str(data)}))))


def test_refused_requests_are_counted_with_their_reason(served):
    client: Client = served[0]
    address = Address("127.0.0.1", client.port, token="abc")
    measured = asyncio.run(closed_load(address, "/v2/models/m/infer", [Body(b"{}", 2)], 1, 0.1))
    assert not measured.latencies
    assert measured.failed > 0
    assert measured.error == "400, want a list of inputs"


def test_shared_inputs_lie_where_the_requests_say(monkeypatch):
    paths = []

    async def call(self, path: str, body: bytes | None = None) -> Reply:
        paths.append(path.rpartition("/")[2])
        return Reply(200, {}, b"")

    async def read() -> list[dict[str, np.ndarray]]:
        found = []
        async with shared_bodies(Address("triton", 8000), requests) as bodies:
            for entry in (entry for body in bodies for entry in json.loads(body.content)["inputs"]):
                region, size, offset = entry["parameters"].values()
                data = Path("/dev/shm", region).read_bytes()[offset : offset + size]
                dtype = {"FP32": "<f4", "INT32": "<i4"}[entry["datatype"]]
                array = np.frombuffer(data, dtype).reshape(entry["shape"])
                found.append((entry["name"], array.tolist()))
        return found

    monkeypatch.setattr(Connection, "call", call)
    numbers, ids = np.float32([[0.5], [2]]), np.int32([[1, 2], [3, 4]])
    inputs = [{"numerical": numbers, "ids": ids}, {"numerical": -numbers, "ids": 9 * ids}]
    requests = [EncodedRequest(2, b"", 0, of) for of in inputs]
    wanted = [(name, array.tolist()) for of in inputs for name, array in of.items()]
    assert asyncio.run(read()) == wanted
    assert paths == ["register", "unregister"]
