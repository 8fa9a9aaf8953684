"""Loggers: what each gets, also of a run that resumes, and what a failing or slow one does to the training."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import version
from logging import getLogger
from pathlib import Path

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from configs.built_in import LOGGERS
from nn.loggers.background import Loggers
from nn.loggers.choice import check_loggers, make_loggers
from nn.loggers.run_logger import LoggedRun
from tests.helpers.command import run_command
from tests.helpers.composed import TINY
from tests.helpers.runs import jsonl, killed_at
from tests.nn.loggers.recording import Recording, Waiting

HERE = "tests.nn.loggers.recording"
SHORT = [
    *(*TINY, "train.max_steps=8", "log.every=2", "eval.every=4", "checkpoint.save_every=4"),
    *("train.tf32=false", "optimizer.lr=0.05", "eval.at_start=false"),
]


@pytest.fixture(autouse=True)
def calls(monkeypatch) -> list:
    """The calls of `Recording`, of this test only."""
    kept: list = []
    monkeypatch.setattr(Recording, "calls", kept)
    return kept


@pytest.fixture(scope="module")
def two_starts(tmp_path_factory) -> tuple[Path, list]:
    """A run with TensorBoard and a logger of its own, killed at step 6 and started again; its calls."""
    run_dir = tmp_path_factory.mktemp("loggers") / "run"
    kept: list = []
    run = [*SHORT, f"log.loggers=[tensorboard,'{HERE}:Recording']", f"run_dir={run_dir}"]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Recording, "calls", kept)
        with killed_at(6):
            run_command(*run)
        ended = run_command(*run)
    assert ended.exit_code == 0, ended.err
    return run_dir, kept


def test_a_logger_gets_all_records_and_the_result(two_starts):
    run_dir, calls = two_starts
    starts = [index for index, call in enumerate(calls) if call[0] == "start"]
    first, second = (calls[index][1] for index in starts)
    assert first.key == second.key
    assert (first.first_step, second.first_step) == (0, 5)
    assert first.config["optimizer"]["lr"] == 0.05
    assert first.directory == run_dir
    again = calls[starts[1] :]
    wanted = [record for record in jsonl(run_dir / "metrics.jsonl")[1:] if record["step"] > 4]
    got = [call for call in again if call[0] in ("train", "test")]
    assert [(group, step) for group, step, _ in got] == [("train", 6), ("train", 8), ("test", 8)]
    assert got[1][2]["loss"] == pytest.approx(wanted[1]["loss"], rel=1e-6)
    assert got[2][2]["auc"] == pytest.approx(wanted[2]["test_auc"], rel=1e-6)
    assert all(type(value) in (int, float) for _, _, numbers in got for value in numbers.values())
    summary = json.loads((run_dir / "summary.json").read_text())
    assert again[-2:] == [("finish", summary), ("close",)]


def accumulated(directory: Path) -> EventAccumulator:
    events = EventAccumulator(str(directory), purge_orphaned_data=True)
    events.Reload()
    return events


def test_tensorboard_has_training_and_evaluation_in_one_chart(two_starts):
    run_dir, _ = two_starts
    train, test = (accumulated(run_dir / "tensorboard" / group) for group in ("train", "test"))
    assert {"loss", "auc", "lr", "samples_per_s"} <= set(train.Tags()["scalars"])
    assert set(test.Tags()["scalars"]) == {"loss", "auc", "rows", "eval_s"}
    # Once per step, although the steps after the checkpoint were trained twice.
    assert [event.step for event in train.Scalars("loss")] == [2, 4, 6, 8]
    assert [event.step for event in test.Scalars("auc")] == [4, 8]
    wanted = [
        record["test_log_loss"]
        for record in jsonl(run_dir / "metrics.jsonl")[1:]
        if "test_auc" in record
    ]
    assert [event.value for event in test.Scalars("loss")] == pytest.approx(wanted)


def test_tensorboard_has_the_options_as_text_and_as_hyperparameters(two_starts):
    run_dir, _ = two_starts
    events = accumulated(run_dir / "tensorboard")
    text = events.Tensors("config")[-1].tensor_proto.string_val[0].decode()
    assert yaml.safe_load(text) == yaml.safe_load((run_dir / "config.yaml").read_text())
    assert events.SummaryMetadata("config").plugin_data.plugin_name == "text"
    content = events.PluginTagToContent("hparams")["_hparams_/session_start_info"]
    hyperparameters = HParamsPluginData.FromString(content).session_start_info.hparams
    assert hyperparameters["optimizer.lr"].number_value == 0.05
    assert hyperparameters["model.name"].string_value == "dlrm"
    assert not [key for key in hyperparameters if key.startswith(("run_dir", "data", "log"))]


def test_a_failing_logger_costs_one_warning(calls, tmp_path):
    run_dir = tmp_path / "run"
    run = [*SHORT, f"log.loggers=['{HERE}:Failing']", f"run_dir={run_dir}"]
    ended = run_command(*run)
    assert ended.exit_code == 0, ended.err
    warnings = [line for line in ended.out.splitlines() if line.startswith("warning: ")]
    assert warnings == [
        f"warning: log.loggers: {HERE}:Failing has failed and gets no more records, training continues: ConnectionError: "
        "the server is gone"
    ]
    assert [call[0] for call in calls] == ["start", "train", "train", "close"]
    assert len(jsonl(run_dir / "metrics.jsonl")) == 1 + 4 + 2


def test_training_does_not_wait_for_a_slow_logger(calls, caplog):
    loggers = Loggers({"slow": Waiting(), "other": Recording()}, getLogger("test"), 0.2)
    loggers.start(LoggedRun(Path("run"), "key", {}, "", {}))
    for step in range(100):
        loggers.record("train", step, {"loss": 1.0})
    loggers.close()
    assert caplog.messages == [
        "log.loggers: slow did not end within 0.2 s; the last records may be missing there"
    ]
    assert sum(call[0] == "train" for call in calls) == 100
    Waiting.may_go_on.set()


@pytest.mark.parametrize(
    ("loggers", "message"),
    [
        (
            "[tensorbord]",
            "log.loggers names tensorbord, which is none of tensorboard, wandb, mlflow",
        ),
        ("[tensorboard,tensorboard]", "log.loggers names tensorboard twice"),
        (f"['{HERE}:Missing']", f"{HERE} has no Missing; correct the name"),
        (f"['{HERE}:NoLogger']", "is no logger: it has no method record"),
        (
            f"['{HERE}:NotMade']",
            f"log.loggers={HERE}:NotMade cannot be made (KeyError: 'TOKEN'); cor",
        ),
        ("[wandb]", "log.loggers=wandb needs the package wandb, which is not installed: `uv sync"),
    ],
)
def test_a_wrong_logger_is_refused_in_one_line(loggers, message, tmp_path, monkeypatch):
    monkeypatch.setattr("configs.messages.find_spec", lambda name: None if name == "wandb" else 1)
    ended = run_command(*SHORT, f"log.loggers={loggers}", f"run_dir={tmp_path / 'run'}")
    assert ended.exit_code == 2
    assert message in ended.err
    assert ended.err.count("\n") == 1


def test_a_logger_of_the_project_need_not_have_the_name_of_a_library(monkeypatch):
    monkeypatch.setitem(LOGGERS, "jsonl", f"{HERE}:Recording")
    check_loggers(["jsonl"])
    make_loggers(["jsonl"], getLogger("test"))


@pytest.mark.doors
def test_weights_and_biases_writes_files_without_a_network(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    # W&B's own process takes long to end on a busy machine.
    monkeypatch.setattr(Loggers.__init__, "__defaults__", (120.0,))
    run_dir = tmp_path / "run"
    ended = run_command(*SHORT, "log.loggers=[wandb]", f"run_dir={run_dir}")
    assert (ended.exit_code, "warning" in ended.out) == (0, False), ended.out
    (written,) = (run_dir / "wandb").glob("offline-run-*/*.wandb")
    content = written.read_bytes()
    assert [
        name for name in (b"train/loss", b"test/auc", b"optimizer") if name not in content
    ] == []


@pytest.fixture
def mlflow_server(tmp_path) -> Iterator[str]:
    """Address of MLflow's own server, installed beside the environment that trains, which has MLflow's client only."""
    venv = tmp_path / "server"
    subprocess.run(["uv", "venv", "--quiet", "--python", sys.executable, venv], check=True)
    install = ["uv", "pip", "install", "--quiet", "--python", venv]
    subprocess.run([*install, f"mlflow=={version('mlflow-skinny')}"], check=True, cwd=tmp_path)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    serve = [venv / "bin/mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
    serve += ["--workers", "1", "--backend-store-uri", f"sqlite:///{tmp_path}/server.db"]
    # Processes for evaluations of language models, which take longest to start.
    env = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (
        (tmp_path / "server.log").open("w") as log,
        subprocess.Popen(
            serve, cwd=tmp_path, env=env, stdout=log, stderr=log, start_new_session=True
        ) as process,
    ):
        try:
            _wait_until_healthy(f"http://127.0.0.1:{port}/health", process, tmp_path / "server.log")
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(process.pid, signal.SIGTERM)  # with its workers
            process.wait(30)
            shutil.rmtree(venv)


def _wait_until_healthy(url: str, process: subprocess.Popen, log: Path) -> None:
    end = time.monotonic() + 300
    while time.monotonic() < end and process.poll() is None:
        with suppress(OSError), urllib.request.urlopen(url, timeout=10):
            return
        time.sleep(0.2)
    raise AssertionError(f"MLflow's server does not answer: {log.read_text()[-3000:]}")


@pytest.mark.doors
@pytest.mark.parametrize("place", ["files", "server"])
def test_mlflow_continues_the_run_of_a_training_that_resumes(place, tmp_path, monkeypatch, request):
    from mlflow.tracking import MlflowClient

    if place == "server":
        monkeypatch.setenv("MLFLOW_TRACKING_URI", request.getfixturevalue("mlflow_server"))
    else:
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'store'}")
    run = [*SHORT, "log.loggers=[mlflow]", f"run_dir={tmp_path / 'run'}"]
    with killed_at(6):
        run_command(*run)
    ended = run_command(*run)
    assert (ended.exit_code, "warning" in ended.out) == (0, False), ended.out
    client = MlflowClient()
    experiment = client.get_experiment_by_name("dlrm")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED"
    assert found.data.params["optimizer.lr"] == "0.05"
    steps = [metric.step for metric in client.get_metric_history(found.info.run_id, "test/auc")]
    assert steps == [4, 8]
    assert found.data.metrics["result/test_auc"] == pytest.approx(found.data.metrics["test/auc"])
