"""The commands of docs/every_day.md, on three days of few ratings."""

import random
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.helpers.command import run_command
from tests.helpers.preproc_command import preproc
from tests.helpers.runs import records

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "every_day.md").read_text()
SMALL = ["log.pictures=false", "log.loggers=[]", "train.batch_size=32", "device=cpu"]


def write_ratings(folder: Path, rows: int = 1_000) -> None:
    """Write ratings whose users and films follow one another in time."""
    folder.mkdir()
    draw = random.Random(0)
    lines = [
        f"{draw.randint(at // 40, at // 40 + 9)},{draw.randint(at // 20, at // 20 + 30)},{draw.randint(1, 5)},{at}"
        for at in range(rows)
    ]
    draw.shuffle(lines)
    text = "\n".join(["userId,movieId,rating,timestamp", *lines])
    (folder / "ratings.csv").write_text(text + "\n")
    films = [f"{film},Film {film},Drama|War" for film in range(rows // 20 + 31)]
    (folder / "movies.csv").write_text("\n".join(["movieId,title,genres", *films]) + "\n")


def of_day(command: str, day: int) -> list[str]:
    """Return the arguments of a command in the page's loop, as the shell would make them."""
    return shlex.split(command.replace("$((day - 1))", str(day - 1)).replace("$day", str(day)))


def test_the_page_lives_through_its_days(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_ratings(tmp_path / "ml-latest-small")
    days, first, other, *_ = re.findall(r"^```\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    subprocess.run(["bash", "-e", "-c", days], cwd=tmp_path, check=True)
    commands = [line.strip() for line in other.splitlines() if line.startswith("  ")]
    for day in range(3):
        fit, train = (of_day(line, day) for line in (commands if day else first.splitlines()))
        assert fit[:3] == ["python", "-m", "preproc"]
        assert train[:2] == ["python", "main.py"]
        preproc(*fit[3:])
        ended = run_command(*train[2:], *SMALL, recipe="main")
        assert ended.exit_code == 0, ended.err
        if day:
            assert f"(day {day}, before it is trained): test AUC" in ended.out
            assert f"(day {day - 1}): test AUC" in ended.out
    scored = [line["next_auc"] for line in records(tmp_path / "runs/movies") if "next_auc" in line]
    assert scored == [pytest.approx(0.5, abs=0.3), pytest.approx(0.5, abs=0.3)]
