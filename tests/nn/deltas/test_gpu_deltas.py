"""Deltas of captured steps on a GPU."""

import pytest

from nn.checkpoint.tensor_index import read_index
from nn.deltas import writer
from nn.deltas.delta import read_delta
from tests.helpers.gpus import needs_one_gpu
from tests.nn.deltas.test_replay import assert_replayed, run
from tests.nn.deltas.test_touched_rows import assert_integers

BF16_TABLES = ("model.embedding_dtype=bf16", "optimizer.embedding_l2=0.01")


@needs_one_gpu
@pytest.mark.parametrize(
    ("options", "free_memory"),
    [
        (("train.amp=bf16",), writer.FREE_MEMORY),
        # Without room on the device, rows are copied to the host at once.
        (("train.amp=bf16", *BF16_TABLES), 0.0),
        (("optimizer.name=sgd", "data.synthetic.hotness=[3,1,2,5,1]"), writer.FREE_MEMORY),
    ],
)
def test_the_replay_is_the_export_byte_for_byte(tmp_path, monkeypatch, options, free_memory):
    monkeypatch.setattr(writer, "FREE_MEMORY", free_memory)
    assert_replayed(run(tmp_path / "run", *options, device="cuda"), tmp_path)


@needs_one_gpu
@pytest.mark.parametrize(("dtype", "free_memory"), [("int8", writer.FREE_MEMORY), ("int4", 0.0)])
def test_integers_are_those_of_the_checkpoint(tmp_path, monkeypatch, dtype, free_memory):
    monkeypatch.setattr(writer, "FREE_MEMORY", free_memory)
    run(tmp_path, f"checkpoint.delta_dtype={dtype}", device="cuda")
    delta = read_delta(tmp_path / "deltas/step_32")
    assert_integers(delta, read_index(tmp_path / "checkpoints/step_32"), dtype)
