"""The training loop: steps of evaluation, end of a run, and records."""

import json
import math
import re
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from time import sleep
from types import SimpleNamespace

import pytest
import torch

from configs.overrides import drop_replaced
from configs.schema import Config
from dataloading.dataset.row_columns import RowColumn
from nn.metrics.late_auc import LateAuc
from nn.models.tasks import metrics_of, tasks_of
from nn.observability.progress import (
    format_train,
)
from nn.training.limits import EvalSteps, total_steps
from nn.training.prefetch import Prefetcher
from nn.training.train_step import TrainStep
from tests.helpers.command import run_command
from tests.helpers.composed import TINY, compose_config, compose_with_hydra
from tests.helpers.distributed import run_distributed

SUMMARY_FIELDS = {
    "recipe",
    "steps",
    "epochs",
    "stopped",
    "test_auc",
    "test_log_loss",
    "split",
    "test_rows",
    "best_test_auc",
    "best_step",
    "first_step",
    "restored_test_auc",
    "best_checkpoint",
    "checkpoint",
    "checkpoint_problem",
    "untrained_test_auc",
    "samples_per_s",
    "step_ms",
    "peak_hbm_bytes",
    "teacher_auc",
}


TWO_EPOCHS = (
    "data.synthetic.train_rows=500",
    "train.epochs=2",
    "eval.per_epoch=2",
    "log.every=5",
    "train.tf32=false",
)


class Run:
    """A run in this process, and the records it left."""

    def __init__(self, run_dir: Path, *overrides: str) -> None:
        quiet = ["log.loggers=[]", "checkpoint.save=false", f"run_dir={run_dir}"]
        self.ended = run_command(*TINY, *quiet, *overrides)
        assert self.ended.exit_code == 0, self.ended.err
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        self.records = [json.loads(line) for line in lines[1:]]
        self.train = [each for each in self.records if "loss" in each]
        self.test = [each for each in self.records if "test_auc" in each]
        self.summary = json.loads((run_dir / "summary.json").read_text())


@pytest.fixture(scope="module")
def two_epochs(tmp_path_factory) -> Run:
    """Two epochs of 8 steps, the last of 52 rows."""
    return Run(tmp_path_factory.mktemp("trainer") / "run", *TWO_EPOCHS)


def test_records_whose_metrics_come_late_are_the_same_in_the_same_order(
    two_epochs, tmp_path, monkeypatch
):
    """As on a GPU that is slower than the host: a record is written before the next one and before an evaluation."""
    monkeypatch.setattr(LateAuc, "is_there", lambda _: False)
    late = Run(tmp_path / "run", *TWO_EPOCHS)
    times = {"samples_per_s", "step_ms", "data_wait_ms", "eval_s"}
    plain, delayed = (
        [{key: value for key, value in each.items() if key not in times} for each in run.records]
        for run in (two_epochs, late)
    )
    assert delayed == plain
    assert all(each["train_auc"] for each in late.train)


@pytest.mark.parametrize(
    ("last_step", "steps_per_epoch", "per_epoch", "wanted"),
    [
        (20, 10, 1, {10, 20}),
        (20, 10, 4, {2, 5, 8, 10, 12, 15, 18, 20}),
        (13, 10, 2, {5, 10, 13}),
        (7, 10, 1, {7}),
        (3, 2, 4, {1, 2, 3}),
    ],
)
def test_evaluations_are_evenly_spaced_and_the_last_step_has_one(
    last_step, steps_per_epoch, per_epoch, wanted
):
    at = EvalSteps(last_step, steps_per_epoch, per_epoch)
    assert {step for step in range(-1, last_step + 3) if step in at} == wanted


def listed_evaluations(last_step: int, steps_per_epoch: int, per_epoch: int) -> set[int]:
    """Return the same steps, listed epoch by epoch."""
    points = {
        epoch * steps_per_epoch + round(steps_per_epoch * part / per_epoch)
        for epoch in range(math.ceil(last_step / steps_per_epoch))
        for part in range(1, per_epoch + 1)
    }
    return {point for point in points if 0 < point < last_step} | {last_step}


