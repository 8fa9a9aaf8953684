"""Runs as a table, files and a picture: finished, running, stopped, failed and crashed ones."""

import csv
import io
import json
import os
import runpy
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

import pytest
import yaml
from matplotlib.image import imread

from compare.run_record import RunRecord, State, differing, find_runs
from compare.table import labels, names_of, short_names
from dataloading.dataset.durable_files import lock_directory
from tests.helpers.command import Ended, kept_signals


def write_run(path: Path, aucs: list[float], **changes) -> Path:
    """Write a run directory with an evaluation every 10 steps and two options."""
    options = {"recipe": "dlrm", "run_dir": str(path), "optimizer": {"lr": 0.1, "eps": 1e-8}}
    options["optimizer"] |= changes.pop("optimizer", {})
    path.mkdir(parents=True)
    options |= {"eval": {"best_metric": None, **changes.pop("eval", {})}}
    options |= changes.pop("options", {})
    (path / "config.yaml").write_text(yaml.safe_dump(options))
    lines = [{"recipe": "dlrm", "started": "2026-11-22T16:00:00+00:00", "start_step": 0}]
    lines[0] |= changes.pop("header", {})
    for number, auc in enumerate(aucs, start=1):
        step = 10 * number
        lines.append({"step": step, "loss": 1 / number, "samples_per_s": 100.0, "step_ms": 50.0})
        test = {"test_auc": auc, "test_log_loss": 1 - auc, "test_rows": 8, "eval_s": 0.5}
        lines.append({"step": step, **test})
    lines += changes.pop("records", [])
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    for name, content in changes.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


@pytest.fixture
def runs(tmp_path) -> Path:
    """A folder of four runs that ended differently; the last lies deeper."""
    folder = tmp_path / "runs"
    summary = {"steps": 20, "samples_per_s": 120.0, "test_auc": 0.7, "peak_hbm_bytes": 2**31}
    write_run(folder / "a", [0.8, 0.7], summary=summary)
    write_run(folder / "b", [0.6], ended={"state": "stopped", "message": "by SIGTERM"})
    write_run(folder / "c", [], ended={"state": "failed", "message": "the loss is nan"})
    write_run(folder / "deep/d", [0.5, 0.9], optimizer={"lr": 0.3})
    return folder


def compare(*arguments: str) -> Ended:
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with (
        kept_signals(),
        redirect_stdout(out),
        redirect_stderr(err),
        patch.object(sys, "argv", ["compare", *arguments]),
    ):
        try:
            runpy.run_module("compare", run_name="__main__")
        except SystemExit as end:
            code = end.code
    return Ended(code, out.getvalue(), err.getvalue())


def test_a_table_has_the_best_run_first_and_what_differs(runs):
    ended = compare(str(runs))
    assert (ended.exit_code, ended.err) == (0, "")
    header, _, *lines = ended.out.splitlines()
    assert header.split() == (
        [
            "run",
            "state",
            "lr",
            "best",
            "auc",
            "at",
            "step",
            "last",
            "auc",
            "steps",
            "samples/s",
            "GPU",
            "GiB",
            "time",
        ]
    )
    assert lines[0].split() == [
        "deep/d",
        "crashed",
        "0.3",
        "0.9000",
        "20",
        "0.9000",
        "20",
        "100",
        "2.0",
        "s",
    ]
    assert lines[1].split() == [
        "a",
        "finished",
        "0.1",
        "0.8000",
        "10",
        "0.7000",
        "20",
        "120",
        "2.0",
        "2.0",
        "s",
    ]
    assert [line.split()[:2] for line in lines[2:4]] == [["b", "stopped"], ["c", "failed"]]
    assert lines[4:] == ["b: stopped: by SIGTERM", "c: failed: the loss is nan"]


def test_a_smaller_log_loss_is_better(runs):
    out = compare(str(runs / "a"), str(runs / "b"), "metric=log_loss").out
    assert [line.split()[0] for line in out.splitlines()[2:4]] == ["a", "b"]
    assert "0.2000" in out


