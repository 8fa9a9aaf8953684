"""`train.batch_size_per_rank`: the global batch that it makes, and a run that resumes on another number of ranks."""

import os
import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
import yaml

from configs.overrides import drop_replaced
from configs.schema import Config
from nn.build import global_batch_size
from tests.helpers.command import Ended, run_command
from tests.helpers.composed import TINY, compose_config, compose_with_hydra
from tests.helpers.distributed import run_distributed
from tests.helpers.runs import differences, summary

RUN = [
    *(option for option in TINY if not option.startswith("train.batch_size")),
    *(
        "log.loggers=[]",
        "eval.at_start=false",
        "checkpoint.save_every=4",
        "train.tf32=false",
    ),
]


@pytest.mark.parametrize(("options", "wanted"), [([], 64), (["train.batch_size_per_rank=24"], 96)])
def test_the_global_batch_is_that_of_all_ranks(options, wanted):
    config = compose_config("train.batch_size=64", *options)
    with patch.dict(os.environ, WORLD_SIZE="4", LOCAL_WORLD_SIZE="4"):
        assert global_batch_size(config) == wanted


def test_a_plan_is_made_for_the_batch_of_its_ranks():
    options = ["train.batch_size_per_rank=8", "sharding.world_size=16"]
    assert global_batch_size(compose_config(*options, "mode=plan")) == 128
    # The option is for plans alone.
    assert global_batch_size(compose_config(*options)) == 8


def test_more_rows_than_can_be_counted_are_refused():
    config = compose_config("train.batch_size_per_rank=2147483647")
    with patch.dict(os.environ, WORLD_SIZE="2"), pytest.raises(ValueError, match="want at most"):
        global_batch_size(config)


def test_the_named_one_of_the_two_batch_sizes_counts():
    composed = compose_with_hydra("train.batch_size_per_rank=3")
    drop_replaced(composed, ["train.batch_size=512"], Config)
    assert composed.train.batch_size_per_rank is None
    ended = run_command(*RUN, "train.batch_size=64", "train.batch_size_per_rank=32")
    assert ended.exit_code == 2
    assert ended.err == (
        "error: train.batch_size_per_rank=32 and train.batch_size=64 exclude each other; write one of them\n"
    )


def train(run_dir: Path, *overrides: str) -> Ended:
    with patch("nn.observability.run_directory.draw_curves"):
        return run_command(*RUN, f"run_dir={run_dir}", *overrides)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> Path:
    """Return the directory of a run of 8 steps of 2 x 32 rows."""
    run_dir = tmp_path_factory.mktemp("per_rank") / "run"
    per_rank = ["train.batch_size_per_rank=32", "train.max_steps=8"]
    assert [ended.err for ended in run_distributed(train, 2, run_dir, *per_rank)] == ["", ""]
    return run_dir


def test_it_trains_as_the_global_batch_does(two_ranks, tmp_path):
    run_distributed(train, 2, tmp_path / "global", "train.batch_size=64", "train.max_steps=8")
    assert differences(tmp_path / "global", two_ranks) == []
    recorded = yaml.safe_load((two_ranks / "config.yaml").read_text())["train"]
    assert (recorded["batch_size"], recorded["batch_size_per_rank"]) == (64, 32)


def test_on_another_number_of_ranks_the_same_global_batch_is_required(two_ranks, tmp_path):
    shutil.copytree(two_ranks, tmp_path / "run", symlinks=True)
    longer = "train.max_steps=12"
    refused = train(tmp_path / "run", "train.batch_size_per_rank=32", longer)
    assert refused.exit_code == 2
    assert "train.batch_size=64 instead of 32" in refused.err
    resumed = train(tmp_path / "run", "train.batch_size_per_rank=64", longer)
    assert resumed.err == ""
    assert summary(tmp_path / "run")["steps"] == 12
    # The option that is not used before is as good.
    assert train(tmp_path / "run", "train.batch_size=64", longer).exit_code == 0
