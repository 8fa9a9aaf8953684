"""A model repository of Triton: its parts score as the model directory does, in this process and in a real tritonserver."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from configs.serving_schema import DenseFormat, DenseType, Device, Layout, TritonConfig
from nn.distributed.launcher import reserved_port
from serving.inference.model import ServedModel
from serving.inference.model_rows import Rows
from serving.inference.tables import MappedTables
from serving.inference.versions import Version
from serving.manifest import MANIFEST, Manifest
from serving.server.protocol import InferRequest, infer_response
from serving.server.service import _metadata
from serving.triton.parts import EMBEDDINGS, load_part
from serving.triton.repository import LOOPBACK, write_repository
from serving.triton.text_proto import Word, entries, text_proto
from tests.helpers.command import ROOT
from tests.serving.handmade_model import (
    FEATURES,
    some_rows,
    write_manifest,
    write_model,
    write_raw_model,
)

SERVER = os.environ.get("TRITONSERVER", "")
"""A server that `serving/triton/install_server.sh` has made."""

NOT_FINITE = "row 1: the score is not finite; the numerical values are larger than the model can compute with"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "1", "fp32", onnx=True)


@pytest.fixture(scope="module")
def repositories(model, tmp_path_factory) -> dict[str, Path]:
    """Return the repositories of all layouts."""
    root = tmp_path_factory.mktemp("repositories")
    kinds = {
        "monolithic": {},
        "ensemble": {"layout": Layout.ensemble, "dense_format": DenseFormat.pytorch, "name": "e"},
        "onnx": {"layout": Layout.ensemble},
    }
    for kind, options in kinds.items():
        write_repository(TritonConfig(model=str(model), output=str(root / kind), **options))
    return {kind: root / kind for kind in kinds}


def inputs_of(rows: Rows) -> dict[str, Tensor]:
    """Return rows as the tensors of a request."""
    found = {"numerical": rows.numerical, "ids": rows.ids.int()}
    for name, ragged in rows.ragged.items():
        width = max(1, int(ragged.lengths.max()))
        found[name] = torch.full((len(rows), width), -1, dtype=torch.int32)
        found[name][torch.arange(width) < ragged.lengths[:, None]] = ragged.values.int()
    if rows.keep_rates is not None:
        found["rate"] = rows.keep_rates[:, None]
    return found


def parameters_of(config: Path) -> dict[str, str]:
    found = re.findall(r'key: "(\w+)"\n  value {\n    string_value: "(.*)"', config.read_text())
    return dict(found)


def part_of(repository: Path, name: str):
    folder = repository / name
    return load_part(folder / "1" / "model", parameters_of(folder / "config.pbtxt"))


def test_the_sparse_part_of_an_ensemble_looks_up_raw_keys(tmp_path):
    model, root = write_raw_model(tmp_path / "1"), tmp_path / "repository"
    options = {"layout": Layout.ensemble, "dense_format": DenseFormat.pytorch, "name": "k"}
    write_repository(TritonConfig(model=str(model), output=str(root), **options))
    rows = some_rows(3, 2)
    column = Manifest.read(model).id_slices()["one"].start
    keys = rows.ids.clone()
    keys[:, column] = torch.tensor([1001, 1039, 7])
    rows.ids[:, column] = torch.tensor([1, 39, 0])
    inputs = inputs_of(rows) | {"ids": keys}
    del inputs["numerical"]
    (answer,) = part_of(root, "k_sparse")([inputs])
    wanted, *_ = MappedTables(model, Manifest.read(model))(rows)
    assert answer["embeddings"].equal(wanted)


def test_the_monolithic_model_answers_each_request_of_a_batch(model, repositories):
    part = part_of(repositories["monolithic"], "m")
    requests = [some_rows(3, 2, 1), some_rows(1, 4, 3), some_rows(5, 2, 0)]
    bad = inputs_of(requests[0]) | {"ids": torch.full((3, 7), 10**6, dtype=torch.int32)}
    answers = part([inputs_of(requests[0]), bad, *map(inputs_of, requests[1:])])
    assert answers.pop(1) == ("feature 'one', row 0: id 1000000 is not in the table; want 0 to 39")
    served = ServedModel.load(model)
    for rows, answer in zip(requests, answers, strict=True):
        assert list(answer) == ["click", "price"]
        torch.testing.assert_close(torch.cat(list(answer.values()), 1), served.scores(rows))


def test_numbers_and_scores_that_are_not_finite_are_refused(model, repositories):
    """As the embedded server does: a warning in the log of a client is no protection."""
    part = part_of(repositories["monolithic"], "m")
    good, bad = inputs_of(some_rows(3, 2, 1)), inputs_of(some_rows(2, 2, 3))
    bad["numerical"][1] = 3e38
    answers = part([bad, good])
    assert answers[0] == NOT_FINITE
    assert torch.cat(list(answers[1].values()), 1).isfinite().all()
    dense = part_of(repositories["ensemble"], "e_dense")
    columns = Manifest.read(model).num_columns
    whole = {"numerical": good["numerical"], EMBEDDINGS: torch.zeros(3, columns)}
    requests = []
    for value in (float("nan"), 3e38, 0.0):
        numerical = whole["numerical"].clone()
        numerical[1] = value
        requests.append(whole | {"numerical": numerical})
    found = dense(requests)
    assert found[0] == "input 'numerical', row 1: 'a' is nan; want a finite number"
    assert found[1] == NOT_FINITE
    assert torch.cat(list(found[2].values()), 1).isfinite().all()


@pytest.mark.parametrize("kind", ["ensemble", "onnx"])
def test_sparse_and_dense_together_score_as_the_model(model, repositories, kind):
    repository, rows = repositories[kind], some_rows(6, 3)
    name = "e" if kind == "ensemble" else "m"
    tensors = inputs_of(rows)
    (sparse,) = part_of(repository, f"{name}_sparse")(
        [{key: tensors[key] for key in tensors if key != "numerical"}]
    )
    dense_inputs = {"numerical": rows.numerical, EMBEDDINGS: sparse[EMBEDDINGS]}
    if kind == "onnx":
        import onnxruntime  # which starts threads

        session = onnxruntime.InferenceSession(repository / "m_dense" / "1" / "model.onnx")
        arrays = {key: value.numpy() for key, value in dense_inputs.items()}
        found = session.run(["click", "price"], arrays)
        got = torch.from_numpy(np.concatenate(found, axis=1))
    else:
        (answer,) = part_of(repository, "e_dense")([dense_inputs])
        got = torch.cat(list(answer.values()), dim=1)
    torch.testing.assert_close(got, ServedModel.load(model).scores(rows), rtol=1e-5, atol=1e-6)


def test_the_configuration_names_every_tensor(repositories):
    text = (repositories["monolithic"] / "m" / "config.pbtxt").read_text()
    ragged = [f.name for f in FEATURES if f.hotness is None]
    for name in ("numerical", "ids", "rate", "click", "price", *ragged):
        assert f'name: "{name}"' in text
    assert 'name: "rate"\n  data_type: TYPE_FP32\n  dims: [1]\n  optional: true' in text
    joined = (repositories["onnx"] / "m" / "config.pbtxt").read_text()
    assert 'platform: "ensemble"' in joined
    assert joined.count("step {") == 2
    assert 'backend: "onnxruntime"' in (repositories["onnx"] / "m_dense/config.pbtxt").read_text()
    assert text_proto({"a": Word("B"), "c": entries({'"': True}), "d": [1, 2]}) == (
        'a: B\nc {\n  key: "\\""\n  value: true\n}\nd: [1, 2]\n'
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output": "there"}, "exists; name a new directory"),
        ({"name": "a/b"}, "name=a/b: want letters"),
        ({"model": "nowhere"}, "is no model directory"),
        ({"dense_dtype": DenseType.bf16}, "dense_dtype=bf16 is of layout=monolithic device=cuda"),
        (
            {"layout": Layout.ensemble, "device": Device.cuda, "dense_format": DenseFormat.pytorch},
            "must be of dense_format=onnx",
        ),
    ],
)
def test_what_cannot_be_written_is_refused(model, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    with pytest.raises(ValueError, match=message):
        write_repository(TritonConfig(**{"model": str(model), "output": "new", **options}))
    assert not (tmp_path / "new").exists()


def test_tensors_of_an_ensemble_have_different_names(model, tmp_path):
    path = shutil.copytree(model, tmp_path / "model")
    document = json.loads((path / MANIFEST).read_text())
    document["outputs"][1]["name"] = "list"
    (path / MANIFEST).write_text(json.dumps(document))
    options = TritonConfig(model=str(path), output=str(tmp_path / "new"), layout=Layout.ensemble)
    with pytest.raises(ValueError, match=r"two of its tensors have one name .*; use layout"):
        write_repository(options)


def test_every_command_that_is_shown_listens_on_loopback():
    """tritonserver listens on every interface by default, for HTTP, gRPC and metrics."""
    page = (ROOT / "docs/serving.md").read_text() + (ROOT / "README.md").read_text()
    shown = [line for line in page.splitlines() if line.startswith("tritonserver ")]
    assert shown
    assert all(LOOPBACK in line for line in shown)


@pytest.mark.doors
def test_a_real_server_scores_as_the_model(model, repositories, tmp_path):
    assert SERVER, "TRITONSERVER names no server; serving/triton/install_server.sh makes one"
    ports = [reserved_port() for _ in range(3)]
    kinds = [f"--model-repository={repositories[kind]}" for kind in ("monolithic", "ensemble")]
    names = ("http", "grpc", "metrics")
    listen = [f"--{name}-port={port}" for name, port in zip(names, ports, strict=True)]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [SERVER, *kinds, *listen, *LOOPBACK.split()], stdout=log, stderr=log
        )
        try:
            _wait_until_ready(ports[0], process, tmp_path / "log")
            rows = some_rows(4, 3, 1)
            wanted = ServedModel.load(model).scores(rows)
            status, found = _infer(ports[0], "m", inputs_of(rows))
            assert status == 200
            torch.testing.assert_close(found, wanted)
            # The ensemble has no input of keep rates.
            without = {name: t for name, t in inputs_of(rows).items() if name != "rate"}
            status, found = _infer(ports[0], "e", without)
            assert status == 200
            wanted = ServedModel.load(model).scores(Rows(rows.numerical, rows.ids, rows.ragged))
            torch.testing.assert_close(found, wanted)
            status, found = _infer(ports[0], "m", without | {"ids": without["ids"] + 10**6})
            assert status == 400
            assert "is not in the table" in found
            without["numerical"][1] = 3e38
            for name in ("m", "e"):
                status, found = _infer(ports[0], name, without)
                assert status == 400
                assert found.endswith(NOT_FINITE)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


def _wait_until_ready(port: int, process: subprocess.Popen, log: Path) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end and process.poll() is None:
        try:
            if _call(port, "GET", "/v2/health/ready")[0] == 200:
                return
        except OSError:
            pass
        time.sleep(0.2)
    raise AssertionError(log.read_text()[-3000:])


def _call(port: int, method: str, path: str, body: str | None = None) -> tuple[int, bytes]:
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, body)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def _infer(port: int, name: str, inputs: dict[str, Tensor]) -> tuple[int, Tensor | str]:
    """Return status, and scores [B, 2] or the error."""
    kinds = {torch.float32: "FP32", torch.int32: "INT32"}
    entries = [
        {"name": key, "shape": list(t.shape), "datatype": kinds[t.dtype], "data": t.tolist()}
        for key, t in inputs.items()
    ]
    status, body = _call(port, "POST", f"/v2/models/{name}/infer", json.dumps({"inputs": entries}))
    answer = json.loads(body)
    if status != 200:
        return status, answer["error"]
    found = {output["name"]: torch.tensor(output["data"]) for output in answer["outputs"]}
    return status, torch.stack([found["click"], found["price"]], dim=1)


@pytest.mark.parametrize("names", [["click"], ["click", "price"]])
def test_outputs_have_the_names_of_the_tasks(model, tmp_path, names):
    """Over HTTP and in Triton, of one task and of several; and the identity of the model stands beside."""
    shutil.copytree(model, tmp_path / "1")
    document = json.loads((tmp_path / "1" / MANIFEST).read_text())
    document["outputs"] = document["outputs"][: len(names)]
    manifest = Manifest.read(write_manifest(tmp_path / "1", document))
    write_repository(TritonConfig(model=str(tmp_path / "1"), output=str(tmp_path / "repository")))
    config = (tmp_path / "repository/m/config.pbtxt").read_text()
    outputs = config.partition("output {")[2].partition("dynamic_batching")[0]
    assert re.findall('name: "(.*)"', outputs) == names
    assert parameters_of(tmp_path / "repository/m/config.pbtxt")["identity"] == manifest.identity
    request = InferRequest({}, 1)
    scores = [(output.name, np.float32([0.5])) for output in manifest.outputs]
    answer = json.loads(infer_response(request, "m", "1", manifest.identity, scores).body)
    assert [output["name"] for output in answer["outputs"]] == names
    metadata = _metadata(Version("1", SimpleNamespace(manifest=manifest, raw=None), "0"), ["1"])
    assert [output["name"] for output in metadata["outputs"]] == names
