"""Metrics of a training for node-exporter: the file of a run that trains, has ended, was stopped or was killed."""

import json
import logging
import os
import signal
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from nn.observers.prometheus_file import PrometheusFile
from tests.helpers.command import run_command
from tests.helpers.composed import TINY
from tests.helpers.runs import at_step

QUIET = ["log.loggers=[]", "log.pictures=false", "train.max_steps=6", "eval.every=4", "log.every=3"]


def values(path: Path) -> dict[str, float]:
    """Return the values by metric, and by `evaluation_METRIC`; all are of one run."""
    samples = [
        s for family in text_string_to_metric_families(path.read_text()) for s in family.samples
    ]
    assert len({sample.labels["run"] for sample in samples}) == 1
    return {
        f"evaluation_{s.labels['metric']}"
        if "metric" in s.labels
        else s.name.removeprefix("training_"): s.value
        for s in samples
    }


def test_a_run_leaves_its_last_values_and_says_that_it_has_finished(tmp_path):
    path = tmp_path / "a.prom"
    ended = run_command(*TINY, *QUIET, f"log.prometheus={path}", f"run_dir={tmp_path}/run")
    assert (ended.exit_code, ended.err) == (0, "")
    found = values(path)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").open()]
    [*_, last] = [line for line in lines if "loss" in line]
    [*_, final] = [line for line in lines if "test_auc" in line]
    assert (found["running"], found["finished"]) == (0, 1)
    assert (found["step"], found["last_step"], found["checkpoint_step"]) == (6, 6, 6)
    assert found["loss"] == pytest.approx(last["loss"], abs=1e-5)
    assert found["step_seconds"] == pytest.approx(last["step_ms"] / 1e3, rel=0.01)
    assert found["evaluation_auc"] == pytest.approx(final["test_auc"], abs=1e-5)
    assert all(
        0 <= time.time() - found[name] < 600 for name in ("updated_seconds", "checkpoint_seconds")
    )
    assert [p.name for p in tmp_path.iterdir() if "prom" in p.name] == ["a.prom"]


def test_a_run_that_is_stopped_does_not_run_and_has_not_finished(tmp_path, monkeypatch):
    path = tmp_path / "a.prom"
    seen = []

    def stop() -> None:
        seen.append(values(path))
        os.kill(os.getpid(), signal.SIGTERM)

    at_step(monkeypatch, 4, stop)
    ended = run_command(*TINY, *QUIET, f"log.prometheus={path}", f"run_dir={tmp_path}/run")
    assert ended.exit_code == 75, ended.err
    assert (seen[0]["running"], seen[0]["finished"]) == (1, 0)
    found = values(path)
    assert (found["running"], found["finished"]) == (0, 0)
    assert found["step"] >= 4


def test_a_file_that_cannot_be_written_is_one_warning(tmp_path, caplog):
    class Loop:
        num_steps, last_step = 1, 2

        def epoch(self) -> float:
            return 0.5

    observer = PrometheusFile(tmp_path / "none/a.prom", "run", logging.getLogger("test"))
    observer.on_start(Loop())  # type: ignore[arg-type]
    observer.on_end(Loop())  # type: ignore[arg-type]
    assert caplog.text.count("cannot be written: No such file or directory") == 1
    (tmp_path / "none").mkdir()
    observer.on_end(Loop())  # type: ignore[arg-type]
    assert values(tmp_path / "none/a.prom")["finished"] == 1


def test_another_name_is_refused():
    ended = run_command(*TINY, "log.prometheus=/tmp/metrics.txt")
    assert ended.exit_code == 2
    assert "the textfile collector reads files NAME.prom alone" in ended.err
