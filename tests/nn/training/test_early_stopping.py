"""`eval.patience`: the evaluation that ends a run, the model that is its result, and both after a kill."""

import io
import json
import shutil
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from configs.schema import Config
from nn.checkpoint.directory import list_checkpoints, step_of
from nn.modes.train import train
from nn.training.limits import early_stop
from tests.helpers.command import run_command
from tests.helpers.composed import TINY, compose_config
from tests.helpers.distributed import run_distributed
from tests.helpers.runs import differences, jsonl, killed_at, records, summary

# So few rows and so high a rate over-fit within a few evaluations.
RUN = [
    *TINY,
    *("data.synthetic.train_rows=256", "train.epochs=40", "optimizer.lr=0.3", "eval.every=2"),
    *("eval.at_start=false", "eval.patience=3", "checkpoint.save_every=4", "log.every=5"),
    *("log.loggers=[]", "train.tf32=false"),
]


def config_of(run_dir: Path, *overrides: str) -> Config:
    return replace(compose_config(*RUN, *overrides), run_dir=str(run_dir))


def start(run_dir: Path, kill_at: int | None = None, *overrides: str) -> None:
    with (
        patch("nn.observability.run_directory.draw_curves"),
        nullcontext() if kill_at is None else killed_at(kill_at),
        redirect_stdout(io.StringIO()),
    ):
        train(config_of(run_dir, *overrides), "")


def evaluations(run_dir: Path) -> list[tuple[int, float]]:
    """Return (step, test AUC) of the evaluations before the final one."""
    return [
        (record["step"], record["test_auc"])
        for record in records(run_dir)
        if "test_auc" in record and "final" not in record
    ]


def expected_end(run_dir: Path, patience: int) -> tuple[int, int]:
    """Return the steps of the end and of the best evaluation that the recorded AUCs call for."""
    best, best_step, since = -1.0, 0, 0
    for step, auc in evaluations(run_dir):
        since += 1
        if auc > best:
            best, best_step, since = auc, step, 0
        if since == patience:
            return step, best_step
    raise AssertionError("the run should not have ended")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Path:
    """Return the directory of a run that patience has ended."""
    run_dir = tmp_path_factory.mktemp("patience") / "run"
    start(run_dir)
    return run_dir


def test_a_run_ends_after_its_patience_with_the_best_model(stopped):
    result = summary(stopped)
    end, best = expected_end(stopped, patience=3)
    assert evaluations(stopped)[-1][0] == end < 160
    assert (result["steps"], result["best_step"], result["result_step"]) == (end, best, best)
    assert result["stopped"] == "eval.patience exhausted"
    assert result["test_auc"] == result["best_test_auc"] == dict(evaluations(stopped))[best]
    assert result["last_test_auc"] == evaluations(stopped)[-1][1] < result["test_auc"]
    assert result["checkpoint"] == f"checkpoints/step_{end}"
    assert result["best_checkpoint"] == f"checkpoints/step_{best}"
    final = records(stopped)[-1]
    assert (final["final"], final["step"], final["test_auc"]) == (True, best, result["test_auc"])


def test_the_best_checkpoint_holds_the_model_of_the_result(stopped, tmp_path):
    best = stopped / "checkpoints" / "best"
    options = [option for option in RUN if not option.startswith("eval.patience")]
    ended = run_command(
        *options, "mode=eval", f"checkpoint.restore={best}", f"run_dir={tmp_path / 'eval'}"
    )
    assert ended.exit_code == 0
    assert summary(tmp_path / "eval")["test_auc"] == summary(stopped)["test_auc"]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_killed_run_counts_on_and_ends_at_the_same_step(num_ranks, stopped, tmp_path):
    """The kill falls between the best evaluation and the end."""
    end, best = expected_end(stopped, patience=3)
    assert best < end - 3
    if num_ranks == 2:
        run_distributed(start, 2, tmp_path / "uninterrupted")
        end, best = expected_end(tmp_path / "uninterrupted", patience=3)
    expected = stopped if num_ranks == 1 else tmp_path / "uninterrupted"
    for kill_at in (end - 1, None):
        if num_ranks == 1:
            start(tmp_path / "run", kill_at)
        else:
            run_distributed(start, 2, tmp_path / "run", kill_at)
    assert len(jsonl(tmp_path / "run" / "restarts.jsonl")) == 1
    assert differences(expected, tmp_path / "run") == []


