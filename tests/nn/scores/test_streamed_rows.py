"""Scores of raw files, without a dataset of their rows, are those of a dataset that `mode=transform` makes of them."""

import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nn.export.tables import export_tables
from nn.library.loaded_run import Run
from nn.observability.console import make_console
from nn.scores import score_writer
from nn.scores.run import predict
from preproc import transformed_rows
from tests.helpers.command import ROOT, run_command, start_command
from tests.helpers.composed import compose_config
from tests.helpers.distributed import run_distributed
from tests.nn.scores.test_predict import kill
from tests.preproc.table.test_new_rows import shop, write_shop
from tests.preproc.table.test_pipeline import build

NEW = 301
BATCH = 32


class Shop:
    """Old orders with a trained model, and new ones without labels: as a raw file, and as a dataset."""

    def __init__(self, root: Path) -> None:
        self.root = root
        write_shop(root / "old.csv", 0, 400)
        write_shop(root / "new.csv", 350, NEW, ["city", "age", "tags", "order_id"])
        build(root / "fit", shop(root / "old.csv"))
        new = shop(root / "new.csv", keep=["order_id", "age"])
        build(root / "data", new, "mode=transform", f"fitted={root / 'fit'}")
        self.options = [
            *(
                "device=cpu",
                "model.embedding_dim=4",
                "model.bottom_mlp=[8,4]",
                "model.top_mlp=[8,1]",
            ),
            *(
                "train.batch_size=32",
                f"eval.batch_size={BATCH}",
                "log.loggers=[]",
                "log.pictures=false",
            ),
        ]
        run = f"run_dir={root / 'run'}"
        ended = run_command(*self.options, f"data.path={root / 'fit'}", run, "train.epochs=3")
        assert ended.exit_code == 0, ended.err

    def command(self, output: Path, *more: str) -> list[str]:
        """Return the options that score the raw file; those of `more` replace others."""
        options = [
            *(*self.options, "mode=predict", f"output={output}"),
            f"checkpoint.restore={self.root / 'run/checkpoints/best'}",
            *(f"source={self.root / 'new.csv'}", f"fitted={self.root / 'fit'}", *more),
        ]
        return list({text.partition("=")[0]: text for text in options}.values())

    def predict(self, output: Path, *more: str):
        """Run the command in this process."""
        return run_command(*self.command(output, *more))


def predict_on_ranks(options: list[str]) -> dict:
    config = compose_config(*options)
    raw = transformed_rows.open_transformed_rows(
        Path(config.fitted), [Path(config.source)], config.predict.columns
    )
    return predict(config, make_console(1), raw)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return Shop(tmp_path_factory.mktemp("stream"))


@pytest.fixture(autouse=True)
def few_rows_at_once(monkeypatch):
    monkeypatch.setattr(transformed_rows, "CHUNK_ROWS", 3 * BATCH + 5)


def test_scores_of_a_raw_file_are_those_of_its_dataset(trained, tmp_path):
    ended = trained.predict(tmp_path / "stream.parquet", "predict.columns=[order_id,age]")
    assert ended.exit_code == 0, ended.err
    assert f"{NEW} rows" in ended.out
    # The options of a run name the dataset with the fit.
    by_run = ["fitted=null", f"data.path={trained.root / 'fit'}"]
    assert trained.predict(tmp_path / "by_run.csv", *by_run).exit_code == 0
    dataset = ["source=null", "fitted=null", f"data.path={trained.root / 'data'}"]
    named = "predict.columns=[order_id,age]"
    ended = trained.predict(tmp_path / "dataset.parquet", *dataset, named)
    assert ended.exit_code == 0, ended.err
    stream, data = (pq.read_table(tmp_path / f"{name}.parquet") for name in ("stream", "dataset"))
    assert stream.equals(data)
    assert stream["order_id"].to_pylist()[:2] == ["o-0350", "o-0351"]
    assert len(set(stream["score"].to_pylist())) > NEW / 6
    output = tmp_path / "two.parquet"
    results = run_distributed(predict_on_ranks, 2, trained.command(output, named))
    assert [result["rows"] for result in results] == [NEW, NEW]
    two = pq.read_table(output)
    assert two.drop_columns("score").equals(stream.drop_columns("score"))
    np.testing.assert_allclose(two["score"], stream["score"], rtol=1e-6)


