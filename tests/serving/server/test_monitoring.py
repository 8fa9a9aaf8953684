"""The alert rules and the Grafana board read what the server's metrics have, and Prometheus' own program takes them."""

import json
import logging
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from nn.observers.prometheus_file import PrometheusFile
from serving.server.metrics import Metrics
from serving.server.request_log import RequestLog

ROOT = Path(__file__).resolve().parents[3]
ALERTS = ROOT / "serving/monitoring/alerts.yaml"
RULES = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
BOARDS = [
    json.loads((ROOT / f"serving/monitoring/{name}.json").read_text())
    for name in ("board", "training_board")
]
PANELS: list[dict[str, Any]] = [panel for board in BOARDS for panel in board["panels"]]
boards = pytest.mark.parametrize("board", BOARDS, ids=["serving", "training"])
WIDTH = 24
"""Columns of a board."""


def expressions() -> list[str]:
    targets = [target for panel in PANELS for target in panel["targets"]]
    return [each["expr"] for each in [*RULES, *targets]]


class Loop:
    """A training at step 3 of 10."""

    num_steps, last_step = 3, 10

    def epoch(self) -> float:
        return 0.3


def metrics_text(folder: Path) -> str:
    """Return all metrics of a server that logs requests, and of a training that has evaluated and saved."""
    metrics, log = Metrics(), RequestLog(folder, 1.0, 1 << 20, print)
    log.start(metrics)
    log.stop()
    metrics.response(200)
    metrics.batch(8, 0.001)
    for counter in (log._ids, log._unknown):
        counter.labels("city")
    for counter in (
        log._logged,
        log._logged_scores,
        log._labelled,
        log._labelled_scores,
        log._labels,
    ):
        counter.labels("1", "click")
    gauges = dict.fromkeys(GAUGES, ("Meaning.", 0.0))
    model = SimpleNamespace(manifest=SimpleNamespace(name="shop"))
    version = SimpleNamespace(name="1", identity="ab", model=model)
    text = metrics.text([(version, 1.0)], gauges).decode()
    training = PrometheusFile(folder / "a.prom", "runs/a", logging.getLogger("test"))
    training.on_checkpoint(
        Loop(), SimpleNamespace(directory=folder.rename(folder.with_name("step_3")))
    )
    training._path = folder.with_name("a.prom")
    training.on_start(Loop())
    training.on_record(Loop(), {"loss": 0.5, "samples_per_s": 10.0, "step_ms": 2.0})
    training.on_evaluation(Loop(), {"test_auc": 0.5}, is_final=False)
    return text + training._path.read_text()


GAUGES = re.findall(r'"(serving_\w+)": \(', (ROOT / "serving/server/service.py").read_text())


def test_every_metric_of_the_rules_and_the_boards_is_one_that_is_written(tmp_path):
    (tmp_path / "log").mkdir()
    written = set(re.findall(r"^(\w+)[{ ]", metrics_text(tmp_path / "log"), re.MULTILINE))
    named = {n for text in expressions() for n in re.findall(r"\b(?:serving|training)_\w+", text)}
    assert named - written == set()
    ours = {re.sub("_(bucket|sum|count)$", "", name) for name in written}
    unseen = ours - {re.sub("_(bucket|sum|count)$", "", name) for name in named}
    # Each of ours is on a board, or an alert's.
    assert {name for name in unseen if name.startswith(("serving", "training"))} <= {
        *("serving_labelled_rows_total", "training_epoch", "training_checkpoint_step"),
    }


def test_every_alert_says_what_happened_where():
    names = [rule["alert"] for rule in RULES]
    assert len(set(names)) == len(names)
    for rule in RULES:
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert "{{ $labels." in rule["annotations"]["summary"], rule["alert"]


