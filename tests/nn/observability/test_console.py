"""Terminal output: lines in a pipe, a bar on a terminal, a plan that fits 80 columns."""

import io
import logging
import math
import re
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from configs.console import LiteralConsole
from dataloading.dataset.row_columns import RowColumn
from nn.models.tasks import metrics_of, tasks_of
from nn.observability.console import (
    make_console,
    make_logger,
    print_header,
    print_importance,
    print_inference,
    print_summary,
)
from nn.observability.plan_table import print_plan
from nn.observability.progress import (
    Progress,
    format_test,
    format_train,
)
from nn.observability.time_left import TimeLeft
from nn.planning.plan import TablePlan

METRICS = metrics_of(tasks_of([RowColumn("clicked")]))
TRAIN = {
    "step": 200,
    "loss": 0.49312,
    "train_auc": 0.73118,
    "samples_per_s": 812345.4,
    "step_ms": 230.8,
}
TEST = {
    "step": 512,
    "test_auc": 0.77123,
    "test_log_loss": 0.45214,
    "test_rows": 13714,
    "eval_s": 1.23,
}
ENVIRONMENT = {
    "recipe": "dlrm",
    "started": "2026-01-02T03:04:05+00:00",
    "git_commit": "0123456789abcdef-dirty",
    "python": "3.12.1",
    "torch": "2.13.0",
    "torchrec": "1.8.0",
    "fbgemm": None,
    "cuda": None,
    "gpu": None,
    "gpu_driver": None,
    "num_cpus": 2,
    "world_size": 1,
    "num_hosts": 1,
}
SUMMARY = {
    "steps": 512,
    "test_auc": 0.77123,
    "test_log_loss": 0.45214,
    "samples_per_s": 812345.4,
    "step_ms": 80.3,
    "peak_hbm_bytes": None,
}


def console_of(width: int = 80, terminal: bool = False) -> Console:
    return Console(
        file=io.StringIO(),
        width=width,
        force_terminal=terminal,
        color_system=None,
        markup=False,
        highlight=False,
        _environ={"TERM": "xterm"},
    )


RATING = RowColumn("rating", dtype=np.dtype(np.float32))


def left_of_steps(step: int) -> TimeLeft:
    """Return an estimate that has seen steps of 230.8 ms."""
    seconds = iter([0, 0.2308, 0.4616])
    left = TimeLeft(512, clock=lambda: next(seconds))
    left.count(step - 1)
    left.count(step)
    return left


def printed(console: Console) -> str:
    return console.file.getvalue()


def test_many_metrics_of_features_are_several_tables_with_all_names():
    keys = [f"test_{metric}.label_{n}" for n in range(3) for metric in ("auc", "log_loss", "gauc")]
    change = {"mean": -0.01234, "deviation": 0.00005}
    features = {f"feature_{n}": dict.fromkeys(keys, change) for n in range(4)}
    for width in (60, 120, 400):
        console = console_of(width)
        found = {"unpermuted": dict.fromkeys(keys, 0.5), "features": features, "repeats": 3}
        print_importance(console, found)
        lines = printed(console).splitlines()
        assert max(map(len, lines)) <= width
        rows = [line for line in lines if "-0.01234" in line]
        assert sum(line.count("-0.01234 ± 0.00005") for line in rows) == len(keys) * len(features)
        assert all(line.lstrip().startswith("feature_") for line in rows)
        heads = " ".join(lines)
        assert all(f"{key} change" in heads for key in keys)
        assert len(rows) == 4 * {60: 9, 120: 3, 400: 1}[width]
        once = console_of(width)
        print_importance(once, found | {"repeats": 1})
        assert "-0.01234" in printed(once)
        assert "±" not in printed(once)  # the deviation of one repeat is unknown


def test_a_record_of_training_is_one_line():
    assert format_train(TRAIN, METRICS, 512, 72.0) == (
        "step 200/512  loss 0.4931  auc 0.7312  812,345 samples/s  230.8 ms/step  left 0:01:12"
    )


def test_a_record_of_an_evaluation_is_one_line():
    assert format_test(TEST, METRICS) == (
        "eval step 512: test AUC 0.7712  log loss 0.4521  (13,714 rows, 1.2 s)"
    )


def test_an_evaluation_without_clicks_says_why_it_has_no_auc():
    line = format_test(TEST | {"test_auc": math.nan}, METRICS)
    assert "test AUC undefined (all labels are the same)  log loss 0.4521" in line
    line = format_test(TEST | {"test_auc": math.nan, "test_log_loss": math.nan}, METRICS)
    assert "test AUC n/a  log loss n/a" in line


