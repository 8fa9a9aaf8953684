"""The alert rules and the Grafana board read what the server's metrics have, and Prometheus' own program takes them."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from serving.server.metrics import Metrics

ROOT = Path(__file__).resolve().parents[3]
ALERTS = ROOT / "serving/monitoring/alerts.yaml"
RULES = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
BOARD = json.loads((ROOT / "serving/monitoring/board.json").read_text())
PANELS: list[dict[str, Any]] = BOARD["panels"]
WIDTH = 24
"""Columns of a board."""


def expressions() -> list[str]:
    targets = [target for panel in PANELS for target in panel["targets"]]
    return [each["expr"] for each in [*RULES, *targets]]


def test_every_metric_of_the_rules_and_the_board_is_one_of_the_server():
    sources = "".join(path.read_text() for path in (ROOT / "serving/server").glob("*.py"))
    named = {name for text in expressions() for name in re.findall(r"\bserving_\w+", text)}
    declared = {re.sub("_(bucket|sum|count)$", "", name) for name in named}
    # A counter may be declared without the end that its text has.
    unknown = {
        name
        for name in declared
        if not re.search(f'"{name.removesuffix("_total")}(_total)?"', sources)
    }
    assert len(declared) >= 8
    assert unknown == set()


def test_every_alert_says_what_happened_where():
    names = [rule["alert"] for rule in RULES]
    assert len(set(names)) == len(names)
    for rule in RULES:
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert "{{ $labels." in rule["annotations"]["summary"], rule["alert"]


def test_the_panels_have_places_of_their_own_and_queries():
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    taken: set[tuple[int, int]] = set()
    for panel in PANELS:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= WIDTH
        columns = range(place["x"], place["x"] + place["w"])
        cells = {(x, y) for x in columns for y in range(place["y"], place["y"] + place["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


def test_the_board_asks_the_data_source_that_the_viewer_chooses():
    variables = {each["name"]: each for each in BOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    used = set(re.findall(r"\$\{?([a-z]\w*)", json.dumps(BOARD)))
    assert used == set(variables)
    assert {panel["datasource"]["uid"] for panel in PANELS} == {"${datasource}"}


def promtool(*words: str | Path, text: str | None = None) -> str:
    done = subprocess.run(
        ["promtool", *words], input=text, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.doors
def test_prometheus_takes_the_rules_the_queries_and_the_metrics(tmp_path):
    assert f"{len(RULES)} rules found" in promtool("check", "rules", ALERTS)
    queries = [text.replace("$__rate_interval", "5m").replace("$", "") for text in expressions()]
    rules = [{"record": f"query:{n}", "expr": text} for n, text in enumerate(queries)]
    recorded = tmp_path / "queries.yaml"
    recorded.write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool("check", "rules", recorded)
    metrics = Metrics()
    metrics.response(200)
    metrics.batch(8, 0.001)
    promtool("check", "metrics", text=metrics.text("shop", "1", "ab", {}).decode())


SERVER = '{job="serving", instance="a"}'
HOUR = [
    (f"up{SERVER}", "0x60"),
    ('serving_responses_total{instance="a", status="200"}', "0+90x60"),
    ('serving_responses_total{instance="a", status="503"}', "0+10x60"),
    ('serving_request_seconds_bucket{instance="a", le="0.1"}', "0+50x60"),
    ('serving_request_seconds_bucket{instance="a", le="0.5"}', "0+100x60"),
    ('serving_request_seconds_bucket{instance="a", le="+Inf"}', "0+100x60"),
    ('serving_queued_rows{instance="a"}', "2000x60"),
    ('serving_versions_refused_total{instance="a"}', "0x50 1x10"),
    ('serving_version{instance="a", model="shop", identity="1"}', "1x60"),
    ('serving_version{instance="b", model="shop", identity="2"}', "1x60"),
]
"""An hour in which everything that has an alert happens, a value per minute."""
CALM = [
    (f"up{SERVER}", "1x60"),
    ('serving_responses_total{instance="a", status="200"}', "0+90x60"),
    ('serving_responses_total{instance="a", status="400"}', "0+10x60"),
    ('serving_request_seconds_bucket{instance="a", le="0.05"}', "0+100x60"),
    ('serving_request_seconds_bucket{instance="a", le="+Inf"}', "0+100x60"),
    ('serving_queued_rows{instance="a"}', "500x60"),
    ('serving_versions_refused_total{instance="a"}', "1x60"),
    ('serving_version{instance="a", model="shop", identity="1"}', "1x60"),
    ('serving_version{instance="b", model="shop", identity="1"}', "1x60"),
]
"""One that is as it should be."""


@pytest.mark.doors
@pytest.mark.parametrize(("series", "fires"), [(HOUR, True), (CALM, False)])
def test_each_alert_fires_when_its_event_happens_and_not_otherwise(tmp_path, series, fires):
    samples = [{"series": name, "values": values} for name, values in series]
    when = "ALERTS{alertstate='firing'}"
    found = [{"labels": f'{{alertname="{rule["alert"]}"}}', "value": 1} for rule in RULES if fires]
    check = {"expr": f"count by (alertname) ({when})", "eval_time": "59m", "exp_samples": found}
    test = {"interval": "1m", "input_series": samples, "promql_expr_test": [check]}
    file = tmp_path / "test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "tests": [test]}))
    promtool("test", "rules", file)
