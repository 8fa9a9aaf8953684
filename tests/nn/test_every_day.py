"""The commands of docs/every_day.md, on two days of few ratings."""

import random
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from dataloading.dataset.feature_spec import FeatureSpec
from serving.manifest import DENSE, PROOF_ROWS, Manifest
from tests.helpers.command import run_command, run_module
from tests.helpers.preproc_command import preproc
from tests.helpers.runs import records, summary
from tests.serving.served_models import export

pytestmark = pytest.mark.doors

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
    other, days, first, *_ = re.findall(r"^```\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    subprocess.run(["bash", "-e", "-c", days], cwd=tmp_path, check=True)
    commands = [line.strip() for line in other.splitlines() if line.startswith("  ")]
    for day in range(2):
        lines = commands if day else first.splitlines()
        fit, train, serve = (of_day(line, day) for line in lines)
        assert fit[:3] == ["python", "-m", "preproc"]
        assert train[:2] == ["python", "main.py"]
        assert serve[:3] == ["python", "-m", "serving.apply" if day else "serving.export"]
        preproc(*fit[3:])
        trained = run_command(*train[2:], *SMALL, recipe="main")
        assert trained.exit_code == 0, trained.err
        if day == 1:
            ended = run_module(*serve[2:5])
            assert ended.exit_code == 2
            assert re.search(r"table \w+ has grown from .* set fitted=DIR, the dataset", ended.err)
            ended = run_module(*serve[2:5], "fitted=data/0")
            assert "other features than the day that" in ended.err
        ended = run_module(*serve[2:])
        assert ended.exit_code == 0, ended.err
        if day:
            assert f"(day {day}, before it is trained): test AUC" in trained.out
            assert f"(day {day - 1}): test AUC" in trained.out
    # The served versions are what exports of the last checkpoints would be.
    last = tmp_path / f"runs/movies/checkpoints/step_{summary(tmp_path / 'runs/movies')['steps']}"
    export(last, tmp_path / "wanted", fitted="data/1")
    got, wanted = (Manifest.read(tmp_path / name) for name in ("models/2", "wanted"))
    got.verify(tmp_path / "models/2")
    assert got.files.keys() == wanted.files.keys()
    differing = {name for name in got.files if got.files[name] != wanted.files[name]}
    # The rows of the base's proof are of its day.
    assert differing <= {DENSE, PROOF_ROWS}
    assert (got.tables, got.categorical, got.raw) == (wanted.tables, wanted.categorical, wanted.raw)
    assert got.tables != Manifest.read(tmp_path / "models/1").tables
    scored = [line["next_auc"] for line in records(tmp_path / "runs/movies") if "next_auc" in line]
    assert scored == [pytest.approx(0.5, abs=0.3)]


def test_the_page_trains_a_part_that_comes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_ratings(tmp_path / "ml-latest-small")
    _, days, first, *_ = blocks = re.findall(
        r"^```\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL
    )
    subprocess.run(["bash", "-e", "-c", days], cwd=tmp_path, check=True)
    preproc(*shlex.split(first.splitlines()[0])[3:])
    (stream,) = (block for block in blocks if "data.watch_dir" in block)
    (hour,) = (block for block in blocks if "split_name=train" in block and "kafka" not in block)
    make, train = stream.splitlines()
    assert make == "mkdir parts"
    (tmp_path / "parts").mkdir()
    arguments = [*shlex.split(train)[2:], "data.watch_idle_s=0.01", *SMALL]
    rows = FeatureSpec.load(tmp_path / "data" / "0").rows_of("train")
    for number in (1, 2):
        part = f"parts/2026-11-27T0{number}"
        of_hour = hour.replace("parts/2026-11-27T01", part).replace("days/1", f"days/{number}")
        preproc(*shlex.split(of_hour)[3:])
        rows += FeatureSpec.load(tmp_path / part).rows_of("train")
        ended = run_command(*arguments, recipe="main")
        assert (ended.exit_code, ended.err) == (0, "")
        assert summary(tmp_path / "runs" / "stream")["steps"] == rows // 32
