"""`mode=predict`: its scores are those of evaluation, in the order of the rows, on any number of ranks and after a kill."""

import json
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import roc_auc_score

from dataloading.dataset.dataset_directory import write_dataset
from dataloading.dataset.feature_spec import CategoricalFeature, FeatureSpec
from dataloading.dataset.kept_columns import KeptWriter
from dataloading.dataset.open_dataset import open_dataset
from nn.build import open_source
from nn.models.tasks import tasks_of_run
from nn.observability.console import make_console
from nn.resume import ResumePoint
from nn.scores import run as scores_run
from nn.scores import score_writer
from nn.scores.run import predict
from tests.helpers.command import run_command
from tests.helpers.composed import TINY, compose_config
from tests.helpers.distributed import run_distributed
from tests.helpers.gpus import needs_one_gpu
from tests.nn.training.two_heads import LABELS, TWO_HEADS

ROWS = {"train": 200, "test": 333}
BATCH = 32


def write_orders(root: Path) -> Path:
    """Write a click and a rating, a one-hot and a ragged feature, weights, keep rates and kept columns."""
    features = [CategoricalFeature.of("user", 20), CategoricalFeature.of("tags", 30, hotness=None)]
    draw = np.random.default_rng(7)
    effect = draw.normal(size=20)
    with write_dataset(
        root,
        categorical=features,
        numerical=("n",),
        numerical_dtype="float32",
        label=LABELS,
        weight="importance",
        keep_rate="kept",
    ) as dataset:
        for split, rows in ROWS.items():
            user, lengths = draw.integers(0, 20, rows), draw.integers(0, 4, rows)
            click = draw.random(rows) < 1 / (1 + np.exp(-effect[user]))
            dataset[split].append(
                numerical=draw.normal(size=(rows, 1)),
                labels=np.stack([click, effect[user] + draw.normal(size=rows)], axis=1),
                weights=draw.choice([0.5, 1, 4], rows),
                keep_rates=draw.choice([0.25, 1], rows),
                ids={"user": user, "tags": draw.integers(0, 30, lengths.sum())},
                lengths={"tags": lengths},
            )
    for split, rows in ROWS.items():
        numbers = range(rows)
        ids = [f"{'o' if split == 'test' else 't'}{n}" for n in numbers]
        orders = pa.table({"order_id": ids, "price": [n / 8 for n in numbers]})
        with KeptWriter(root, split, orders.schema) as kept:
            kept.append(orders)
    return root


class Trained:
    """A dataset, a run on it, and the options of commands."""

    def __init__(self, directory: Path, device: str = "cpu") -> None:
        self.root = write_orders(directory / "data")
        self.options = [
            *(f"device={device}", TWO_HEADS, f"data.path={self.root}", "model.embedding_dim=4"),
            *("optimizer.name=sgd", "optimizer.lr=0.5", "train.epochs=2", "train.ema_decay=0.8"),
            *(f"train.batch_size={BATCH}", f"eval.batch_size={BATCH}", "data.shuffle_block=8"),
            *(
                "log.loggers=[]",
                "eval.metrics=[calibration]",
                "train.tf32=false",
                "log.pictures=false",
            ),
        ]
        ended = run_command(*self.options, f"run_dir={directory / 'run'}")
        assert ended.exit_code == 0, ended.err
        self.checkpoint = directory / "run/checkpoints/best"
        # The summary has seven digits.
        facts = json.loads((self.checkpoint / "run.json").read_text())
        self.test = facts["trainer"]["test"]

    def command(self, output: Path, *more: str) -> list[str]:
        """Return the options that write `output`; those of `more` replace others."""
        restore = f"checkpoint.restore={self.checkpoint}"
        options = [*self.options, "mode=predict", restore, f"output={output}", *more]
        return list({text.partition("=")[0]: text for text in options}.values())

    def predict(self, output: Path, *more: str):
        """Run the command in this process."""
        return run_command(*self.command(output, *more))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return Trained(tmp_path_factory.mktemp("scores"))


