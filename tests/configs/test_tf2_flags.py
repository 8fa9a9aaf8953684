"""Flags of NVIDIA's TF2 recipe are answered with the command that does the same here."""

import re
import shlex

import pytest

from configs.tf2_flags import NOT_ONE_OPTION, OPTIONS, SWITCHES
from nn.library.options import options
from tests.helpers.command import run_command
from tests.project.test_readme import FLAGS as PAGE
from tests.project.test_readme import TF2_FLAGS

WRITTEN = (
    "--dataset_path /data/a=b --amp --xla --batch_size=65536 --top_mlp_dims 1024,512,1 --learning_rate 24 --run_eagerly "
    "--nocpu --interaction cross seed=2 --auc_thresholds=100 -epochs 2 --optimizer SGD --max_steps -1"
)
HERE = (
    "experiment=dlrm_criteo_t15 data.path=/data/a=b train.amp=fp16 train.compile=true train.batch_size=65536 "
    "'model.top_mlp=[1024,512,1]' optimizer.lr=24 model.name=dcnv2 seed=2 train.epochs=2 optimizer.name=sgd train.max_steps=null"
)


def test_flags_are_answered_with_the_command():
    ended = run_command(*shlex.split(WRITTEN))
    assert (ended.exit_code, ended.err.count("\n")) == (2, 1)
    assert f".py {HERE} (--run_eagerly, --auc_thresholds by hand, or gone); docs/" in ended.err
    config = options("dlrm", *[text for text in shlex.split(HERE) if "top_mlp" not in text])
    assert (config.model.name, config.optimizer.lr) == ("dcnv2", 24)


def test_a_mistyped_flag_is_no_flag_of_theirs():
    assert "there is no flag --batch_sizes; " in run_command("--batch_sizes=3").err


@pytest.mark.parametrize("recipe", ["dlrm", "dcnv2"])
def test_the_command_has_the_defaults_of_their_recipe(recipe):
    message = run_command("--dataset_path", "DIR", "--amp=false", recipe=recipe).err
    here = f"experiment={recipe}_criteo_t15 train.amp=off data.path=DIR"
    assert f"{recipe}.py {here}; docs/" in message
    config = options(recipe, *here.split())
    rate, batch = (24, 65_536) if recipe == "dlrm" else (1e-4, 65_536)
    assert (config.optimizer.lr, config.train.batch_size, config.model.embedding_dim) == (
        rate,
        batch,
        128,
    )


@pytest.mark.parametrize(
    ("written", "here"),
    [
        ("--dataset_type synthetic --max_steps 9", "train.max_steps=9 (--dataset_type by hand"),
        ("--nodata_parallel_input --seed 2", "seed=2 (--nodata_parallel_input by hand"),
        ("--embedding_dim 64,32 --seed 2", "seed=2 (--embedding_dim by hand"),
        ("--embedding_dim=64", "model.embedding_dim=64; docs/"),
    ],
)
def test_a_flag_without_an_option_is_named(written, here):
    assert f"experiment=dlrm_criteo_t15 train.amp=off {here}" in run_command(*written.split()).err


def test_an_experiment_that_is_chosen_stays():
    message = run_command("experiment=dlrm_criteo_t3", "--amp").err
    assert "dlrm.py experiment=dlrm_criteo_t3 train.amp=fp16; docs/" in message


def test_every_flag_is_known():
    assert sorted([*OPTIONS, *SWITCHES, *NOT_ONE_OPTION]) == sorted(TF2_FLAGS)


@pytest.mark.parametrize("flag", [*OPTIONS, *SWITCHES])
def test_the_page_has_the_same_option(flag):
    (row,) = re.findall(rf"^\| .*`{flag}`.* \|.*$", PAGE, re.MULTILINE)[:1]
    assert f"`{SWITCHES[flag]}`" in row if flag in SWITCHES else f"`{OPTIONS[flag]}=" in row
