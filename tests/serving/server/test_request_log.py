"""The log of served requests: rows that preprocessing reads, labels by id, what they say in the metrics, and its limits."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from serving.inference.model_rows import Rows
from serving.server import request_log
from serving.server.metrics import Metrics
from serving.server.protocol import InferRequest, Tensor
from serving.server.request_log import LoggedRequest, RequestLog
from tests.preproc.table.test_pipeline import build
from tests.serving.handmade_model import write_raw_model
from tests.serving.served_models import Client, serving, tensor

INFER = "/v2/models/m/infer"
RAW = {
    **{"a": ["0.5", "2", None], "b": ["1", "nan", "-3"], "one": ["x", "y", None]},
    **{"three": ["shared 3|shared 4|?", "", "shared 1"], "list": ["shared 7", "?|?", ""]},
    **{"several": ["positions 1", "positions 2|positions 3", "?"], "tags": ["narrow 1", "", "?"]},
    "narrow": ["narrow 3", "?", "narrow 5"],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_raw_model(tmp_path_factory.mktemp("raw") / "1")


def rows_in(folder: Path) -> list[dict]:
    files = sorted(folder.glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def metrics(client: Client) -> dict[str, float]:
    text = client.call("/metrics")[1].decode()
    return {name: float(value) for name, value in re.findall(r"^(serving_\S+) (\S+)$", text, re.M)}


def ask(client: Client, inputs: list[dict], identity: str | None = None) -> dict:
    body = {"inputs": inputs} | ({} if identity is None else {"id": identity})
    status, answer = client.call(INFER, json.dumps(body).encode())
    assert status == 200, answer
    return json.loads(answer)


def label(client: Client, identity: str, name: str, values: list[float]) -> tuple[int, str]:
    body = {"id": identity, "inputs": [tensor(name, "FP32", values)]}
    status, answer = client.call("/v2/models/m/labels", json.dumps(body).encode())
    return status, answer.decode()


def test_logged_rows_have_what_was_asked_and_answered_and_preprocessing_reads_them(model, tmp_path):
    raw = [tensor(name, "BYTES", values) for name, values in RAW.items()]
    with serving(model, log_requests=str(tmp_path / "log"), log_share=1.0) as client:
        answer = ask(client, raw, "mine")
    rows, scores = rows_in(tmp_path / "log"), answer["outputs"][0]["data"]
    for number, row in enumerate(rows):
        assert {name: row[name] for name in RAW} == {n: v[number] for n, v in RAW.items()}
        assert [row[f"served_{name}"] for name in ("id", "row", "version")] == ["mine", number, "1"]
        assert row["served_click"] == pytest.approx(scores[number])
    # Labels come later, from elsewhere, and are joined by the id.
    labels = ["served_id,served_row,bought"] + [f"mine,{row},{row % 2}" for row in range(3)]
    (tmp_path / "labels.csv").write_text("\n".join(labels) + "\n")
    table = {
        "sources": {
            "served": {"files": str(tmp_path / "log/*.jsonl"), "format": "jsonl"},
            "labels": {"files": str(tmp_path / "labels.csv")},
        },
        "query": "SELECT served.*, bought FROM served JOIN labels USING (served_id, served_row)",
        "order_by": [
            "CAST(served_time AS DOUBLE)",
            "text_order(served_id)",
            "CAST(served_row AS BIGINT)",
        ],
        "label": {"name": "bought"},
        "numerical": [{"name": "a", "transforms": [{"fill": 0}]}],
        "categorical": ["narrow", {"name": "three", "separator": "|"}],
        "split": {"by": "fraction", "train": 0.67},
    }
    files = build(tmp_path / "data", table, "frequency_limit=1")
    assert np.frombuffer(files["train/label.bin"], np.bool_).tolist() == [False, True]
    assert np.frombuffer(files["train/numerical.bin"], "<f2").tolist() == [0.5, 2.0]
    assert np.frombuffer(files["test/numerical.bin"], "<f2").tolist() == [0.0]


def test_a_request_of_features_is_logged_by_their_names(model, tmp_path):
    features = [
        tensor("numerical", "FP32", [[0.5, 2.0]]),
        tensor("ids", "INT64", [[1001, 3, 4, 0, 1, 2, 5]]),
        tensor("list", "INT64", [[7, 0, -1]]),
        tensor("tags", "INT64", [[-1, -1, -1]]),
    ]
    with serving(model, log_requests=str(tmp_path), log_share=1.0) as client:
        answer = ask(client, features)
    [row] = rows_in(tmp_path)
    assert row["served_id"] == answer["id"]
    assert {name: row[name] for name in RAW} == {
        **{"a": 0.5, "b": 2.0, "one": 1001, "three": [3, 4, 0], "list": [7, 0]},
        **{"several": [1, 2], "narrow": 5, "tags": []},
    }


def test_labels_by_the_id_of_a_request_tell_the_calibration(model, tmp_path):
    raw = [tensor(name, "BYTES", values) for name, values in RAW.items()]
    with serving(model, log_requests=str(tmp_path), log_share=1.0) as client:
        first, second = ask(client, raw, "mine"), ask(client, raw)
        assert label(client, "mine", "click", [1, 0, 1])[0] == 200
        for identity, name, values, status, problem in (
            ("mine", "click", [1, 0, 1], 404, "no request with the id 'mine' is logged, or its"),
            ("other", "click", [1], 404, "no request with the id 'other'"),
            (
                second["id"],
                "price",
                [1],
                400,
                "'price' is no output with probabilities; those are 'click'",
            ),
            (second["id"], "click", [1, 0], 400, "want 3 numbers from 0 to 1"),
            (second["id"], "click", [2, 1, 0], 400, "want 3 numbers from 0 to 1"),
        ):
            found = label(client, identity, name, values)
            assert (found[0], problem in found[1]) == (status, True), found
        found = metrics(client)
    of = '{output="click",version="1"}'
    assert found[f"serving_logged_rows_total{of}"] == 6
    assert found[f"serving_labelled_rows_total{of}"] == 3
    assert found[f"serving_labels_total{of}"] == 2
    scores = sum(first["outputs"][0]["data"])
    assert found[f"serving_labelled_scores_total{of}"] == pytest.approx(scores, abs=1e-5)
    assert found[f"serving_logged_scores_total{of}"] == pytest.approx(2 * scores, abs=1e-5)


def test_the_share_of_ids_that_the_model_does_not_know_is_counted_by_feature(model, tmp_path):
    raw = [tensor(name, "BYTES", values) for name, values in RAW.items()]
    with serving(model, log_requests=str(tmp_path / "log"), log_share=1.0) as client:
        ask(client, raw)
        client.stop(5.0)
        found = client.service._metrics_text().decode()
    counts = {
        feature: [
            float(re.search(rf'serving_{name}_total{{feature="{feature}"}} (\S+)', found)[1])
            for name in ("logged_ids", "logged_unknown_ids")
        ]
        for feature in ("one", "narrow", "list")
    }
    # Of one, no value is a key; of narrow, "?" is unknown; of list, two of three, and a row without any.
    assert counts == {"one": [3, 3], "narrow": [3, 1], "list": [3, 2]}


def test_most_requests_are_not_logged_and_none_without_the_option(model, tmp_path):
    raw = [tensor(name, "BYTES", values) for name, values in RAW.items()]
    with serving(model, log_requests=str(tmp_path / "log"), log_share=1e-9) as client:
        assert "id" not in ask(client, raw)
        assert ask(client, raw, "mine")["id"] == "mine"
    assert rows_in(tmp_path / "log") == []
    with serving(model) as client:
        assert "id" not in ask(client, raw)
        assert label(client, "mine", "click", [1])[0] == 404
        assert "logged" not in client.call("/metrics")[1].decode()


@pytest.fixture
def version():
    output = SimpleNamespace(name="click", is_binary=True)
    manifest = SimpleNamespace(
        name="m",
        outputs=[output],
        raw={"columns": {"a": 1}},
        fixed=[],
        numerical=[],
        keep_rate=None,
        sequences=[],
    )
    raw = SimpleNamespace(inputs={"a": 1})
    return SimpleNamespace(name="1", model=SimpleNamespace(manifest=manifest, raw=raw))


def logged(version, identity: str, text: str = "x") -> LoggedRequest:
    inputs = {"a": Tensor("a", "BYTES", (1,), [text])}
    request = LoggedRequest(version, InferRequest(inputs, 1, identity), 100, lambda: None)
    request.rows = Rows(torch.zeros(1, 0), torch.zeros(1, 0, dtype=torch.int64))
    request.scores = np.zeros((1, 1), "f4")
    return request


def total(metrics: Metrics, name: str) -> float:
    return float(re.search(rf"(?m)^{name} (\S+)", metrics.text([], {}).decode())[1])


def test_rows_are_dropped_where_the_thread_is_behind_or_the_disk_is_full(
    version, tmp_path, monkeypatch
):
    printed: list[str] = []
    log, found = RequestLog(tmp_path / "log", 1.0, 1 << 20, printed.append), Metrics()
    monkeypatch.setattr(request_log, "MOST_WAITING", 250)
    monkeypatch.setattr(RequestLog, "_run", lambda self: None)
    log.start(found)
    for number in range(4):
        log.put(logged(version, str(number)))
    assert total(found, "serving_log_dropped_rows_total") == 2
    log.stop()
    monkeypatch.undo()
    log, found = RequestLog(tmp_path / "log", 1.0, 1 << 20, printed.append), Metrics()
    (tmp_path / "log").rmdir()
    log.start(found)
    for number in range(3):
        log.put(logged(version, str(number)))
    log.stop()
    assert total(found, "serving_log_dropped_rows_total") == 3
    [line] = printed
    assert line.startswith("served requests are not logged: ")


def test_a_row_that_cannot_be_written_keeps_no_other_from_the_log(version, tmp_path):
    log, found = RequestLog(tmp_path, 1.0, 1 << 20, lambda line: None), Metrics()
    log.start(found)
    log.put(logged(version, "\ud800", "\udfff"))  # half a character each
    broken = logged(version, "broken")
    del broken.rows
    log.put(broken)
    log.put(logged(version, "whole"))
    log.stop()
    assert [row["served_id"] for row in rows_in(tmp_path)] == ["?", "whole"]
    assert total(found, "serving_log_dropped_rows_total") == 1
    assert log._bytes_put == log._bytes_taken


def test_labels_of_a_version_that_answers_no_more_are_counted(version, tmp_path):
    log, found = RequestLog(tmp_path, 1.0, 1 << 20, print), Metrics()
    log.start(found)
    log.put(logged(version, "a"))
    log.stop()
    log.label("a", {"click": Tensor("click", "FP32", (1,), np.ones(1))})
    served = [
        SimpleNamespace(name=str(name), identity="x", model=version.model) for name in range(1, 11)
    ]
    kept = []
    for one in served:
        text = found.text([(one, 1.0)], {}).decode()
        kept.append('serving_labels_total{output="click",version="1"} 1.0' in text)
    assert kept == [True] * 8 + [False] * 2
    assert 'serving_logged_rows_total{output="click",version="1"}' not in text


def test_the_oldest_files_go_and_the_oldest_scores_wait_for_no_label(
    version, tmp_path, monkeypatch
):
    monkeypatch.setattr(request_log, "MOST_REMEMBERED", 5)
    log = RequestLog(tmp_path, 1.0, 8000, print)
    log.start(Metrics())
    for number in range(100):
        log.put(logged(version, str(number), "x" * 300))
    assert list(log._scored) == [str(number) for number in range(95, 100)]
    log.stop()
    files = list(tmp_path.glob("*.jsonl"))
    assert 5 < len(files) <= 9
    assert sum(file.stat().st_size for file in files) <= 8000
    assert [int(row["served_id"]) for row in rows_in(tmp_path)] == list(
        range(100 - len(rows_in(tmp_path)), 100)
    )
