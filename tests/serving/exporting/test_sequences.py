"""Models that take rows of tables and events: exported, they score as training does, over HTTP too."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from configs.serving_schema import Device, Layout, TableType, TritonConfig
from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.dataset.open_dataset import open_dataset
from dataloading.dataset.source import read_with_keys
from serving.client.dataset_requests import RequestEncoder
from serving.exporting.proof_rows import read_proof_rows
from serving.gpu.model import GpuModel
from serving.inference.model import ServedModel
from serving.inference.requests import IdInputs, InputError
from serving.inference.versions import load_version
from serving.manifest import Manifest
from serving.triton.repository import write_repository
from tests.helpers.composed import ranks_of_cpu
from tests.helpers.sequence_models import LONGEST, MODELS, ROWS, overrides, write_sequences
from tests.serving.served_models import export, save_run, served_scores, serving, tensor
from tests.serving.triton.test_repository import part_of

NAMES = [
    pytest.param(name, marks=[] if name in ("din", "hstu") else pytest.mark.doors)
    for name in MODELS
]


@dataclass(frozen=True, slots=True)
class Cases:
    """Runs and model directories, made when they are asked for."""

    data: Path
    # checkpoint of a model, and the scores of the test split by its training step
    run: Callable[[str], tuple[Path, np.ndarray]]
    model: Callable[[str], Path]


@pytest.fixture(scope="module")
def cases(tmp_path_factory) -> Cases:
    root = tmp_path_factory.mktemp("runs")
    data = write_sequences(root / "data")

    @cache
    def run(name: str) -> tuple[Path, np.ndarray]:
        with ranks_of_cpu():
            # With more, all units of TransAct's small MLP end at zero.
            options = [*overrides(name, data), "optimizer.lr=0.1"]
            path, logits = save_run(root / name, options, 6)
        return path, 1 / (1 + np.exp(-logits.astype(np.float64)))

    @cache
    def model(name: str) -> Path:
        export(run(name)[0], root / f"{name}_model")
        return root / f"{name}_model"

    return Cases(data, run, model)


@pytest.fixture(scope="module")
def requests(cases) -> dict[str, Any]:
    """Return the rows of the test split as inputs of features, with times and moments."""
    (path,) = (cases.data / "test").glob("*.parquet")
    table = pq.read_table(path)

    def padded(name: str, dtype: type, value: int) -> np.ndarray:
        rows = table[name].to_pylist()
        matrix = np.full((len(rows), max(map(len, rows))), value, dtype)
        for row, values in zip(matrix, rows, strict=True):
            row[: len(values)] = values
        return matrix

    return {
        "numerical": table["price"].to_numpy().astype(np.float32)[:, None],
        "ids": np.stack([table[name].to_numpy() for name in ("item", "genre", "user")], 1),
        **{n: padded(n, np.int64, -1) for n in ("hist_item", "hist_genre", "query", "tags")},
        "hist_time": padded("hist_time", np.int64, 0),
        "hist_rating": padded("hist_rating", np.float32, 0),
        "history": table["history"].to_numpy(),
    }


@pytest.mark.parametrize("name", NAMES)
def test_models_score_as_their_training_step(name, cases):
    checkpoint, wanted = cases.run(name)
    assert Manifest.read(cases.model(name)).proof["largest_difference"] <= 1e-6
    scores = served_scores(cases.model(name), checkpoint)[:, 0]
    np.testing.assert_allclose(scores, wanted, rtol=0, atol=1e-6)
    assert len(np.unique(scores.round(6))) > 10
    load_version(cases.model(name), "1", None)


@pytest.mark.parametrize("name", NAMES)
def test_requests_of_any_rows_give_the_same_scores(name, cases, requests):
    served = ServedModel.load(cases.model(name))
    read = IdInputs(served.manifest).rows
    # The first row alone has no events, and the other groups and lists of a row may be empty too.
    for rows in (slice(0, 1), slice(3, 4), slice(0, None, 7)):
        some = {name: values[rows] for name, values in requests.items()}
        parts = read(some, len(some["ids"]))
        scores = served.scores(parts)[:, 0].numpy()
        np.testing.assert_allclose(scores, cases.run(name)[1][rows], rtol=0, atol=1e-6)
    ages = requests["history"][:, None] - requests["hist_time"]
    of_ages = {n: v for n, v in requests.items() if n != "history"} | {"hist_time": ages}
    rows = read(of_ages, ROWS["test"])
    both = served.scores(rows.part(0, 5), rows.part(5, ROWS["test"]))[:, 0].numpy()
    np.testing.assert_allclose(both, cases.run(name)[1], rtol=0, atol=1e-6)


def test_the_server_answers_with_the_scores(cases, requests, tmp_path):
    log = tmp_path / "log"
    kinds = {"f": "FP32", "i": "INT64"}
    with serving(cases.model("din"), log_requests=str(log), log_share=1.0) as client:
        inputs = [tensor(n, kinds[v.dtype.kind], v) for n, v in requests.items()]
        status, answer = client.infer(inputs, "din")
        assert status == 200, answer
        (output,) = answer["outputs"]
        np.testing.assert_allclose(output["data"], cases.run("din")[1], rtol=0, atol=1e-6)
        # The client of datasets sends ages.
        _, body = client.call("/v2/models/din")
        metadata = json.loads(body)
        assert [of["max_length"] for of in metadata["parameters"]["sequences"]] == [LONGEST] * 2
        source = open_dataset(FeatureSpec.load(cases.data))
        columns = read_with_keys(source, "test", np.array([[0, ROWS["test"]]]))
        request = RequestEncoder(metadata, source.spec).encode(columns)
        header = {"Inference-Header-Content-Length": str(request.header_length)}
        status, body = client.call("/v2/models/din/infer", request.body, header)
        assert status == 200, body
        scores = np.frombuffer(body[-4 * ROWS["test"] :], "<f4")
        np.testing.assert_allclose(scores, cases.run("din")[1], rtol=0, atol=1e-6)
        inputs[-2] = tensor("hist_rating", "FP32", requests["hist_rating"][:, :1])
        status, answer = client.infer(inputs, "din")
        assert status == 400
        assert answer["error"].startswith("input 'hist_rating' has shape [40, 1], and 'hist_item'")
    lines = [
        json.loads(line)
        for file in log.rglob("*.jsonl")
        for line in file.read_text().split("\n")
        if line
    ]
    assert len(lines) == 2 * ROWS["test"]
    assert lines[0]["hist_time"] == lines[0]["hist_item"] == lines[0]["hist_rating"] == []
    lengths = (requests["hist_item"] >= 0).sum(1)
    assert [len(line["hist_rating"]) for line in lines[: ROWS["test"]]] == lengths.tolist()
    assert [line["history"] for line in lines[: ROWS["test"]]] == requests["history"].tolist()


ROW = {
    "numerical": np.zeros((1, 1), np.float32),
    "ids": np.zeros((1, 3), int),
    "query": np.array([[1]]),
    "tags": np.array([[1, -1]]),
    "hist_item": np.array([[1, 2, -1]]),
    "hist_genre": np.array([[3, 4]]),
    "hist_time": np.array([[20.0, 10.0]], np.float32),
    "hist_rating": np.array([[0.5, 1.0, np.nan]], np.float32),
}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"hist_genre": np.array([[3]])},
            "feature 'hist_genre', row 0: 1 events, and 'hist_item' has 2; want equally many in all inputs of 'history'",
        ),
        (
            {"hist_item": np.array([[-1, 1, 2]])},
            "feature 'hist_item', row 0: -1 before an id; want it behind the last one only",
        ),
        (
            {"query": np.ones((1, 7), int)},
            "feature 'query', row 0: 7 events; want at most 6, the latest ones",
        ),
        (
            {"hist_time": np.array([[20.0, -1.0]])},
            "'hist_time': an event of age -1.0 at row 0; want only events before the moment of their row",
        ),
        (
            {"hist_time": np.array([[5, 9]]), "history": np.array([9])},
            "'hist_time': an event of time 9 at row 0, whose moment is 9; want only events before the moment of their row",
        ),
        (
            {"hist_time": np.array([[9, 5]]), "history": np.array([10])},
            "'hist_time': an event of time 5 after one of 9 at row 0; want the oldest event first",
        ),
        (
            {"history": np.array([10])},
            "input 'hist_time' has no integers; want INT32 or INT64",
        ),
        (
            {"hist_rating": np.array([[1.0, np.inf]])},
            "'hist_rating': an event has inf at row 0; want a finite number that float32 can hold",
        ),
    ],
)
def test_bad_events_are_refused(changed, message, cases):
    read = IdInputs(Manifest.read(cases.model("din"))).rows
    read(ROW, 1)
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        read(ROW | changed, 1)


def test_proof_rows_have_the_numbers_of_events(cases, requests):
    _, rows = read_proof_rows(cases.model("din"), Manifest.read(cases.model("din")))
    is_event = requests["hist_item"] >= 0
    np.testing.assert_array_equal(
        rows.numbers["hist_rating"].values, requests["hist_rating"][is_event]
    )


def test_narrow_tables_are_proved(cases, tmp_path):
    proof = export(cases.run("din")[0], tmp_path / "int8", dtype=TableType.int8).proof
    assert 0 < proof["largest_difference"] <= 2e-3


def test_what_takes_no_rows_of_tables_says_so(cases, tmp_path):
    model, manifest = cases.model("din"), Manifest.read(cases.model("din"))
    with pytest.raises(ValueError, match=r"takes rows of table 'item' itself.*device=cpu"):
        GpuModel.load(model, manifest, max_batch=64)
    for options in ({"layout": Layout.ensemble}, {"device": Device.cuda}):
        config = TritonConfig(model=str(model), output=str(tmp_path / "triton"), **options)
        with pytest.raises(ValueError, match="use layout=monolithic device=cpu"):
            write_repository(config)
    with pytest.raises(ValueError, match=r"^onnx=true: .* ONNX lacks"):
        export(cases.run("din")[0], tmp_path / "model", onnx=True)


def test_scores_that_depend_on_the_rows_beside_them_are_not_exported(cases, tmp_path):
    options = [*overrides("hstu", cases.data), "model.attention_norm=batch_max"]
    with ranks_of_cpu():
        checkpoint, _ = save_run(tmp_path / "run", options, 1)
    with pytest.raises(
        ValueError,
        match=r"^model.attention_norm=batch_max: .*; train with model.attention_norm=length or",
    ):
        export(checkpoint, tmp_path / "model")


def test_tritons_part_scores_events_by_their_ages(cases, requests, tmp_path):
    write_repository(TritonConfig(model=str(cases.model("din")), output=str(tmp_path / "triton")))
    text = (tmp_path / "triton" / "din" / "config.pbtxt").read_text()
    assert "model_warmup" not in text
    ages = (requests["history"][:, None] - requests["hist_time"]).astype(np.float32)
    inputs = {name: torch.from_numpy(values) for name, values in requests.items()}
    inputs |= {"hist_time": torch.from_numpy(ages)}
    del inputs["history"]
    assert all(f'"{name}"' in text for name in inputs)
    assert '"history"' not in text
    bad = inputs | {"hist_genre": torch.full_like(inputs["hist_genre"], -1)}
    good, refused = part_of(tmp_path / "triton", "din")([inputs, bad])
    (scores,) = good.values()
    np.testing.assert_allclose(scores[:, 0], cases.run("din")[1], rtol=0, atol=1e-6)
    assert refused.startswith("feature 'hist_genre'")