def test_a_loaded_run_scores_raw_values_as_the_command_does(trained, tmp_path):
    assert trained.predict(tmp_path / "command.parquet").exit_code == 0
    wanted = pq.read_table(tmp_path / "command.parquet")["score"].to_numpy()
    run = Run.load(trained.root / "run", fitted=trained.root / "fit")
    texts = pd.read_csv(trained.root / "new.csv", dtype=str).set_index("order_id")
    found = run.predict(texts)
    assert list(found.index) == list(texts.index)
    np.testing.assert_allclose(found["score"], wanted, atol=1e-9)
    # Numbers may be numbers, and rows come back in their order.
    some = pa.Table.from_pandas(texts.astype({"age": float}).iloc[[200, 3, 50]])
    np.testing.assert_allclose(run.predict(some)["score"], wanted[[200, 3, 50]], atol=1e-9)
    for rows, message in (
        (texts.assign(age="twenty"), "the table, row 1: age is twenty, wanted a number"),
        (texts.drop(columns="city"), 'no column "city"'),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            run.predict(rows)
        assert "\n" not in str(caught.value)
    build(tmp_path / "other", shop(trained.root / "old.csv", categorical=["city"]))
    with pytest.raises(ValueError, match="has other features"):
        Run.load(trained.root / "run", fitted=tmp_path / "other")


@pytest.mark.parametrize("columns", ["[order_id]", "[]"])
def test_a_raw_file_resumes_after_a_kill(trained, tmp_path, monkeypatch, columns):
    named = f"predict.columns={columns}"
    with monkeypatch.context() as patch:
        patch.setattr(score_writer, "CHUNK_ROWS", 2 * BATCH)
        assert trained.predict(tmp_path / "whole.parquet", named).exit_code == 0
    output = tmp_path / "parts.parquet"
    kill(trained, output, monkeypatch, named)
    ended = trained.predict(output, named)
    assert ended.exit_code == 0, ended.err
    assert f"resumes after row {6 * BATCH}," in ended.out
    parts, whole = pq.read_table(output), pq.read_table(tmp_path / "whole.parquet")
    assert parts.drop_columns("score").equals(whole.drop_columns("score"))
    np.testing.assert_allclose(parts["score"], whole["score"], rtol=1e-6)


REFUSALS = {
    "source=null": "source names raw files, and fitted the dataset whose fit transforms them; set both, or data.path",
    "source=nowhere.csv": "nowhere.csv",
    "fitted=nowhere": "nowhere/feature_spec.yaml: no such file",
    "predict.columns=[number]": "predict.columns: 'number': got column 'number'",
    "predict.split=test": "exclude each other: predict.split is of rows that are a dataset already",
}


@pytest.mark.parametrize("option", REFUSALS)
def test_invalid_input_is_refused_in_one_line(trained, tmp_path, option):
    ended = trained.predict(tmp_path / "scores.parquet", option)
    assert ended.exit_code == 2
    assert REFUSALS[option] in ended.err
    assert ended.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_missing_source_is_refused_before_torch_is_imported(trained, tmp_path):
    program = "import sys; from main import command; sys.argv = ['dlrm.py', *sys.argv[1:]]\n"
    program += "try:\n    command('dlrm')()\nexcept SystemExit:\n    print('torch' in sys.modules)"
    options = trained.command(tmp_path / "scores.csv", "source=/nowhere.csv")
    ended = start_command("-c", program, *options, directory=ROOT, program=sys.executable)
    assert ended.out == "False\n"
    assert "/nowhere.csv" in ended.err


def test_a_bad_row_is_refused_with_its_place(trained, tmp_path):
    lines = (trained.root / "new.csv").read_text().splitlines()
    lines[150] = "city 1,twenty,a,o-1"
    (tmp_path / "bad.csv").write_text("\n".join(lines) + "\n")
    ended = trained.predict(tmp_path / "scores.parquet", f"source={tmp_path / 'bad.csv'}")
    assert ended.exit_code == 2
    assert f"{tmp_path / 'bad.csv'}, row 150" in ended.err
    assert not (tmp_path / "scores.parquet").exists()


def test_a_negative_weight_is_refused_with_its_place(tmp_path):
    rows = [
        {"label": i % 2, "user": i % 3, "tags": [1 + i % 4, 2], "tag_weights": [0.5, i % 7]}
        for i in range(200)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "old.parquet")
    # Behind the rows that are transformed at once.
    rows[110]["tag_weights"] = [0.5, -0.875]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "new.parquet")
    table = {
        "sources": {"rows": {"files": str(tmp_path / "old.parquet"), "format": "parquet"}},
        "label": {"name": "label"},
        "categorical": ["user", {"name": "tags", "list": True}],
        "sequence": [
            {"name": "weighed", "lists": ["tags"], "numbers": ["tag_weights"], "length": 4}
        ],
        "split": {"by": "random", "train": 0.8},
    }
    build(tmp_path / "fit", table)
    run_dir = f"run_dir={tmp_path / 'run'}"
    model = ["model.name=embedding_mlp", "model.embedding_dim=4", "model.hidden=[4]"]
    ended = run_command(
        *model,
        "model.event_weights={weighed: tag_weights}",
        f"data.path={tmp_path / 'fit'}",
        run_dir,
        "train.batch_size=32",
        f"eval.batch_size={BATCH}",
        "device=cpu",
        "log.loggers=[]",
        "log.pictures=false",
        recipe="main",
    )
    assert ended.exit_code == 0, ended.err
    ended = run_command(
        "mode=predict",
        f"config={tmp_path / 'run/config.yaml'}",
        f"checkpoint.restore={tmp_path / 'run/checkpoints/best'}",
        f"source={tmp_path / 'new.parquet'}",
        f"output={tmp_path / 'scores.parquet'}",
        recipe="main",
    )
    assert ended.exit_code == 2
    place = (
        f"'tag_weights': an event has -0.875 at {tmp_path / 'new.parquet'}, row 111; want a weight"
    )
    assert place in ended.err


def test_another_vocabulary_of_the_same_size_is_refused(trained, tmp_path):
    text = (trained.root / "old.csv").read_text()
    (tmp_path / "towns.csv").write_text(text.replace("city ", "town "))
    build(tmp_path / "towns", shop(tmp_path / "towns.csv"))
    output, fitted = tmp_path / "scores.parquet", f"fitted={tmp_path / 'towns'}"
    ended = trained.predict(output, fitted)
    assert ended.exit_code == 2
    message = (
        "was trained with other vocabularies than this dataset's, of 'city': the same id means"
    )
    assert message in ended.err
    assert ended.err.count("\n") == 1
    with pytest.raises(ValueError, match=message):
        Run.load(trained.root / "run", fitted=tmp_path / "towns")
    best = trained.root / "run/checkpoints/best"
    with pytest.raises(ValueError, match=message):
        export_tables(best, tmp_path / "tables", fitted=tmp_path / "towns")
    assert trained.predict(output, fitted, "checkpoint.allow_changes=true").exit_code == 0