@pytest.mark.parametrize("missing", [None, math.nan])
def test_what_was_not_measured_is_said_so(missing):
    line = format_train(TRAIN | {"train_auc": missing, "step_ms": missing}, METRICS, 512, None)
    assert "auc n/a  812,345 samples/s  n/a ms/step  left n/a" in line


def test_a_pipe_gets_one_plain_line_a_record():
    console = console_of(width=40)
    with Progress(console, METRICS, 512, time_left=left_of_steps(200)) as progress:
        progress.show_train(TRAIN)
        progress.show_test(TEST)
        progress.show_test(TEST, best="best AUC 0.7800 at step 400")
    trained, tested = format_train(TRAIN, METRICS, 512, 312 * 0.2308), format_test(TEST, METRICS)
    assert printed(console).splitlines() == [
        trained,
        tested,
        f"{tested}  best AUC 0.7800 at step 400",
    ]


@pytest.mark.parametrize("width", [80, 120])
def test_a_terminal_gets_one_bar_with_evaluations_above_it(width):
    console = console_of(width, terminal=True)
    with Progress(console, METRICS, 512, time_left=left_of_steps(211)) as progress:
        progress.show_train(TRAIN)
        progress.advance(212)
        progress.show_test(TEST)
        progress.show_test(TEST, best="best AUC 0.7800 at step 400")
    text = re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", printed(console))
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", text) if line.strip()]
    assert format_train(TRAIN, METRICS, 512, 72.0) not in text
    assert format_test(TEST, METRICS) in lines
    assert lines[-1].startswith("212/512 ")
    # 300 steps of 230.8 ms are left.
    speed = "812,345 samples/s  left 0:01:09"
    best = "best AUC 0.7800 at step 400"
    assert lines[-1].endswith(speed if width == 80 else "230.8 ms/step  left 0:01:09")
    assert (best in lines[-1]) == (width == 120)
    assert max(len(line) for line in lines) <= width
    # A line is broken between words, and the bar keeps its width.
    tested = format_test(TEST, METRICS)
    assert (f"{tested}  {best}" in lines) == (width == 120)
    bars = {line.count("━") for line in lines if "━" in line}
    assert len(bars) == 1, bars


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("is_terminal", [True, False])
def test_an_evaluation_of_several_tasks_is_a_table_that_fits(width, is_terminal):
    labels = [RowColumn("click"), RowColumn("a_purchase_within_seven_days"), RATING]
    metrics = metrics_of(tasks_of(labels, further=["normalised_entropy", "calibration", "mae"]))
    values = {metric.test_key: 0.7 + number / 100 for number, metric in enumerate(metrics)}
    console = console_of(width, is_terminal)
    progress = Progress(console, metrics, 512)
    progress.show_test(
        {"step": 512, "test_rows": 13714, "eval_s": 1.2} | values | {"test_auc.click": math.nan},
        model="untrained model",
        best="best click AUC 0.7800 at step 400",
    )
    lines = [line.rstrip() for line in printed(console).splitlines()]
    assert lines[0].startswith("eval step 512 (untrained model): (13,714 rows, 1.2 s)")
    assert "best click AUC 0.7800 at step 400" in " ".join(lines[:2])
    assert max(map(len, lines[1:])) <= width
    text = " ".join(lines)
    assert all(f"{value:.4f}" in text for key, value in values.items() if key != "test_auc.click")
    assert "n/a" in text
    if width > 60:
        (click,) = [line for line in lines if line.startswith("  click")]
        assert click.split() == ["click", "n/a", "0.7100", "0.7200", "0.7300"]


def test_an_evaluation_moves_a_bar_of_its_own():
    console = console_of(terminal=True)
    with (
        Progress(console, METRICS, 512, has_training=False) as progress,
        progress.evaluation(3) as advance,
    ):
        advance()
        progress.bar.refresh()
        advance()
    progress.console.print("done")
    text = re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", printed(console))
    assert re.search(r"eval 1/3 .*evaluating", text)
    assert "/512" not in text
    assert text.rstrip().endswith("done")
    with Progress(console_of(), METRICS, 512) as progress, progress.evaluation(3) as advance:
        advance()
    assert printed(progress.console) == ""


def test_a_bar_starts_where_a_restored_run_does():
    console = console_of(terminal=True)
    with Progress(console, METRICS, 512, start_step=100):
        pass
    assert "100/512" in printed(console)