@pytest.fixture(scope="module")
def rows(trained):
    source = open_dataset(FeatureSpec.load(trained.root))
    return source.read("test", np.array([[0, ROWS["test"]]]))


def predict_on_ranks(options: list[str]) -> dict:
    return predict(compose_config(*options), make_console(1))


def check_against_evaluation(trained, rows, table) -> None:
    assert table["row"].to_numpy().tolist() == list(range(ROWS["test"]))
    click, rating = (table[f"score_{label.name}"].to_numpy() for label in LABELS)
    labels, weights = rows.labels.astype(float), rows.weights.astype(float)
    auc = roc_auc_score(labels[:, 0], click, sample_weight=weights)
    assert auc == pytest.approx(trained.test["test_auc.click"], abs=1e-9)
    # The mean of the probabilities, which the keep rates change.
    calibration = (click * weights).sum() / (labels[:, 0] * weights).sum()
    assert calibration == pytest.approx(trained.test["test_calibration.click"], rel=1e-9)
    rmse = np.sqrt(np.average((rating - labels[:, 1]) ** 2, weights=weights))
    assert rmse == pytest.approx(trained.test["test_rmse.rating"], rel=1e-9)


def test_scores_are_those_of_evaluation_on_one_and_two_ranks(trained, rows, tmp_path):
    ended = trained.predict(tmp_path / "one.parquet")
    assert ended.exit_code == 0, ended.err
    assert f"{ROWS['test']} rows" in ended.out
    one = pq.read_table(tmp_path / "one.parquet")
    assert one.schema.names == ["row", "score_click", "score_rating"]
    assert one.schema.metadata[b"checkpoint"] == str(trained.checkpoint).encode()
    check_against_evaluation(trained, rows, one)
    first, second = run_distributed(predict_on_ranks, 2, trained.command(tmp_path / "two.parquet"))
    assert first["rows"] == second["rows"] == ROWS["test"]
    check_against_evaluation(trained, rows, pq.read_table(tmp_path / "two.parquet"))
    # Neither work directory nor lock is left.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.parquet", "two.parquet"]


@needs_one_gpu
def test_a_gpu_writes_the_scores_of_its_evaluation(tmp_path, rows):
    trained = Trained(tmp_path, "cuda")
    ended = trained.predict(tmp_path / "one.parquet")
    assert ended.exit_code == 0, ended.err
    check_against_evaluation(trained, rows, pq.read_table(tmp_path / "one.parquet"))


def test_kept_columns_and_csv(trained, tmp_path):
    options = ["predict.columns=[order_id,price]"]
    assert trained.predict(tmp_path / "a.parquet", *options).exit_code == 0
    assert trained.predict(tmp_path / "a.csv", *options).exit_code == 0
    table = pq.read_table(tmp_path / "a.parquet")
    assert table.schema.names == ["order_id", "price", "score_click", "score_rating"]
    assert table["order_id"].to_pylist() == [f"o{row}" for row in range(ROWS["test"])]
    assert pc.read_csv(tmp_path / "a.csv").equals(table.replace_schema_metadata())


def test_rows_that_were_held_out_are_scored(trained, tmp_path):
    named = ["predict.columns=[order_id]"]
    held = [*named, "predict.split=validation", "data.validation_fraction=0.3"]
    all_rows, last_rows = tmp_path / "train.parquet", tmp_path / "validation.parquet"
    assert trained.predict(all_rows, *named, "predict.split=train").err == ""
    ended = trained.predict(last_rows, *held)
    assert (ended.exit_code, ended.err) == (0, "")
    trained_on, scored = pq.read_table(all_rows), pq.read_table(last_rows)
    assert scored.num_rows == round(0.3 * ROWS["train"])
    assert scored["order_id"].to_pylist()[-1] == f"t{ROWS['train'] - 1}"
    last = trained_on.slice(ROWS["train"] - scored.num_rows)
    assert scored.replace_schema_metadata().equals(last.replace_schema_metadata())
    refused = trained.predict(tmp_path / "none.parquet", "predict.split=validation")
    assert (refused.exit_code, refused.err.count("no split 'validation'")) == (2, 1)


