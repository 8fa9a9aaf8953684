"""All commands of docs/sequences.md, on two days of few events; the server scores rows as `mode=predict` does."""

import csv
import json
import random
import re
import shlex
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nn.library.loaded_run import Run
from tests.helpers.command import ROOT, run_command, run_module
from tests.serving.served_models import serving, tensor

pytestmark = pytest.mark.doors

BLOCKS = re.findall(
    r"^```(\w+)\n(.*?)^```",
    (ROOT / "docs" / "sequences.md").read_text(),
    flags=re.MULTILINE | re.DOTALL,
)
Row = dict[str, str]


def write_day(day: int, rows: int) -> list[Row]:
    """Write a row per minute; the second day has an item more."""
    draw = random.Random(day)
    written = []
    for at in range(rows):
        item = draw.randrange(29 + day)
        action = draw.choice(["view", "cart", "buy"])
        row = {"user": f"u{draw.randrange(40)}", "item": f"i{item}", "category": f"c{item % 5}"}
        time = f"2026-03-0{day} {at // 60:02}:{at % 60:02}:00"
        written.append(row | {"action": action, "price": f"{1.5 * item}", "time": time})
    with Path(f"day_{day}.csv").open("w", newline="") as stream:
        lines = csv.DictWriter(stream, written[0])
        lines.writeheader()
        lines.writerows(written)
    return written


def seconds(row: Row) -> int:
    return int(datetime.fromisoformat(row["time"]).replace(tzinfo=UTC).timestamp())


def follow(line: str) -> None:
    match shlex.split(line)[1:]:
        case ["-m", "preproc", *arguments]:
            ended = run_module("preproc", *arguments, "plot=false")
        case ["-m", module, *arguments]:
            ended = run_module(module, *arguments)
        case ["main.py", *arguments]:
            ended = run_command(*arguments, "log.pictures=false", "device=cpu", recipe="main")
    assert not ended.exit_code, ended.err


def raw_request(shown: list[dict], row: Row, rows: list[Row]) -> bytes:
    """Return the page's request with the values of a row and of its user's events, the row's own among them."""
    events = [event for event in rows if event["user"] == row["user"]]
    inputs = []
    for entry in shown:
        _, is_of_event, column = entry["name"].rpartition("seen_")
        values: list = [event[column] for event in (events if is_of_event else [row])]
        if entry["datatype"] == "FP32":
            values = list(map(float, values))
        shape = [1, len(values)][: len(entry["shape"])]
        inputs.append(entry | {"data": values, "shape": shape})
    return json.dumps({"inputs": inputs}).encode()


def raw_table(scored: list[Row], rows: list[Row]) -> pa.Table:
    """Return rows as `Run.predict` takes them, each with all events of its user."""
    events = [[event for event in rows if event["user"] == row["user"]] for row in scored]
    columns: dict[str, list] = {
        name: [row[name] for row in scored] for name in ("user", "item", "category", "time")
    }
    for name in ("item", "category", "price", "action", "time"):
        columns[f"seen_{name}"] = [[event[name] for event in of_user] for of_user in events]
    return pa.table(columns)


def id_request(row: Row, earlier: list[Row], day: int) -> bytes:
    """Return a request of ids and numbers of a row and its user's events."""
    ids = {}
    for name in ("user", "item", "category"):
        table = pq.read_table(f"data/{day}/vocabulary/{name}.parquet", columns=["value", "id"])
        ids[name] = dict(zip(*(column.to_pylist() for column in table.columns), strict=True))
    events = [event for event in earlier if event["user"] == row["user"]][-20:]
    of_events: dict[str, list] = {
        "seen_item": [ids["item"].get(event["item"], 0) for event in events],
        "seen_category": [ids["category"].get(event["category"], 0) for event in events],
        "seen_price": [float(event["price"]) for event in events],
        "seen_bought": [float(event["action"] == "buy") for event in events],
        "seen_time": [seconds(event) for event in events],
    }
    columns = [("ids", [[ids[name].get(row[name], 0) for name in ids]]), ("seen", [seconds(row)])]
    columns += [(name, [values]) for name, values in of_events.items()]
    inputs = [
        tensor(name, "FP32" if name in ("seen_price", "seen_bought") else "INT64", np.array(values))
        for name, values in columns
    ]
    return json.dumps({"inputs": inputs}).encode()


def test_the_page_runs_from_a_log_to_the_served_scores_of_two_days(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert [kind for kind, _ in BLOCKS] == ["bash", "yaml", "bash", "bash"]
    first, description, curl, second = (block for _, block in BLOCKS)
    Path("mine/dataset").mkdir(parents=True)
    Path("mine/dataset/shop.yaml").write_text(description)
    _, address, _, body = shlex.split(curl)
    path, shown = address.removeprefix("localhost:8000"), json.loads(body)["inputs"]
    *first_day, serve = first.splitlines()
    assert serve == "python -m serving.run model=models"
    rows: list[Row] = []
    for day, commands, count in ((1, first_day, 600), (2, second.splitlines(), 300)):
        rows += write_day(day, count)
        for line in commands:
            follow(line)
        with Path(f"scores_{day}.csv").open() as stream:
            wanted = [float(row["score"]) for row in csv.DictReader(stream)]
        assert len(wanted) == count // 10
        assert len(set(wanted)) > 10
        run = Run.load("runs/shop", fitted=f"data/{day}")
        predicted = run.predict(raw_table(rows[-len(wanted) :], rows))["score"].to_pylist()
        assert predicted == pytest.approx(wanted, abs=1e-6)
        with serving(Path("models")) as client:
            assert client.call(path, body.encode())[0] == 200
            earlier = len(rows) - len(wanted)
            of_values, of_ids = [], []
            for index, row in enumerate(rows[earlier:], earlier):
                for found, sent in (
                    (of_values, raw_request(shown, row, rows[: index + 1])),
                    (of_ids, id_request(row, rows[:index], day)),
                ):
                    status, answer = client.call(path, sent)
                    assert status == 200, answer
                    decoded = json.loads(answer)
                    assert decoded["model_version"] == str(day)
                    found += decoded["outputs"][0]["data"]
        assert of_values == pytest.approx(wanted, abs=1e-6)
        assert of_ids == of_values
