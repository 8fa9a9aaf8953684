"""A sweep with trials of tenths of a second: results, kills, failures, pruning and refusals."""

import csv
import io
import json
import math
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import Mock, patch

import numpy as np
import optuna
import pytest
from matplotlib.image import imread
from optuna.distributions import FloatDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial
from rich.console import Console

from compare.run_record import RunRecord, State
from configs.many_runs_schema import Pruner, Sampler, SweepConfig
from dataloading.dataset.durable_files import exclusive
from nn.models.metric import metric_of_key
from sweep.__main__ import with_trial_options
from sweep.driver import StoppedSweepError
from sweep.plan import _Composition
from sweep.proposals import final_values, promising_values, spread_values
from sweep.run import run_sweep
from sweep.space import allows, as_override, grid_of, read_space
from sweep.study import ReachPruner
from sweep.trial import Ending, RunningTrial
from tests.helpers.command import hydra_that_reads_once
from tests.helpers.datasets import write_clicks
from tests.helpers.runs import Killed
from tests.sweep import fake_run

SPACE = "optimizer.lr: {low: 0.001, high: 10, log: true}\ncheckpoint.keep: [1, 2]\n"


class Starts:
    """Commands that were started, in place of which fake runs are."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.kill_at: int | None = None

    def __call__(self, command, environment, log):
        if len(self.commands) == self.kill_at:
            self.kill_at = None
            raise Killed
        self.commands.append(list(command))
        with log.open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-S", fake_run.__file__, *command[2:]],
                env=environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def tests(self) -> list[list[str]]:
        return [command for command in self.commands if "mode=eval" in command]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("sweep.driver.POLL_SECONDS", 0.02)
    monkeypatch.setattr("sweep.results.POLL_SECONDS", 0.02)
    with hydra_that_reads_once():
        yield


@pytest.fixture
def space(tmp_path) -> Path:
    path = tmp_path / "space.yaml"
    path.write_text(SPACE)
    return path


@pytest.fixture
def output(tmp_path) -> Path:
    return tmp_path / "sweep"


def sweep(
    space: Path, output: Path, starts: Starts | None = None, *, draws: bool = False, **changes
) -> str:
    """Run a sweep; return what it prints. Its pictures take a second."""
    overrides = ["device=cpu", *changes.pop("overrides", [])]
    text = io.StringIO()
    # The Gaussian process takes seconds, and few tests are about it.
    settings = {"trials": 4, "parallel": 2, "pruner": Pruner.none, "sampler": Sampler.tpe} | changes
    config = SweepConfig(space=str(space), output=str(output), overrides=overrides, **settings)
    with ExitStack() as stack:
        for name in () if draws else ("draw_coordinates", "draw_importances"):
            stack.enter_context(patch(f"sweep.run.{name}"))
        run_sweep(config, Console(file=text, width=200), starts or Starts())
    return text.getvalue()


def starts_of(output: Path) -> dict[str, int]:
    """Return how often each trial was started, by its number."""
    runs = sorted((output / "trials").iterdir())
    return {run.name[:2]: len((run / "starts").read_text().splitlines()) for run in runs}


def test_the_best_trial_is_tested_once_and_results_are_left(space, output):
    starts = Starts()
    text = sweep(space, output, starts, draws=True, trials=5)
    result = json.loads((output / "sweep.json").read_text())
    rows = list(csv.DictReader((output / "trials.csv").open()))
    assert [row["trial"] for row in rows] == [
        str(trial["trial"]) for trial in sorted(result["trials"], key=lambda row: -row["value"])
    ]
    best = max(result["trials"], key=lambda row: row["value"])
    assert (result["best"]["trial"], result["best"]["value"]) == (best["trial"], best["value"])
    assert result["split"] == "validation"
    # At the last evaluation the AUC is below the test's by 0.001 + 0.1 / 4.
    assert result["test"]["test_auc"] == pytest.approx(best["value"] + 0.025)
    assert [name[:2] for name in starts_of(output)] == [f"{number:02d}" for number in range(5)]
    assert len(starts.tests) == 1
    assert "eval.split=test" in starts.tests[0]
    # Not those of the checkpoint that trials may begin from.
    whole = ["checkpoint.parts=[dense,tables]", "checkpoint.restore_tables=null"]
    assert starts.tests[0][-2:] == whole
    assert all("data.validation_fraction=0.1" in command for command in starts.commands)
    kept = [path.parent.name[:2] for path in (output / "trials").glob("*/checkpoints")]
    assert kept == [f"{best['trial']:02d}"]
    assert f"best        trial {best['trial']}: validation auc {best['value']:.4f}" in text
    for name in ("parallel_coordinates.png", "importances.png"):
        assert imread(output / name)[..., :3].std() > 0.05
    assert result["importances"].keys() == {"optimizer.lr", "checkpoint.keep"}
    assert sum(result["importances"].values()) == pytest.approx(1)
    # The same command has nothing left to do.
    again = Starts()
    sweep(space, output, again, trials=5)
    assert again.commands == []


@pytest.mark.doors
def test_after_a_kill_of_the_sweep_no_trial_is_lost_or_run_twice(space, output):
    starts = Starts()
    starts.kill_at = 3
    with pytest.raises(Killed):
        sweep(space, output, starts)
    starts.commands.clear()
    # What a killed process leaves: its lock, and a part of a line.
    journal = output / "journal.log"
    Path(f"{journal}.lock").symlink_to(journal)
    with journal.open("a") as stream:
        stream.write('{"op_code": 5, "wor')
    sweep(space, output, starts)
    numbers = [
        trial["trial"] for trial in json.loads((output / "sweep.json").read_text())["trials"]
    ]
    assert numbers == [0, 1, 2, 3]
    for run in (output / "trials").iterdir():
        steps = [
            json.loads(line)["step"] for line in (run / "metrics.jsonl").open() if "step" in line
        ]
        assert steps == [10, 20, 30, 40]


@pytest.mark.doors
def test_a_killed_trial_resumes_and_then_fails(space, output, tmp_path):
    text = sweep(space, output, overrides=["recipe=killed"], trials=2)
    assert "its process was killed; it resumes" in text
    assert starts_of(output) == {"00": 2, "01": 2}
    assert {t["state"] for t in json.loads((output / "sweep.json").read_text())["trials"]} == {
        "complete"
    }
    with pytest.raises(ValueError, match="none of the 1 trials is complete"):
        sweep(
            *(space, tmp_path / "b"),
            **{"draws": True, "overrides": ["recipe=always_killed"], "trials": 1, "restarts": 1},
        )
    assert starts_of(tmp_path / "b") == {"00": 2}


@pytest.mark.doors
def test_a_trial_that_diverges_is_recorded_and_ends_no_other(tmp_path, output):
    space = tmp_path / "space.yaml"
    space.write_text("optimizer.lr: [0.1, 5.0]\n")
    text = sweep(space, output, draws=True, overrides=["recipe=diverge"], sampler=Sampler.grid)
    trials = json.loads((output / "sweep.json").read_text())["trials"]
    assert [(trial["state"], trial["problem"]) for trial in trials] == [
        ("complete", ""),
        ("failed", "diverged: the loss is nan"),
    ]
    assert "trial 1 failed: diverged: the loss is nan" in text


@pytest.mark.doors
def test_a_trial_worse_than_the_others_is_pruned(tmp_path, output):
    space = tmp_path / "space.yaml"
    space.write_text(f"optimizer.lr: {[*(0.1 + 0.001 * number for number in range(6)), 9.0]}\n")
    options = {"sampler": Sampler.grid, "pruner": Pruner.median, "trials": 7, "parallel": 1}
    sweep(space, output, **options | {"trials": 6, "pruner": Pruner.none})
    starts = Starts()
    # The process of the last one would wait for 30 s after each evaluation.
    original = starts.__call__
    sweep(
        space,
        output,
        lambda command, environment, log: original([*command, "recipe=slow"], environment, log),
        draws=True,
        **options,
    )
    trials = json.loads((output / "sweep.json").read_text())["trials"]
    assert [trial["state"] for trial in trials] == ["complete"] * 6 + ["pruned"]
    assert trials[6]["steps"] == 10
    assert RunRecord.read(output / trials[6]["run_dir"]).state is State.pruned


@pytest.mark.doors
def test_the_default_sampler_begins_with_the_recipe_and_spreads_values(space, output):
    sweep(space, output, trials=2, parallel=1, sampler=Sampler.gp)
    trials = json.loads((output / "sweep.json").read_text())["trials"]
    assert (trials[0]["optimizer.lr"], trials[0]["checkpoint.keep"]) == (0.02, "2")
    drawn = spread_values(read_space(str(space))[1], 1, seed=0)
    assert (trials[1]["optimizer.lr"], trials[1]["checkpoint.keep"]) == (*drawn.values(),)


def test_a_trial_that_cannot_reach_the_best_is_pruned():
    for direction, sign in (("maximize", 1), ("minimize", -1)):
        study = optuna.create_study(direction=direction, pruner=ReachPruner())
        for curve in ((0.5, 0.7, 0.8), (0.6, 0.7, 0.75)):
            trial = study.ask()
            for number, value in enumerate(curve, start=1):
                trial.report(sign * value, number)
                assert not trial.should_prune()
            study.tell(trial, sign * curve[-1])
        # No trial gained more than 0.3 after the first evaluation, and 0.1 after the second.
        for curve, is_pruned in (((0.49,), True), ((0.51,), False), ((0.51, 0.69), True)):
            trial = study.ask()
            for number, value in enumerate(curve, start=1):
                trial.report(sign * value, number)
            assert trial.should_prune() == is_pruned
            study.tell(trial, state=TrialState.PRUNED)


@pytest.mark.parametrize(("evaluations", "ending"), [(2, Ending.pruned), (1, None)])
def test_a_trial_is_not_pruned_by_its_last_evaluation(tmp_path, evaluations, ending):
    study = optuna.create_study(direction="maximize", pruner=ReachPruner())
    for value in (0.7, 0.8):
        trial = study.ask()
        for number in range(evaluations):
            trial.report(value, number + 1)
        study.tell(trial, value)
    (tmp_path / "metrics.jsonl").write_text('{"recipe": "fake"}\n{"step": 9, "test_auc": 0.5}\n')
    process = Mock(poll=lambda: None)
    fixed = (tmp_path, tmp_path / "log", None, metric_of_key("test_auc"), Mock())
    running = RunningTrial(study.ask(), {}, *fixed, restarts=0, process=process)
    assert running.update(Mock()) is ending
    assert running.num_reported == 1


def complete_trial(number: int, *curve: float) -> FrozenTrial:
    state = TrialState.COMPLETE if len(curve) == 3 else TrialState.PRUNED
    steps = dict(enumerate(curve, start=1))
    trial = create_trial(
        state=state, value=max(curve) if len(curve) == 3 else None, intermediate_values=steps
    )
    trial.number = number
    return trial


def test_a_pruned_trial_counts_with_the_value_that_it_would_have():
    trials = [complete_trial(0, 0.5, 0.7, 0.8), complete_trial(1, 0.6, 0.7, 0.6)]
    trials += [complete_trial(2, 0.4), complete_trial(3, 0.5, 0.45)]
    # After the first evaluation the others gained 0.3 and 0.1, after the second 0.1 and nothing.
    wanted = {0: 0.8, 1: 0.7, 2: 0.6, 3: 0.55}
    assert final_values(trials, 1.0) == pytest.approx(wanted)
    assert final_values(trials[2:], 1.0) == {}


def test_the_most_promising_values_lie_between_the_best_ones():
    space = {"optimizer.lr": FloatDistribution(0.001, 10.0, log=True)}
    known = [0.8 - 0.05 * (math.log10(lr) + 1) ** 2 for lr in (0.001, 0.02, 0.5, 3)]
    trials = []
    for lr, value in zip((0.001, 0.02, 0.5, 3), known, strict=True):
        params = {"optimizer.lr": lr}
        trials.append(create_trial(params=params, distributions=dict(space), value=value))
        trials[-1].number = len(trials) - 1
    found = promising_values(trials, space, "maximize", seed=0)
    assert 0.02 < found["optimizer.lr"] < 0.5
    assert promising_values(trials[:0], space, "maximize", seed=0) is None


@pytest.mark.doors
def test_each_trial_that_runs_at_once_has_a_gpu_of_its_own(space, output, monkeypatch):
    monkeypatch.setattr("sweep.run.visible_gpus", lambda: ["3", "5"])
    sweep(space, output, trials=2, overrides=["device=auto"])
    runs = sorted((output / "trials").iterdir())
    assert [(run / "starts").read_text() for run in runs] == ["3\n", "5\n"]
    with pytest.raises(ValueError, match=r"^parallel=3, and there are 2 GPUs, of which each trial"):
        sweep(space, output, parallel=3, overrides=["device=auto"])


@pytest.mark.doors
def test_a_signal_stops_the_trials_and_the_same_command_resumes(space, output):
    starts = Starts()

    def start(command, environment, log):
        process = starts(command, environment, log)
        if len(starts.commands) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return process

    with pytest.raises(StoppedSweepError, match=r"^stopped by SIGTERM; the same command resumes"):
        sweep(space, output, start)
    assert not (output / "sweep.json").exists()
    again = Starts()
    sweep(space, output, again)
    assert len(starts.commands) == 2
    assert sorted({name[:2] for name in starts_of(output)}) == ["00", "01", "02", "03"]


@pytest.mark.doors
def test_one_directory_holds_one_sweep_at_a_time_and_one_space(space, output, tmp_path):
    sweep(space, output, trials=1)
    with exclusive(output, "is sweeping there"), pytest.raises(ValueError, match="is sweeping in"):
        sweep(space, output)
    with pytest.raises(
        ValueError, match=r"trials with other options \(they differ in train\.epochs=3\)"
    ):
        sweep(space, output, overrides=["train.epochs=3"])
    space.write_text(SPACE.replace("10", "20"))
    with pytest.raises(
        ValueError, match=r"holds a sweep with another space: .* set another output"
    ):
        sweep(space, output)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/x").touch()
    with pytest.raises(ValueError, match="is not empty and holds no sweep"):
        sweep(space, tmp_path / "full")


@pytest.mark.doors
def test_data_that_changed_end_a_sweep(space, output, tmp_path):
    """Trials of one table are measured on the same rows; here every label was inverted."""
    root = write_clicks(tmp_path / "clicks")
    overrides = [f"data.path={root}"]
    sweep(space, output, trials=1, overrides=overrides)
    settings = json.loads((output / "settings.json").read_text())
    label = root / "train/label.bin"

    def invert():
        label.write_bytes((1 - np.fromfile(label, np.uint8)).tobytes())

    invert()
    message = r"on other data, .*: train/label.bin \(the same size, other bytes\); restore the data"
    with pytest.raises(ValueError, match=message):
        sweep(space, output, trials=2, overrides=overrides)
    invert()
    # An earlier version recorded nothing of the data.
    del settings["data"]
    (output / "settings.json").write_text(json.dumps(settings))
    # What is refused as another sweep leaves nothing there.
    with pytest.raises(ValueError, match="trials with other options"):
        sweep(space, output, trials=2, overrides=[*overrides, "train.epochs=3"])
    assert json.loads((output / "settings.json").read_text()) == settings
    starts = Starts()

    def start(*command):
        invert()
        return starts(*command)

    with pytest.raises(ValueError, match=message):
        sweep(space, output, start, trials=4, parallel=1, overrides=overrides)
    assert len(starts.commands) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("optimizer.lrr: [1, 2]", "there is no option optimizer.lrr; did you mean optimizer.lr?"),
        ("sharding.staged_gib: [1]", "no option sharding.staged_gib; did you mean sharding.read_ahead_gib?"),
        ("model.dropuot: [0.1]", "there is no option model.dropuot; did you mean model.dropout?"),
        ("model.hidden: [[8], [9]]", "space: model.hidden is an option of wide_deep, deepfm, "),
        ("model.name: [dlrm, dcnv2]\nmodel.hidden: [[8]]", "model.hidden is an option of wide_deep, "),
        ("model.name: [masknet]\nmodel.hidden: [[8]]", "space: model.hidden has no effect: "),
        ("model.name: [deepfm]\nmodel.hidden: [[8], [-1]]", "model.hidden must all be positive"),
        ("model.dropout: [0.1, 1.5]", "model.dropout must lie in [0, 1)"),
        ("optimizer.lr: {low: -1, high: 1}", "optimizer.lr must be positive, got -1"),
        ("", "the space is empty"),
        ("{}", "the space is empty"),
        ("seed: []", "seed has no choices"),
        ("seed: [1, 1]", "seed has a choice twice"),
        ("optimizer.lr: [0.01, 1e-2]", "optimizer.lr has a choice twice: 0.01, 0.01"),
        ("optimizer.lr: [1, 1.0]", "optimizer.lr has a choice twice: 1, 1.0"),
        ("model.bottom_mlp: [[1e1, 8], [10, 8]]", "model.bottom_mlp has a choice twice"),
        ("optimizer.lr: {low: 0.1, high: 0.2, step: 1}", "a step of 1 leaves only 0.1 of 0.1 to 0.2"),
        ("seed: 3", "got 3, want a list of choices, or {low: .., high: ..}"),
        ("seed: {low: 1}", "seed needs low and high"),
        ("seed: {low: 1, high: 9, steps: 2}", "there is no 'steps'; want low, high, and log or step"),
        ("seed: {low: 1, high: 9, step: 2, log: true}", "seed: Samplers and other components in Opt"),
        ("optimizer.lr: {low: 0, high: 1, log: true}", "optimizer.lr: "),  # in the words of each Optuna
        ("eval.split: [test]", "eval.split cannot differ between trials"),
        ("config: [a.yaml, b.yaml]", "config cannot differ between trials"),
        ("eval.max_steps: [1, 2]", "trials with eval.max_steps=1 and with 2 would be measured on dif"),
        ("seed: [1, 2]", "trials with seed=1 and with 2 would be measured on different rows or labels"),
        ("data.synthetic.exponent: [0.0, 3.0]", "trials with data.synthetic.exponent=0.0 and with"),
        ("tasks: ['{label: {keep_rate: 0.5}}', '{label: {keep_rate: 0.1}}']", "keep_rate=0.5 and with 0"),
        ("hello", "the space is 'hello'; want options with values"),
        ("optimizer.lr: [[0.1], [0.2]]", "space: optimizer.lr: Value '[0.1]' of type 'list' could"),
    ],
)  # fmt: skip
def test_a_bad_space_is_refused_before_anything_starts(space, output, content, message):
    space.write_text(content)
    with pytest.raises(ValueError, match=r"space") as caught:
        sweep(space, output)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not output.exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recipe": "dlmr"}, "there is no recipe=dlmr; did you mean dlrm?"),
        ({"metric": "aucc"}, "eval.best_metric=aucc is not measured"),
        ({"sampler": Sampler.grid}, "sampler=grid needs choices or a step, and optimizer.lr is"),
        ({"overrides": ["eval.split=test"]}, "eval.split=test: trials chosen by the test split"),
        ({"overrides": ["eval.split=train"]}, "eval.split=train: trials chosen by the train split"),
        ({"overrides": ["run_dir=x"]}, "run_dir: each trial has its own, below output; set output"),
        ({"overrides": ["checkpoint.keep=3"]}, "checkpoint.keep is in the space and among the options of all trials"),
        ({"overrides": ["checkpoint.save=false"]}, "checkpoint.save=false: the best trial is tested"),
        ({"overrides": ["model.hidden=[8]"]}, "model.hidden is an option of wide_deep, deepfm, "),
        ({"overrides": ["optimizer.lrr=3"]}, "there is no option optimizer.lrr; did you mean"),
    ],
)  # fmt: skip
def test_bad_options_are_refused_before_anything_starts(space, output, changes, message):
    with pytest.raises(ValueError, match=r"^\w") as caught:
        sweep(space, output, **changes)
    assert str(caught.value).startswith(message)
    assert not output.exists()


def _values_of(output: Path) -> list[str]:
    return sorted(row["optimizer.lr"] for row in csv.DictReader((output / "trials.csv").open()))


@pytest.mark.parametrize("sampler", [Sampler.random, Sampler.tpe, Sampler.gp, Sampler.qmc])
def test_a_space_smaller_than_the_trials_is_tried_whole_and_once(space, output, sampler):
    """Samplers drew one of two values three times out of four."""
    space.write_text("optimizer.lr: [0.01, 0.02]\n")
    sweep(space, output, trials=4, parallel=1, sampler=sampler)
    assert _values_of(output) == ["0.01", "0.02"]


def test_a_grid_begun_by_another_sampler_has_each_combination_once(space, output):
    """It took the combination with the number of the trial, so that the first ones were left out."""
    space.write_text("optimizer.lr: [0.01, 0.02, 0.03, 0.04]\n")
    sweep(space, output, trials=2, parallel=1, sampler=Sampler.random, sampler_seed=3)
    assert _values_of(output) != ["0.01", "0.02"]
    sweep(space, output, trials=4, parallel=1, sampler=Sampler.grid)
    assert len(set(_values_of(output))) == len(_values_of(output)) == 4


@pytest.mark.doors
def test_a_space_that_chooses_the_model_may_have_options_of_each(space, output):
    """A trial has, names and lists those of its own model only: its command would refuse the others."""
    space.write_text(
        "model.name: [dlrm, masknet]\nmodel.top_mlp: ['[8,1]']\nmodel.structure: [serial, parallel]\nmodel.hidden: [[8], [9]]\n"
        "optimizer.lr: [0.1]\n"
    )
    starts = Starts()
    overrides = ["model.dropout=0.1"]
    sweep(space, output, starts, draws=True, sampler=Sampler.grid, trials=8, overrides=overrides)
    rows = list(csv.DictReader((output / "trials.csv").open()))
    assert {
        tuple(row[f"model.{key}"] for key in ("name", "top_mlp", "structure", "hidden"))
        for row in rows
    } == {
        ("dlrm", "[8,1]", "", ""),
        ("masknet", "", "serial", ""),
        ("masknet", "", "parallel", "[8]"),
        ("masknet", "", "parallel", "[9]"),
    }
    for command in starts.commands:
        _Composition("dlrm", command[2:]).config({})  # as the command does


def test_a_step_may_be_as_long_as_its_range(space):
    space.write_text("optimizer.lr: {low: 0.1, high: 0.3, step: 0.2}\n")  # 0.3 - 0.1 < 0.2
    assert list(grid_of(read_space(str(space))[1])) == [
        {"optimizer.lr": 0.1},
        {"optimizer.lr": 0.3},
    ]


def test_numbers_of_choices_may_be_written_without_a_point(space):
    """Yaml reads texts, so that the recipe's own value, 0.02, was none of them."""
    space.write_text("optimizer.lr: [2e-2, .5]\nmodel.bottom_mlp: [[1e1, '8', 3]]\n")
    found = read_space(str(space))[1]
    assert [values.choices for values in found.values()] == [("0.02", "0.5"), ("[10.0,8,3]",)]
    assert allows(found["optimizer.lr"], 0.02)