def test_other_ranks_print_nothing(capsys, tmp_path):
    console = make_console(rank=1)
    print_header(console, ENVIRONMENT, {})
    print_plan(console, [plan_of("a")], world_size=2)
    with Progress(console, METRICS, 512) as progress:
        progress.show_train(TRAIN)
        progress.show_test(TEST)
    print_summary(console, SUMMARY, METRICS, tmp_path / "made by rank 0 only")
    assert capsys.readouterr().out == ""


def test_rank_0_prints_names_with_brackets_as_they_are(capsys):
    print_header(make_console(rank=0), ENVIRONMENT, {"model": "top [512, 1] [bold]:smile:"})
    assert "model     top [512, 1] [bold]:smile:" in capsys.readouterr().out


def test_the_head_tells_versions_that_exist_and_the_devices():
    console = console_of(120)
    print_header(console, ENVIRONMENT, {"seed": "1"})
    lines = [line.rstrip() for line in printed(console).splitlines()]
    assert lines == [
        "dlrm",
        "started   2026-01-02 03:04:05+00:00, commit 0123456789 with uncommitted changes",
        "versions  python 3.12.1, torch 2.13.0, torchrec 1.8.0",
        "devices   1 process on 1 host, 2 CPU cores, no GPU",
        "seed      1",
    ]


def test_the_head_tells_the_gpus():
    console = console_of(120)
    gpus = {"gpu": "NVIDIA H200", "gpu_driver": "580.65", "world_size": 16, "num_hosts": 2}
    nodes = [{"numa_node": gpu // 4, "peers": []} for gpu in range(8)]
    print_header(console, ENVIRONMENT | gpus | {"gpus": nodes}, {})
    assert "16 x NVIDIA H200 on 2 hosts, driver 580.65, 2 CPU cores" in printed(console)
    assert "GPUs      NUMA node 0: GPU 0-3, 1: GPU 4-7; no peer access (first host)" in printed(
        console
    )


def test_the_summary_sets_the_auc_beside_its_bounds_and_lists_the_files(tmp_path):
    console = console_of(200)
    (tmp_path / "curves.png").touch()
    (tmp_path / "checkpoints").mkdir()
    bounds = {"untrained_test_auc": 0.5, "teacher_auc": 0.83, "peak_hbm_bytes": 3 << 29}
    print_summary(console, SUMMARY | bounds | {"launched_steps": 3}, METRICS, tmp_path)
    lines = [line.rstrip() for line in printed(console).splitlines()]
    assert "launched    3 steps operation by operation, without CUDA graph" in lines
    assert "test AUC    0.7712  (untrained 0.5000, ceiling 0.8300)" in lines
    assert "log loss    0.4521" in lines
    assert "speed       812,345 samples/s, 80.3 ms/step, 512 steps" in lines
    assert "GPU memory  1.5 GiB at its peak" in lines
    assert f"written to  {tmp_path}/" in lines
    assert lines[-1].split() == ["checkpoints/", "curves.png"]


TRAINED = SUMMARY | {
    "best_test_auc": 0.79183,
    "best_step": 256,
    "best_checkpoint": "checkpoints/step_256",
    "checkpoint": "checkpoints/step_512",
    "checkpoint_problem": None,
    "first_step": 0,
    "test_rows": 13_714,
}
NOT_SAVED = {"best_checkpoint": None, "checkpoint": None}
NONE_BEST = {"best_step": None, "best_test_auc": math.nan}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "0.7918 at step 256: {run_dir}/checkpoints/step_256"),
        (
            {"best_step": 512, "best_checkpoint": "checkpoints/step_512"},
            "0.7918 at step 512, the last: {run_dir}/checkpoints/step_512",
        ),
        (NOT_SAVED, "0.7918 at step 256: not saved; set checkpoint.save=true to keep the best"),
        (
            NOT_SAVED | {"checkpoint_problem": "no room"},
            "0.7918 at step 256: not saved: its checkpoint could not be written",
        ),
        (NOT_SAVED | {"best_step": 0}, "0.7918 at step 0: the untrained model"),
        (
            NOT_SAVED | {"best_step": 0, "restored_test_auc": 0.79183},
            "0.7918 at step 0: the model of checkpoint.restore",
        ),
        (
            NONE_BEST,
            "none: no evaluation had a defined AUC, so that no checkpoint is marked as the best",
        ),
    ],
)
def test_the_summary_names_the_best_evaluation_and_its_checkpoint(tmp_path, changes, line):
    console = console_of(300)
    print_summary(console, TRAINED | changes, METRICS, tmp_path)
    (best,) = [text for text in printed(console).splitlines() if text.startswith("best AUC")]
    assert best.removeprefix("best AUC").strip().startswith(line.format(run_dir=tmp_path))


