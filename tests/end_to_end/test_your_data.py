"""All commands of docs/your_data.md on a shop, run in order; test_weights_road.py runs those of ids with weights."""

import csv
import json
import re
import shlex
from pathlib import Path

import pytest
from sklearn.metrics import roc_auc_score

from dataloading.dataset.feature_spec import FeatureSpec
from tests.helpers.command import ROOT, Ended, run_command, run_module, start_command

pytestmark = pytest.mark.doors

PAGE = (ROOT / "docs" / "your_data.md").read_text().partition("## Ids with weights")[0]


def bought(folder: Path) -> list[int]:
    with (folder / "shop.csv").open() as rows:
        return [int(row["bought"]) for row in csv.DictReader(rows)]


def follow(words: list[str]) -> Ended:
    """Run a command of the page, in this process if it starts none itself."""
    assert words[0] == "python"
    match words[1:]:
        case ["-m", "sweep", *_]:
            # The pictures of the trials would take as long as their training.
            return start_command(*words[1:], "log.pictures=false", directory=Path.cwd())
        case ["-m", module, *arguments]:
            return run_module(module, *arguments)
        case ["dlrm.py", *arguments]:
            return run_command(*arguments)
    raise AssertionError(words)


def test_the_page_runs_from_the_csv_to_the_scores_of_a_chosen_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert [kind for kind, _ in blocks] == [
        *("python", "bash", "yaml", "bash", "bash", "bash"),
        *("yaml", "bash", "bash", "python", "bash"),
    ]
    files = iter(["mine/dataset/shop.yaml", "space.yaml"])
    for kind, block in blocks:
        if kind == "yaml":
            name = next(files)
            assert f"`{name}`" in PAGE
            (tmp_path / name).write_text(block)
            continue
        if kind == "python":
            exec(compile(block, "your_data.md", "exec"), {})
            continue
        ended = follow(shlex.split(block))
        assert not ended.exit_code, ended.err
    (summary,) = tmp_path.glob("runs/dlrm/*/summary.json")
    assert json.loads(summary.read_text())["test_auc"] > 0.7
    fitted, applied = (FeatureSpec.load(tmp_path / "data" / name) for name in ("shop", "next"))
    assert applied.fingerprint() == fitted.fingerprint()
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
    # The next day, as docs/every_day.md has it, without another option at the first fit.
    with (tmp_path / "shop.csv").open() as rows:
        (tmp_path / "day.csv").write_text("".join([*rows][:2000]))
    extend = "dataset=shop source=day.csv output=data/day mode=extend fitted=data/shop"
    ended = run_module("preproc", "--config-dir", "mine", *extend.split())
    assert not ended.exit_code, ended.err