def test_the_committed_space_is_that_of_the_sample():
    path, space = read_space("deepfm_criteo")
    assert path.name == "deepfm_criteo.yaml"
    assert space["optimizer.lr"] == FloatDistribution(0.001, 0.01, log=True)
    assert space["model.dropout"].choices == ("0.4", "0.5", "0.6")


def test_options_of_trials_stand_beside_those_of_the_sweep():
    written = ["space=s.yaml", "data.path=a b", "trials=3", "model.top_mlp=[8,1]", "--help"]
    assert with_trial_options(written) == [
        *("space=s.yaml", "trials=3", "--help"),
        "overrides=['data.path=a b','model.top_mlp=[8,1]']",
    ]
    # The sweep would take the value from an option of its own.
    assert with_trial_options(["run_dir=${output}"]) == [r"overrides=['run_dir=\${output}']"]
    with pytest.raises(ValueError, match=r"^there is no option trails; did you mean trials\?"):
        with_trial_options(["trails=3"])
    assert as_override("optimizer.lr", 1e-5) == "optimizer.lr=1e-05"


def test_a_trial_has_all_of_its_values_beside_a_mapping():
    composition = _Composition("dlrm", ["device=cpu", "tasks={label: {label_smoothing: 0.1}}"])
    config = composition.config({"optimizer.lr": 0.123, "tasks": "{label: {focal_gamma: 2}}"})
    assert (config.optimizer.lr, config.tasks) == (0.123, {"label": {"focal_gamma": 2}})
    assert composition.config({}).tasks == {"label": {"label_smoothing": 0.1}}
