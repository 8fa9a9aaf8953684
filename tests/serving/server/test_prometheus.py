"""A real Prometheus scrapes a server, and a training through node-exporter, as the page says: every query has values."""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
import yaml

from nn.distributed.launcher import reserved_port
from tests.helpers.command import run_command
from tests.helpers.composed import TINY
from tests.serving.handmade_model import FEATURES, write_raw_model
from tests.serving.served_models import Client, serving, tensor
from tests.serving.server.test_monitoring import ALERTS, ROOT, expressions

pytestmark = pytest.mark.doors
COLUMNS = {"a": ["0.5"], "b": ["0.25"], **{feature.name: ["x"] for feature in FEATURES}}
BODY = {"id": "r", "inputs": [tensor(name, "BYTES", texts) for name, texts in COLUMNS.items()]}
LABEL = {"id": "r", "inputs": [tensor("click", "FP32", [1])]}


def answerable(text: str) -> str:
    """Return a query of a board with its variables filled in, or the condition of an alert as 0 or 1, without yesterday."""
    text = text.replace("$__rate_interval", "1m").replace("$job", "serving")
    text = re.sub(r"\$(instance|run)", ".+", text.replace(" offset 1h", ""))
    return re.sub(r" (==|>) ", r" \1 bool ", text)


def ask(client: Client) -> None:
    """Send a request to both versions, and the label of one."""
    for version in "12":
        path = f"/v2/models/m/versions/{version}/infer"
        assert client.call(path, json.dumps(BODY).encode())[0] == 200
        assert client.call("/v2/models/m/labels", json.dumps(LABEL).encode())[0] == 200


@contextmanager
def started(*command: str | Path) -> Iterator[None]:
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            yield
        finally:
            process.terminate()


def answer(port: int, path: str, **parameters: str) -> dict:
    with urlopen(f"http://127.0.0.1:{port}/api/v1/{path}?{urlencode(parameters)}") as reply:
        return json.load(reply)["data"]


def parts_of_share(text: str) -> list[str]:
    return text.split(" / ") if "serving_sampled" in text else [text]


def without_values(port: int) -> list[str]:
    """Return the queries that have no series, or a NaN."""
    empty = []
    # A server on a CPU samples nothing: the parts of the share are 0 each.
    asked = (part for text in expressions() for part in parts_of_share(text))
    for text in asked:
        found = answer(port, "query", query=answerable(text))["result"]
        if not found or any(series["value"][1] == "NaN" for series in found):
            empty.append(text)
    return empty


def test_every_panel_and_alert_has_values_of_a_server_and_a_training(tmp_path):
    [page] = re.findall(
        r"```\n(# prometheus.yml\n.*?)```", (ROOT / "docs/operations.md").read_text(), re.DOTALL
    )
    config = yaml.safe_load(page)
    config["rule_files"] = [str(ALERTS)]
    config["global"] = {"scrape_interval": "200ms", "evaluation_interval": "200ms"}
    (tmp_path / "files").mkdir()
    written = f"log.prometheus={tmp_path}/files/a.prom"
    ended = run_command(*TINY, "log.pictures=false", written, f"run_dir={tmp_path}/run")
    assert (ended.exit_code, ended.err) == (0, "")
    first = write_raw_model(tmp_path / "models/1")
    shutil.copytree(first, tmp_path / "models/2")
    with ExitStack() as stack:
        client = stack.enter_context(
            serving(
                tmp_path / "models",
                canary_share=0.5,
                log_requests=str(tmp_path / "log"),
                log_share=1.0,
            )
        )
        node, own = reserved_port(), reserved_port()
        for job, port in zip(config["scrape_configs"], (client.port, node), strict=True):
            job["static_configs"] = [{"targets": [f"127.0.0.1:{port}"]}]
        (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
        textfile = f"--collector.textfile.directory={tmp_path}/files"
        only = ["--collector.disable-defaults", "--collector.textfile", textfile]
        stack.enter_context(
            started("prometheus-node-exporter", f"--web.listen-address=127.0.0.1:{node}", *only)
        )
        stack.enter_context(
            started(
                "prometheus",
                f"--config.file={tmp_path}/prometheus.yml",
                f"--storage.tsdb.path={tmp_path}/tsdb",
                f"--web.listen-address=127.0.0.1:{own}",
            )
        )
        deadline, empty = time.monotonic() + 40, ["not asked"]
        while empty:
            assert time.monotonic() < deadline, empty
            ask(client)
            time.sleep(0.3)
            try:
                empty = without_values(own)
            except OSError as error:
                empty = [str(error)]
        rules = [rule for group in answer(own, "rules")["groups"] for rule in group["rules"]]
        assert {rule["health"] for rule in rules} == {"ok"}
        assert {each["health"] for each in answer(own, "targets")["activeTargets"]} == {"up"}