@boards
def test_the_panels_have_places_of_their_own_and_queries(board):
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        box = panel["gridPos"]
        assert box["x"] + box["w"] <= WIDTH
        columns = range(box["x"], box["x"] + box["w"])
        cells = {(x, y) for x in columns for y in range(box["y"], box["y"] + box["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


@boards
def test_the_board_asks_the_data_source_that_the_viewer_chooses(board):
    variables = {each["name"]: each for each in board["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    used = set(re.findall(r"\$\{?([a-z]\w*)", json.dumps(board)))
    assert used == set(variables)
    assert {panel["datasource"]["uid"] for panel in board["panels"]} == {"${datasource}"}


SERVER = '{job="serving", instance="a"}'
HOUR = [
    (f"up{SERVER}", "0x1700"),
    ('serving_responses_total{instance="a", status="200"}', "0+90x1700"),
    ('serving_responses_total{instance="a", status="503"}', "0+10x1700"),
    ('serving_request_seconds_bucket{instance="a", le="0.1"}', "0+50x1700"),
    ('serving_request_seconds_bucket{instance="a", le="0.5"}', "0+100x1700"),
    ('serving_request_seconds_bucket{instance="a", le="+Inf"}', "0+100x1700"),
    ('serving_queued_rows{instance="a"}', "2000x1700"),
    ('serving_versions_refused_total{instance="a"}', "0x1690 1x10"),
    ('serving_version{instance="a", model="shop", identity="1"}', "1x1700"),
    ('serving_version{instance="b", model="shop", identity="2"}', "1x1700"),
    ('serving_request_seconds_bucket{instance="c", version="1", le="0.005"}', "0+100x1700"),
    ('serving_request_seconds_bucket{instance="c", version="1", le="+Inf"}', "0+100x1700"),
    ('serving_request_seconds_bucket{instance="c", version="2", le="0.005"}', "0+0x1700"),
    ('serving_request_seconds_bucket{instance="c", version="2", le="0.05"}', "0+100x1700"),
    ('serving_request_seconds_bucket{instance="c", version="2", le="+Inf"}', "0+100x1700"),
    ('serving_logged_ids_total{instance="a", feature="city"}', "0+100x1700"),
    ('serving_logged_unknown_ids_total{instance="a", feature="city"}', "0+5x1600 8030+30x100"),
    ('serving_labelled_scores_total{version="1", output="click"}', "0+6x1700"),
    ('serving_labels_total{version="1", output="click"}', "0+4x1700"),
    ('serving_log_dropped_rows_total{instance="a"}', "0x1690 7x10"),
    ('training_running{run="killed"}', "1x1700"),
    ('training_updated_seconds{run="killed"}', "0x1700"),
    ('training_checkpoint_seconds{run="killed"}', "0x1700"),
    ('training_running{run="stopped"}', "0x1700"),
    ('training_finished{run="stopped"}', "0x1700"),
]
"""A day and four hours in which everything that has an alert happens, a value per minute."""
CALM = [
    (f"up{SERVER}", "1x1700"),
    ('serving_responses_total{instance="a", status="200"}', "0+90x1700"),
    ('serving_responses_total{instance="a", status="400"}', "0+10x1700"),
    ('serving_request_seconds_bucket{instance="a", le="0.05"}', "0+100x1700"),
    ('serving_request_seconds_bucket{instance="a", le="+Inf"}', "0+100x1700"),
    ('serving_queued_rows{instance="a"}', "500x1700"),
    ('serving_versions_refused_total{instance="a"}', "1x1700"),
    ('serving_version{instance="a", model="shop", identity="1"}', "1x1700"),
    ('serving_version{instance="b", model="shop", identity="1"}', "1x1700"),
    # A canary on both servers.
    ('serving_version{instance="a", model="shop", identity="2"}', "0.1x1700"),
    ('serving_version{instance="b", model="shop", identity="2"}', "0.1x1700"),
    ('serving_request_seconds_bucket{instance="c", version="1", le="0.05"}', "0+100x1700"),
    ('serving_request_seconds_bucket{instance="c", version="1", le="+Inf"}', "0+100x1700"),
    ('serving_request_seconds_bucket{instance="c", version="2", le="0.05"}', "0+10x1700"),
    ('serving_request_seconds_bucket{instance="c", version="2", le="+Inf"}', "0+10x1700"),
    ('serving_logged_ids_total{instance="a", feature="city"}', "0+100x1700"),
    ('serving_logged_unknown_ids_total{instance="a", feature="city"}', "0+30x1700"),
    ('serving_labelled_scores_total{version="1", output="click"}', "0+41x1700"),
    ('serving_labels_total{version="1", output="click"}', "0+40x1700"),
    ('serving_log_dropped_rows_total{instance="a"}', "7x1700"),
    ('training_running{run="trains"}', "1x1700"),
    ('training_updated_seconds{run="trains"}', "0+60x1700"),
    ('training_checkpoint_seconds{run="trains"}', "0+60x1700"),
    ('training_running{run="finished"}', "0x1700"),
    ('training_finished{run="finished"}', "1x1700"),
    ('training_updated_seconds{run="finished"}', "0x1700"),
]
"""One that is as it should be."""


@pytest.mark.doors
@pytest.mark.parametrize(("series", "fires"), [(HOUR, True), (CALM, False)])
def test_each_alert_fires_when_its_event_happens_and_not_otherwise(tmp_path, series, fires):
    samples = [{"series": name, "values": values} for name, values in series]
    when = "ALERTS{alertstate='firing'}"
    found = [{"labels": f'{{alertname="{rule["alert"]}"}}', "value": 1} for rule in RULES if fires]
    check = {"expr": f"count by (alertname) ({when})", "eval_time": "1699m", "exp_samples": found}
    test = {"interval": "1m", "input_series": samples, "promql_expr_test": [check]}
    file = tmp_path / "test.yaml"
    file.write_text(
        yaml.safe_dump({"rule_files": [str(ALERTS)], "evaluation_interval": "5m", "tests": [test]})
    )
    done = subprocess.run(
        ["promtool", "test", "rules", file], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
