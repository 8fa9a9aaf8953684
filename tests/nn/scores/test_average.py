"""The mean of the scores of several runs, by one command."""

from pathlib import Path

import numpy as np
import pyarrow.csv as pc
import pyarrow.parquet as pq
import pytest
from hydra.core.global_hydra import GlobalHydra

from nn.scores import average as module
from tests.helpers.command import run_command
from tests.helpers.composed import TINY

MODELS = {"a": "dlrm", "b": "deepfm"}
DATA = [option for option in TINY if not option.startswith("model.")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for name, model in MODELS.items():
        options = (*DATA, f"model.name={model}", "model.embedding_dim=8", "optimizer.lr=0.05")
        options += ("model.bottom_mlp=[8]",) * (model == "dlrm")
        ended = run_command(*options, "train.max_steps=16", f"run_dir={folder / name}")
        assert ended.exit_code == 0, ended.err
    return folder


def in_this_process(options):
    # Hydra has composed the options of the command itself, which only a process of its own could do again.
    GlobalHydra.instance().clear()
    return run_command(*options).exit_code


@pytest.fixture(autouse=True)
def in_process(monkeypatch):
    """Score with each run in this process."""
    monkeypatch.setattr(module, "run_command", in_this_process)


def averaged(runs: Path, output: Path, *options: str):
    named = ",".join(str(runs / name) for name in MODELS)
    return run_command("mode=predict", f"predict.average=[{named}]", f"output={output}", *options)


def test_the_mean_of_two_models_is_written(runs, tmp_path):
    ended = averaged(runs, tmp_path / "mean.parquet")
    assert ended.exit_code == 0, ended.err
    single = []
    for name in MODELS:
        run = [
            f"config={runs / name}/config.yaml",
            f"checkpoint.restore={runs / name}/checkpoints/best",
        ]
        path = tmp_path / f"{name}.parquet"
        assert run_command(*run, "mode=predict", f"output={path}").exit_code == 0
        single.append(pq.read_table(path))
    mean = pq.read_table(tmp_path / "mean.parquet")
    assert mean.column_names == ["row", "score"]
    assert mean["row"].equals(single[0]["row"])
    scores = [table["score"].to_numpy() for table in single]
    np.testing.assert_array_equal(mean["score"].to_numpy(), np.mean(scores, axis=0))
    assert {path.name for path in tmp_path.iterdir()} == {"a.parquet", "b.parquet", "mean.parquet"}


def test_options_of_the_command_are_those_of_every_run(runs, tmp_path):
    ended = averaged(runs, tmp_path / "mean.csv", "predict.split=train", "eval.batch_size=512")
    assert ended.exit_code == 0, ended.err
    assert len(pc.read_csv(tmp_path / "mean.csv")) == 2048


def test_a_run_that_cannot_score_ends_the_command_without_a_file(runs, tmp_path, monkeypatch):
    monkeypatch.setitem(MODELS, "nowhere", "dlrm")
    ended = averaged(runs, tmp_path / "mean.parquet")
    assert ended.exit_code == 2
    assert "nowhere has no checkpoint" in ended.err
    monkeypatch.delitem(MODELS, "nowhere")
    ended = averaged(runs, tmp_path / "mean.parquet", "predict.split=nothing")
    assert ended.exit_code == 2
    assert "could not score the rows (exit code 2)" in ended.err
    assert not list(tmp_path.iterdir())


def test_what_every_run_has_of_its_own_and_a_run_named_twice_are_refused(runs, tmp_path):
    output = tmp_path / "mean.parquet"
    ended = averaged(runs, output, f"checkpoint.restore={runs}/a/checkpoints/best")
    assert ended.exit_code == 2
    assert "and predict.average exclude each other; leave checkpoint.restore out" in ended.err
    again = f"predict.average=[{runs / 'a'},{runs}/b/../a]"
    ended = run_command("mode=predict", again, f"output={output}")
    assert ended.exit_code == 2
    assert "predict.average names a run twice" in ended.err
    assert not output.exists()


def test_scores_of_other_rows_are_not_averaged(runs, tmp_path, monkeypatch):
    def with_other_rows(options):
        more = "data.synthetic.test_rows=128" if "/b/" in " ".join(options) else "seed=1"
        return in_this_process([*options, more])

    monkeypatch.setattr(module, "run_command", with_other_rows)
    ended = averaged(runs, tmp_path / "mean.parquet")
    assert ended.exit_code == 2
    assert "the runs have scored other rows; set data.path and predict.split" in ended.err
    assert not (tmp_path / "mean.parquet").exists()
