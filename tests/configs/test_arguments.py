"""Arguments of the commands: texts that arrive as written, and refusals in one line that name the option or the flag."""

import os
import re
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from configs.arguments import Choices, as_written, hydra_arguments
from configs.export_schema import ExportConfig
from configs.preproc_schema import PreprocConfig
from configs.schema import Config
from tests.helpers.command import run_command
from tests.helpers.composed import TINY, compose_config, compose_with_hydra
from tests.helpers.preproc_command import compose_preproc_with_hydra

TRAINING = Choices(Config, ("experiment", "data"), ("model.top_mlp", "model.bottom_mlp"))
PREPROCESSING = Choices(PreprocConfig, ("dataset",))
EXPORT = Choices(ExportConfig)

TEXTS = [
    *("a b", "a=b", "a,b", "a:b", "a(b)", "(a)", "a$b", "$HOME/x", "a%b", "'a", "a'b", 'a"b', "a''b"),
    *("ünï/日本", "a\\", "a\\b c", "007", "1e3", "1.50", "1_000", "true", "inf", "nan", "a#b", "a!b", "a&b;c"),
    *("a[b]", "a{b}", "day_{0..3}", "sort(a)", "range(1,3)", "glob(*)", "^a|b", "<a>", "`a`", "x~y", "[1,2"),
    *("a\nb", "*.gz", "day_?", "s3://b/x", "C:/x", "-a", "+a", "@a", "a?b=c&d=e,f", "(" * 80, "é" * 200),
]  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_arrives_as_written(text):
    [written] = hydra_arguments([f"run_dir={text}"], TRAINING)
    assert OverridesParser.create().parse_override(written).value() == text
    # A second time changes nothing.
    assert hydra_arguments([written], TRAINING) == [written]


@pytest.mark.parametrize("text", ["'a b'", '"a"', "null", "plain", "a\\,b", "${recipe}", "", " a "])
def test_what_hydra_reads_as_a_text_stays_as_it_is(text):
    assert hydra_arguments([f"run_dir={text}"], TRAINING) == [f"run_dir={text}"]


def test_a_text_goes_through_composition_to_the_typed_options():
    for text in ("a,b/c=d", "1e3", "x~y", "é'\"", "a\\"):
        assert compose_config(*hydra_arguments([f"run_dir={text}"], TRAINING)).run_dir == text


@pytest.mark.parametrize(
    ("argument", "key", "value"),
    [
        ("source=LOGS/day_{0..3}.gz", "source", "LOGS/day_{0..3}.gz"),
        ("source=a,b", "source", "a,b"),
        ("source=7", "source", "7"),
        ("source=[a,b]", "source", ["a", "b"]),
        ("source=[~/a,b c!]", "source", ["~/a", "b c!"]),
        ("memory_limit=8", "memory_limit", "8"),
        ("table={label:{name:y}}", "table", {"label": {"name": "y"}}),
    ],
)
def test_options_of_preprocessing_arrive_as_written(argument, key, value):
    assert compose_preproc_with_hydra(*hydra_arguments([argument], PREPROCESSING))[key] == value


@pytest.mark.parametrize(
    ("recipe", "key", "more"),
    [
        ("dlrm", "run_dir", []),
        ("dlrm", "data.path", []),
        ("dlrm", "checkpoint.restore", []),
    ],
)
def test_a_tilde_is_the_home_directory(recipe, key, more, monkeypatch):
    monkeypatch.setenv("HOME", "/home/of/me")
    config = compose_config(*hydra_arguments([f"{key}=~/a b", *more], TRAINING), recipe=recipe)
    section, _, name = key.rpartition(".")
    assert getattr(getattr(config, section) if section else config, name) == "/home/of/me/a b"


@pytest.mark.parametrize(
    ("choices", "argument"),
    [
        (TRAINING, "run_dir=x"),
        (TRAINING, "train.max_steps=5"),
        (TRAINING, "sharding.tables={cat_0:row_wise}"),
        (PREPROCESSING, "table={label:{name:y}}"),
        (PREPROCESSING, "source=x"),
    ],
)
def test_an_option_that_may_be_null_may_have_a_plus_sign(choices, argument):
    """Hydra itself refuses the sign only where a value is present."""
    written = hydra_arguments([f"+{argument}"], choices)
    assert as_written(written) == as_written(hydra_arguments(written, choices)) == [argument]


def test_a_home_directory_that_does_not_exist_is_refused():
    ended = run_command(*TINY, "mode=plan", "run_dir=~nobody_of_this_name/x")
    assert (ended.exit_code, ended.out) == (2, "")
    assert ended.err == (
        "error: run_dir='~nobody_of_this_name/x': there is no home directory of "
        "'~nobody_of_this_name'; a file of that name is './~nobody_of_this_name/x'\n"
    )


