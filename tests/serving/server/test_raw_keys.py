"""Texts of a feature without a vocabulary, from a CSV file to scores over HTTP: the key of a text means the same everywhere."""

import csv
import random
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from dataloading.dataset.feature_spec import FeatureSpec
from nn.checkpoint.tensor_index import read_index
from serving.inference import key_rows
from serving.inference.model import ServedModel
from tests.helpers.command import run_command
from tests.helpers.preproc_command import preproc
from tests.serving.served_models import Client, export, serving, tensor

ROWS, TRAIN, CAPACITY = 400, 300, 80
COLUMNS = ["age", "user", "seen", "city"]
SMALL = [
    *("model.embedding_dim=4", "model.bottom_mlp=[8,4]", "model.top_mlp=[8,1]", "device=cpu"),
    *("train.batch_size=16", "eval.batch_size=32", "log.pictures=false", "log.loggers=[]"),
    *("optimizer.embedding_lr=1", "data.dynamic.admit_after=2"),
]
TABLE = (
    "table={{sources:{{t:{{files:{path}}}}},label:{{name:click}},numerical:[age],"
    "categorical:[{{name:user,vocabulary:dynamic,capacity:{capacity}}},"
    "{{name:seen,separator:'|',vocabulary_of:user}},city],split:{{train:{share}}}}}"
)


def drawn_rows() -> list[dict[str, str]]:
    """Draw users whose names need quotes or are no ASCII, more of them than rows of the table."""
    draw = random.Random(3)
    names = [f'{kind}"{number}, Ωμέγα ' for number in range(40) for kind in ("a", "é", "b c")]
    rows = []
    for _ in range(ROWS):
        user = draw.choice(names[: draw.choice([6, 120])])
        seen = "|".join(draw.choices(names, k=draw.randrange(4)))
        rows.append(
            {
                "click": str(int(draw.random() < names.index(user) % 3 / 3)),
                "age": str(draw.randint(18, 80)),
                "user": draw.choice(["", user, user, user]),
                "seen": seen,
                "city": draw.choice(["Wien", "Rom", "Oslo"]),
            }
        )
    return rows


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, list[dict[str, str]]]:
    """Preprocess, train, and predict; return the directory and the rows of the test split."""
    root = tmp_path_factory.mktemp("texts")
    rows = drawn_rows()
    with (root / "clicks.csv").open("w", newline="") as stream:
        lines = csv.DictWriter(stream, ["click", *COLUMNS])
        lines.writeheader()
        lines.writerows(rows)
    table = TABLE.format(path=root / "clicks.csv", capacity=CAPACITY, share=TRAIN / ROWS)
    preproc("dataset=any", table, f"output={root / 'data'}")
    assert FeatureSpec.load(root / "data").dynamic_tables == {"user": (0, 1)}
    run = [*SMALL, f"data.path={root / 'data'}"]
    ended = run_command(*run, f"run_dir={root / 'run'}", "train.epochs=4")
    assert ended.exit_code == 0, ended.err
    restored = f"checkpoint.restore={root / 'run/checkpoints/best'}"
    ended = run_command(*run, "mode=predict", restored, f"output={root / 'scores.parquet'}")
    assert ended.exit_code == 0, ended.err
    return root, rows[TRAIN:]


@pytest.fixture(scope="module")
def client(trained) -> "Client":
    root, _ = trained
    checkpoint = (root / "run/checkpoints/best").resolve()
    export(checkpoint, root / "models" / "1", fitted=str(root / "data"))
    with serving(root / "models") as served:
        yield served


def scores(client: "Client", rows: list[dict[str, str]]) -> np.ndarray:
    """Return the scores of raw rows over HTTP."""
    status, answer = client.infer(
        [tensor(name, "BYTES", [row[name] for row in rows]) for name in COLUMNS]
    )
    assert status == 200, answer
    return np.array(answer["outputs"][0]["data"])


def test_scores_of_texts_are_those_of_prediction(trained, client):
    root, rows = trained
    predicted = pq.read_table(root / "scores.parquet")["score"].to_numpy()
    np.testing.assert_allclose(scores(client, rows), predicted, atol=1e-6)
    assert predicted.std() > 0.01
    stored = read_index(root / "run/checkpoints/best").tensors["keys.user.keys"]
    assert np.count_nonzero(np.concatenate([*stored.blocks()])) == CAPACITY - 1, "keys are evicted"


def test_an_unseen_text_has_the_row_of_unknown_keys(trained, client):
    _, rows = trained
    known = next(row for row in rows if row["user"].startswith('a"0'))
    missing, unseen, other = scores(
        client,
        [known | {"user": user} for user in ("", "nobody has seen this", known["user"])],
    )
    assert unseen == missing
    assert abs(other - missing) > 1e-4


def test_a_server_maps_the_keys_of_a_model_once(trained, client, monkeypatch):
    root, _ = trained
    mapped = []

    class Counted(key_rows.KeyRows):
        def __init__(self, path: Path, *rest: int) -> None:
            mapped.append(path.name)
            super().__init__(path, *rest)

    monkeypatch.setattr(key_rows, "KeyRows", Counted)
    model = ServedModel.load(root / "models" / "1")
    assert model.raw is not None
    assert mapped == ["user.bin"]
