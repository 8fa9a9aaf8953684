"""From libffm to a served model that weighs ids by their values: the page's commands, and one score by every way out."""

import csv
import json
import random
import re
import shlex
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.dataset.open_dataset import open_dataset
from nn.library.loaded_run import Run
from tests.helpers.command import ROOT, run_command, run_module
from tests.serving.served_models import serving, tensor

pytestmark = pytest.mark.doors

PAGE = (ROOT / "docs" / "your_data.md").read_text()


def write_lines(path: str, rows: int, seed: int) -> list[list[tuple[int, float]]]:
    """Write rows whose label depends on the values of their ids; return these."""
    draw, written = random.Random(seed), []
    with open(path, "w") as lines:
        for _ in range(rows):
            items = [
                (draw.randrange(30), round(draw.random(), 2)) for _ in range(draw.randint(1, 4))
            ]
            label = int(sum(w if i % 2 else -w for i, w in items) > 0)
            tags = " ".join(f"3:{i}:{w}" for i, w in items)
            lines.write(f"{label} {tags} 4:{draw.randrange(5)}:1\n")
            written.append(items)
    return written


def test_ids_with_weights_are_trained_predicted_and_served(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_lines("clicks.ffm", 2000, 1)
    rows = write_lines("new.ffm", 50, 2)
    block = re.search(r"## Ids with weights\n.*?```bash\n(.*?)```", PAGE, flags=re.DOTALL)
    assert block is not None
    for line in block[1].splitlines():
        match shlex.split(line)[1:]:
            case ["-m", module, *arguments]:
                ended = run_module(module, *arguments)
            case ["dlrm.py", *arguments]:
                ended = run_command(*arguments, "log.pictures=false", "device=cpu")
        assert not ended.exit_code, ended.err
    with open("scores.csv") as stream:
        wanted = [float(row["score"]) for row in csv.DictReader(stream)]
    assert len(wanted) == len(rows)
    signs = [sum(w if i % 2 else -w for i, w in items) > 0 for items in rows]
    assert np.mean([(score > 0.5) == sign for score, sign in zip(wanted, signs, strict=True)]) > 0.8
    fields = [line.split()[1:] for line in Path("new.ffm").read_text().splitlines()]
    parts = [[item.split(":") for item in items] for items in fields]
    raw = {
        "f3": [" ".join(i for f, i, _ in items if f == "3") for items in parts],
        "f3_value": [" ".join(w for f, _, w in items if f == "3") for items in parts],
        "f4": [items[-1][1] for items in parts],
    }
    run = Run.load("runs/clicks", fitted="data/clicks")
    assert run.predict(pa.table(raw))["score"].to_pylist() == pytest.approx(wanted, abs=1e-6)
    transform = f"source=new.ffm output=data/new mode=transform fitted=data/clicks {' '.join(MINE)}"
    ended = run_module("preproc", *transform.split())
    assert not ended.exit_code, ended.err
    spec = FeatureSpec.load("data/new")
    columns = open_dataset(spec).read("test", np.array([[0, len(rows)]]))
    names = [feature.name for feature in spec.categorical]
    ids, single = (columns.ids[names.index(name)] for name in ("f3", "f4"))
    places = np.arange(4) < columns.lengths[names.index("f3")][:, None]
    of_ids, weights = np.full(places.shape, -1), np.zeros(places.shape, np.float32)
    of_ids[places], weights[places] = ids, columns.events[0]
    inputs = [
        tensor("ids", "INT64", single[:, None].astype(np.int64)),
        tensor("f3", "INT64", of_ids),
        tensor("f3_value", "FP32", weights),
    ]
    with serving(Path("models")) as client:
        status, answer = client.infer(inputs, "embedding_mlp")
        assert status == 200, answer
        assert answer["outputs"][0]["data"] == pytest.approx(wanted, abs=1e-6)
        texts = [{"name": n, "datatype": "BYTES", "shape": [50], "data": v} for n, v in raw.items()]
        status, answer = client.infer(texts, "embedding_mlp")
        assert status == 200, answer
        assert answer["outputs"][0]["data"] == pytest.approx(wanted, abs=1e-6)
        texts[1]["data"] = [value.replace("0.", "-0.", 1) for value in raw["f3_value"]]
        status, answer = client.infer(texts, "embedding_mlp")
        assert status == 400
        assert "want a weight that is not negative" in json.dumps(answer)


MINE = ("--config-dir", "mine", "dataset=clicks", "plot=false")
