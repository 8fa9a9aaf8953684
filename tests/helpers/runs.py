"""Runs that are disturbed at a step, and whether two came to the same end: what their directories hold, but for times."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nn.checkpoint.manager import THREAD_NAME
from nn.training.train_step import TrainStep

OF_A_START = {"samples_per_s", "step_ms", "data_wait_ms", "eval_s"}


def at_step(monkeypatch: pytest.MonkeyPatch, step: int, do: Callable[[], None]) -> None:
    """Call `do` when a run in this process comes to a step."""
    undisturbed = TrainStep.train

    def train(self, number, prefetcher):
        if number == step:
            do()
        return undisturbed(self, number, prefetcher)

    monkeypatch.setattr(TrainStep, "train", train)


def wait_for_writer() -> None:
    """Wait until no checkpoint is being written in this process."""
    for thread in threading.enumerate():
        if thread.name == THREAD_NAME:
            thread.join()


def records(run_dir: Path) -> list[dict[str, Any]]:
    """What metrics.jsonl says."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [_timeless(json.loads(line)) for line in lines[1:]]


def summary(run_dir: Path) -> dict[str, Any]:
    """What summary.json says."""
    return _timeless(json.loads((run_dir / "summary.json").read_text()))


def stored_bytes(run_dir: Path) -> dict[str, bytes]:
    """Weights and optimizer states of the last checkpoint of a finished run, as they lie on disk."""
    path = run_dir / "checkpoints" / f"step_{summary(run_dir)['steps']}"
    return {each.name: each.read_bytes() for each in path.iterdir() if each.name != "run.json"}


def differences(whole: Path, parts: Path) -> list[str]:
    """What is not equal, bit by bit, between two finished runs."""
    stored, wanted = stored_bytes(parts), stored_bytes(whole)
    found = {
        "metrics.jsonl": records(parts) != records(whole),
        "summary.json": summary(parts) != summary(whole),
        **{name: stored.get(name) != wanted.get(name) for name in stored | wanted},
    }
    return [name for name, is_different in found.items() if is_different]


def _timeless(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in OF_A_START}
