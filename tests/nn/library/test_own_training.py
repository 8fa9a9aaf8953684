"""A training with a loop of one's own: the same run as the command's, batches by name, its own schedule, and its errors."""

import os
import runpy
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from nn.build import Loaders
from nn.library.options import options
from nn.library.own_training import Training
from tests.helpers.command import ROOT, run_command
from tests.helpers.composed import TINY, compose_config
from tests.helpers.gpus import needs_one_gpu
from tests.helpers.runs import differences, records, summary
from tests.nn.library.test_loaded_run import OPTIONS, write_data

RUN = [
    *(*TINY, "data.synthetic.hotness=[1,2,1,1,3]", "train.max_steps=8", "log.every=3"),
    *("train.tf32=false", "optimizer.lr=0.05", "eval.at_start=false", "eval.every=4"),
    *("log.loggers=[]", "model.dropout=0.1"),
]


def train(run_dir: Path, num_steps: int, *more: str) -> None:
    """Train up to a step with a loop that evaluates when the command does; finish at the last step."""
    config = options("dlrm", *RUN, *more, f"run_dir={run_dir}")
    with Training(config, quiet=True) as training:
        while training.num_steps < num_steps:
            training.step()
            if training.num_steps % 4 == 0:
                training.evaluate()
        if training.num_steps == training.last_step:
            training.finish()
        else:
            training.save()


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """Return a finished run of an own loop."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    train(run_dir, 8)
    return run_dir


def test_an_own_loop_trains_what_the_command_trains(whole, tmp_path):
    ended = run_command(*RUN, f"run_dir={tmp_path / 'command'}")
    assert ended.exit_code == 0, ended.err
    assert differences(tmp_path / "command", whole) == []
    # Left after step 5, and resumed by another loop and by the command.
    train(tmp_path / "resumed", 5)
    shutil.copytree(tmp_path / "resumed", tmp_path / "by command", symlinks=True)
    train(tmp_path / "resumed", 8)
    ended = run_command(*RUN, f"run_dir={tmp_path / 'by command'}")
    assert ended.exit_code == 0, ended.err
    assert "warning" not in ended.out
    for name in ("resumed", "by command"):
        assert differences(tmp_path / "command", tmp_path / name) == []


def test_a_batch_is_a_dictionary_of_named_tensors(tmp_path):
    data = write_data(tmp_path / "data")
    own = [text for text in OPTIONS if not text.startswith(("data.multi_hot", "sharding"))]
    config = options("dlrm", *own, f"data.path={data}", f"run_dir={tmp_path / 'run'}")
    with Training(config, quiet=True) as training:
        named = training.batch()
        again = training.batch(0)
        result = training.step()
        batch, rows = result._batch, result._batch.num_valid
        assert list(named) == ["label", "kept", "age", "price", "user", "tags", "items"]
        assert torch.equal(named["label"], batch.labels[:rows])
        assert torch.equal(named["price"], batch.numerical[:rows, 1])
        assert named["tags"].shape == (rows, 3)
        assert torch.equal(named["user"], batch.ids["user"].values())
        assert torch.equal(named["items"].values(), batch.ids["items"].values())
        assert len(named["items"].lengths()) == rows
        assert torch.equal(named["tags"], again["tags"])
        assert list(result.batch) == list(named)
        assert torch.equal(result.batch["tags"], named["tags"])
        assert not torch.equal(named["user"], training.batch()["user"])


@needs_one_gpu
def test_on_a_gpu_a_result_keeps_its_logits_and_refuses_a_batch_that_is_overwritten(tmp_path):
    gpu = [text for text in RUN if text != "device=cpu"]
    config = options("dlrm", *gpu, "device=cuda", f"run_dir={tmp_path / 'run'}")
    with Training(config, quiet=True) as training:
        result = training.step()
        logits = result.logits.clone()
        assert len(result.batch["cat_0"]) == len(logits)
        training.step()
        torch.testing.assert_close(result.logits, logits, rtol=0, atol=0)
        with pytest.raises(ValueError, match="a later step has overwritten this batch; take it"):
            _ = result.batch


def test_an_own_schedule_sets_the_learning_rates(tmp_path):
    with Training(options("dlrm", *RUN, f"run_dir={tmp_path / 'run'}"), quiet=True) as training:
        training.set_schedule(lambda step: 0.5**step)
        rates = []
        for _ in range(3):
            assert training.step().loss > 0
            rates.append(training.learning_rate)
        assert rates == pytest.approx([0.05, 0.025, 0.0125])
        training.set_schedule(lambda step: np.float32(0.5))
        while training.num_steps < training.last_step:
            training.step()
    # A record with a number of NumPy's could not be written.
    assert records(tmp_path / "run")[-1]["lr"] == 0.025


def test_a_schedule_that_is_no_number_is_refused_and_may_be_corrected(whole, tmp_path):
    with Training(options("dlrm", *RUN, f"run_dir={tmp_path / 'run'}"), quiet=True) as training:
        for factor in (float("nan"), float("inf"), -1.0, 10**400, "x", None):
            training.set_schedule(lambda step, factor=factor: factor)
            with pytest.raises(
                ValueError, match=r"the schedule returned .* for step 0; want a finite"
            ):
                training.step()
        training.set_schedule(lambda step: 1)
        assert training.step().loss > 0
    train(tmp_path / "run", 8)
    assert differences(whole, tmp_path / "run") == []


@pytest.mark.parametrize("processes", [False, True], ids=["threads", "processes"])
def test_an_interrupted_evaluation_changes_nothing(processes, tmp_path, monkeypatch):
    enter = Loaders.__enter__

    def enter_with_processes(loaders: Loaders) -> Loaders:
        # As on a machine with a GPU.
        loaders.train.fork_readers()
        loaders.test.fork_readers()
        return enter(loaders)

    if processes:
        monkeypatch.setattr(Loaders, "__enter__", enter_with_processes)
    options_ = (*RUN, "train.ema_decay=0.5", "checkpoint.save_every=1000")
    for name in ("whole", "interrupted"):
        config = options("dlrm", *options_, f"run_dir={tmp_path / name}")
        with Training(config, quiet=True) as training:
            for _ in range(3):
                training.step()
            if name == "interrupted":
                with monkeypatch.context() as patched:
                    patched.setattr("nn.metrics.task_metrics.TaskMetrics.update", interrupt)
                    with pytest.raises(KeyboardInterrupt) as caught:
                        training.evaluate()
                # As a notebook does, whose last traceback keeps the evaluation's frames; they keep no batches open.
                (frame,) = [
                    entry.frame.f_locals
                    for entry in caught.traceback
                    if "passed" in entry.frame.f_locals
                ]
                assert frame["passed"].gi_frame is None
                assert frame["batches"].gi_frame is None
            training.save()
            while training.num_steps < training.last_step:
                training.step()
            training.evaluate()
            training.finish()
    assert differences(tmp_path / "whole", tmp_path / "interrupted") == []
    third = "checkpoints/step_3/rank_00000.bin"
    assert (tmp_path / "whole" / third).read_bytes() == (
        tmp_path / "interrupted" / third
    ).read_bytes()


def interrupt(*_):
    raise KeyboardInterrupt


def test_a_loop_that_ends_early_says_so(tmp_path):
    with Training(options("dlrm", *RUN, f"run_dir={tmp_path / 'run'}"), quiet=True) as training:
        training.step()
        evaluated = training.evaluate()["test_auc"]
        training.step()
        found = training.finish()
        assert found["stopped"] == "ended by its caller before the last step"
        assert (found["steps"], found["result_step"], found["test_auc"]) == (2, 1, evaluated)
        for call in (training.step, training.evaluate, training.save, training.finish):
            with pytest.raises(ValueError, match="the run is finished; open another one"):
                call()
    train(tmp_path / "run", 8)
    assert summary(tmp_path / "run")["stopped"] == "all steps done"


def test_a_loop_without_an_evaluation_says_so(tmp_path):
    with Training(options("dlrm", *RUN, f"run_dir={tmp_path / 'run'}"), quiet=True) as training:
        training.step()
        with pytest.warns(UserWarning, match="made no evaluation, so its result has no metric"):
            assert training.finish()["test_auc"] is None


def test_a_recipe_is_a_command_an_experiment_or_a_model():
    assert options("mmoe").model.name == options("mmoe").recipe == "mmoe"
    kaggle = options("dlrm_criteo_kaggle", "seed=3")
    assert kaggle == options("dlrm", "experiment=dlrm_criteo_kaggle", "seed=3")
    assert kaggle.recipe != options("dlrm").recipe
    own = options("tests.nn.models.test_third_model:DeepFM")
    assert (own.recipe, own.model.name) == ("DeepFM", "tests.nn.models.test_third_model:DeepFM")


def test_options_from_python_are_those_of_the_command_line():
    assert options("dcnv2", *TINY, "eval.per_epoch=2") == compose_config(
        *TINY, "eval.per_epoch=2", recipe="dcnv2"
    )


@pytest.mark.parametrize(
    ("recipe", "override", "message"),
    [
        ("dlrm", "train.epoch=2", "there is no option train.epoch; did you mean train.epochs"),
        ("dlrm", "train.epochs=-2", "train.epochs must be positive"),
        ("dlrm", "--multirun", "--multirun is a flag of the command line"),
        ("dlmr", "seed=1", "there is no recipe=dlmr; did you mean dlrm. want"),
        ("dlrm", "experiment=nothing", "there is no experiment=nothing"),
        ("nn.nope:Model", "seed=1", "model.name=nn.nope:Model: nn.nope cannot be imported"),
        ("nn.nope:", "seed=1", "there is no recipe=nn.nope:"),
    ],
)
def test_wrong_options_are_refused_in_one_line(recipe, override, message):
    with pytest.raises(ValueError, match=message) as caught:
        options(recipe, override)
    assert "\n" not in str(caught.value)


def test_calls_at_the_wrong_time_are_refused(tmp_path):
    config = options("dlrm", *RUN, "checkpoint.save=false", f"run_dir={tmp_path / 'run'}")
    training = Training(config, quiet=True)
    with pytest.raises(ValueError, match="the training is not open"):
        training.step()
    with training:
        with pytest.raises(ValueError, match=r"checkpoint\.save=false saves nothing"):
            training.save()
        while training.num_steps < training.last_step:
            training.step()
        with pytest.raises(ValueError, match="all 8 steps are done"):
            training.step()
        for step in (None, 8, -1, 1.5):
            with pytest.raises(ValueError, match=r"there is no batch of step .*; want 0 to 7"):
                training.batch(step)
    with pytest.raises(ValueError, match="mode=eval is no training"):
        Training(options("dlrm", *RUN, "mode=eval"))


def test_options_of_a_run_are_those_of_its_file_from_python_too(whole):
    saved = options("dlrm", f"config={whole}/config.yaml")
    assert saved.run_dir == str(whole)
    assert saved.train == options("dlrm", *RUN).train != options("dlrm").train
    assert options("dlrm", f"config={whole}/config.yaml", "train.epochs=3").train.epochs == 3
    assert options("dlrm").train.epochs == 1
    with pytest.raises(ValueError, match=r"config=nope.yaml: no such file"):
        options("dlrm", "config=nope.yaml")
    with pytest.raises(ValueError, match="chooses others; leave one of them out"):
        options("dlrm_criteo_t0", f"config={whole}/config.yaml")


def test_a_training_in_a_thread_is_that_of_the_main_thread(whole, tmp_path):
    with (
        pytest.warns(UserWarning, match="outside of the main thread saves nothing at SIGTERM"),
        ThreadPoolExecutor(1) as threads,
    ):
        threads.submit(train, tmp_path / "run", 8).result()
    assert differences(whole, tmp_path / "run") == []


def test_a_second_training_of_a_process_is_refused_and_the_first_goes_on(tmp_path):
    first = options("dlrm", *RUN, f"run_dir={tmp_path / 'first'}")
    second = options("dlrm", *RUN, f"run_dir={tmp_path / 'second'}")
    with Training(first, quiet=True) as training:
        training.step()
        with (
            pytest.raises(ValueError, match=r"this process has a process group .* end that first"),
            Training(second, quiet=True),
        ):
            pass
        training.step()
        assert training.num_steps == 2


def test_relative_paths_hold_where_the_run_was_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Training(options("dlrm", *RUN, "run_dir=run"), quiet=True) as training:
        training.step()
        os.chdir(tmp_path.parent)
        with pytest.raises(ValueError, match=r"the run's relative paths begin in .* change back"):
            training.save()
        os.chdir(tmp_path)
        training.save()
    assert not (tmp_path.parent / "run").exists()
    with Training(options("dlrm", *RUN, f"run_dir={tmp_path / 'run'}"), quiet=True) as training:
        os.chdir(tmp_path.parent)
        training.train()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (torch.no_grad, "torch.no_grad, inference_mode or set_grad_enabled"),
        (torch.inference_mode, "torch.no_grad, inference_mode or set_grad_enabled"),
        (lambda: torch.autocast("cpu", torch.bfloat16), "torch.autocast is in force here"),
        (lambda: torch.device("meta"), r"torch.set_default_device\(meta\) is in force here"),
    ],
)
def test_settings_of_torch_that_would_change_a_step_are_refused(setting, message, tmp_path):
    with Training(options("dlrm", *RUN, f"run_dir={tmp_path / 'run'}"), quiet=True) as training:
        with setting(), pytest.raises(ValueError, match=message):
            training.step()
        training.step()
        assert training.num_steps == 1
        with torch.no_grad():
            training.evaluate()


def test_another_default_dtype_is_refused(tmp_path):
    torch.set_default_dtype(torch.float64)
    try:
        with (
            pytest.raises(ValueError, match=r"set_default_dtype\(torch.float64\) is in force here"),
            Training(options("dlrm", *RUN, f"run_dir={tmp_path / 'run'}"), quiet=True),
        ):
            pass
    finally:
        torch.set_default_dtype(torch.float32)


def test_what_an_open_run_refuses_is_a_value_error(tmp_path):
    scalar = "tasks={label: {loss: 'torch.nn.functional:binary_cross_entropy_with_logits'}}"
    config = options("dlrm", *RUN, scalar, f"run_dir={tmp_path}/run")
    with (
        pytest.raises(ValueError, match=r"logits returns \[\] for .* predictions; want a float of"),
        Training(config, quiet=True) as training,
    ):
        training.step()


def test_a_finished_run_is_not_trained_again(tmp_path):
    train(tmp_path / "run", 8)
    with (
        pytest.raises(ValueError, match="holds the complete run already"),
        Training(options("dlrm", *RUN, f"run_dir={tmp_path / 'run'}"), quiet=True),
    ):
        pass


@pytest.mark.doors
def test_the_script_of_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "docs/library.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "'label': (512,)" in printed
    assert "score" in printed
    assert printed.rstrip().endswith("parameters")
