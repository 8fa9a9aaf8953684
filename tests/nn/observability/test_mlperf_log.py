"""The benchmark's log of tiny runs, as the checkers of mlperf-logging read it."""

import io
import json
import re
import subprocess
import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from mlperf_logging.compliance_checker import mlp_compliance
from mlperf_logging.rcp_checker import rcp_checker

from configs.schema import Config
from nn.modes.train import train
from nn.observability.mlperf_log import MlperfLog, now_ms, settings_of
from nn.training.limits import EvalSteps
from tests.helpers.command import ROOT
from tests.helpers.composed import compose_config
from tests.helpers.preproc_command import preproc
from tests.helpers.runs import jsonl, killed_at

# 128 steps of 64 rows; an evaluation after every sixth or seventh.
RUN = [
    *("experiment=dcnv2_mlperf", "device=cpu", "log.mlperf=true", "log.mlperf_division=open"),
    *("data.synthetic.train_rows=8192", "data.synthetic.test_rows=2000"),
    *("data.synthetic.cardinalities=[50,40,7,30]", "data.multi_hot.hotness=[3,2,1,5]"),
    *("model.embedding_dim=16", "model.bottom_mlp=[16,16]", "model.top_mlp=[16,1]"),
    *("model.cross.projection_dim=8", "train.batch_size=64", "eval.batch_size=512"),
    *("optimizer.lr=0.05", "log.loggers=[]", "eval.auc_threshold=0.7"),
]


def config_of(*overrides: str) -> Config:
    return compose_config(*RUN, *overrides, recipe="dcnv2")


def start(run_dir: Path, *overrides: str, kill_at: int | None = None) -> str:
    """Run in this process; return what rank 0 prints."""
    printed = io.StringIO()
    with (
        patch("nn.observability.run_directory.draw_curves"),
        nullcontext() if kill_at is None else killed_at(kill_at),
        redirect_stdout(printed),
    ):
        train(config_of(f"run_dir={run_dir}", *overrides), "")
    return printed.getvalue()


def complaints(path: Path, ruleset: str = "6.0.0") -> list[str]:
    """Return what the compliance checker says of a log, warnings included."""
    checker = mlp_compliance.make_checker("training", ruleset, quiet=False, werror=True)
    mlp_compliance.main(str(path), f"training_{ruleset}/common.yaml", checker)
    return [*checker.overwritable.values(), *checker.not_overwritable, *checker.warnings.values()]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in path.read_text().splitlines()]


def values(path: Path) -> dict[str, Any]:
    """Return the last value of each key."""
    return {line["key"]: line["value"] for line in lines(path)}


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """Return the directory of a run that has reached its target."""
    run_dir = tmp_path_factory.mktemp("mlperf") / "run"
    start(run_dir)
    return run_dir


def test_the_checker_accepts_the_log_of_the_open_division(finished):
    assert complaints(finished / "mlperf.log") == []


