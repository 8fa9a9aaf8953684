"""A sweep of real trainings whose processes are killed: the same command ends as one that was never disturbed."""

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from configs.many_runs_schema import Pruner, Sampler, SweepConfig
from nn.distributed.launcher import PR_SET_PDEATHSIG
from tests.helpers.forks import fork_context
from tests.helpers.runs import differences, records

SPACE = "optimizer.lr: {low: 0.01, high: 1, log: true}\n"
OPTIONS = [
    *("data.synthetic.train_rows=512", "data.synthetic.test_rows=64"),
    *("data.synthetic.cardinalities=[50,20]", "data.synthetic.num_numerical=2"),
    *("model.embedding_dim=4", "model.bottom_mlp=[4]", "model.top_mlp=[4,1]"),
    *("train.batch_size=32", "eval.batch_size=64", "train.max_steps=12", "eval.per_epoch=4"),
    *("checkpoint.save_every=3", "log.every=4", "train.tf32=false", "log.pictures=false"),
    *("log.loggers=[]", "device=cpu"),
]
LIMIT_S = 1200


class Forked:
    """A trial's process: a fork of the sweep's, which has imported what it needs."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.setsid()
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
                os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
                os.dup2(1, 2)
                sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
                Path("pid").write_text(str(os.getpid()))
                code = _train(command[2:])
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code


def _train(overrides: list[str]) -> int:
    from main import _process, _run
    from sweep.plan import _composed

    try:
        _process()(partial(_run, _composed("dlrm", overrides)))()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    return 0


def _sweep(directory: Path, pause_s: float) -> None:
    """Run the sweep in this process, whose trials pause before every step."""
    import torch
    from rich.console import Console

    from nn.training.train_step import TrainStep
    from sweep.run import run_sweep

    os.chdir(directory)
    torch.set_num_threads(1)
    original = TrainStep.train

    def train(self: TrainStep, *arguments: Any) -> Any:
        time.sleep(pause_s)
        return original(self, *arguments)

    config = SweepConfig(
        **{"recipe": "dlrm", "space": "space.yaml", "output": "out", "overrides": OPTIONS},
        **{"trials": 2, "parallel": 1, "pruner": Pruner.none, "sampler": Sampler.random},
    )
    with (
        patch.object(TrainStep, "train", train),
        patch("matplotlib.figure.Figure.savefig", lambda figure, target, **_: target.write(b"x")),
        Path("sweep.log").open("a") as log,
    ):
        run_sweep(config, Console(file=log, width=200), Forked)


def start(directory: Path, pause_s: float = 0.0) -> Any:
    directory.mkdir(exist_ok=True)
    (directory / "space.yaml").write_text(SPACE)
    process = fork_context().Process(target=_sweep, args=(directory, pause_s))
    process.start()
    return process


def wait_for(is_there: Callable[[], object], process: Any) -> None:
    end = time.monotonic() + LIMIT_S
    while not is_there():
        assert process.is_alive(), "the sweep ended before it was killed"
        assert time.monotonic() < end
        time.sleep(0.02)


def result(directory: Path) -> dict[str, Any]:
    found = json.loads((directory / "out/sweep.json").read_text())
    for trial in found["trials"]:
        del trial["seconds"]
    return found


@pytest.mark.doors
def test_a_killed_sweep_of_real_trainings_ends_as_an_undisturbed_one(tmp_path):
    whole = start(tmp_path / "whole")
    killed, out = tmp_path / "killed", tmp_path / "killed/out"
    # In the middle of the first trial, of the second, and of the test of the best one.
    for pattern, kills_trial in (
        ("trials/00*/checkpoints/step_3", False),
        ("trials/01*/checkpoints/step_3", True),
        ("test_trial_*/config.yaml", True),
    ):
        process = start(killed, pause_s=0.1)
        wait_for(lambda pattern=pattern: list(out.glob(pattern)), process)
        process.kill()
        process.join()
        if kills_trial:  # else it saves a checkpoint after the signal that its parent's death sends
            with suppress(ProcessLookupError):
                os.kill(int((killed / "pid").read_text()), signal.SIGKILL)
    last = start(killed)
    for process in (whole, last):
        process.join(LIMIT_S)
        assert process.exitcode == 0, (killed / "sweep.log").read_text()
    assert result(killed) == result(tmp_path / "whole")
    best = result(killed)["best"]["trial"]
    for run in (out / "trials").iterdir():
        same = tmp_path / "whole/out/trials" / run.name
        assert records(run) == records(same)
        assert (run / "restarts.jsonl").exists()
        if run.name.startswith(f"{best:02d}"):
            assert differences(same, run) == []
