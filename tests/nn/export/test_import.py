"""Exported files come back: a run that starts from them equals one that restores the checkpoint."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.export_schema import ExportFormat
from configs.schema import Component
from nn.checkpoint.tensor_index import read_index
from nn.export.tables import Selection, export_tables
from tests.helpers.command import run_command
from tests.helpers.preproc_command import preproc

MODEL = (
    *("optimizer.name=adam", "optimizer.lr=0.001", "train.batch_size=128", "model.embedding_dim=8"),
    *("model.bottom_mlp=[16,8]", "model.top_mlp=[16,1]", "model.batch_norm=true"),
    *("train.ema_decay=0.9", "eval.per_epoch=4", "log.every=5", "seed=3"),
    *("data.synthetic.cardinalities=[50,20,7]", "data.synthetic.num_numerical=3"),
    *("data.synthetic.train_rows=4096", "data.synthetic.test_rows=1024", "log.pictures=false"),
)
ALL = Selection(parts=list(Component))


def run(*options: str) -> None:
    ended = run_command(*MODEL, *options)
    assert ended.exit_code == 0, ended.err


def metrics(run_dir: Path) -> list[dict]:
    """Return what all records say of loss and AUC."""
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    names = ("step", "loss", "train_auc", "test_auc", "test_log_loss")
    return [{name: record.get(name) for name in names} for record in records]


def tensors(checkpoint: Path, root: Path) -> dict[str, bytes]:
    """Return all arrays of a checkpoint, exported to one kind of file."""
    export_tables(checkpoint, root, ALL, format=ExportFormat.safetensors)
    return {
        f"{path.stem}.{name}": array.numpy().tobytes()
        for path in sorted(root.glob("*.safetensors"))
        for name, array in load_file(path).items()
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Return a checkpoint of a run, between two records."""
    root = tmp_path_factory.mktemp("trained")
    run("train.max_steps=20", "checkpoint.save_every=18", f"run_dir={root / 'run'}")
    return root / "run/checkpoints/step_18"


@pytest.fixture(scope="module")
def from_checkpoint(trained, tmp_path_factory) -> tuple[list[dict], dict[str, bytes]]:
    """Return records and arrays of a run that begins with it."""
    return results_from(trained, tmp_path_factory.mktemp("from_checkpoint"))


def results_from(path: Path, directory: Path) -> tuple[list[dict], dict[str, bytes]]:
    out = directory / "run"
    run("train.max_steps=30", f"checkpoint.restore={path}", f"run_dir={out}")
    return metrics(out), tensors(out / "checkpoints/step_30", directory / "arrays")


@pytest.mark.parametrize("format", [ExportFormat.npy, ExportFormat.safetensors])
def test_a_run_from_exported_files_equals_one_from_the_checkpoint(
    trained, from_checkpoint, tmp_path, format
):
    record = export_tables(trained, tmp_path / "files", ALL, format=format)
    assert record["dense"] == [
        *("dense.safetensors", "dense_ema.safetensors", "dense_optimizer.safetensors"),
        "trainer.safetensors",
    ]
    found = results_from(tmp_path / "files", tmp_path)
    assert found == from_checkpoint
    records = found[0]
    assert any(record["test_auc"] for record in records)
    assert any(record["train_auc"] and record["loss"] for record in records)


def test_dense_files_are_read_by_the_library_and_weights_start_another_run(trained, tmp_path):
    export_tables(trained, tmp_path / "files", Selection(parts=[Component.dense], optimizer=False))
    files = tmp_path / "files"
    assert {path.name for path in files.glob("*.safetensors")} == {
        *("dense.safetensors", "dense_ema.safetensors")
    }
    arrays = load_file(files / "dense.safetensors")
    stored = read_index(trained).tensors
    assert {f"dense.{name}" for name in arrays} == {n for n in stored if n.startswith("dense.")}
    assert arrays["top.norms.0.running_var"].shape == (16,)
    ended = run_command(*MODEL, f"checkpoint.restore={files}", f"run_dir={tmp_path / 'no'}")
    assert ended.exit_code == 2
    assert "no tables.cat_0.weight" in ended.err
    run(f"checkpoint.restore={files}", "checkpoint.parts=[dense]", "train.max_steps=1")
    # Files that have changed are refused, also if they have the same size.
    arrays["top.layers.1.bias"] = torch.ones(1)
    save_file(arrays, files / "dense.safetensors")
    ended = run_command(*MODEL, f"checkpoint.restore={files}", "checkpoint.parts=[dense]")
    assert ended.exit_code == 2
    assert "dense.safetensors" in ended.err


def test_raw_values_stand_beside_the_rows(tmp_path):
    draw = np.random.default_rng(0)
    lines = [
        f"{draw.integers(0, 2)},u{draw.integers(0, 30)},i{draw.integers(0, 9)},i{draw.integers(0, 9)},x"
        for _ in range(400)
    ]
    (tmp_path / "t.csv").write_text("\n".join(["y,user,item,last,other", *lines]))
    table = (
        f"table={{sources:{{t:{{files:{tmp_path / 't.csv'}}}}},label:{{name:y}},categorical:[user,item,"
        "{name:last,vocabulary_of:item},{name:other,buckets:5}]}"
    )
    preproc("dataset=any", table, f"output={tmp_path / 'data'}")
    options = (f"data.path={tmp_path / 'data'}", "train.batch_size=64", "log.pictures=false")
    model = ("model.name=deepfm", "model.embedding_dim=4", "model.hidden=[8]")
    ended = run_command(*options, *model, "train.max_steps=2", f"run_dir={tmp_path / 'run'}")
    assert ended.exit_code == 0, ended.err
    checkpoint = tmp_path / "run/checkpoints/step_2"
    record = export_tables(checkpoint, tmp_path / "out", fitted=tmp_path / "data")
    with_values = [t for t, files in record["tables"].items() if files[-1].endswith("parquet")]
    # Both tables of a feature, and the features that share one; hashes have no values.
    assert sorted(with_values) == ["item", "user", "weight_item", "weight_user"]
    rows = pq.read_table(tmp_path / "out/item.value.parquet")
    assert len(rows) == len(np.load(tmp_path / "out/item.weight.npy"))
    vocabulary = pq.read_table(tmp_path / "data/vocabulary/item.parquet")
    assert rows["value"].to_pylist() == [None, *vocabulary["value"].to_pylist()]
    assert rows["id"].to_pylist() == list(range(len(rows)))
    pq.write_table(vocabulary.slice(0, 3), tmp_path / "data/vocabulary/item.parquet")
    with pytest.raises(
        ValueError, match=r"has 3 values, but table .*item of the checkpoint has 10"
    ):
        export_tables(checkpoint, tmp_path / "no", fitted=tmp_path / "data")
    assert not (tmp_path / "no").exists()
    with pytest.raises(ValueError, match="there is no vocabulary/ with vocabularies"):
        export_tables(checkpoint, tmp_path / "no", fitted=tmp_path / "run")
