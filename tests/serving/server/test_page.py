"""The commands of docs/serving.md, from the table of docs/your_data.md to the score of a raw row."""

import asyncio
import csv
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from configs.serving_schema import AccuracyConfig
from serving.client.accuracy import evaluate
from serving.exporting.dense import load_dense
from serving.exporting.proof import TrainingPath, looked_up_rows, proof_batches
from serving.exporting.run import open_trained
from serving.exporting.tables import write_tables
from serving.manifest import Manifest
from tests.helpers.command import ROOT, run_command
from tests.preproc.table.test_pipeline import build
from tests.serving.served_models import export, serving

pytestmark = pytest.mark.doors

SMALL = ["model.embedding_dim=8", "model.bottom_mlp=[8]", "model.top_mlp=[8,1]", "device=cpu"]


def blocks(page: str, kind: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text()
    found = re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    return [block for named, block in found if named == kind]


def options(words: list[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for word in words if "=" in word)


def described(source: Path) -> dict:
    """Return the table of docs/your_data.md."""
    text = blocks("your_data.md", "yaml")[0]
    return yaml.safe_load(text.replace("${source}", str(source)))["table"]


def preprocess(source: Path, output: Path, *overrides: str, **changes) -> None:
    build(output, described(source) | changes, "frequency_limit=2", "plot=false", *overrides)


def training_score(row: dict[str, str], checkpoint: str, folder: Path) -> float:
    """Return the score of a raw row by preprocessing and the training path."""
    with (folder / "new.csv").open("w", newline="") as stream:
        lines = csv.writer(stream)
        lines.writerow(["bought", *row])
        lines.writerows([[number % 2, *row.values()] for number in range(8)])
    halves = {"by": "fraction", "train": 0.5}
    fit = ["mode=transform", f"fitted={folder / 'data/shop'}"]
    preprocess(folder / "new.csv", folder / "data/new", *fit, split=halves)
    trained = open_trained(Path(checkpoint).resolve(), str(folder / "data/new"))
    (batch,) = proof_batches(trained.source, "test", 1)
    numbers = looked_up_rows(trained.tables, [batch])
    (folder / "rows").mkdir()
    tables = Manifest.read(folder / "models/1").tables
    rows, _ = write_tables(folder / "rows", tables, trained.saved.index, "fp32", numbers)
    dense = load_dense(trained.config, trained.source.spec, trained.saved)
    path = TrainingPath(trained.tables, numbers, rows, dense, trained.tasks, trained.source.spec)
    return path.scores(batch).item()


def predicted_score(row: dict[str, str]) -> float:
    """Return the score of a raw row by the page's last command."""
    with Path("new.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([row, row.values()])
    (words,) = [shlex.split(block) for block in blocks("serving.md", "bash")[2:3]]
    ended = run_command(*words[2:], "device=cpu")
    assert ended.exit_code == 0, ended.err
    with Path(options(words)["output"]).open() as stream:
        (scored,) = csv.DictReader(stream)
    return float(scored["score"])


def test_the_page_runs_from_a_checkpoint_to_the_score_of_training(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train, export_it, serve = map(shlex.split, blocks("serving.md", "bash")[0].splitlines())
    script = blocks("your_data.md", "python")[0]
    exec(script.replace("20_000", "1_000"), {})  # the code of that page
    preprocess(tmp_path / "shop.csv", tmp_path / "data/shop")
    assert train[:2] == ["python", "dlrm.py"]
    assert run_command(*train[2:], *SMALL).exit_code == 0
    assert export_it[:3] == ["python", "-m", "serving.export"]
    wanted = options(export_it)
    manifest = export(wanted.pop("checkpoint"), wanted.pop("output"), **wanted)
    assert manifest.proof["rows"] > 100
    assert serve[:3] == ["python", "-m", "serving.run"]
    (curl,) = [shlex.split(block) for block in blocks("serving.md", "bash")[1:2]]
    assert (curl[0], curl[2]) == ("curl", "-d")
    with serving(Path(options(serve)["model"])) as client:
        status, answer = client.call(curl[1].removeprefix("localhost:8000"), curl[3].encode())
        measured = next(block for block in blocks("serving.md", "") if "evaluate_accuracy" in block)
        (words,) = [line for line in measured.splitlines() if "evaluate_accuracy" in line]
        asked = AccuracyConfig(**options(shlex.split(words)), url=f"http://127.0.0.1:{client.port}")
        found = asyncio.run(evaluate(asked))
        trained = json.loads(Path(options(train)["run_dir"], "summary.json").read_text())
        metadata = json.loads(client.call("/v2/models/dlrm")[1])
        # A client that knows nothing of the model fills every input that is listed, or every feature.
        for listed in (metadata["inputs"], metadata["parameters"]["features"]):
            filled = []
            for entry in listed:
                shape = [abs(size) for size in entry["shape"]]
                value = None if entry["datatype"] == "BYTES" else 0
                filled.append(entry | {"shape": shape, "data": [value] * shape[-1]})
            sent = client.call("/v2/models/dlrm/infer", json.dumps({"inputs": filled}).encode())
            assert sent[0] == 200, sent[1]
        assert found["outputs"]["bought"]["auc"] == pytest.approx(
            trained["best_test_auc"], abs=1e-6
        )
    assert status == 200, answer
    found = json.loads(answer)
    shown = json.loads(blocks("serving.md", "")[0])
    assert found["model_version"] == shown["model_version"]
    assert found["outputs"][0].keys() == shown["outputs"][0].keys()
    row = {entry["name"]: entry["data"][0] for entry in json.loads(curl[3])["inputs"]}
    checkpoint = options(export_it)["checkpoint"]
    score = training_score(row, checkpoint, tmp_path)
    assert found["outputs"][0]["data"] == pytest.approx([score], abs=1e-6)
    assert 0.05 < score < 0.95
    assert predicted_score(row) == pytest.approx(score, abs=1e-6)
    features = {entry["name"]: entry["datatype"] for entry in metadata["parameters"]["features"]}
    assert features == {"ids": "INT32", "numerical": "FP32", "tastes": "INT32"}
    assert metadata["inputs"] == metadata["parameters"]["raw"]
    raw = {entry.pop("name"): entry for entry in metadata["parameters"]["raw"]}
    assert raw == {name: {"datatype": "BYTES", "shape": [-1]} for name in row}
