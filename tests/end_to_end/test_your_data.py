"""All commands of docs/your_data.md, run in order."""

import csv
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

from sklearn.metrics import roc_auc_score

from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.dataset.kept_columns import KeptColumns

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "your_data.md").read_text()


def bought(folder: Path) -> list[int]:
    with (folder / "shop.csv").open() as rows:
        return [int(row["bought"]) for row in csv.DictReader(rows)]


def test_the_page_runs_from_the_csv_to_the_scores_of_a_chosen_model(tmp_path):
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert [kind for kind, _ in blocks] == [
        *("python", "yaml", "bash", "bash", "bash"),
        *("python", "bash", "yaml", "bash", "bash", "bash"),
    ]
    (tmp_path / "mine" / "dataset").mkdir(parents=True)
    files = iter(["mine/dataset/shop.yaml", "space.yaml"])
    for kind, block in blocks:
        if kind == "yaml":
            name = next(files)
            assert f"`{name}`" in PAGE
            (tmp_path / name).write_text(block)
            continue
        command = [sys.executable, "-c", block]
        if kind == "bash":
            words = shlex.split(block.replace("dlrm.py", str(ROOT / "dlrm.py")))
            assert words[0] == "python"
            command = [sys.executable, *words[1:]]
        environment = {"PYTHONPATH": str(ROOT), "PATH": "", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    (summary,) = tmp_path.glob("runs/dlrm/*/summary.json")
    assert json.loads(summary.read_text())["test_auc"] > 0.7
    fitted, *applied = (
        FeatureSpec.load(tmp_path / "data" / name) for name in ("shop", "next", "new")
    )
    assert {spec.fingerprint() for spec in applied} == {fitted.fingerprint()}
    assert KeptColumns(tmp_path / "data/new", "test", 20_000).names == ["item"]
    assert (tmp_path / "data" / "shop" / "report.png").stat().st_size > 10_000
    sweep = tmp_path / "sweeps" / "dlrm-space"
    result = json.loads((sweep / "sweep.json").read_text())
    assert len(result["trials"]) == 4
    assert result["test"]["test_auc"] > 0.7
    assert (tmp_path / "trials.png").stat().st_size > 10_000
    with (tmp_path / "scores.csv").open() as scores, (tmp_path / "new.csv").open() as rows:
        scored = list(csv.DictReader(scores))
        assert [row["item"] for row in scored] == [row["item"] for row in csv.DictReader(rows)]
    assert roc_auc_score(bought(tmp_path), [float(row["score"]) for row in scored]) > 0.7