def test_home_directories_of_files_by_name_are_those_of_a_shell():
    files = ["checkpoint.restore_tables={cat_0: '~/x'}", "model.pretrained={cat_1: '~/y.npy'}"]
    more = ["checkpoint.restore=z", "model.embedding_dims={cat_1: 3}", "model.name=deepfm"]
    config = compose_config(*TINY, *files, *more)
    assert config.checkpoint.restore_tables == {"cat_0": f"{Path.home()}/x"}
    assert config.model.pretrained == {"cat_1": f"{Path.home()}/y.npy"}
    nobody = files[1].replace("~", "~nobody_of_this_name")
    with pytest.raises(ValueError, match=r"model\.pretrained\.cat_1='~nobody_of_this_name/y\.npy'"):
        compose_config(*TINY, files[0], nobody, *more)


def test_flags_may_stand_anywhere():
    arguments = ["seed=3", "--cfg", "job", "train.epochs=2", "-cn=dcnv2", "seed=4"]
    assert hydra_arguments(arguments, TRAINING) == [
        *("--cfg=job", "--config-name=dcnv2"),
        *("seed=3", "train.epochs=2", "seed=4"),
    ]


def test_a_sweep_is_kept_for_multirun_only():
    for flag in ("--multirun", "-m"):
        assert hydra_arguments([flag, "seed=1,2"], TRAINING) == ["--multirun", "seed=1,2"]
    with pytest.raises(ValueError, match=r"^seed: got several values, and only --multirun of a tr"):
        hydra_arguments(["seed=1,2"], TRAINING)


REFUSED = [
    (TRAINING, "", "the argument '' is empty, perhaps from an unset shell variable"),
    (TRAINING, "=5", "the argument '=5' has no name"),
    (TRAINING, "+=5", "the argument '+=5' has no name"),
    (TRAINING, "seed==5", "seed: got '=5', which Hydra's grammar cannot read; want an integer"),
    (TRAINING, "seed", "'seed' has no value; write seed=VALUE"),
    (TRAINING, "clicks.csv", "there is no option clicks.csv"),
    (TRAINING, "train.epochs =2", "there is no option train.epochs ; did you mean train.epochs?"),
    (TRAINING, "train=5", "train is a section, got 5; set its options, as train.batch_size=..."),
    (TRAINING, "train=null", "train is a section, got None; set its options"),
    (TRAINING, "train.tf32=5", "train.tf32: got 5; want true or false"),
    (TRAINING, "train.epochs=1,2", "train.epochs: got several values"),
    (TRAINING, "optimizer.lr=0.1,0.2", "optimizer.lr: got several values"),
    (TRAINING, "mode=train,eval", "want one of train, eval, inference, importance, predict, plan"),
    (TRAINING, "sharding.types=table_wise,row_wise", "a list is written sharding.types=[a,b]"),
    (TRAINING, "sharding.tables={cat_0:row_wise", "want a value; a list is written"),
    (TRAINING, f"train.epochs={'[' * 500}", "which Hydra's grammar cannot read; want an integer"),
    (TRAINING, f"model.x={'{' * 500}", "which Hydra's grammar cannot read"),
    (TRAINING, "train.epochs=" + "9" * 5000, "train.epochs: got "),
    (TRAINING, "~train", "~train: the section train cannot be removed; set its values instead"),
    (TRAINING, "~train.epochs", "~train.epochs: the option train.epochs cannot be removed"),
    (TRAINING, "~model", "~model: the section model cannot be removed"),
    (TRAINING, "~nope", "there is no option nope"),
    (TRAINING, "+train.epochs=2", "+train.epochs: train.epochs exists already; write train.epochs="),
    (TRAINING, "+nope=2", "there is no option nope"),
    (TRAINING, "++nope=2", "there is no option nope"),
    (TRAINING, "a\x1b[2J=1", r"there is no option a\x1b[2J"),
    (TRAINING, "--", "there is no flag --"),
    (TRAINING, "--multirn", "there is no flag --multirn; did you mean --multirun?"),
    (TRAINING, "--cfg", "--cfg: got nothing, want one of job, hydra, all"),
    (TRAINING, "--cfg=nope", "--cfg: got 'nope', want one of job, hydra, all"),
    (TRAINING, "--experimental-rerun=x", "there is no flag --experimental-rerun"),
    (TRAINING, "--config-name", "--config-name: got nothing, want a value"),
    (PREPROCESSING, "threads=x(", "threads: got 'x(', which Hydra's grammar cannot read; want an integer or null"),
    (PREPROCESSING, "table.query=SELECT 'a' FROM t", "and a text in quotes"),
    (EXPORT, "tables=cat_0,cat_1", "tables: got several values, and only --multirun of a training makes a run"),
    (EXPORT, "stage=next", "there is no option stage; --help lists them all"),
    (EXPORT, "formt=npy", "there is no option formt; did you mean format?"),
]  # fmt: skip


