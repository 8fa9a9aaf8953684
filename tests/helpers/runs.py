"""Interruption of a run at a step, and comparison of the directories of two runs, except for times."""

import io
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from nn.checkpoint.manager import THREAD_NAME
from nn.deltas.writer import THREAD_NAME as DELTA_THREAD_NAME
from nn.training.train_step import TrainStep

TIMES = {"samples_per_s", "step_ms", "data_wait_ms", "eval_s", "peak_host_bytes"}
"""What differs between two runs of one command."""


def at_step(monkeypatch: pytest.MonkeyPatch, step: int, do: Callable[[], None]) -> None:
    """Call `do` before a run in this process trains a step."""
    original = TrainStep.train

    def train(self, number, prefetcher):
        if number == step:
            do()
        return original(self, number, prefetcher)

    monkeypatch.setattr(TrainStep, "train", train)


def wait_for_writer() -> None:
    """Wait until neither a checkpoint nor a delta is written in this process."""
    for thread in threading.enumerate():
        if thread.name in (THREAD_NAME, DELTA_THREAD_NAME):
            thread.join()


class Killed(BaseException):
    """Stand-in for SIGKILL, which would end the tests too; the program does not catch it."""


@contextmanager
def killed_at(step: int) -> Iterator[None]:
    """Leave a training in the middle of a step without closing anything.

    A checkpoint that is being written is finished first. Its writer would otherwise continue in this process without the ranks
    that it communicates with.
    """

    def end() -> None:
        wait_for_writer()
        raise Killed

    with pytest.MonkeyPatch.context() as patched:
        at_step(patched, step, end)
        with pytest.raises(Killed):
            yield


@contextmanager
def unreadable(path: Path, number: int) -> Iterator[None]:
    """Let every attempt to open or list `path`, or what lies below it, fail with an error of the system.

    Root, as whom tests may run, reads files without permission too.
    """
    originals = {"io.open": io.open, "os.open": os.open, "os.listdir": os.listdir}

    def failing(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(name: Any = ".", *arguments: Any, **options: Any) -> Any:
            if isinstance(name, str | Path) and Path(name).is_relative_to(path):
                raise OSError(number, os.strerror(number), str(name))
            return original(name, *arguments, **options)

        return call

    with pytest.MonkeyPatch.context() as patched:
        for name, original in originals.items():
            patched.setattr(name, failing(original))
        yield


def records(run_dir: Path) -> list[dict[str, Any]]:
    """Return the records of metrics.jsonl, without times."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [timeless(json.loads(line)) for line in lines[1:]]


def jsonl(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file with one JSON object per line."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def summary(run_dir: Path) -> dict[str, Any]:
    """Return summary.json, without times."""
    return timeless(json.loads((run_dir / "summary.json").read_text()))


def stored_bytes(run_dir: Path) -> dict[str, bytes]:
    """Return the files with weights and optimizer states of the last checkpoint of a finished run."""
    path = run_dir / "checkpoints" / f"step_{summary(run_dir)['steps']}"
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name != "run.json"}


def differences(expected: Path, actual: Path) -> list[str]:
    """Return the names of the files that differ, bit by bit, between two finished runs."""
    stored, wanted = stored_bytes(actual), stored_bytes(expected)
    is_different = {
        "metrics.jsonl": records(actual) != records(expected),
        "summary.json": summary(actual) != summary(expected),
        **{name: stored.get(name) != wanted.get(name) for name in stored | wanted},
    }
    return [name for name, different in is_different.items() if different]


def timeless(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record without times, and without the traffic of tables in host memory: a resumed run begins with other rows."""
    return {
        key: value
        for key, value in record.items()
        if key not in TIMES and not key.startswith("tier_")
    }