@pytest.mark.doors
def test_the_documented_command_writes_a_log_that_the_documented_checker_accepts(tmp_path):
    """A complete run to its target, as a user types it: every key and their order hold in the open division.

    The target and the test rows are smaller than the closed division's; a run of that size takes hours here.
    """
    run_dir = tmp_path / "run"
    train = [sys.executable, "dcnv2.py", *RUN, f"run_dir={run_dir}"]
    subprocess.run(train, cwd=ROOT, check=True, capture_output=True, timeout=900)
    page = (ROOT / "docs/mlperf.md").read_text()
    [check] = re.findall(
        r"^  python (-m mlperf_logging.compliance_checker .*) \S+ \|\|", page, re.M
    )
    done = subprocess.run(
        [sys.executable, *check.split(), run_dir / "mlperf.log"],
        **{"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 300},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout + done.stderr


def test_the_closed_division_lacks_criteos_test_rows_and_target_only(finished, tmp_path):
    closed = tmp_path / "closed.log"
    closed.write_text((finished / "mlperf.log").read_text().replace('"open"', '"closed"'))
    target, rows = sorted(complaints(closed))[::-1]
    assert target.startswith("Failed checks for eval_accuracy : v['value'] >= 0.80275")
    assert rows.startswith("CHECK for 'eval_samples' failed")
    assert "v['value'] == 89137319" in rows
    reached = closed.read_text().replace('"value": 2000', '"value": 89137319')
    aucs = [line["value"] for line in lines(closed) if line["key"] == "eval_accuracy"]
    closed.write_text(reached.replace(str(aucs[-1]), "0.8028"))
    assert complaints(closed) == []


def test_evaluations_lie_on_the_grid_and_the_first_at_the_target_ends_the_run(finished):
    log = lines(finished / "mlperf.log")
    tested = [record for record in jsonl(finished / "metrics.jsonl") if "test_auc" in record]
    logged = [
        (line["metadata"]["epoch_num"], line["value"])
        for line in log
        if line["key"] == "eval_accuracy"
    ]
    assert logged == [
        (record["step"] / 128, pytest.approx(record["test_auc"])) for record in tested
    ]
    assert [epoch for epoch, _ in logged] == [
        pytest.approx(0.05 * number, abs=0.5 / 128) for number in range(1, len(logged) + 1)
    ]
    assert [auc >= 0.7 for _, auc in logged] == [False] * (len(logged) - 1) + [True]
    assert log[-1]["key"] == "run_stop"
    assert log[-1]["metadata"]["status"] == "success"
    times = [line["time_ms"] for line in log]
    assert times == sorted(times)


def test_training_and_evaluation_alternate(finished):
    keys = [line["key"] for line in lines(finished / "mlperf.log")]
    after = keys[keys.index("run_start") :]
    block = ["block_start", "block_stop", "eval_start", "eval_accuracy", "eval_stop"]
    assert after == [
        *("run_start", "epoch_start"),
        *(block * ((len(after) - 4) // 5)),
        *("epoch_stop", "run_stop"),
    ]


def test_the_rcp_checker_reads_the_epochs_to_the_target(finished, tmp_path):
    text = (finished / "mlperf.log").read_text()
    steps = [r["step"] for r in jsonl(finished / "metrics.jsonl") if "test_auc" in r][-1]
    for number in range(3):
        (tmp_path / f"result_{number}.txt").write_text(text)
    read = rcp_checker.read_submission_file(tmp_path / "result_0.txt", "6.0.0", False)
    assert read == (0, round(steps / 128, 3), 64, "dlrm_dcnv2")
    # A tiny batch has no reference, and synthetic clicks are learnt faster than any.
    arguments = (str(tmp_path), "training", "6.0.0", False, False, None, "pruned_rcps")
    assert rcp_checker.check_directory(*arguments)[:2] == (
        False,
        "Missing RCP, please submit RCP with BS = 64",
    )


def test_a_run_that_misses_its_target_is_aborted(tmp_path):
    start(tmp_path / "run", "eval.auc_threshold=0.99", "train.max_steps=3", "seed=7")
    log = lines(tmp_path / "run" / "mlperf.log")
    assert log[-1]["metadata"]["status"] == "aborted"
    assert (values(tmp_path / "run" / "mlperf.log")["seed"], log[-3]["key"]) == (7, "eval_stop")


def test_a_resumed_run_says_that_it_is_no_result(tmp_path):
    run_dir, log = tmp_path / "run", tmp_path / "run" / "mlperf.log"
    start(run_dir, "checkpoint.save_every=4", kill_at=9)
    before = log.read_text()
    # The process was killed while it wrote a line.
    log.write_text(before + ':::MLLOG {"name')
    printed = " ".join(start(run_dir, "checkpoint.save_every=4").split())
    assert printed.count("is no valid result") == 1
    assert log.read_text().startswith(before)
    statuses = [line["metadata"]["status"] for line in lines(log) if line["key"] == "run_stop"]
    assert statuses == ["aborted", "aborted"]
    assert values(log)["starts_from_checkpoint_of_step"] == 8
    assert any("CHECK for 'init_start' failed" in complaint for complaint in complaints(log))
    assert rcp_checker.read_submission_file(log, "6.0.0", False)[0] == 1


def test_settings_that_differ_from_the_benchmark_reach_the_log():
    config = config_of(
        *("optimizer.embedding_name=rowwise_adagrad", "optimizer.embedding_lr=0.1"),
        *("train.amp=off", "scheduler.warmup_steps=5", "log.mlperf_platform=two hosts"),
    )
    found = settings_of(
        config, machine="1x1xCPU", train_rows=1, eval_rows=1, on_gpu=True, num_ranks=1
    )
    assert found["opt_name"] == "adagrad/rowwise_adagrad"
    assert (found["opt_base_learning_rate"], found["opt_sparse_base_learning_rate"]) == (0.05, 0.1)
    assert found["opt_learning_rate_warmup_steps"] == 5
    assert found["lowest_numerical_precision_in_linear"] == "tf32"
    assert found["submission_platform"] == "two hosts"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["eval.auc_threshold=null"], "log.mlperf=true needs the AUC that ends the run"),
        (["train.epochs=2"], "which wants train.epochs=1, got 2"),
        (["log.mlperf_org=''"], "log.mlperf_org is empty"),
    ],
)
def test_a_run_that_cannot_be_the_benchmark_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        config_of(*options)


def test_the_log_is_hstus_or_dcnv2s():
    with pytest.raises(ValueError, match=r"which wants model\.name=hstu or dcnv2, got dlrm"):
        compose_config("log.mlperf=true", "eval.auc_threshold=0.7")


# Batch, rate, and the samples at which the rules have the first evaluation.
DLRMV4 = {
    8192: (["train.accumulate=4"], 57_344_000),
    16384: (["optimizer.lr=2e-6", "eval.every=140", "eval.first_step=4340"], 71_106_560),
    32768: (["optimizer.lr=4e-6", "eval.every=70", "eval.first_step=2870"], 94_044_160),
}
TRAIN_ROWS, EVAL_ROWS = 2_290_835_423, 2_058_204


def write_dlrmv4(path: Path, batch_size: int, options: list[str], num_evaluations: int) -> None:
    """Write the log of a closed run of hstu_mlperf that reaches its target at an evaluation."""
    batch = [f"train.batch_size={batch_size}", *options]
    config = compose_config("experiment=hstu_mlperf", *batch, recipe="dlrm")
    steps = -(-TRAIN_ROWS // batch_size)
    rows = {"train_rows": TRAIN_ROWS, "eval_rows": EVAL_ROWS}
    settings = settings_of(config, machine="1x8xH100", on_gpu=True, num_ranks=8, **rows)
    evaluated = EvalSteps.of(config, steps)
    steps_of = [step for step in range(1, 20_000) if step in evaluated][:num_evaluations]
    with MlperfLog(path, settings, steps_per_epoch=steps, target=0.75) as log:
        log.start(now_ms(), is_cache_cleared=True)
        for step in steps_of:
            is_last = step == steps_of[-1]
            auc_of = {True: 0.7591, False: 0.62}.__getitem__
            loop = SimpleNamespace(num_steps=step, ends_day=is_last, auc_of=auc_of)
            log.on_evaluation_begin(loop)
            log.on_evaluation(loop, is_last, is_final=False)


@pytest.mark.parametrize("batch_size", DLRMV4)
def test_the_checker_accepts_dlrmv4_in_the_closed_division(tmp_path, batch_size):
    options, first = DLRMV4[batch_size]
    path = tmp_path / "result_0.txt"
    write_dlrmv4(path, batch_size, options, 6)
    assert complaints(path, "6.1.0") == []
    counts = [
        line["metadata"]["samples_count"] for line in lines(path) if line["key"] == "eval_accuracy"
    ]
    assert counts == [first + 2_293_760 * number for number in range(6)]
    assert rcp_checker.read_submission_file(path, "6.1.0", False) == (
        0,
        counts[-1],
        batch_size,
        "dlrmv4",
    )


def test_the_rcp_checker_accepts_ten_runs_of_dlrmv4_as_long_as_the_references(tmp_path):
    for number in range(10):
        write_dlrmv4(tmp_path / f"result_{number}.txt", 8192, [], 6 + number % 2)
    arguments = (str(tmp_path), "training", "6.1.0", False, False, None, "pruned_rcps")
    assert rcp_checker.check_directory(*arguments)[0]


def test_what_the_rules_of_dlrmv4_fix_is_complained_of(tmp_path):
    path = tmp_path / "mlperf.log"
    wrong = ["optimizer.beta1=0.9", "scheduler.first_step=1", "eval.first_step=6720"]
    write_dlrmv4(path, 8192, wrong, 2)
    found = " ".join(complaints(path, "6.1.0"))
    for key in ("opt_adam_beta_1", "opt_learning_rate_warmup_start_lr", "first_eval_samples"):
        assert key in found


def test_a_run_of_hstu_writes_the_log(tmp_path):
    log = ["yambda.users=40", "yambda.mean_events=150", "yambda.history=60"]
    sizes = "table_rows=[500,50,150,41,300,200,200,200,100,90,82]"
    preproc("dataset=yambda", *log, sizes, f"output={tmp_path / 'data'}")
    tiny = ["width=8", "layers=1", "heads=2", "head_dim=4", "embedding_dim=4", "input_hidden=4"]
    config = compose_config(
        *("experiment=hstu_mlperf", "device=cpu", "train.amp=off", "train.batch_size=64"),
        *(f"model.{option}" for option in tiny),
        *("log.mlperf=true", "log.mlperf_division=open", "log.loggers=[]", "eval.every=2"),
        *("eval.first_step=5", "train.max_steps=8", "eval.auc_threshold=0.01"),
        *(f"data.path={tmp_path / 'data'}", f"run_dir={tmp_path / 'run'}"),
        recipe="dlrm",
    )
    with patch("nn.observability.run_directory.draw_curves"), redirect_stdout(io.StringIO()):
        train(config, "")
    found = lines(tmp_path / "run" / "mlperf.log")
    assert found[-1]["metadata"]["status"] == "success"
    [accuracy] = [line for line in found if line["key"] == "eval_accuracy"]
    assert accuracy["metadata"]["samples_count"] == 6 * 64
    # A smaller log, its rate and its AUC are all that the open division complains of.
    complained = complaints(tmp_path / "run" / "mlperf.log", "6.1.0")
    keys = ("train_samples", "eval_samples", "learning_rate", "eval_accuracy")
    assert all(any(key in text for key in keys) for text in complained), complained
