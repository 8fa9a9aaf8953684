"""Histories as raw values: a request with a user's last values has the score that `mode=predict` gives the row."""

import csv
import json
from types import SimpleNamespace

import numpy as np
import pytest

from serving.inference.versions import Version
from serving.manifest import Feature, Manifest
from serving.server.service import _metadata
from tests.helpers.command import run_command
from tests.preproc.table.test_history import described, random_rows, reference, write_rows
from tests.preproc.table.test_pipeline import build
from tests.serving.served_models import export, serving, tensor

LENGTH = 3
SMALL = [
    *("model.embedding_dim=8", "model.bottom_mlp=[8]", "model.top_mlp=[8,1]", "device=cpu"),
    "log.pictures=false",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the rows of a table, and the folder of its dataset, run and model."""
    root = tmp_path_factory.mktemp("histories")
    rows = random_rows(5, 200)
    table = described(write_rows(root / "t.csv", rows), length=LENGTH)
    # A rare value is an item with id 0, which is not the end of a history.
    build(root / "data", table, "frequency_limit=3")
    run = [f"data.path={root / 'data'}", f"run_dir={root / 'run'}", "train.batch_size=20"]
    ended = run_command(*run, *SMALL, "optimizer.lr=0.1", "optimizer.embedding_lr=1")
    assert ended.exit_code == 0, ended.err
    export(root / "run/checkpoints/best", root / "models/1", fitted=str(root / "data"))
    return root, rows


@pytest.mark.parametrize("is_mixed", [True, False])
def test_a_name_is_listed_once(is_mixed):
    """A ragged feature has the name of its column; without other features it cannot be sent as ids."""
    features = [Feature("tags", 5, None)] + [Feature("city", 3, 1)] * is_mixed
    column = {"name": "tags", "datatype": "BYTES", "shape": [-1]}
    manifest = Manifest(
        name="m",
        model="m",
        numerical=[],
        categorical=features,
        keep_rate=None,
        outputs=[],
        dtype="fp32",
        tables=[],
        raw={"columns": {"tags": 1}},
    )
    raw = SimpleNamespace(describe_inputs=lambda: [column])
    found = _metadata(Version("1", SimpleNamespace(manifest=manifest, raw=raw), "0"), ["1"])
    kinds = [(entry["name"], entry["datatype"]) for entry in found["parameters"]["features"]]
    assert kinds == ([("ids", "INT32"), ("tags", "INT32")] if is_mixed else [])
    assert found["inputs"] == [column]
    assert found["parameters"]["raw"] == [column]


def predicted(root) -> np.ndarray:
    """Return the scores of the test split by `mode=predict`."""
    best = f"checkpoint.restore={root / 'run/checkpoints/best'}"
    output = root / "scores.csv"
    output.unlink(missing_ok=True)
    options = ["mode=predict", f"config={root / 'run/config.yaml'}", best, f"output={output}"]
    ended = run_command(*options, "device=cpu")
    assert ended.exit_code == 0, ended.err
    with output.open() as stream:
        return np.array([float(line["score"]) for line in csv.DictReader(stream)])


def inputs_of(rows, histories, width: int) -> list[dict]:
    past = [[*items, *[""] * (width - len(items))] for items in histories]
    return [
        tensor("user", "BYTES", [row.user for row in rows]),
        tensor("item", "BYTES", [row.item for row in rows]),
        tensor("past", "BYTES", past),
    ]


def test_served_histories_have_the_scores_of_predict(trained):
    root, rows = trained
    tested = slice(len(rows) // 2, None)
    wanted = predicted(root)
    histories = reference(rows, LENGTH)[tested]
    # Longer than the model reads: only the most recent values count.
    longer = reference(rows, LENGTH + 2)[tested]
    assert {len(items) for items in histories} == {0, 1, 2, 3}
    assert len(set(wanted.round(6))) > 20
    with serving(root / "models") as client:
        metadata = json.loads(client.call("/v2/models/dlrm")[1])
        raw = {entry["name"]: entry["shape"] for entry in metadata["parameters"]["raw"]}
        assert raw == {"user": [-1], "item": [-1], "past": [-1, -1]}
        for items, width in ((histories, LENGTH), (longer, LENGTH + 2)):
            status, answer = client.infer(inputs_of(rows[tested], items, width))
            assert status == 200, answer
            scores = answer["outputs"][0]["data"]
            np.testing.assert_allclose(scores, wanted, rtol=0, atol=1e-6)
        # The order of a history counts in no sum, but which values are the last ones does.
        turned = [items[::-1] for items in longer]
        status, answer = client.infer(inputs_of(rows[tested], turned, LENGTH + 2))
        assert status == 200
        assert np.abs(np.array(answer["outputs"][0]["data"]) - wanted).max() > 1e-4