def test_files_have_a_row_per_run_and_the_picture_is_drawn(runs, tmp_path):
    endings = {"csv": "csv", "json": "json", "picture": "png"}
    names = {name: tmp_path / f"out.{ending}" for name, ending in endings.items()}
    ended = compare(str(runs), *(f"{name}={path}" for name, path in names.items()))
    assert (ended.exit_code, ended.err) == (0, "")
    rows = list(csv.DictReader(io.StringIO(names["csv"].read_text())))
    assert [row["run"] for row in rows] == ["deep/d", "a", "b", "c"]
    assert (rows[0]["optimizer.lr"], rows[1]["gpu_bytes"]) == ("0.3", str(2**31))
    assert "optimizer.eps" not in rows[0]
    objects = json.loads(names["json"].read_text())
    assert objects[1]["options"]["optimizer.eps"] == 1e-8
    assert objects[1]["result_auc"] == 0.7
    assert [record["test_auc"] for record in objects[1]["evaluations"]] == [0.8, 0.7]
    pixels = imread(names["picture"], format="png")
    assert pixels.shape[:2] == (780, 1560)
    assert pixels[..., :3].std() > 0.05


def test_a_run_whose_directory_is_locked_is_running(runs):
    assert RunRecord.read(runs / "a").state is State.finished
    descriptor = lock_directory(runs / "a")
    try:
        assert RunRecord.read(runs / "a").state is State.running
    finally:
        os.close(descriptor)


def test_a_final_evaluation_is_no_candidate_for_the_best(tmp_path):
    run = RunRecord.read(
        write_run(tmp_path / "a", [0.6], records=[{"step": 10, "test_auc": 0.9, "final": True}])
    )
    metric = run.main_metric()
    assert metric is not None
    assert (run.best(metric), run.last(metric)) == ((0.6, 10), 0.6)


def test_runs_of_other_data_splits_and_rows_have_tables_of_their_own(tmp_path):
    on_shop = {"options": {"data": {"path": "shop"}}, "header": {"data_identity": "a" * 16}}
    # A copy, or the same directory by another path.
    write_run(tmp_path / "a", [0.7], **on_shop | {"options": {"data": {"path": "/the/shop"}}})
    write_run(tmp_path / "b", [0.9], options={"seed": 1})
    write_run(tmp_path / "c", [0.8], **on_shop)
    write_run(tmp_path / "d", [], **on_shop)
    write_run(tmp_path / "e", [0.99], **on_shop, eval={"split": "validation"})
    write_run(tmp_path / "f", [0.95], options={"data": {"path": "shop"}, "mode": "eval"})
    # The files of the same directory were replaced.
    changed = {"data_identity": "b" * 16}
    write_run(tmp_path / "g", [0.85], options={"data": {"path": "shop"}}, header=changed)
    rows = {"step": 20, "test_auc": 0.75, "test_rows": 9}
    write_run(tmp_path / "h", [], **on_shop, records=[rows])
    ended = compare(str(tmp_path), f"csv={tmp_path / 'x.csv'}", f"picture={tmp_path / 'x.png'}")
    assert (ended.exit_code, ended.err) == (0, "")
    lines = [line.split()[:2] for line in ended.out.splitlines() if line.strip("─ ")]
    found = [line for line in lines if line[0] != "run"]
    assert [line[0] if line[0] != "on" else line[1] for line in found[:-3]] == [
        *("shop", "c", "a", "d", "synthetic", "b", "shop", "e", "shop", "g", "shop", "h"),
    ]
    texts = ended.out.splitlines()
    assert texts[0] == "on shop (aaaaaaaa), split test, 8 rows"
    assert "on shop (aaaaaaaa), split test, 9 rows" in texts
    assert texts[-3].startswith("5 groups: metrics on different data, splits, days or rows cannot")
    assert texts[-2] == "1 left out: evaluations (mode=eval) and others that do not train"
    with (tmp_path / "x.csv").open() as stream:
        assert [row["run"] for row in csv.DictReader(stream)] == [*"cadbegh"]
    ended = compare(str(tmp_path / "f"))
    assert ended.exit_code == 2
    assert "only evaluations and other runs that do not train" in ended.err


