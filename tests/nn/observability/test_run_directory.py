"""Files of a run directory, read back."""

import json
import math
import os
import shutil
import subprocess
from dataclasses import fields
from logging import getLogger
from pathlib import Path

import numpy as np
import pytest
import torch

from nn.distributed.process_group import Ranks
from nn.metrics.prediction_curves import ScoreBuckets, describe_predictions
from nn.observability.environment import (
    environment,
    git_commit,
)
from nn.observability.records import records_until
from nn.observability.run_directory import (
    SUMMARY_KEYS,
    RunDirectory,
    to_json_value,
)
from nn.planning.memory_estimate import RankMemory
from nn.planning.plan import TablePlan

SUMMARY = dict.fromkeys(SUMMARY_KEYS, 1.0) | {"peak_hbm_bytes": None, "step_ms": math.nan}
TRAIN = {"step": 200, "epoch": 0, "loss": 0.123456789, "train_auc": 0.75, "hbm_bytes": None}
TEST = {"step": 200, "epoch": 0, "test_auc": math.nan, "test_log_loss": 0.5, "test_rows": 64}


def open_recorder(run_dir: Path, **changes) -> RunDirectory:
    settings = {"rank": 0, "config_yaml": "seed: 1\n", "environment": {"recipe": "dlrm"}}
    settings["logger"] = getLogger("test")
    if changes.get("rank", 0) == 0:
        run_dir.mkdir(parents=True, exist_ok=True)
    return RunDirectory(run_dir, **(settings | changes))