@pytest.mark.parametrize(("choices", "argument", "message"), REFUSED, ids=range(len(REFUSED)))
def test_an_argument_is_refused_with_its_name(choices, argument, message):
    with pytest.raises(ValueError, match=re.escape(message)) as refusal:
        hydra_arguments([argument], choices)
    assert len(str(refusal.value)) < 600
    assert "\n" not in str(refusal.value)


def test_the_version_is_that_of_the_recipe():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    version = re.search(r'^version = "(.*)"', text, re.MULTILINE)[1]
    for recipe in ("dlrm", "preproc/__main__", "nn/export/__main__"):
        ended = run_command("--version", recipe=recipe)
        assert (ended.exit_code, ended.err) == (None, "")
        assert ended.out.startswith(f"hybrid-parallel-recsys {version} (Hydra ")


def test_an_added_experiment_replaces_the_default_one():
    plain, added = (
        compose_with_hydra(*hydra_arguments([f"{sign}experiment=dlrm_criteo_t3"], TRAINING))
        for sign in ("", "+")
    )
    assert plain == added
    assert os.environ.get("HYDRA_FULL_ERROR") in (None, "1")


FILES = [
    ("run_dir: " + "[" * 500 + "]" * 500, "an option or a yaml file is nested too deeply"),
    ("train: {epochs: [1", "mine.yaml', line "),
    ("train: {epoch: 2}", "experiment/mine.yaml: train.epoch: there is no such option"),
    ("sharding: {staged_gib: 2}", "there is no such option; it is sharding.read_ahead_gib now"),
    ("train: {epochs: two}", "experiment/mine.yaml: train.epochs: Value 'two' of type 'str'"),
    (
        "mode: trian",
        "expected one of [train, eval, inference, importance, predict, plan]; did you mean train?",
    ),
    ("train: 5", "experiment/mine.yaml: Merge error: int is not a subclass of TrainConfig"),
    ("train: null", "experiment/mine.yaml: train: got null, want a value"),
    ("optimizer: {lr: .inf}", "optimizer.lr must be a finite number, got inf"),
    ("seed: ${nope}", "seed: got '${nope}': Interpolation key 'nope' not found; write a value"),
    ("defaults: [/data: nope]", "there is no data=nope; choose one of criteo_giant, criteo_kaggle"),
    ("defaults: [mine]", "an option or a yaml file is nested too deeply"),
]


@pytest.mark.parametrize(("text", "message"), FILES, ids=range(len(FILES)))
def test_an_error_in_an_experiment_is_one_line(text, message, tmp_path):
    (tmp_path / "experiment").mkdir()
    path = tmp_path / "experiment" / "mine.yaml"
    path.write_text(f"# @package _global_\n{text}\n")
    ended = run_command(f"--config-dir={tmp_path}", "experiment=mine", "mode=plan")
    assert (ended.exit_code, ended.out) == (2, ""), ended
    assert re.fullmatch(r"error: [^\n]+\n", ended.err)
    assert message.replace("mine.yaml'", f'{path}"') in ended.err


def test_an_experiment_needs_its_first_line_and_utf_8(tmp_path):
    (tmp_path / "experiment").mkdir()
    path = tmp_path / "experiment" / "mine.yaml"
    for content, message in [
        (
            b"train: {epochs: 2}",
            "experiment/mine.yaml: want '# @package _global_' as its first line",
        ),
        (b"run_dir: \xe9", "a yaml file of this command is not UTF-8 text: "),
    ]:
        path.write_bytes(content)
        ended = run_command(f"--config-dir={tmp_path}", "experiment=mine", "mode=plan")
        assert (ended.exit_code, ended.err.count("\n")) == (2, 1)
        assert message in ended.err


@pytest.mark.parametrize("recipe", ["dlrm", "preproc/__main__", "nn/export/__main__"])
def test_the_config_of_another_command_is_refused(recipe):
    ended = run_command("-cn", "nope", recipe=recipe)
    assert re.match("error: --config-name=nope: this command has no such config; ", ended.err)
    other = "preproc" if recipe == "dlrm" else "dlrm"
    ended = run_command("-cn", other, recipe=recipe)
    assert (ended.exit_code, ended.err.count("\n")) == (2, 1)
    assert f"--config-name={other}: this command has no such config; choose one of " in ended.err


@pytest.mark.parametrize("key", ["run_dir", "data.path", "checkpoint.restore"])
def test_an_empty_path_is_refused(key):
    ended = run_command(f"{key}=", "mode=plan")
    assert ended.exit_code == 2
    assert ended.err == (
        f"error: {key} is empty, perhaps from an unset shell variable: name a path, or null\n"
    )


@pytest.mark.parametrize("written", ["stage=next", "--stage=next"])
def test_a_renamed_option_is_taken_with_one_line(written, capsys):
    assert hydra_arguments([written], TRAINING) == ["day=next"]
    warning = "warning: stage is now day; 0.4.0 will refuse stage\n"
    assert capsys.readouterr() == ("", warning)
