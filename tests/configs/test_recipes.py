"""The recipes of HugeCTR's examples, run as their heads say, on few rows and for few steps."""

import random
from pathlib import Path

import pytest

from tests.helpers.command import run_command
from tests.helpers.preproc_command import preproc, raw_line
from tests.helpers.runs import records, summary


def write_criteo(path: Path, rows: int) -> None:
    """Write raw logs whose label depends on the pair of C1 and C2."""
    draw = random.Random(1)
    lines = []
    for _ in range(rows):
        values = {f"c{number}": f"{draw.randrange(8):x}" for number in range(1, 27)}
        integers = {f"i{number}": draw.randrange(50) for number in range(1, 14)}
        is_click = (int(values["c1"], 16) + int(values["c2"], 16)) % 2
        lines.append(raw_line(is_click, **values, **integers))
    path.write_text("\n".join(lines) + "\n")


def write_movielens(folder: Path, rows: int) -> None:
    """Write ratings and movies as MovieLens has them; a user likes one genre."""
    draw = random.Random(1)
    folder.mkdir()
    genres = ["Action", "Comedy", "Drama", "War"]
    movies = [
        f"{number},Movie,{'|'.join(draw.sample(genres, 1 + number % 3))}" for number in range(40)
    ]
    (folder / "movies.csv").write_text("\n".join(["movieId,title,genres", *movies]) + "\n")
    ratings = []
    for time in range(rows):
        user, movie = draw.randrange(60), draw.randrange(40)
        rating = 5.0 if genres[user % 4] in movies[movie] else 2.0
        ratings.append(f"{user},{movie},{rating},{time}")
    (folder / "ratings.csv").write_text(
        "\n".join(["userId,movieId,rating,timestamp", *ratings]) + "\n"
    )


@pytest.fixture(scope="module")
def criteo(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("criteo")
    write_criteo(folder / "day_1", 6000)
    preproc("dataset=criteo_wdl", f"source={folder}/day_1", f"output={folder}/data")
    return folder / "data"


@pytest.fixture(scope="module")
def movielens(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("movielens")
    write_movielens(folder / "raw", 12_000)
    for dataset in ("movielens", "movielens_history"):
        preproc(f"dataset={dataset}", f"source={folder}/raw", f"output={folder}/{dataset}")
    return folder


def train(experiment: str, run_dir: Path, *overrides: str) -> dict:
    ended = run_command(
        f"experiment={experiment}",
        f"run_dir={run_dir}",
        *("device=cpu", "log.pictures=false", "log.loggers=[]"),
        *overrides,
        recipe="main",
    )
    assert (ended.exit_code, ended.err) == (0, "")
    return summary(run_dir)


@pytest.mark.doors
def test_wide_and_deep_learns_the_cross(criteo, tmp_path):
    options = (f"data.path={criteo}", "train.batch_size=256", "train.epochs=4")
    result = train("wide_deep_criteo", tmp_path / "run", *options)
    assert result["steps"] == 4 * 19
    assert result["test_auc"] > 0.95


@pytest.mark.doors
def test_the_movielens_mlp_is_evaluated_every_200_steps(movielens, tmp_path):
    options = (f"data.path={movielens}/movielens", "train.batch_size=512", "train.max_steps=210")
    result = train("embedding_mlp_movielens", tmp_path / "run", *options)
    evaluated = [record["step"] for record in records(tmp_path / "run") if "test_auc" in record]
    assert evaluated == [200, 210]
    assert result["test_auc"] > 0.9


@pytest.mark.doors
def test_din_reads_the_history_of_the_dataset(movielens, tmp_path):
    path = f"data.path={movielens}/movielens_history"
    result = train(
        "din_movielens", tmp_path / "run", path, "train.batch_size=256", "train.epochs=2"
    )
    assert result["test_auc"] > 0.6


def test_din_without_data_names_what_it_lacks(tmp_path):
    ended = run_command("experiment=din_movielens", f"run_dir={tmp_path}/run", recipe="main")
    assert (ended.exit_code, ended.out) == (2, "")
    assert ended.err == (
        "error: model.history_features names 'history', which the dataset lacks; it has userId, movieId, genres\n"
    )


SMALL = {
    "deepfm_criteo": (
        "train.batch_size_per_rank=256",
        "eval.batch_size=256",
        "eval.every=2",
        "eval.max_steps=1",
        "eval.final_max_steps=3",
        "data.synthetic.train_rows=4096",
        "data.synthetic.test_rows=1024",
    ),
    "embedding_mlp_sok": (
        "train.batch_size=128",
        "eval.batch_size=128",
        "data.synthetic.train_rows=1024",
        "data.synthetic.test_rows=256",
    ),
}


@pytest.mark.parametrize("experiment", SMALL)
@pytest.mark.doors
def test_a_recipe_trains_without_data(experiment, tmp_path):
    overrides = (*SMALL[experiment], "train.max_steps=4")
    assert train(experiment, tmp_path / "run", *overrides)["steps"] == 4


def test_the_tables_of_movielens_have_their_size():
    overrides = ("mode=plan", "device=cuda", "sharding.hbm_gib=139")
    ended = run_command("experiment=embedding_mlp_movielens", *overrides, recipe="main")
    assert (ended.exit_code, ended.err) == (0, "")
    assert (162_542 + 56_586 + 21) * 16 == 3_506_384
    for table, rows in (("userId", "162,542"), ("movieId", "56,586"), ("genres", "21")):
        assert any(line.split()[:2] == [table, rows] for line in ended.out.splitlines()), ended.out