def test_evaluations_that_are_computed_are_those_that_are_listed():
    for steps_per_epoch, per_epoch in product(range(1, 24), range(1, 30)):
        for last_step in (1, steps_per_epoch, 2 * steps_per_epoch + 3):
            at = EvalSteps(last_step, steps_per_epoch, per_epoch)
            computed = {step for step in range(last_step + 2) if step in at}
            assert computed == listed_evaluations(last_step, steps_per_epoch, per_epoch)


def test_a_run_of_any_length_takes_no_memory_for_its_steps():
    endless = compose_config("train.epochs=1000000000", "eval.per_epoch=1000000")
    last_step = total_steps(endless, 10**6)
    at = EvalSteps(last_step, 1000, endless.eval.per_epoch)
    assert last_step == 10**15
    assert last_step - 1 in at
    at = EvalSteps(last_step, 10**12, 10**6)
    assert 7 * 10**12 + 10**6 in at
    assert 7 * 10**12 + 10**6 + 1 not in at
    record = {"step": 1, "loss": 1.0, "train_auc": 0.5, "samples_per_s": 1, "step_ms": 9e9}
    left = format_train(record, metrics_of(tasks_of([RowColumn("label")])), 10**15, 9e6 * 10**15)
    assert "left more than 10,000 days" in left
    with pytest.raises(ValueError, match="a run has at most"):
        total_steps(compose_config("train.epochs=2000000000"), 10**9)


def test_a_run_takes_all_epochs_unless_told_to_stop_before():
    assert total_steps(compose_config("train.epochs=3"), 10) == 30
    assert total_steps(compose_config("train.epochs=3", "train.max_steps=12"), 10) == 12
    assert total_steps(compose_config("train.epochs=3", "train.max_steps=99"), 10) == 30


def test_the_tail_of_an_epoch_is_trained(two_epochs):
    assert two_epochs.summary["steps"] == 16
    assert two_epochs.summary["epochs"] == 2
    assert two_epochs.summary["stopped"] == "all steps done"


def test_records_come_as_often_as_asked_and_at_the_end(two_epochs):
    assert [each["step"] for each in two_epochs.train] == [5, 10, 15, 16]
    assert [each["step"] for each in two_epochs.test] == [0, 4, 8, 12, 16]
    assert all(0 < each["train_auc"] < 1 for each in two_epochs.train)
    assert [each["epoch"] for each in two_epochs.test] == [0, 0.5, 1, 1.5, 2]


def test_an_evaluation_sees_every_row(two_epochs):
    assert {each["test_rows"] for each in two_epochs.test} == {256}


def test_the_summary_repeats_the_first_the_last_and_the_best_evaluation(two_epochs):
    summary, tests = two_epochs.summary, two_epochs.test
    assert set(summary) == SUMMARY_FIELDS
    assert summary["untrained_test_auc"] == tests[0]["test_auc"]
    for name in ("test_auc", "test_log_loss", "test_rows"):
        assert summary[name] == tests[-1][name]
    assert summary["best_test_auc"] == max(each["test_auc"] for each in tests)
    assert summary["teacher_auc"] > summary["best_test_auc"] > summary["untrained_test_auc"]
    assert summary["peak_hbm_bytes"] is None


def test_the_best_evaluation_is_that_of_the_named_metric(tmp_path):
    run = Run(tmp_path / "run", "eval.best_metric=log_loss")
    losses = {each["step"]: each["test_log_loss"] for each in run.test}
    assert run.summary["best_test_log_loss"] == min(losses.values())
    assert losses[run.summary["best_step"]] == min(losses.values())
    assert "best_test_auc" not in run.summary


def test_the_speed_of_the_run_leaves_the_first_record_out(two_epochs):
    rows = [5 * 64, 64 + 64 + 52 + 2 * 64, 5 * 64, 52]
    seconds = [n / each["samples_per_s"] for n, each in zip(rows, two_epochs.train, strict=True)]
    assert two_epochs.summary["samples_per_s"] == pytest.approx(
        sum(rows[1:]) / sum(seconds[1:]), rel=1e-4
    )
    assert two_epochs.summary["step_ms"] == pytest.approx(sum(seconds[1:]) * 1e3 / 11, rel=1e-4)


