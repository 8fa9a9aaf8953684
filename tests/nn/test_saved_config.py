"""The options of a run given back with `config=`: the same run, other options behind it, and what is refused."""

import json
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from configs.schema import ShardingType
from nn.saved_config import load_saved_config
from tests.helpers.command import run_command
from tests.helpers.composed import TINY, compose_with_hydra

OF_A_RUN = [
    *(*TINY, "model.name=wukong", "eval.every=8", "sharding.tables={cat_0: row_wise}"),
    *("tasks={label: {focal_gamma: 2.0}}", "eval.metrics=[calibration]", "train.amp=bf16"),
]


@pytest.fixture
def saved(tmp_path) -> Path:
    """The config.yaml that a run of `OF_A_RUN` writes."""
    path = tmp_path / "run of, day=1" / "config.yaml"
    path.parent.mkdir()
    composed = compose_with_hydra(*OF_A_RUN, recipe="dcnv2")
    path.write_text(OmegaConf.to_yaml(composed, resolve=True))
    return path


def test_all_options_of_a_run_come_back(saved):
    ended = run_command(f"config={saved}", "optimizer.lr=0.5", "--cfg", "job")
    assert ended.exit_code == 0, ended.err
    wanted = yaml.safe_load(saved.read_text())
    assert wanted["model"]["name"] == "wukong"
    wanted["optimizer"]["lr"] = 0.5
    wanted["config"] = str(saved)
    assert yaml.safe_load(ended.out) == wanted


def test_a_run_takes_further_options_and_records_the_command_as_written(saved, tmp_path):
    run_dir = tmp_path / "new"
    arguments = [f"config={saved}", "eval.per_epoch=2", "train.max_steps=2", f"run_dir={run_dir}"]
    ended = run_command(*arguments, "log.loggers=[]")
    assert ended.exit_code == 0, ended.err
    config = load_saved_config(run_dir / "config.yaml", trusted=False)
    assert (config.recipe, config.model.name, config.train.max_steps) == ("dcnv2", "wukong", 2)
    # The file has eval.every, which replaces eval.per_epoch unless the command line names that.
    assert (config.eval.every, config.eval.per_epoch) == (None, 2)
    environment = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[0])
    assert "eval.per_epoch=2" in environment["command"]
    assert "--config-name" not in environment["command"]
    again = run_command(f"config={run_dir / 'config.yaml'}")
    assert again.exit_code == 0, again.err
    assert "holds the complete run already" in again.out


@pytest.mark.parametrize(
    ("more", "run_dir"),
    [
        ([], "runs/a"),
        (["mode=train"], "runs/a"),
        (["mode=eval"], None),
        (["mode=plan"], None),
        (["mode=eval", "run_dir=runs/b"], "runs/b"),
    ],
)
def test_another_mode_does_not_write_into_the_directory_of_the_run(saved, more, run_dir):
    values = yaml.safe_load(saved.read_text())
    saved.write_text(yaml.safe_dump(values | {"run_dir": "runs/a"}))
    ended = run_command(f"config={saved}", *more, "--cfg", "job")
    assert ended.exit_code == 0, ended.err
    assert yaml.safe_load(ended.out)["run_dir"] == run_dir


def test_mappings_of_the_command_line_replace_those_of_the_file(saved, tmp_path):
    text = saved.read_text()
    first = "tasks={label: {label_smoothing: 0.1, focal_gamma: 2}}"
    tables = "sharding.tables={cat_0: {tier: host, cache: 1}}"
    before = [f"config={saved}", first, tables, "train.max_steps=1", "log.loggers=[]"]
    assert run_command(*before, f"run_dir={tmp_path / 'first'}").err == ""
    assert saved.read_text() == text
    file = tmp_path / "first" / "config.yaml"
    again = [f"config={file}", "train.max_steps=1", "log.loggers=[]"]
    for number, (tasks, tables, wanted) in enumerate(
        (
            ("tasks={label: {positive_weight: 2}}", "sharding.tables={cat_1: table_wise}", "cat_1"),
            ("tasks={}", "sharding.tables={}", None),
        )
    ):
        run_dir = tmp_path / str(number)
        ended = run_command(*again, tasks, tables, f"run_dir={run_dir}")
        assert (ended.exit_code, ended.err) == (0, "")
        config = load_saved_config(run_dir / "config.yaml", trusted=False)
        assert (config.tasks or {}) == ({"label": {"positive_weight": 2}} if wanted else {})
        assert (config.sharding.tables or {}) == (
            {wanted: ShardingType.table_wise} if wanted else {}
        )
    recorded = json.loads((tmp_path / "1" / "metrics.jsonl").read_text().splitlines()[0])["command"]
    assert "tasks={}" in recorded
    assert "null" not in recorded
    # An option below a mapping of the file is added to it.
    ended = run_command(*again, "tasks.label.focal_gamma=1", f"run_dir={tmp_path / 'part'}")
    assert (ended.exit_code, ended.err) == (0, "")
    config = load_saved_config(tmp_path / "part" / "config.yaml", trusted=False)
    assert config.tasks == {"label": {"label_smoothing": 0.1, "focal_gamma": 1}}


