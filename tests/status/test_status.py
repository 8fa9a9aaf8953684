"""`python -m status`: what a run is doing, by the files and the lock of its directory."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

from dataloading.dataset.durable_files import lock_directory
from status.__main__ import main
from status.run_status import read_status
from tests.compare.test_compare import write_run

LATER_DAY = [
    {"step": 40, "epoch": 0.5, "loss": 0.3, "step_ms": 50.0, "day": 2},
    {"step": 60, "epoch": 1.0, "loss": 0.2, "step_ms": 50.0, "day": 2},
]


def training(*steps: int, **more) -> list[dict]:
    """Records of a run of 100 steps per epoch."""
    return [
        {"step": n, "epoch": n / 100, "loss": 0.5, "samples_per_s": 1000.0 * n, "step_ms": 20.0}
        | more
        for n in steps
    ]


def status(capsys, *arguments: str) -> str:
    sys.argv[1:] = arguments
    main()
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def _arguments(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["status"])


@pytest.fixture
def run(tmp_path) -> Path:
    """A run of two epochs at step 30, in which training took 20 ms per step and an evaluation 0.6 s."""
    records = [*training(10, 20, 30), {"step": 30, "epoch": 0.3, "test_auc": 0.7, "eval_s": 0.6}]
    path = write_run(tmp_path / "runs/a", [], records=records, options={"train": {"epochs": 2}})
    for name in ("checkpoints/step_9", "checkpoints/step_10", "deltas/step_30"):
        (path / name).mkdir(parents=True)
    (path / "checkpoints/.step_30.unfinished").mkdir()
    (path / "checkpoints/best").symlink_to("step_9")
    return path


def test_a_running_run_tells_step_rate_time_left_checkpoint_and_delta(run):
    minute_ago = time.time() - 60
    os.utime(run / "metrics.jsonl", (minute_ago, minute_ago))
    descriptor = lock_directory(run)
    try:
        found = read_status(run)
    finally:
        os.close(descriptor)
    assert (found.state, found.step, found.last_step) == ("running", 30, 200)
    assert (found.samples_per_s, found.step_ms) == (20_000.0, 20.0)
    # 30 steps took 1.2 s with their evaluation.
    assert found.left_s == pytest.approx(170 * 1.2 / 30)
    assert 60 <= found.record_s < 90
    assert (found.checkpoint, found.delta, found.restarts, found.error) == (10, 30, 0, None)


@pytest.mark.parametrize(
    ("files", "state", "error"),
    [
        ({"summary": {"steps": 30}}, "finished", None),
        (
            {"summary": {"steps": 30, "test_problem": "nan scores"}},
            "finished",
            "nan scores",
        ),
        (
            {"summary": {"steps": 30, "checkpoint_problem": "the disk is full"}},
            "failed",
            "the disk is full",
        ),
        (
            {"ended": {"state": "stopped", "kind": "StoppedError", "message": "by SIGTERM"}},
            "stopped",
            "by SIGTERM",
        ),
        (
            {"ended": {"state": "failed", "kind": "OSError", "message": "no space"}},
            "failed",
            "no space",
        ),
        (
            {"ended": {"state": "failed", "kind": "DivergedError", "message": "the loss is nan"}},
            "diverged",
            "the loss is nan",
        ),
    ],
)
def test_the_state_and_the_error_are_those_of_the_runs_files(run, files, state, error):
    for name, content in files.items():
        (run / f"{name}.json").write_text(json.dumps(content))
    found = read_status(run)
    assert (found.state, found.error, found.left_s) == (state, error, None)


def test_a_day_of_one_record_has_its_last_step_and_is_no_restart(tmp_path, capsys):
    records = [
        {"step": 20, "epoch": 4, "loss": 0.5},
        {"step": 24, "epoch": 4, "loss": 0.5, "day": 1},
    ]
    run = write_run(tmp_path / "a", [], records=records, options={"train": {"epochs": 4}})
    (run / "summary.json").write_text(json.dumps({"steps": 24}))
    (run / "restarts.jsonl").write_text('{"step": 20, "day": 1}\n{"step": 22}\n')
    found = read_status(run)
    assert (found.last_step, found.restarts) == (24, 1)
    assert "state       finished, 1 restart\n" in status(capsys, str(run))


def test_a_run_that_was_killed_says_so(run):
    found = read_status(run)
    assert found.state == "crashed"
    assert found.error is not None
    assert "the same command resumes" in found.error


def test_the_last_step_is_that_of_the_shorter_limit_and_of_the_latest_day(tmp_path):
    limited = {"train": {"epochs": 2, "max_steps": 150}}
    run = write_run(tmp_path / "a", [], records=training(10), options=limited)
    assert read_status(run).last_step == 150
    days = write_run(
        tmp_path / "b", [], records=[*training(10), *LATER_DAY], options={"train": {"epochs": 3}}
    )
    # The day began at step 20 and has 40 steps per epoch.
    assert read_status(days).last_step == 20 + 3 * 40
    assert read_status(write_run(tmp_path / "c", [])).last_step is None


def test_one_run_is_a_list_and_several_are_a_table_with_their_errors(run, capsys):
    alone = status(capsys, str(run))
    assert "state       crashed" in alone
    assert "step        30/200" in alone
    assert "error       no reason is recorded" in alone
    ended = {"state": "failed", "kind": "ValueError", "message": "no such column"}
    write_run(run.parent / "b", [], ended=ended)
    several = status(capsys, str(run.parent))
    assert [line.split()[1] for line in several.splitlines() if "ago" in line] == [
        "crashed",
        "failed",
    ]
    assert f"{run.parent / 'b'}: failed: no such column" in several


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("summary.json", b"{", "summary.json: not JSON: "),
        ("summary.json", b"[1]", "damaged: TypeError('cannot convert dictionary"),
        ("summary.json", b"", "summary.json: not JSON: "),
        ("summary.json", b"\xff\xfe", "summary.json: not UTF-8 text: "),
        ("summary.json", b'{"checkpoint_problem": {"a": 1}}', "{'a': 1}"),
        ("metrics.jsonl", b"{\n", "metrics.jsonl, line 1: not JSON"),
        ("metrics.jsonl", b'{}\n{"step": 3, "loss": 1}\n', "damaged: KeyError('epoch')"),
        ("config.yaml", b"train: {max_steps: [1]}", 'damaged: TypeError("unsupported operand'),
        ("config.yaml", b"train: {epochs: x}", "invalid literal for int()"),
    ],
)
def test_a_damaged_run_is_a_line_and_hides_no_other(run, capsys, name, content, problem):
    write_run(run.parent / "b", [], ended={"state": "failed", "kind": "E", "message": "no space"})
    (run / name).write_bytes(content)
    lines = status(capsys, str(run.parent)).splitlines()
    [line] = [line for line in lines if line.startswith(f"{run}: ")]
    assert problem in line
    assert f"{run.parent / 'b'}: failed: no space" in lines
    assert len([row for row in lines if row.split()[:1] == [str(run)]]) == 1
    assert len(json.loads(status(capsys, str(run.parent), "--json"))) == 2


def test_json_has_the_same_for_programs(run, capsys):
    [found] = json.loads(status(capsys, str(run), "--json"))
    assert (found["run"], found["state"], found["step"]) == (str(run), "crashed", 30)


def test_a_folder_without_runs_ends_with_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        status(capsys, str(tmp_path))
    assert ended.value.code == 2
    assert "holds no run" in capsys.readouterr().err
