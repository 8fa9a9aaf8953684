"""A run directory as an object: predictions against evaluation's, metrics, and what it refuses."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from dataloading.dataset.dataset_directory import write_dataset
from dataloading.dataset.feature_spec import CategoricalFeature
from nn.library.loaded_run import Run
from nn.training.train_step import TrainStep
from tests.helpers.command import run_command
from tests.helpers.composed import TINY
from tests.helpers.distributed import run_distributed

ROWS = {"train": 256, "test": 100}
HOTNESS = {"user": 1, "tags": 3, "items": None}
ROWS_OF_TABLES = {"user": 60, "tags": 30, "items": 40}
OPTIONS = [
    *(text for text in TINY if not text.startswith("data.synthetic")),
    *("train.epochs=2", "eval.batch_size=64", "eval.per_epoch=1", "optimizer.lr=0.3"),
    *("data.multi_hot.hotness=[4,1,1]", "sharding.tables={items:row_wise,user:row_wise}"),
    *("model.dropout=0.2", "train.ema_decay=0.5", "log.loggers=[]", "train.tf32=false"),
]


def write_data(root: Path) -> Path:
    """Write a Parquet dataset with features of one, three and any number of ids, two numericals and a keep rate."""
    generator = np.random.default_rng(3)
    features = [
        CategoricalFeature.of(name, ROWS_OF_TABLES[name], hotness)
        for name, hotness in HOTNESS.items()
    ]
    with write_dataset(
        root,
        categorical=features,
        numerical=("age", "price"),
        numerical_dtype="float32",
        keep_rate="kept",
        file_format="parquet",
    ) as dataset:
        for split, rows in ROWS.items():
            user = generator.integers(0, 60, rows)
            lengths = generator.integers(0, 5, rows)
            dataset[split].append(
                numerical=generator.normal(size=(rows, 2)),
                labels=user % 3 == 0,
                ids={
                    "user": user,
                    "tags": generator.integers(0, 30, (rows, 3)),
                    "items": generator.integers(0, 40, lengths.sum()),
                },
                lengths={"items": lengths},
                keep_rates=generator.choice([0.25, 1.0], rows),
            )
    return root


def train(data: Path, run_dir: Path) -> str:
    """Train one rank; return its error."""
    return run_command(*OPTIONS, f"data.path={data}", f"run_dir={run_dir}").err


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_data(tmp_path_factory.mktemp("library") / "data")


@pytest.fixture(scope="module")
def runs(data) -> dict[int, Path]:
    """A trained run directory by its number of ranks."""
    one, two = data.with_name("one"), data.with_name("two")
    assert train(data, one) == ""
    assert run_distributed(train, 2, data, two) == ["", ""]
    return {1: one, 2: two}


def test_rows(data: Path) -> pa.Table:
    (path,) = (data / "test").glob("*.parquet")
    return pq.read_table(path)


test_rows.__test__ = False  # type: ignore[attr-defined]


@pytest.mark.parametrize("world_size", [1, 2])
def test_predictions_are_those_of_an_evaluation(world_size, runs, data, tmp_path, monkeypatch):
    logits: list[Tensor] = []
    predict = TrainStep.predict

    def noting(self, batch, ids):
        result = predict(self, batch, ids)
        logits.append(result[: batch.num_valid].clone() + batch.keep_rates[: batch.num_valid].log())
        return result

    monkeypatch.setattr(TrainStep, "predict", noting)
    run = Run.load(runs[world_size])
    restore = ["mode=eval", f"checkpoint.restore={run.checkpoint}", f"data.path={data}"]
    ended = run_command(*OPTIONS, *restore, f"run_dir={tmp_path / 'eval'}")
    assert ended.exit_code == 0, ended.err
    scores = run.predict(test_rows(data).drop_columns(["label"]), batch_size=33)
    assert scores.column_names == ["score"]
    wanted = torch.cat(logits).double().sigmoid()
    assert len(wanted) == ROWS["test"]
    assert wanted.std() > 0.01
    np.testing.assert_allclose(scores["score"].to_numpy(), wanted.numpy(), atol=1e-6)


def test_a_data_frame_gives_a_data_frame_with_its_index(runs, data):
    run = Run.load(runs[1], checkpoint="step_8")
    assert run.num_steps == 8
    rows = test_rows(data)
    frame = rows.to_pandas().sample(20, random_state=1)
    predicted = run.predict(frame)
    assert isinstance(predicted, pd.DataFrame)
    assert list(predicted.index) == list(frame.index)
    wanted = run.predict(rows)["score"].to_numpy()[frame.index]
    np.testing.assert_allclose(predicted["score"], wanted, atol=1e-9)
    assert run.predict(frame.iloc[:0]).shape == (0, 1)


def test_lists_that_are_all_empty_are_lists_of_ids(runs, data):
    run = Run.load(runs[1])
    frame = test_rows(data).to_pandas()
    empty = frame[frame["items"].map(len) == 0].head(3)
    assert len(empty) > 1
    wanted = run.predict(frame)["score"][empty.index]
    np.testing.assert_allclose(run.predict(empty)["score"], wanted, atol=1e-9)
    np.testing.assert_allclose(run.predict(empty.head(1))["score"], wanted[:1], atol=1e-9)
    # pandas knows no type of an empty list.
    for nothing, kind in (([], pa.null()), (np.array([]), pa.float64())):
        plain = empty.assign(items=[nothing] * len(empty))
        table = pa.Table.from_pandas(plain, preserve_index=False)
        assert table["items"].type == pa.list_(kind)
        large = table.set_column(
            table.schema.get_field_index("items"),
            "items",
            table["items"].cast(pa.large_list(pa.float64())),
        )
        for given in (plain, table, large):
            scores = np.asarray(run.predict(given)["score"])
            np.testing.assert_allclose(scores, wanted, atol=1e-9)


def test_a_loaded_run_depends_on_no_directory_and_no_setting_of_torch(runs, data, monkeypatch):
    monkeypatch.chdir(runs[1].parent)
    run = Run.load(runs[1].name)
    rows = test_rows(data)
    wanted = run.predict(rows)["score"].to_numpy()
    monkeypatch.chdir(data)
    assert run.summary() is not None
    assert run.metrics().num_rows > 1
    np.testing.assert_array_equal(run.predict(rows)["score"], wanted)
    with torch.autocast("cpu", torch.bfloat16):
        np.testing.assert_array_equal(run.predict(rows)["score"], wanted)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pd.arrays.SparseArray([1, 0]), r"column 'user' of Sparse\[int64, 0\] cannot be read"),
        (np.array([1, 2], ">i8"), r"column 'user' of >i8 cannot be read \(Byte-swapped arrays"),
        ([10**25, 1], "column 'user' of object cannot be read"),
    ],
)
def test_a_column_that_arrow_cannot_hold_is_named(column, message, runs):
    with pytest.raises(ValueError, match=f"^the table: {message}.*; convert it, for example by"):
        Run.load(runs[1]).predict(pd.DataFrame({"age": [1.0, 2.0], "user": column}))


def test_a_table_without_keep_rates_is_not_corrected_and_says_so(runs, data):
    run = Run.load(runs[1])
    rows = test_rows(data)
    with pytest.warns(UserWarning, match="no keep rates, column kept"):
        plain = run.predict(rows.drop_columns(["kept"]))["score"].to_numpy()
    odds = plain / (1 - plain) * rows["kept"].to_numpy()
    np.testing.assert_allclose(run.predict(rows)["score"], odds / (1 + odds), atol=1e-6)


def test_records_and_summary_are_those_of_the_files(runs):
    run = Run.load(runs[1])
    metrics = run.metrics().to_pydict()
    summary = run.summary()
    assert summary["test_auc"] in metrics["test_auc"]
    assert metrics["step"][-1] == summary["steps"] == 8
    assert run.config.model.embedding_dim == 8
    assert [feature.name for feature in run.spec.categorical] == list(HOTNESS)


IDS = pa.array([0] * ROWS["test"])
REFUSED = {
    "no column": (lambda t: t.drop_columns(["price"]), "the table: got 'no column price'"),
    "texts": (
        lambda t: t.set_column(t.column_names.index("user"), "user", pa.array(["a"] * len(t))),
        "the table: column 'user': got 'string', want integers",
    ),
    "one id of three": (
        lambda t: t.set_column(t.column_names.index("tags"), "tags", IDS),
        "column 'tags': got 'int64', want a list of integers",
    ),
    "an id outside": (
        lambda t: t.set_column(
            t.column_names.index("user"), "user", pa.array([0] * (len(t) - 1) + [60])
        ),
        "feature 'user': id 60 at row 99 of the table lies outside its table of 60 rows",
    ),
    "nan": (
        lambda t: t.set_column(t.column_names.index("age"), "age", pa.array([np.nan] * len(t))),
        "'age' is nan at row 0 of the table; want a finite number",
    ),
    "a dictionary": (lambda t: t.to_pydict(), "got rows of type dict; want a pandas DataFrame or"),
    "mixed types": (
        lambda t: t.to_pandas().assign(user=[1, "a"] * (len(t) // 2)),
        "the table: ",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_table_of_other_features_is_refused_in_one_line(name, runs, data):
    change, message = REFUSED[name]
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        Run.load(runs[1]).predict(change(test_rows(data)))
    assert "\n" not in str(caught.value)


def without_checkpoints(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")


def damaged(run: Path) -> None:
    for path in (run / "checkpoints/step_8").glob("*.bin"):
        data = bytearray(path.read_bytes())
        data[5] ^= 1
        path.write_bytes(data)


def of_another_model(run: Path) -> None:
    content = json.loads((run / "model.json").read_text())
    content["model"]["top_mlp"] = [4, 1]
    (run / "model.json").write_text(json.dumps(content))


def replace_in(run: Path, name: str, old: str, new: str) -> None:
    text = (run / name).read_text()
    assert old in text
    (run / name).write_text(text.replace(old, new))


BAD_RUNS = {
    "no checkpoint": (without_checkpoints, "has no complete checkpoint"),
    "damaged": (damaged, "has changed since it was written"),
    "another model": (of_another_model, "is of another model than its run's options name"),
    "no description": (lambda run: (run / "model.json").unlink(), "model.json: no such file"),
    "code in the configuration": (
        lambda run: replace_in(run, "config.yaml", "name: dlrm", "name: 'antigravity:Model'"),
        "model.name='antigravity:Model' is no model of the project; trusted=True imports it",
    ),
    "code in the description": (
        lambda run: replace_in(run, "model.json", '"dlrm"', '"antigravity:Model"'),
        "model.json: model.name='antigravity:Model' is no model of the project",
    ),
    "an interpolation": (
        lambda run: replace_in(run, "config.yaml", "recipe: dlrm", "recipe: ${oc.env:HOME}"),
        "recipe is '${oc.env:HOME}'; a run's config.yaml holds values only",
    ),
    "a section that is missing": (
        lambda run: (run / "config.yaml").write_text(
            re.sub(r"(?m)^eval:\n( .*\n)+", "", (run / "config.yaml").read_text())
        ),
        "config.yaml: Missing mandatory value: eval",
    ),
    "an unknown option": (
        lambda run: replace_in(run, "config.yaml", "recipe: dlrm", "recipe: dlrm\nhydra: {a: 1}"),
        "there is no option hydra",
    ),
}


@pytest.mark.parametrize("name", BAD_RUNS)
def test_a_run_that_cannot_be_loaded_is_refused_in_one_line(name, runs, tmp_path):
    change, message = BAD_RUNS[name]
    run = tmp_path / "run"
    shutil.copytree(runs[1], run, symlinks=True)
    change(run)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        Run.load(run, checkpoint="step_8" if name == "damaged" else None)
    assert "\n" not in str(caught.value)


def test_a_name_of_no_checkpoint_is_refused(runs, tmp_path):
    with pytest.raises(ValueError, match="has no checkpoint 'step_9', only step_4, step_8"):
        Run.load(runs[1], checkpoint="step_9")
    with pytest.raises(ValueError, match="no such directory"):
        Run.load(tmp_path / "nowhere")