def test_mappings_of_the_command_line_replace_those_of_an_experiment(tmp_path):
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\ntasks: {label: {focal_gamma: 2}}\nsharding: {tables: {cat_0: row_wise}}\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    command = [*TINY, f"--config-dir={tmp_path}", "experiment=mine", "train.max_steps=1"]
    cases = (
        ("{label: {label_smoothing: 0.1}}", {"label": {"label_smoothing": 0.1}}),
        ("{}", {}),
    )
    for number, (written, tasks) in enumerate(cases):
        tables = {"cat_1": ShardingType.table_wise} if tasks else {}
        shards = "{cat_1: table_wise}" if tasks else "{}"
        options = [f"tasks={written}", f"sharding.tables={shards}", "log.loggers=[]"]
        run_dir = tmp_path / str(number)
        ended = run_command(*command, *options, f"run_dir={run_dir}")
        assert (ended.exit_code, ended.err) == (0, "")
        config = load_saved_config(run_dir / "config.yaml", trusted=False)
        assert (config.tasks or {}) == tasks
        assert (config.sharding.tables or {}) == tables


REFUSED = [
    ("eval:\n", "evla:\n", [], "there is no option evla"),
    ("recipe: dcnv2\n", "defaults: [dlrm]\nrecipe: a\n", [], "there is no option defaults"),
    ("seed: 1\n", "seed: ${oc.env:HOME}\n", [], "seed is '${oc.env:HOME}'; a run's config.yaml"),
    ("seed: 1\n", "seed: [\n", [], "not plain yaml"),
    ("recipe: dcnv2\n", "", [], "is no configuration of a run, which has recipe, model and train"),
    ("", "", ["experiment=dlrm_criteo_t15"], "experiment=dlrm_criteo_t15 chooses others"),
    ("", "", ["--config-name=dlrm"], "--config-name exclude each other"),
    ("", "", ["optimizer.rl=1"], "there is no option optimizer.rl"),
    ("  embedding_dim: 8\n", "  embeding_dim: 8\n", [], "there is no option model.embeding_dim"),
]


@pytest.mark.parametrize(("old", "new", "more", "message"), REFUSED)
def test_options_that_cannot_be_given_back_are_refused_in_one_line(old, new, more, message, saved):
    text = saved.read_text()
    assert old in text
    saved.write_text(text.replace(old, new, 1))
    ended = run_command(f"config={saved}", *more)
    assert ended.exit_code == 2
    assert message in ended.err
    assert ended.err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [("nowhere.yaml", "no such file"), ("", "is a directory; name the config.yaml in it")],
)
def test_a_file_that_is_not_there_is_refused_in_one_line(name, message, tmp_path):
    ended = run_command(f"config={tmp_path / name}")
    assert ended.exit_code == 2
    assert message in ended.err
    assert ended.err.count("\n") == 1


@pytest.mark.parametrize("mode", ["eval", "plan"])
def test_another_mode_leaves_the_directory_of_the_run_alone(mode, saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_dir = tmp_path / "trained"
    options = ["train.max_steps=1", "log.loggers=[]", "log.pictures=false"]
    assert run_command(f"config={saved}", *options, f"run_dir={run_dir}").err == ""

    def contents():
        return {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}

    before = contents()
    restore = f"checkpoint.restore={run_dir / 'checkpoints/step_1'}"
    ended = run_command(f"mode={mode}", f"config={run_dir / 'config.yaml'}", restore)
    assert (ended.exit_code, ended.err) == (0, "")
    assert contents() == before
    assert ("test AUC" in ended.out) == (mode == "eval")
