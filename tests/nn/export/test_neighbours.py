"""All commands of docs/neighbours.md, run in order on a few generated ratings."""

import random
import re
import shlex
from pathlib import Path

import pytest

from tests.helpers.command import ROOT, run_command, start_command
from tests.helpers.preproc_command import preproc, write_lines

pytestmark = pytest.mark.doors

PAGE = (ROOT / "docs" / "neighbours.md").read_text()
NUM_FILMS, NUM_USERS = 8, 120


def write_films(directory: Path) -> None:
    """Write ratings of users who like either the even films or the odd ones."""
    draw = random.Random(0)
    directory.mkdir(parents=True)
    films = [f"{film},Film {film},Drama" for film in range(1, NUM_FILMS + 1)]
    write_lines(directory / "movies.csv", ["movieId,title,genres", *films])
    ratings = [
        f"{user},{film},{5 if film % 2 == user % 2 else 1},{draw.randrange(10**6)}"
        for user in range(NUM_USERS)
        for film in range(1, NUM_FILMS + 1)
    ]
    write_lines(directory / "ratings.csv", ["userId,movieId,rating,timestamp", *ratings])


def test_the_page_lists_films_that_the_same_users_like(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_films(tmp_path / "data/movielens")
    (commands, script) = re.findall(r"^```(?:bash|python)\n(.*?)^```", PAGE, re.M | re.S)
    prepare, train, export = (shlex.split(line) for line in commands.splitlines())
    assert prepare[:3] == ["python", "-m", "preproc"]
    preproc(*prepare[3:])
    assert train[:2] == ["python", "dlrm.py"]
    # So few ratings need larger steps.
    larger = ("train.batch_size=32", "optimizer.embedding_lr=0.05", "optimizer.lr=0.02")
    ended = run_command(*train[2:], *larger)
    assert ended.exit_code == 0, ended.err
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    ended = start_command(*export[1:], directory=tmp_path)
    assert ended.exit_code == 0, ended.err
    capsys.readouterr()
    # The script asks for five of thousands of films; here three others are liked by the same users.
    exec(compile(script.replace("n_neighbors=6", "n_neighbors=4"), "page", "exec"), {})
    title, *near = capsys.readouterr().out.splitlines()
    assert title == "near Film 1:"
    assert {line.split("  ")[1] for line in near} == {"Film 3", "Film 5", "Film 7"}