def test_the_best_of_a_run_is_of_its_last_day_split_and_data(tmp_path):
    days = [
        {"step": 30, "test_auc": 0.92, "test_rows": 400, "day": 1},
        {"step": 40, "test_auc": 0.61, "test_rows": 500, "day": 2},
        {"step": 50, "test_auc": 0.6, "test_rows": 500, "day": 2},
    ]
    run = RunRecord.read(write_run(tmp_path / "days", [0.8], records=days))
    metric = run.main_metric()
    assert metric is not None
    assert (run.best(metric), run.last(metric)) == ((0.61, 40), 0.6)
    assert len(run.evaluations) == 4
    path = write_run(tmp_path / "split", [0.8, 0.7, 0.6], header={"split": "test"})
    (path / "restarts.jsonl").write_text('{"step": 10, "split": "validation"}\n')
    run = RunRecord.read(path)
    assert run.best(metric) == (0.7, 20)
    other = RunRecord.read(write_run(tmp_path / "other", [0.7], header={"split": "test"}))
    assert run.measured_on == other.measured_on
    (path / "restarts.jsonl").write_text('{"step": 30, "split": "validation"}\n')
    assert RunRecord.read(path).best(metric) == (0.6, 30)


def test_a_number_beyond_all_floats_is_no_value(runs):
    path = runs / "a" / "metrics.jsonl"
    path.write_text(path.read_text() + f'{{"step": 21, "test_auc": {"9" * 400}}}\n')
    ended = compare(str(runs / "a"))
    assert (ended.exit_code, ended.err) == (0, "")


def test_names_are_as_short_as_they_can_be(runs):
    found = [RunRecord.read(path) for path in find_runs([str(runs)])]
    assert labels(found) == ["a", "b", "c", "deep/d"]
    assert differing(found) == ["optimizer.lr"]
    assert short_names(["train.batch_size", "eval.batch_size", "optimizer.lr"]) == [
        "train.batch_size",
        "eval.batch_size",
        "lr",
    ]

    assert short_names(["profile.steps", "optimizer.lr"], ["steps"]) == ["profile.steps", "lr"]


def test_where_options_were_read_from_is_no_difference(tmp_path):
    found = [
        write_run(tmp_path / name, [0.5], options={"config": config, "seed": seed})
        for seed, (name, config) in enumerate({"a": None, "b": "runs/a/config.yaml"}.items())
    ]
    assert differing(map(RunRecord.read, found)) == ["seed"]


def test_an_option_is_the_same_under_its_old_name(tmp_path):
    names = ("staged_gib", "read_ahead_gib")
    found = [write_run(tmp_path / n, [0.5], options={"sharding": {n: 1.0}}) for n in names]
    assert differing(map(RunRecord.read, found)) == []


def test_options_do_not_take_the_place_of_other_columns(runs):
    for name, steps in (("a", 0), ("b", 99)):
        path = runs / name / "config.yaml"
        path.write_text(path.read_text() + f"profile: {{steps: {steps}}}\n")
    lines = compare(str(runs / "a"), str(runs / "b")).out.splitlines()
    assert lines[0].count("steps") == 2
    assert "profile.steps" in lines[0]


def test_one_run_by_several_paths_is_one_line(runs, monkeypatch):
    monkeypatch.chdir(runs)
    out = compare("a", "./a", str(runs / "a"), str(runs / "b")).out
    assert [line.split()[0] for line in out.splitlines()[2:4]] == ["a", "b"]
    assert out.splitlines()[4:] == ["b: stopped: by SIGTERM"]


def test_a_damaged_number_is_none_in_json(runs, tmp_path):
    path = runs / "a" / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 21, "test_auc": NaN}\n')
    assert compare(str(runs / "a"), f"json={tmp_path / 'out.json'}").exit_code == 0
    assert json.loads((tmp_path / "out.json").read_text())[0]["run"]