def test_a_split_smaller_than_a_batch_is_scored(trained, tmp_path):
    output = tmp_path / "train.csv"
    ended = trained.predict(output, "predict.split=train", "eval.batch_size=4096")
    assert ended.exit_code == 0, ended.err
    assert len(output.read_text().splitlines()) == 1 + ROWS["train"]


class Killed(BaseException):
    """End of a process at a batch."""


def count_batches(monkeypatch, kill_at: int | None = None) -> list[int]:
    """Count the batches that are scored, and end the process at one of them once its writer has caught up."""
    scored: list[int] = []
    plain, put = scores_run.scores_of, score_writer.ScoreWriter.put

    def scores_of(*arguments):
        scored.append(len(scored))
        return plain(*arguments)

    def put_or_kill(writer, scores):
        if len(scored) == kill_at:
            while writer._free.qsize() < score_writer.MOST_PENDING:
                time.sleep(0.001)
            raise Killed
        put(writer, scores)

    monkeypatch.setattr(scores_run, "scores_of", scores_of)
    monkeypatch.setattr(score_writer.ScoreWriter, "put", put_or_kill)
    monkeypatch.setattr(score_writer, "CHUNK_ROWS", 2 * BATCH)
    return scored


def kill(trained, output: Path, monkeypatch, *more: str) -> None:
    with monkeypatch.context() as patch:
        count_batches(patch, kill_at=8)
        with pytest.raises(Killed):
            trained.predict(output, *more)
    assert not output.exists()


def test_the_same_command_resumes_after_a_kill(trained, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        batches = count_batches(patch)
        assert trained.predict(tmp_path / "whole.parquet").exit_code == 0
    whole = (tmp_path / "whole.parquet").read_bytes()
    output = tmp_path / "parts.parquet"
    kill(trained, output, monkeypatch)
    with monkeypatch.context() as patch:
        scored = count_batches(patch)
        ended = trained.predict(output)
    # Seven batches were scored, which are three complete chunks.
    assert len(scored) == len(batches) - 6
    assert "resumes after row 192" in ended.out
    assert output.read_bytes() == whole
    # A damaged chunk costs itself and those after it; another batch size resumes inside a batch.
    again = tmp_path / "again.parquet"
    kill(trained, again, monkeypatch)
    with (tmp_path / ".again.parquet.unfinished/scores.bin").open("r+b") as stream:
        stream.seek(16 * 2 * BATCH + 5)
        stream.write(b"?")
    ended = trained.predict(again, "eval.batch_size=48")
    assert f"resumes after row {2 * BATCH}," in ended.out
    np.testing.assert_allclose(
        pq.read_table(again)["score_click"], pq.read_table(output)["score_click"], rtol=1e-6
    )


def test_scores_of_another_model_are_not_kept(trained, tmp_path, monkeypatch):
    output = tmp_path / "scores.parquet"
    kill(trained, output, monkeypatch)
    ended = trained.predict(output, "train.ema_decay=null")
    assert ended.exit_code == 0, ended.err
    assert "held scores of another checkpoint" in ended.out
    assert "resumes after" not in ended.out
    assert trained.predict(tmp_path / "other.parquet", "train.ema_decay=null").exit_code == 0
    assert output.read_bytes() == (tmp_path / "other.parquet").read_bytes()


def test_scores_with_a_table_of_another_checkpoint_at_the_same_path_are_not_kept(
    trained, tmp_path, monkeypatch
):
    """As `best` may lead to another one."""
    ended = run_command(*trained.options, "seed=2", f"run_dir={tmp_path / 'other'}")
    assert ended.exit_code == 0, ended.err
    link, output = tmp_path / "link", tmp_path / "scores.parquet"
    option = f"checkpoint.restore_tables={{user: {link}}}"
    link.symlink_to(trained.checkpoint)
    kill(trained, output, monkeypatch, option)
    link.unlink()
    link.symlink_to(tmp_path / "other/checkpoints/best")
    ended = trained.predict(output, option)
    assert ended.exit_code == 0, ended.err
    assert f";userof{link}" in "".join(ended.out.split())
    assert "held scores of another checkpoint" in ended.out
    assert trained.predict(tmp_path / "again.parquet", option).exit_code == 0
    assert output.read_bytes() == (tmp_path / "again.parquet").read_bytes()
    found = pq.read_schema(output).metadata
    assert found[b"checkpoint"] == str(trained.checkpoint).encode()
    assert found[b"checkpoint of user"] == str(link).encode()


def test_a_score_that_is_not_finite_ends_the_command(trained, tmp_path, monkeypatch):
    plain = scores_run.scores_of

    def with_infinity(tasks, logits, keep_rates):
        logits = logits.clone()
        logits[3, 0] = np.inf
        return plain(tasks, logits, keep_rates)

    monkeypatch.setattr(scores_run, "scores_of", with_infinity)
    ended = trained.predict(tmp_path / "scores.parquet")
    assert ended.exit_code == 2
    assert "the score of row 3 is not finite" in ended.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["keep_rate", "positive_weight"])
