"""Usual mistakes in a model outside the project: refused, or told, where a run would be wrong without a word."""

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from configs.schema import Config
from nn.library.loaded_run import Run
from nn.library.options import options
from nn.library.own_training import Training
from tests.helpers.composed import TINY

MODELS = "tests.nn.models.mistaken_models"


def config_of(name: str, run_dir: Path, *more: str) -> Config:
    tiny = [text for text in TINY if "_mlp" not in text]
    run = ["log.loggers=[]", "train.max_steps=4", f"run_dir={run_dir}"]
    return options(f"{MODELS}:{name}", *tiny, *run, *more)


def train(config: Config) -> None:
    with Training(config, quiet=True) as training:
        training.train()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("InAList", "hidden holds a Linear that torch does not know, so it is neither trained nor"),
        ("InADict", "scales holds a Tensor that torch does not know"),
        ("PlainTensor", "scale holds a Tensor that torch does not know"),
        ("Frozen", "the parameter out.weight has requires_grad=False; want"),
        ("Double", "the parameter scale has torch.float64; want float32"),
        ("Tied", "out.weight and other.weight are one parameter"),
        ("NoSuper", r"its __init__ does not call super\(\).__init__\(\)"),
        ("FailingTables", r"tables\(\) has failed \(AttributeError: 'FeatureSpec'"),
        ("Drawn", "its buffer scale is drawn anew each time, and no checkpoint holds it"),
        ("Moving", "changes its buffer mean, which checkpoints do not hold"),
        ("Rebound", "changes its buffer mean, which checkpoints do not hold"),
        ("Detached", r"loss is no tensor \[\] with a gradient, which"),
        ("InPlace", r"InPlace has failed \(RuntimeError: one of the variables needed for gradient"),
        ("VectorLoss", r"loss is no tensor \[\] with a gradient, which"),
    ],
)
def test_a_mistake_is_one_line(name, message, tmp_path):
    with pytest.raises(ValueError, match=message) as caught:
        train(config_of(name, tmp_path / "run"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["DrawnOnce", "DrawnAndSaved", "ListedTwice"])
def test_a_loaded_run_has_the_constants_of_its_training(name, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        train(config_of(name, tmp_path / "run", "seed=5"))
    run = Run.load(tmp_path / "run", checkpoint="step_4", trusted=True)
    config = config_of(name, tmp_path / "again", "seed=5")
    with Training(config, quiet=True) as training:
        rows = training.batch(0)
        for _ in range(4):
            training.step()
        trained = training._session.step.dense
        numerical = torch.stack([rows[name] for name in run.spec.numerical], 1)
        vectors = torch.rand(len(numerical), trained.columns)
        wanted = trained(numerical, vectors)
        got = run.model.dense(numerical, vectors)
    np.testing.assert_array_equal(got.detach(), wanted.detach())


def test_scores_that_are_random_are_told(tmp_path):
    with pytest.warns(UserWarning, match=r"forward\(\) draws random numbers in evaluation too"):
        train(config_of("NoisyScores", tmp_path / "run"))