def test_max_steps_ends_a_run_with_an_evaluation(tmp_path):
    run = Run(tmp_path / "run", "train.max_steps=3", "eval.at_start=false", "eval.max_steps=1")
    assert run.summary["steps"] == 3
    assert [each["step"] for each in run.test] == [3]
    assert run.summary["test_rows"] == 128
    assert run.summary["untrained_test_auc"] is None


def test_predictions_that_are_not_finite_are_named_and_end_the_run_with_3(tmp_path, monkeypatch):
    predict = TrainStep.predict

    def predict_nan(self, batch, ids):
        logits = predict(self, batch, ids).clone()
        logits[100:102] = math.nan
        return logits

    monkeypatch.setattr(TrainStep, "predict", predict_nan)
    quiet = ["log.loggers=[]", "eval.per_epoch=2", "train.max_steps=4", "eval.at_start=true"]
    ended = run_command(*TINY, *quiet, f"run_dir={tmp_path / 'run'}")
    assert ended.exit_code == 3
    problem = (
        r"the predictions of 4 of 256 rows of split 'test' are not finite, the first of row 100 \(its largest "
        r"numerical value is num_\d=-?\d\.\d+\); AUC and log loss are undefined\. Clip or scale such values .*"
    )
    assert re.fullmatch(f"error: the run is complete, but {problem}\n", ended.err)
    assert len(re.findall(f"warning: {problem}", ended.out)) == 1
    undefined = "undefined (predictions are not finite)"
    assert (
        f"eval step 0 (untrained model): test AUC {undefined}  log loss {undefined}  (256"
        in ended.out
    )
    assert "best AUC    none: no evaluation had a defined AUC" in ended.out
    assert (tmp_path / "run" / "checkpoints" / "step_4").is_dir()
    records = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert re.match(problem, json.loads(records[-1])["test_problem"])
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["best_step"] is None


def test_a_restored_model_is_called_that_although_training_starts_at_step_0(tmp_path):
    short = ["log.loggers=[]", "train.max_steps=2", "eval.at_start=true", "train.tf32=false"]
    assert run_command(*TINY, *short, f"run_dir={tmp_path / 'before'}").exit_code == 0
    warm = [
        f"checkpoint.restore={tmp_path / 'before' / 'checkpoints' / 'step_2'}",
        "checkpoint.parts=[dense,tables]",
    ]
    ended = run_command(*TINY, *short, *warm, f"run_dir={tmp_path / 'run'}")
    before, after = (
        json.loads((tmp_path / name / "summary.json").read_text()) for name in ("before", "run")
    )
    assert after["untrained_test_auc"] is None
    assert after["restored_test_auc"] == before["test_auc"]
    assert before["restored_test_auc"] is None
    assert "eval step 0 (restored model): test AUC" in ended.out
    assert f"(restored {before['test_auc']:.4f}, ceiling" in ended.out
    assert "untrained" not in ended.out
    header = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().partition("\n")[0])
    assert (header["restored"], header["start_step"]) == (warm[0].partition("=")[2], 0)


def threshold_run(run_dir: Path) -> str:
    """Stops before its first record."""
    overrides = ["eval.auc_threshold=0.3", "eval.per_epoch=4", "log.every=1000"]
    return run_command(*TINY, *overrides, f"run_dir={run_dir}", "checkpoint.save=false").err


def test_a_good_enough_auc_stops_all_ranks_together(tmp_path):
    assert run_distributed(threshold_run, 2, tmp_path / "run") == ["", ""]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["stopped"] == "eval.auc_threshold reached"
    assert summary["steps"] == 8
    assert summary["test_auc"] >= 0.3
    assert summary["samples_per_s"] > 0


def test_an_auc_below_the_threshold_stops_nothing(tmp_path):
    run = Run(tmp_path / "run", "eval.auc_threshold=0.99", "train.max_steps=2")
    assert run.summary["stopped"] == "all steps done"


