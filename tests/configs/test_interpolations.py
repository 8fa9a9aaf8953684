"""An interpolation that does not resolve: one line that names the option, what was got and what to do, in every command."""

import re

import pytest

from configs.arguments import Choices, hydra_arguments
from configs.overrides import to_config
from configs.schema import Config
from tests.helpers.command import run_command, run_module
from tests.helpers.composed import TINY, compose_with_hydra
from tests.helpers.preproc_command import compose_preproc_with_hydra

TRAINING = Choices(Config, ("experiment", "data"))
NOWHERE = "Interpolation key 'nope' not found; write a value, or, in single quotes, ${KEY} of an option or"


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("model.top_mlp=${nope}", f"model.top_mlp: got '${{nope}}': {NOWHERE}"),
        ("model.top_mlp=[${nope},1]", f"model.top_mlp[0]: got '${{nope}}': {NOWHERE}"),
        ("model.top_mlp=[1,[2,${nope}]]", f"model.top_mlp[1][1]: got '${{nope}}': {NOWHERE}"),
        ("train.batch_size=${nope}", f"train.batch_size: got '${{nope}}': {NOWHERE}"),
        ("sharding.tables={a:${nope}}", f"sharding.tables.a: got '${{nope}}': {NOWHERE}"),
        ("tasks={y:{loss:[${nope}]}}", f"tasks.y.loss[0]: got '${{nope}}': {NOWHERE}"),
        ("run_dir=a/${nope}/b", f"run_dir: got 'a/${{nope}}/b': {NOWHERE}"),
        ("data.path='~/${nope}'", f"data.path: got '~/${{nope}}': {NOWHERE}"),
        (
            "train.batch_size=${oc.env:NOT_SET_HERE}",
            "Environment variable 'NOT_SET_HERE' not found",
        ),
        (
            "run_dir=${foo:1}",
            "run_dir: got '${foo:1}': Unsupported interpolation type foo; write a",
        ),
        ("seed=${seed}", "seed: got '${seed}': "),
        (
            "train.batch_size=${model.name}",
            "train.batch_size: got '${model.name}': Value 'dlrm' of type 'str' could not be converted to Integer; write a value",
        ),
    ],
)
def test_the_option_is_named(argument, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        to_config(compose_with_hydra(argument))
    assert str(error.value).isprintable()


def test_a_variable_names_a_file_of_a_group(monkeypatch):
    monkeypatch.setenv("TABLES", "criteo_t15")
    monkeypatch.setenv("LIMIT", "15")
    wanted = compose_with_hydra("data=criteo_t15").data
    for name in (
        "${oc.env:TABLES}",
        "${oc.env:NOT_SET_HERE,criteo_t15}",
        "criteo_t${oc.env:LIMIT}",
    ):
        assert compose_with_hydra(*hydra_arguments([f"data={name}"], TRAINING)).data == wanted


def test_of_two_options_the_one_with_the_mistake_is_named():
    composed = compose_with_hydra("eval.batch_size=${train.batch_size}", "train.batch_size=${nope}")
    with pytest.raises(ValueError, match=r"^train.batch_size: got '\$\{nope\}'"):
        to_config(composed)


def test_the_description_of_a_table_is_looked_through():
    table = "{sources:{t:{files:a}},categorical:[a,{name:${outpt}}]}"
    composed = compose_preproc_with_hydra("dataset=any", f"table={table}", "output=x")
    wanted = r"table.categorical\[1\].name: got '\$\{outpt\}': .*'outpt' not found; write"
    with pytest.raises(ValueError, match=wanted):
        to_config(composed)


@pytest.mark.parametrize(
    ("module", "arguments", "key"),
    [
        ("dlrm", ["model.top_mlp=${nope}"], "model.top_mlp"),
        ("dlrm", ["model.top_mlp=[${nope},1]"], "model.top_mlp[0]"),
        ("dlrm", ["days=${nope}"], "days"),
        ("dlrm", ["run_dir=${nope}", "seed=1,2", "--multirun"], "run_dir"),
        ("preproc", ["output=${nope}"], "output"),
        ("preproc", ["source=[${nope},a]", "output=x"], "source[0]"),
        ("serving.export", ["output=${nope}"], "output"),
        ("serving.export", ["checkpoint=${nope}", "output=x"], "checkpoint"),
        ("serving.run", ["port=${nope}"], "port"),
        ("sweep", ["output=${nope}"], "output"),
        ("sweep", ["output=x", "space=SPACE", "model.top_mlp=[${nope},1]"], "model.top_mlp[0]"),
    ],
)
def test_every_command_names_it_in_one_line(module, arguments, key, tmp_path):
    (tmp_path / "space.yaml").write_text("optimizer.lr: {low: 0.001, high: 0.01}\n")
    written = [text.replace("SPACE", str(tmp_path / "space.yaml")) for text in arguments]
    ended = run_command(*written) if module == "dlrm" else run_module(module, *written)
    assert ended.exit_code == 2
    assert ended.err.startswith(f"error: {key}: got '${{nope}}': {NOWHERE}")
    assert ended.err.count("\n") == 1


def test_a_config_group_is_named_in_one_line():
    ended = run_command("experiment=${nope}")
    assert ended.exit_code == 2
    assert re.fullmatch(r"error: [^\n]*nope[^\n]*\n", ended.err)


def test_one_that_resolves_is_taken(tmp_path):
    arguments = [*TINY, "mode=plan", "optimizer.embedding_lr=${optimizer.lr}", "optimizer.lr=0.5"]
    assert run_command(*arguments).exit_code == 0
    composed = compose_with_hydra("optimizer.embedding_lr=${optimizer.lr}", "optimizer.lr=0.5")
    assert to_config(composed).optimizer.embedding_lr == 0.5