@pytest.mark.parametrize("before", [None, 0.5, {"label": {"weight": 2}}])
@pytest.mark.parametrize("now", [None, 0.5])
def test_a_constant_correction_must_be_that_of_the_training(name, before, now):
    options = [] if now is None else [f"tasks={{label:{{{name}:{now}}}}}"]
    before = {"label": {name: before}} if before == 0.5 else before
    config = compose_config(*TINY, *options)
    tasks = tasks_of_run(config, open_source(config).spec)
    start = ResumePoint(Path("step_1"), {"config": {"tasks": before}})
    if ((before or {}).get("label", {})).get(name) == now:
        scores_run._check_corrections(config, tasks, start)
        return
    with pytest.raises(
        ValueError, match=rf"checkpoint.restore=step_1 was trained with tasks.label.{name}="
    ):
        scores_run._check_corrections(config, tasks, start)
    config.checkpoint.allow_changes = True
    scores_run._check_corrections(config, tasks, start)


REFUSALS = {
    "output=null": "mode=predict writes scores to the file output, got None; set output to a name that ends in .parquet or .csv",
    "output=x.json": "got x.json; set output to a name that ends in .parquet or .csv",
    "output=nowhere/x.csv": "output=nowhere/x.csv: there is no directory nowhere; make it, or set another output",
    "output=README.csv": "exists; move or delete it, or set another output",
    "checkpoint.restore=null": "mode=predict needs a trained model; set checkpoint.restore to a run's checkpoints/best",
    "checkpoint.restore=nowhere": "checkpoint.restore=nowhere is not a checkpoint",
    "checkpoint.parts=[tables]": "mode=predict needs both components of a trained model",
    "predict.split=next": "no split 'next', only train, test",
    "predict.columns=[order]": "split 'test', keeps no column 'order', only order_id, price; name the column in table.keep",
    "predict.columns=[row,row]": "predict.columns names row twice",
    "run_dir=runs/x": "run_dir=runs/x: mode=predict writes output and no run directory; the model of a run is named by",
    "mode=eval": "is of mode=predict, and mode=eval would ignore it; leave it out, or set mode=predict",
    "tasks={rating:{weight:0.5},click:{keep_rate:0.5}}": "leave one of the two out",
}


@pytest.mark.parametrize("option", REFUSALS)
def test_invalid_input_is_refused_in_one_line(trained, tmp_path, monkeypatch, option):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.csv").touch()
    ended = trained.predict(Path("scores.parquet"), option)
    assert ended.exit_code == 2
    assert REFUSALS[option] in ended.err
    assert ended.err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.csv"]