def test_the_last_record_has_an_auc_however_far_the_next_would_be(tmp_path, monkeypatch):
    monkeypatch.setattr("nn.training.train_records.TRAIN_AUC_ROWS", 128)
    run = Run(tmp_path / "run", "train.max_steps=7", "log.every=5", "eval.max_steps=1")
    assert [each["step"] for each in run.train] == [5, 7]
    assert all(each["train_auc"] is not None for each in run.train)


def test_evaluations_come_every_so_many_steps_over_all_epochs(tmp_path):
    assert [step for step in range(30) if step in EvalSteps(25, 10, 3, every=8)] == [8, 16, 24, 25]
    late = EvalSteps(25, 10, 3, every=8, first=16)
    assert [step for step in range(30) if step in late] == [16, 24, 25]
    assert [late.remaining(step) for step in (1, 16, 17, 25)] == [3, 3, 2, 1]
    short = ["data.synthetic.train_rows=500", "train.epochs=2", "eval.every=5", "eval.max_steps=1"]
    run = Run(tmp_path / "run", *short, "eval.at_start=false")
    assert [each["step"] for each in run.test] == [5, 10, 15, 16]


def test_of_two_options_that_replace_each_other_the_named_one_counts():
    composed = compose_with_hydra("eval.every=3")
    drop_replaced(composed, ["eval.every=3"], Config)
    assert composed.eval.every == 3
    drop_replaced(composed, ["eval.per_epoch=2"], Config)
    assert composed.eval.every is None
    for both in (["eval.every=3", "eval.per_epoch=2"], ["+eval.every=3", "eval.per_epoch=2"]):
        with pytest.raises(ValueError, match=r"^eval\.every=3 and eval\.per_epoch=2 exclude each"):
            drop_replaced(composed, both, Config)
    drop_replaced(composed, ["eval.every=null", "eval.per_epoch=2"], Config)
    ended = run_command("eval.every=3", "eval.per_epoch=2")
    assert ended.exit_code == 2
    assert ended.err.startswith("error: eval.every=3 and eval.per_epoch=2 exclude each other")


def test_the_final_evaluation_scores_more_batches_and_is_the_result(tmp_path):
    run = Run(
        tmp_path / "run",
        *("train.max_steps=4", "eval.every=2", "eval.max_steps=1", "eval.final_max_steps=2"),
        *("eval.batch_size=100", "eval.at_start=false"),
    )
    assert [(each["step"], each["test_rows"], each.get("final")) for each in run.test] == [
        *((2, 100, None), (4, 100, None), (4, 200, True))
    ]
    assert run.summary["test_rows"] == 200
    assert run.summary["test_auc"] == run.test[-1]["test_auc"] != run.test[-2]["test_auc"]
    # The best is chosen among evaluations of the same rows.
    assert run.summary["best_test_auc"] == max(each["test_auc"] for each in run.test[:2])
    assert run.summary["last_test_auc"] == run.test[-2]["test_auc"]
    assert (run.summary["result_step"], run.summary["steps"]) == (4, 4)
    assert "eval step 4 (final): test AUC" in run.ended.out
    assert "the final evaluation, of the model after step 4" in run.ended.out


def test_a_final_evaluation_of_the_same_rows_is_not_made(tmp_path):
    run = Run(tmp_path / "run", "train.max_steps=2", "eval.final_max_steps=99", "eval.every=2")
    assert [each["step"] for each in run.test] == [0, 2]
    assert set(run.summary) == SUMMARY_FIELDS


def test_the_wait_for_data_leaves_out_ids_that_other_ranks_need_from_disk():
    loading = []

    class Runner:
        tables = SimpleNamespace(has_disk_tables=True, tier=None)

        def announce(self, batch: object) -> None:
            assert not loading, "a rank that hangs here hangs in its step"
            sleep(0.1)

        def read_ahead(self, needs: object) -> None:
            pass

        def start(self, batch: object, need: object, turn: int) -> object:
            return batch, need

    @contextmanager
    def wait():
        loading.append(True)
        yield
        loading.pop()

    def batches():
        sleep(0.02)
        assert loading
        yield SimpleNamespace(to=lambda _: "batch")

    prefetcher = Prefetcher(batches(), Runner(), torch.device("cpu"), wait)
    assert 20 <= prefetcher.data_wait.ms < 100
    assert next(prefetcher) == ("batch", None)