def test_a_path_with_an_equals_sign_is_a_directory(runs):
    named = (runs / "a").rename(runs / "00-lr=0.1")
    assert compare(str(named)).out.splitlines()[2].startswith("00-lr=0.1 ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "error: nowhere is no directory"),
        (["{runs}/a/x"], "/a/x holds no run: no directory there has config.yaml and metrics.jsonl"),
        (["{runs}", "metric=gauc"], "error: metric=gauc is in none of the runs; they have auc, log_loss"),
        (["metrik=auc"], "error: there is no option metrik; did you mean metric?"),
        (["{runs}", "csv={runs}/o", "json={runs}/a/../o"], "error: csv and json name the same file, {runs}/o"),
        (["{runs}", "picture={runs}/no/a.png"], "error: picture={runs}/no/a.png: there is no directory {runs}/no; make"),
        (["{runs}", "csv={runs}/a"], "error: csv={runs}/a is a directory; name a file"),
        (["{runs}", "--multirun", "metric=auc,log_loss"], "error: --multirun makes runs of a training, and this command is"),
        (["{runs}", "picture=a.pdf"], "picture=a.pdf: the picture is a PNG; want a name that ends with .png"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(runs, arguments, message):
    (runs / "a/x").mkdir()
    ended = compare(*(text.format(runs=runs) for text in arguments))
    assert ended.exit_code == 2
    assert message.format(runs=runs) in ended.err
    assert ended.err.count("\n") == 1
    assert not (runs / "o").exists()


def write_seeds(folder: Path) -> Path:
    """Write two recipes with two seeds each, one with two rates, on one dataset; and a baseline."""
    data = {"data": {"path": "shop"}}
    runs = [
        ("dlrm", {"name": "dlrm"}, 0.1, 1, 0.70),
        ("dlrm", {"name": "dlrm"}, 0.1, 2, 0.72),
        ("dlrm", {"name": "dlrm"}, 0.3, 1, 0.69),
        ("dlrm", {"name": "deepfm", "dropout": 0.5, "sizes": [400, 400]}, 0.1, 1, 0.74),
        ("dlrm", {"name": "deepfm", "dropout": 0.5, "sizes": [400, 400]}, 0.1, 2, 0.75),
    ]
    for number, (recipe, model, rate, seed, auc) in enumerate(runs):
        options = data | {"recipe": recipe, "model": model, "seed": seed, "log": {"every": number}}
        baseline = {
            "baseline_rows": 9000,
            "baseline_test_auc": 0.731,
            "baseline_test_log_loss": 0.25,
        }
        write_run(
            folder / f"{number:02d}-{model['name']},seed={seed}",
            [auc],
            options=options,
            optimizer={"lr": rate},
            header={"data_identity": "a" * 16},
            summary={"steps": 10, "test_auc": auc, "samples_per_s": 120.0}
            | (baseline if number else {}),
        )
    return folder


def test_runs_are_grouped_by_recipe_with_means_over_seeds_and_the_baseline(tmp_path):
    ended = compare(str(write_seeds(tmp_path)), f"csv={tmp_path / 'x.csv'}")
    assert (ended.exit_code, ended.err) == (0, "")
    lines = [line.strip() for line in ended.out.splitlines() if line.strip("─ ")]
    assert lines[0].split("  ")[0] == "mean ± deviation over seeds"
    assert [line.split() for line in lines[1:4]] == [
        *(["deepfm", "2"] + 2 * ["0.7450", "±", "0.0071"] + ["0.2550", "±", "0.0071"],),
        *(["dlrm", "lr=0.1", "2"] + 2 * ["0.7100", "±", "0.0141"] + ["0.2900", "±", "0.0141"],),
        *(["dlrm", "lr=0.3", "1", "0.6900", "0.6900", "0.3100"],),
    ]
    # The options of a model and of the log are no difference within a recipe.
    assert lines[4] == "deepfm"
    assert "dropout" not in ended.out
    assert "every" not in ended.out
    assert lines[5].split()[:4] == ["run", "state", "seed", "best"]
    assert lines[8] == "dlrm"
    assert lines[9].split()[:4] == ["run", "state", "lr", "seed"]
    assert (
        lines[-1]
        == "baseline: test AUC 0.7310  log loss 0.2500  (logistic regression on the ids of 9,000 rows)"
    )
    with (tmp_path / "x.csv").open() as stream:
        assert [row["baseline_auc"] for row in csv.DictReader(stream)].count("0.731") == 4


def test_curves_are_named_by_what_differs(tmp_path):
    found = [RunRecord.read(path) for path in find_runs([str(write_seeds(tmp_path))])]
    assert names_of(found)[0] == "dlrm lr=0.1 seed=1"
    assert names_of(found)[3:] == ["deepfm seed=1", "deepfm seed=2"]
    assert names_of(found[:1]) == ["00-dlrm,seed=1"]


@pytest.mark.parametrize("options", [3, 9])
def test_a_table_fits_120_columns_in_a_pipe(tmp_path, options):
    for number in range(2):
        chosen = {f"a_long_name_of_option_{index}": [number] * 8 for index in range(options)}
        write_run(tmp_path / f"{number}", [0.7], options={"model": {"name": "dlrm", **chosen}})
    out = compare(str(tmp_path)).out
    assert max(map(len, out.splitlines())) <= 120
    assert "option_2" in out.replace("\n", "")
