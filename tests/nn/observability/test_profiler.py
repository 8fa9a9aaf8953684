"""Profiles: their files, refusals, and that they are off by default."""

import json

import pytest

from nn.observability.annotations import annotate, use_annotations
from nn.observability.trace_breakdown import STEP, read_trace
from tests.helpers.command import run_command
from tests.helpers.composed import TINY
from tests.helpers.distributed import run_distributed

QUIET = ["log.loggers=[]", "checkpoint.save=false", "train.max_steps=12", "eval.per_epoch=1"]
PROFILE = ["profile.steps=3", "profile.start_step=4"]


def train(run_dir, *overrides: str):
    return run_command(*TINY, *QUIET, f"run_dir={run_dir}", *overrides)


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("profiler") / "run"
    ended = train(run_dir, *PROFILE)
    assert ended.exit_code == 0, ended.err
    return run_dir, ended


def test_a_profile_holds_the_steps_asked_for_and_the_parts_of_each(profiled):
    names = [
        annotation.name
        for annotation in read_trace(profiled[0] / "profile/rank0.json.gz").annotations
    ]
    parts = {STEP, "data wait", "lookup", "sort", "dense", "backward", "update"}
    assert {name: names.count(name) for name in parts} == dict.fromkeys(parts, 3)


def test_the_summary_is_written_and_printed(profiled):
    run_dir, ended = profiled
    (rank,) = json.loads((run_dir / "profile/summary.json").read_text())
    assert (rank["num_steps"], rank["on_gpu"]) == (3, False)
    exposed = sum(phase["exposed_ms"] for phase in rank["phases"])
    total = exposed + rank["overlap_ms"] + rank["idle_ms"]
    assert total == pytest.approx(rank["step_ms"])
    text = (run_dir / "profile/summary.txt").read_text()
    assert "host time of 3 steps" in text
    assert text in ended.out


def test_profiled_steps_are_left_out_of_the_speed_and_train_as_others_do(profiled, tmp_path):
    every = ["log.every=4"]
    for name, overrides in (("with", PROFILE), ("without", [])):
        ended = train(tmp_path / name, *every, *overrides)
        assert ended.exit_code == 0, ended.err
    lines = {
        name: [json.loads(x) for x in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("with", "without")
    }
    records = {name: [x for x in found if "loss" in x] for name, found in lines.items()}
    assert [x["loss"] for x in records["with"]] == [x["loss"] for x in records["without"]]
    # steps 1 to 7 run under the profiler, its warm-up included
    assert [x["samples_per_s"] is None for x in records["with"]] == [False, False, False]
    assert not (tmp_path / "without/profile").exists()


def test_a_record_of_profiled_steps_only_has_no_speed(tmp_path):
    assert train(tmp_path / "run", "log.every=1", *PROFILE).exit_code == 0
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()[1:]
    records = [record for record in map(json.loads, lines) if "loss" in record]
    without_speed = [x["step"] for x in records if x["samples_per_s"] is None]
    assert without_speed == [2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        (["profile.start_step=10"], "end after step 13, but this run ends after 12"),
        (
            ["train.epochs=2", "train.max_steps=40", "profile.start_step=31"],
            "evaluates after step 32",
        ),
        (["profile.nvtx=true"], "profile.nvtx=true requires a GPU"),
        (["profile.start_step=0"], "profile.start_step must be positive"),
        (["profile.steps=-1"], "profile.steps must not be negative"),
    ],
)
def test_a_profile_that_cannot_be_is_refused_before_the_run(tmp_path, overrides, wanted):
    ended = train(tmp_path / "run", *PROFILE, *overrides)
    assert ended.exit_code == 2
    assert wanted in ended.err
    assert not (tmp_path / "run").exists()


def profiled_on_ranks(run_dir: str) -> int:
    return train(run_dir, *PROFILE).exit_code


def test_every_rank_leaves_a_trace_and_the_summary_has_all(tmp_path):
    assert run_distributed(profiled_on_ranks, 2, str(tmp_path / "run")) == [0, 0]
    names = sorted(path.name for path in (tmp_path / "run/profile").iterdir())
    assert names == ["rank0.json.gz", "rank1.json.gz", "summary.json", "summary.txt"]
    assert len(json.loads((tmp_path / "run/profile/summary.json").read_text())) == 2
    assert "rank 0 of 2" in (tmp_path / "run/profile/summary.txt").read_text()


def test_annotations_are_shown_only_with_a_profiler():
    shown = []

    class Range:
        def __init__(self, name: str) -> None:
            shown.append(name)

        def __enter__(self):
            return self

        def __exit__(self, *exception: object) -> None:
            shown.append("end")

    with annotate("before"):
        pass
    with use_annotations(Range), annotate("lookup"):
        shown.append("inside")
    with annotate("after"):
        pass
    assert shown == ["lookup", "inside", "end"]
