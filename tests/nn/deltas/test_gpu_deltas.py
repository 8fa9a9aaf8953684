"""Deltas of captured steps on a GPU."""

import pytest

from tests.helpers.gpus import needs_one_gpu
from tests.nn.deltas.test_replay import assert_replayed, run


@needs_one_gpu
@pytest.mark.parametrize(
    "options",
    [
        ("train.amp=bf16",),
        ("train.amp=bf16", "model.embedding_dtype=bf16", "optimizer.embedding_l2=0.01"),
        ("optimizer.name=sgd", "data.synthetic.hotness=[3,1,2,5,1]"),
    ],
)
def test_the_replay_is_the_export_byte_for_byte(tmp_path, options):
    assert_replayed(run(tmp_path / "run", *options, device="cuda"), tmp_path)