def test_a_run_killed_after_its_last_checkpoint_makes_the_final_evaluation_again(stopped, tmp_path):
    shutil.copytree(stopped, tmp_path / "run", symlinks=True)
    (tmp_path / "run" / "summary.json").unlink()
    before = (stopped / "metrics.jsonl").read_text().splitlines()
    start(tmp_path / "run")
    assert records(tmp_path / "run") == records(stopped)
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == len(before)
    speed = {"samples_per_s": None, "step_ms": None}
    assert summary(tmp_path / "run") | speed == summary(stopped) | speed


def test_a_finished_run_is_left_alone_and_more_patience_trains_on_from_its_last_state(
    stopped, tmp_path
):
    shutil.copytree(stopped, tmp_path / "run", symlinks=True)
    end, _ = expected_end(stopped, patience=3)
    before = (tmp_path / "run" / "summary.json").read_bytes()
    start(tmp_path / "run")
    assert (tmp_path / "run" / "summary.json").read_bytes() == before
    start(tmp_path / "run", None, "eval.patience=5")
    start(tmp_path / "patient", None, "eval.patience=5")
    assert summary(tmp_path / "run")["steps"] > end
    # The first run's last record of training, at a step that is no multiple of log.every, stays.
    assert differences(tmp_path / "patient", tmp_path / "run") in ([], ["metrics.jsonl"])
    assert evaluations(tmp_path / "patient") == evaluations(tmp_path / "run")
    assert [record["step"] for record in records(tmp_path / "run") if "final" in record] == [
        summary(tmp_path / "run")["best_step"]
    ]


def test_the_result_is_the_best_model_although_all_steps_are_done(tmp_path):
    end = 24
    start(tmp_path / "run", None, "eval.patience=999", f"train.max_steps={end}")
    result = summary(tmp_path / "run")
    assert result["stopped"] == "all steps done"
    assert result["result_step"] == result["best_step"] < result["steps"] == end
    assert result["test_auc"] == result["best_test_auc"]


def test_a_best_model_without_a_checkpoint_is_reported(tmp_path):
    """The untrained model, at a rate that only worsens it."""
    with patch("nn.models.tasks.Metric.improves", lambda _, value, best: best != best):
        ended = run_command(
            *RUN,
            *("eval.at_start=true", "eval.patience=1", f"run_dir={tmp_path / 'run'}"),
        )
    assert ended.exit_code == 0
    assert "the best evaluation was after step 0, and there is no checkpoint" in ended.out
    result = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert "result_step" not in result
    assert (result["steps"], result["best_step"]) == (2, 0)
    assert result["test_auc"] == evaluations(tmp_path / "run")[-1][1]


def test_early_stops_are_those_of_the_last_evaluation():
    config = compose_config("eval.patience=2", "eval.auc_threshold=0.7")
    test = {"step": 4, "test_auc": 0.6}
    assert early_stop(config, test, 4, 1) is None
    assert early_stop(config, test, 4, 2) == "eval.patience exhausted"
    assert early_stop(config, test, 5, 2) is None
    assert early_stop(config, {}, 0, 0) is None
    assert early_stop(config, test | {"test_auc": None}, 4, 0) is None
    assert early_stop(config, test | {"test_auc": 0.7}, 4, 2) == "eval.auc_threshold reached"


def test_patience_requires_checkpoints():
    ended = run_command(*TINY, "eval.patience=1", "checkpoint.save=false")
    assert ended.exit_code == 2
    assert ended.err == (
        "error: eval.patience=1 ends with the best checkpoint, and checkpoint.save=false saves none; set "
        "checkpoint.save=true, or eval.patience=null\n"
    )


def test_only_the_latest_and_the_best_checkpoints_are_kept(stopped):
    end, best = expected_end(stopped, patience=3)
    kept = [step_of(path) for path in list_checkpoints(stopped / "checkpoints")]
    assert len(kept) == 3
    assert {end, best} < set(kept)
