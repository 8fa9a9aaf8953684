"""A DataFrame described, preprocessed, trained and predicted by library calls, with the checks of the commands."""

import numpy as np
import pandas as pd
import pytest

from nn.library.loaded_run import Run
from nn.library.options import options
from nn.library.own_training import Training
from preproc.frames import describe, preprocess
from tests.helpers.command import run_command
from tests.helpers.runs import differences

ROWS = 400
FRAME = pd.DataFrame(
    {
        "bought": [i % 3 == 0 for i in range(ROWS)],
        "price": [i * 0.5 for i in range(ROWS)],
        "item": [i % 9 for i in range(ROWS)],
        "tags": [["a", "b"][: i % 3] for i in range(ROWS)],
    }
)
SIZES = ["model.embedding_dim=4", "model.bottom_mlp=[4]", "model.top_mlp=[1]", "device=cpu"]


def test_from_a_frame_to_scores(tmp_path):
    description = describe(FRAME)
    assert "label: {name: bought}  # 33.5 % ones" in str(description)
    changed = description.options
    changed["table"]["split"] = {"by": "fraction", "train": 0.75}
    preprocess(FRAME, changed, tmp_path / "data", "plot=false")
    overrides = [f"data.path={tmp_path / 'data'}", "train.batch_size=64", "train.epochs=2", *SIZES]
    overrides += ["log.loggers=[]", "log.pictures=false"]
    with Training(
        options("dlrm", *overrides, f"run_dir={tmp_path / 'run'}"), quiet=True
    ) as training:
        summary = training.train()
        assert training.num_steps == training.last_step == 10
    run = Run.load(tmp_path / "run", fitted=tmp_path / "data")
    scores = run.predict(FRAME.drop(columns="bought"))
    assert len(scores) == ROWS
    assert scores["score"].between(0, 1).all()
    assert run.summary()["test_auc"] == pytest.approx(summary["test_auc"])
    # All steps at once are those of the command, with its evaluations.
    ended = run_command(*overrides, f"run_dir={tmp_path / 'command'}")
    assert ended.exit_code == 0, ended.err
    assert differences(tmp_path / "command", tmp_path / "run") == []


def test_a_frame_has_the_checks_of_the_command(tmp_path):
    with pytest.raises(ValueError, match="column 'x' has values of several types, int, str"):
        describe(pd.DataFrame({"y": [0, 1], "x": [1, "a"]}))
    with pytest.raises(ValueError, match=r"column 'x' has complex numbers; want real ones"):
        describe(pd.DataFrame({"y": [0, 1], "x": [1j, 2]}))
    for waited in (pd.to_timedelta([1, 2], "s"), pd.period_range("2026-01", periods=2, freq="M")):
        with pytest.raises(ValueError, match=r"column 'x' is .* whose unit a file does not keep"):
            describe(pd.DataFrame({"y": [0, 1], "x": waited}))
    for empty in (pd.DataFrame(), FRAME.head(0), pd.DataFrame(index=range(3))):
        with pytest.raises(ValueError, match=r"^the table has shape \[.*\]; want rows and columns"):
            describe(empty)
        with pytest.raises(ValueError, match="the table has shape"):
            preprocess(empty, describe(FRAME).options, tmp_path / "data")
    with pytest.raises(ValueError, match="label=z: no such column"):
        describe(FRAME, label="z")
    described = describe(FRAME).options
    with pytest.raises(ValueError, match='no column "item"; correct it; the columns are'):
        preprocess(FRAME.drop(columns="item"), described, tmp_path / "data")
    bad = FRAME.assign(bought=[None, *FRAME["bought"][1:]])
    with pytest.raises(ValueError, match=r"^the table, row 1: the label is missing"):
        preprocess(bad, described, tmp_path / "data")
    described["table"]["categorical"] = [{"name": "item", "hotnes": 3}]
    with pytest.raises(ValueError, match="hotnes: no such key"):
        preprocess(FRAME, described, tmp_path / "data")
    for own in ("source=x.csv", "output=x", "+table.keep=[item]", "table={}", "~table.split.by"):
        with pytest.raises(ValueError, match="is another argument of preprocess; change that"):
            preprocess(FRAME, describe(FRAME).options, tmp_path / "data", own)


def test_arguments_are_taken_as_they_are(tmp_path):
    described = describe(FRAME).options
    frame = FRAME.rename(columns={"bought": "bought "})
    assert describe(frame, label="bought ").options["table"]["label"]["expression"] == '"bought "'
    preprocess(FRAME, described, tmp_path / "end ", "plot=false")
    assert (tmp_path / "end " / "feature_spec.yaml").exists()
    for wrong in ({}, {"layout": "criteo", **{key: described[key] for key in ["table"]}}):
        with pytest.raises(ValueError, match=r"^options: got {.*}; want layout and table as"):
            preprocess(FRAME, wrong, tmp_path / "none")
    described["table"]["split"]["train"] = np.float64(0.5)
    with pytest.raises(
        ValueError, match=r"^table.split.train: .*float64.*; want values of Python"
    ) as caught:
        preprocess(FRAME, described, tmp_path / "none")
    assert "\n" not in str(caught.value)
