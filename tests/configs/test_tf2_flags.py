"""Flags of NVIDIA's TF2 recipe are answered with the command that does the same here."""

import re
import shlex

import pytest

from configs.tf2_flags import OPTIONS, SWITCHES
from nn.library.options import options
from tests.helpers.command import run_command
from tests.project.test_readme import FLAGS as PAGE
from tests.project.test_readme import TF2_FLAGS

WRITTEN = (
    "--dataset_path /data/a=b --amp --xla --batch_size=65536 --top_mlp_dims 1024,512,1 --learning_rate 24 --run_eagerly "
    "--nocpu --interaction cross seed=2 --auc_thresholds=100 -epochs 2"
)
HERE = (
    "data.path=/data/a=b train.amp=fp16 train.compile=true train.batch_size=65536 'model.top_mlp=[1024,512,1]' "
    "optimizer.lr=24 model.name=dcnv2 seed=2 train.epochs=2"
)


def test_flags_are_answered_with_the_command():
    ended = run_command(*shlex.split(WRITTEN))
    assert (ended.exit_code, ended.err.count("\n")) == (2, 1)
    assert f".py {HERE} (--run_eagerly, --auc_thresholds by hand, or gone); docs/" in ended.err
    config = options("dlrm", *[text for text in shlex.split(HERE) if "top_mlp" not in text])
    assert (config.model.name, config.optimizer.lr) == ("dcnv2", 24)


def test_a_mistyped_flag_is_no_flag_of_theirs():
    assert "there is no flag --batch_sizes; " in run_command("--batch_sizes=3").err


def test_every_flag_with_one_option_is_known():
    assert {*OPTIONS, *SWITCHES} < set(TF2_FLAGS)


@pytest.mark.parametrize("flag", [*OPTIONS, *SWITCHES])
def test_the_page_has_the_same_option(flag):
    (row,) = re.findall(rf"^\| .*`{flag}`.* \|.*$", PAGE, re.MULTILINE)[:1]
    assert f"`{SWITCHES[flag]}`" in row if flag in SWITCHES else f"`{OPTIONS[flag]}=" in row
