"""All commands of docs/sequences.md, on two days of few events; the server scores rows as `mode=predict` does."""

import csv
import json
import random
import re
import shlex
from datetime import UTC, datetime
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.helpers.command import ROOT, run_command, run_module
from tests.serving.served_models import serving

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


def request(shown: list[dict], row: Row, earlier: list[Row], day: int) -> bytes:
    """Return the page's request with the values of a row and its user's events."""
    ids = {}
    for name in ("user", "item", "category"):
        table = pq.read_table(f"data/{day}/vocabulary/{name}.parquet", columns=["value", "id"])
        ids[name] = dict(zip(*(column.to_pylist() for column in table.columns), strict=True))
    events = [event for event in earlier if event["user"] == row["user"]][-20:]
    data = {
        "ids": [ids[name].get(row[name], 0) for name in ids],
        "seen_item": [ids["item"].get(event["item"], 0) for event in events],
        "seen_category": [ids["category"].get(event["category"], 0) for event in events],
        "seen_price": [float(event["price"]) for event in events],
        "seen_bought": [float(event["action"] == "buy") for event in events],
        "seen_time": [seconds(event) for event in events],
        "seen": [seconds(row)],
    }
    inputs = [
        entry | {"data": data[entry["name"]], "shape": [1, len(data[entry["name"]])][: len(shape)]}
        for entry in shown
        for shape in [entry["shape"]]
    ]
    assert len(inputs) == len(data)
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
        with serving(Path("models")) as client:
            assert client.call(path, body.encode())[0] == 200
            found = []
            for index in range(len(rows) - len(wanted), len(rows)):
                status, answer = client.call(path, request(shown, rows[index], rows[:index], day))
                assert status == 200, answer
                decoded = json.loads(answer)
                assert decoded["model_version"] == str(day)
                found += decoded["outputs"][0]["data"]
        assert found == pytest.approx(wanted, abs=1e-6)