@pytest.mark.parametrize(
    ("best", "rows", "wanted"),
    [
        (0.79183, 13_714, True),
        (0.77223, 10**8, False),
        (0.7793, 13_714, False),
        (0.7793, 10**8, True),
    ],
)
def test_only_a_clear_fall_of_the_auc_gets_a_note(tmp_path, best, rows, wanted):
    console = console_of(300)
    print_summary(console, TRAINED | {"best_test_auc": best, "test_rows": rows}, METRICS, tmp_path)
    fallen = f"note        the test AUC has fallen by {best - 0.77123:.4f} since step 256: the model over-fits"
    assert (fallen in printed(console)) is wanted
    assert f"checkpoint  {tmp_path}/checkpoints/step_512" in printed(console)


def test_the_best_evaluation_is_that_of_another_metric(tmp_path):
    console = console_of(300)
    others = {key: value for key, value in TRAINED.items() if key != "best_test_auc"}
    print_summary(console, others | {"best_test_log_loss": 0.44}, METRICS, tmp_path)
    lines = printed(console).splitlines()
    assert f"best log loss  0.4400 at step 256: {tmp_path}/checkpoints/step_256" in lines
    assert not [line for line in lines if line.startswith("note")]


def test_the_summary_leaves_out_what_was_not_measured(tmp_path):
    console = console_of(200)
    nothing = dict.fromkeys(SUMMARY) | {"steps": 0, "teacher_auc": 0.83}
    print_summary(console, nothing, METRICS, tmp_path)
    assert printed(console).split("\n")[2].startswith("written to")


def test_the_summary_says_that_an_auc_is_undefined(tmp_path):
    console = console_of(200)
    print_summary(console, SUMMARY | {"test_auc": math.nan}, METRICS, tmp_path)
    assert "test AUC    n/a" in printed(console)
    assert "GPU" not in printed(console)


def test_inference_is_a_line_a_batch_size():
    console = console_of()
    result = {"batch_size": 2048, "samples_per_s": 1234567.8}
    print_inference(console, [result | {"p50_ms": 1.5, "p90_ms": 1.6, "p99_ms": 2.25}])
    assert printed(console).splitlines()[-1].split() == [
        *("2,048", "1,234,568", "1.500", "1.600", "2.250")
    ]


def test_messages_of_a_run_cannot_be_disabled(capsys):
    logger = make_logger(make_console(0))
    logging.disable()
    try:
        logger.warning("the checkpoint could not be written")
    finally:
        logging.disable(logging.NOTSET)
    assert "could not be written" in capsys.readouterr().out


HOSTILE = "[red]x[/y]\x1b[31m\nerror: all is well\r:smile:"
ESCAPED = r"[red]x[/y]\x1b[31m\nerror: all is well\r:smile:"


def plan_of(name: str) -> TablePlan:
    return TablePlan(name, 10, 4, 1.0, "table_wise", "fused", (0,), (160,))


def print_everything(console: Console, run_dir: Path) -> None:
    """Print a hostile text wherever a name from a file or an option is printed."""
    make_logger(console).warning("%s", HOSTILE)
    print_header(console, ENVIRONMENT | {"recipe": HOSTILE}, {"data": HOSTILE})
    print_plan(console, [plan_of(HOSTILE)], 1)
    (run_dir / HOSTILE.replace("/", "")).touch()
    print_summary(console, SUMMARY, METRICS, run_dir)
    console.print(f"left out: {HOSTILE}", soft_wrap=True)
    console.print(f"title {HOSTILE}", style="bold")


@pytest.mark.parametrize("is_terminal", [False, True])
def test_names_reach_the_terminal_as_they_are_written_and_never_raw(tmp_path, is_terminal):
    stream = io.StringIO()
    options = {"force_terminal": True, "color_system": None} if is_terminal else {}
    console = LiteralConsole(file=stream, width=300, highlight=False, **options)
    print_everything(console, tmp_path)
    text = stream.getvalue()
    assert text.count(ESCAPED) == 6
    assert "\x1b" not in text
    assert "\r" not in text
    assert not [line for line in text.splitlines() if line.strip().startswith("error:")]


def test_the_console_of_a_run_is_literal():
    assert isinstance(make_console(0), LiteralConsole)
    assert make_console(1).quiet
