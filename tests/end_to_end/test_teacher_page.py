"""The commands of docs/tasks_and_metrics.md on a teacher: trained, its scores joined to the rows, and learnt by a student."""

import json
import random
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from dataloading.dataset.feature_spec import FeatureSpec
from tests.helpers.command import ROOT, run_command, run_module

pytestmark = pytest.mark.doors

PAGE = (ROOT / "docs" / "tasks_and_metrics.md").read_text()
SECTION = PAGE.partition("## Scores of a teacher\n")[2].partition("\n## ")[0]


def follow(*words: str) -> None:
    if words[0] == "main.py":
        ended = run_command(*words[1:], "log.pictures=false", "device=cpu", recipe="main")
    else:
        ended = run_module(words[1], *words[2:], "plot=false")
    assert not ended.exit_code, ended.err


def test_a_student_learns_from_scores_of_the_training_rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draw = random.Random(3)
    with open("orders.csv", "w") as rows:
        rows.write("order,bought,city,item\n")
        for order in range(3000):
            city, item = draw.randrange(6), draw.randrange(40)
            rows.write(
                f"{order},{int(draw.random() < 0.15 + 0.6 * ((city + item) % 2))},c{city},i{item}\n"
            )
    (_, commands), (_, description) = re.findall(
        r"^```(\w+)\n(.*?)^```", SECTION, flags=re.MULTILINE | re.DOTALL
    )
    Path("mine/dataset").mkdir(parents=True)
    Path("mine/dataset/taught.yaml").write_text(description)
    lines = [line for line in description.splitlines() if "teacher" not in line]
    plain = "\n".join(lines).replace(
        'SELECT o.*, s.score FROM orders o JOIN scores s USING ("order")', "FROM orders"
    )
    plain = plain.replace(", scores: {files: scores.parquet}", "")
    Path("mine/dataset/plain.yaml").write_text(plain)
    fit = "-m preproc --config-dir mine dataset=plain source=orders.csv output=data/plain"
    follow(*fit.split())
    train = "main.py model.name=embedding_mlp model.embedding_dim=8 data.path=data/plain run_dir=runs/teacher"
    follow(*train.split(), "train.batch_size=100", "train.epochs=3")
    for line in commands.splitlines():
        follow(*shlex.split(line)[1:])
    spec = FeatureSpec.load("data/taught")
    assert [column.name for column in spec.teachers] == ["old_score"]
    scores = np.fromfile("data/taught/train/old_score.bin", "<f4")
    labels = np.fromfile("data/taught/train/label.bin", "i1")
    assert scores[labels == 1].mean() > scores[labels == 0].mean() + 0.1
    assert json.loads(Path("runs/student/summary.json").read_text())["test_auc"] > 0.6
    # New rows, which no teacher has scored.
    predict = "main.py mode=predict config=runs/student/config.yaml checkpoint.restore=runs/student/checkpoints/best"
    follow(*predict.split(), "source=orders.csv", "output=new.csv")