def strict_json(text: str):
    """Parse JSON without NaN, which Python accepts and other readers refuse."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_metrics_open_with_the_environment_and_every_line_is_there_at_once(tmp_path):
    with open_recorder(tmp_path / "a" / "run") as recorder:
        recorder.write_train(TRAIN)
        recorder.write_test(TEST)
        lines = (tmp_path / "a" / "run" / "metrics.jsonl").read_text().splitlines()
    assert [strict_json(line) for line in lines] == [
        {"recipe": "dlrm"},
        TRAIN | {"loss": 0.1234568},
        TEST | {"test_auc": None},
    ]


def test_numbers_keep_seven_digits_and_no_json_reader_meets_a_nan():
    record = {"lr": 1e-5 / 3, "speed": 1234567.89, "steps": 10**12, "parts": (math.inf, 0.5)}
    wanted = {"lr": 3.333333e-06, "speed": 1234568.0, "steps": 10**12, "parts": [None, 0.5]}
    assert to_json_value(record) == wanted


def test_planned_memory_is_written_with_its_sum(tmp_path):
    terms = {field.name: index for index, field in enumerate(fields(RankMemory))}
    with open_recorder(tmp_path) as recorder:
        recorder.write_plan([], [RankMemory(**terms)])
    assert strict_json((tmp_path / "memory.json").read_text()) == [
        terms | {"total": sum(terms.values())}
    ]


def test_config_and_plan_are_written_as_given(tmp_path):
    row = TablePlan("cat_0", 1000, 128, 1.0, "column_wise", "fused", (0, 1), (256, 256))
    with open_recorder(tmp_path) as recorder:
        recorder.write_plan([row], [])
    assert (tmp_path / "config.yaml").read_text() == "seed: 1\n"
    assert strict_json((tmp_path / "plan.json").read_text()) == [
        {
            "table": "cat_0",
            "num_embeddings": 1000,
            "embedding_dim": 128,
            "hotness": 1.0,
            "sharding": "column_wise",
            "kernel": "fused",
            "ranks": [0, 1],
            "bytes_per_rank": [256, 256],
            "expansion_bytes": 0,
            "num_vectors": 1.0,
            "tier": "device",
            "cache_rows": 0,
            "host_bytes_per_rank": [],
            "fetched_rows": 0.0,
            "disk_bytes_per_rank": [],
            "staged_rows": 0.0,
            "journal_rows": 0.0,
            "memories": 1,
            "exchange": "vectors",
            "batch_rows": [],
            "group_rows": [],
            "part_events": [],
        }
    ]


def test_the_end_leaves_a_summary_and_a_picture(tmp_path):
    with open_recorder(tmp_path) as recorder:
        recorder.write_train(TRAIN)
        recorder.finish(SUMMARY)
    summary = strict_json((tmp_path / "summary.json").read_text())
    assert summary == SUMMARY | {"step_ms": None}
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_that_is_killed_while_it_draws_has_no_summary(tmp_path, monkeypatch):
    """The summary shows that the results are complete, so that the same command completes them otherwise."""

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("nn.observability.run_directory.draw_curves", end)
    with open_recorder(tmp_path) as recorder:
        recorder.write_train(TRAIN)
        with pytest.raises(KeyboardInterrupt):
            recorder.finish(SUMMARY)
    assert not (tmp_path / "summary.json").exists()


def test_curves_that_cannot_be_drawn_do_not_cost_the_summary(tmp_path, caplog):
    with open_recorder(tmp_path) as recorder:
        recorder.write_train(TRAIN)
        (tmp_path / ".curves.png.tmp").mkdir()
        recorder.finish(SUMMARY)
    assert (tmp_path / "summary.json").exists()
    (message,) = caplog.messages
    assert message.startswith(f"{tmp_path / 'curves.png'} could not be drawn: Is a directory: ")


DESCRIBED = {
    "recipe": "dlrm",
    "split": "test",
    "step": 8,
    "tasks": {"label": describe_predictions(ScoreBuckets(*np.ones((4, 9))))},
}


def test_the_latest_predictions_are_kept_and_drawn(tmp_path):
    with open_recorder(tmp_path) as recorder:
        recorder.write_predictions(DESCRIBED)
        recorder.write_predictions(DESCRIBED | {"step": 16})
        recorder.finish(SUMMARY)
    assert strict_json((tmp_path / "predictions.json").read_text())["step"] == 16
    assert (tmp_path / "predictions.png").read_bytes().startswith(b"\x89PNG")
    # A run that resumes keeps them until its next evaluation, and a new one does not.
    kept = records_until(tmp_path / "metrics.jsonl", 16, None)
    open_recorder(tmp_path, kept=kept).close()
    names = {path.name for path in tmp_path.iterdir()}
    assert "predictions.json" in names
    assert "predictions.png" not in names
    open_recorder(tmp_path).close()
    assert not (tmp_path / "predictions.json").exists()


def test_undefined_predictions_replace_earlier_ones(tmp_path):
    with open_recorder(tmp_path) as recorder:
        recorder.write_predictions(DESCRIBED)
        recorder.write_predictions({})
        recorder.finish(SUMMARY)
    assert not list(tmp_path.glob("predictions*"))


def test_a_run_without_pictures_has_its_numbers(tmp_path):
    with open_recorder(tmp_path) as recorder:
        recorder.write_train(TRAIN)
        recorder.write_predictions(DESCRIBED)
        recorder.finish(SUMMARY, pictures=False)
    assert not list(tmp_path.glob("*.png"))
    assert (tmp_path / "predictions.json").exists()


def test_a_run_without_records_has_no_picture(tmp_path):
    with open_recorder(tmp_path) as recorder:
        recorder.finish(SUMMARY)
    assert (tmp_path / "summary.json").exists()
    assert not (tmp_path / "curves.png").exists()


def test_a_run_that_breaks_off_leaves_its_records_and_no_summary(tmp_path):
    def run():
        with open_recorder(tmp_path) as recorder:
            recorder.write_train(TRAIN)
            raise RuntimeError("loss is nan")

    with pytest.raises(RuntimeError, match="loss is nan"):
        run()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    assert not (tmp_path / "summary.json").exists()


def test_a_summary_cut_short_is_not_there_at_all(tmp_path, monkeypatch):
    def break_off(source, target):
        raise OSError("disk full")

    with open_recorder(tmp_path) as recorder:
        monkeypatch.setattr(os, "replace", break_off)
        with pytest.raises(OSError, match="disk full"):
            recorder.finish(SUMMARY)
    assert not (tmp_path / "summary.json").exists()


@pytest.mark.parametrize("key", SUMMARY_KEYS)
def test_a_summary_without_one_of_its_keys_is_our_own_mistake(tmp_path, key):
    summary = {name: value for name, value in SUMMARY.items() if name != key}
    with open_recorder(tmp_path) as recorder, pytest.raises(AssertionError, match=key):
        recorder.finish(summary)


def test_other_ranks_write_nothing(tmp_path):
    with open_recorder(tmp_path / "run", rank=1) as recorder:
        recorder.write_plan([], [])
        recorder.write_train(TRAIN)
        recorder.write_test(TEST)
        recorder.finish(SUMMARY)
    assert list(tmp_path.iterdir()) == []


def test_environment_names_the_versions_and_the_machines(monkeypatch):
    monkeypatch.setattr("sys.argv", ["/somewhere/dlrm.py", "data.path=a b"])
    facts = environment("dlrm", Ranks(0, 0, 8, 4, torch.device("cpu")))
    assert facts["command"] == "dlrm.py 'data.path=a b'"
    assert facts["torch"] == torch.__version__
    assert (facts["recipe"], facts["world_size"], facts["num_hosts"]) == ("dlrm", 8, 2)
    assert (facts["gpu"], facts["gpu_driver"]) == (None, None)
    assert facts["torchrec"]
    assert facts["fbgemm"]
    assert facts["num_cpus"] >= 1


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_and_changed_files_are_recorded(tmp_path):
    def git(*arguments: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        command = ["git", "-C", str(tmp_path), *who, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert git_commit(tmp_path) is None
    git("init")
    assert git_commit(tmp_path) is None
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "first")
    git("tag", "v1")
    assert git_commit(tmp_path) == git("rev-parse", "HEAD")
    (tmp_path / "file").write_text("2")
    assert git_commit(tmp_path) == git("rev-parse", "HEAD") + "-dirty"
    (tmp_path / "inside").mkdir()
    assert git_commit(tmp_path / "inside") is None
