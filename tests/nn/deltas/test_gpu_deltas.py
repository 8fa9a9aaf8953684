"""Deltas of captured steps on a GPU."""

import pytest

from nn.deltas import writer
from tests.helpers.gpus import needs_one_gpu
from tests.nn.deltas.test_replay import assert_replayed, run

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
