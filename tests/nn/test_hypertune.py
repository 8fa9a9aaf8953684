"""Reports to a tuning service, in the format of cloudml-hypertune."""

import json
import time
from logging import getLogger
from pathlib import Path

import pytest

from nn.hypertune import DEFAULT_FILE, HypertuneReport, hypertune_report
from nn.models.metric import AUC, METRICS
from tests.helpers.command import run_command
from tests.helpers.composed import TINY

LOG_LOSS = METRICS[1]

QUIET = ["log.loggers=[]", "train.max_steps=4", "eval.every=2", "eval.at_start=true"]


def test_a_run_that_the_service_starts_reports_every_evaluation(tmp_path, monkeypatch):
    path = tmp_path / "hypertune/output.metrics"
    monkeypatch.setenv("CLOUD_ML_HP_METRIC_FILE", str(path))
    monkeypatch.setenv("CLOUD_ML_TRIAL_ID", "7")
    options = ["--optimizer.lr=0.05", "--model.dropout=0.5", f"run_dir={tmp_path}/run"]
    ended = run_command(*TINY, *QUIET, *options)
    assert (ended.exit_code, ended.err) == (0, "")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").open()]
    aucs = [record["test_auc"] for record in records if record.get("step") and "test_auc" in record]
    assert [line["global_step"] for line in lines] == ["2", "4"]
    assert [float(line["AUC"]) for line in lines] == pytest.approx(aucs, abs=1e-6)
    assert all(set(line) == {"timestamp", "trial", "AUC", "global_step"} for line in lines)
    assert lines[0]["trial"] == "7"
    assert abs(lines[0]["timestamp"] - time.time()) < 600
    assert "lr: 0.05" in (tmp_path / "run/config.yaml").read_text()


def test_a_run_of_its_own_reports_nothing(monkeypatch):
    monkeypatch.delenv("CLOUD_ML_HP_METRIC_FILE", raising=False)
    monkeypatch.delenv("CLOUD_ML_TRIAL_ID", raising=False)
    assert hypertune_report(getLogger("test")) is None
    monkeypatch.setenv("CLOUD_ML_TRIAL_ID", "3")
    report = hypertune_report(getLogger("test"))
    assert report is not None
    assert report._path == Path(DEFAULT_FILE)


def test_a_file_that_cannot_be_written_ends_no_run(tmp_path, caplog):
    (tmp_path / "file").touch()
    report = HypertuneReport(tmp_path / "file/output.metrics", "1", getLogger("test"))
    report.write(LOG_LOSS, 0.5, 10)
    assert "could not be written for the tuning service" in caplog.text
    report = HypertuneReport(tmp_path / "output.metrics", "1", getLogger("test"))
    for value in (None, float("nan")):
        report.write(AUC, value, 10)
    assert not (tmp_path / "output.metrics").exists()
