"""Tables of a file's vectors: they are read by the sharding, stay as they are, and train the projection."""

import re

import numpy as np
import pytest
import torch

from nn.checks import open_checked
from tests.helpers.composed import TINY, build, compose_config, ranks_of_cpu
from tests.helpers.distributed import run_distributed
from tests.nn.training.plain_training import resumes_bit_by_bit

NAMES = "data.synthetic.names=[user,item,kind,page,tag]"
# The table of `item` has 40 rows.
LAYOUTS = ["row_wise", "column_wise", "data_parallel", "table_wise"]
OPTIMIZERS = ["adam", "lion", "rowwise_adagrad", "sgd_momentum"]


def options_of(path, *more: str, widths: str = "{item:12,kind:3}") -> list[str]:
    return [
        *TINY,
        NAMES,
        f"model.embedding_dims={widths}",
        f"model.pretrained={{item:{path}}}",
        *more,
    ]


@pytest.fixture
def vectors(tmp_path):
    rows = np.random.default_rng(1).normal(size=(40, 12)).astype(np.float16)
    np.save(tmp_path / "items.npy", rows)
    return tmp_path / "items.npy"


def trained(path, layout: str, optimizer: str) -> tuple[list[float], list[tuple]]:
    """Return the losses, and this rank's shards of the table with their places."""
    layouts = f"sharding.tables={{item:{layout}}}"
    with ranks_of_cpu():
        built = build(
            compose_config(*options_of(path, layouts, f"optimizer.embedding_name={optimizer}"))
        )
        before = built.step.dense.projections["item"].weight.clone()
        losses = built.train(0, 4)
        assert not torch.equal(before, built.step.dense.projections["item"].weight)
        shards = [
            (shard.row_offset, shard.column_offset, shard.weight.clone())
            for shard in built.step.tables.shards()
            if shard.table == "item"
        ]
        built.step.close()
    return losses, shards


@pytest.mark.parametrize(("layout", "optimizer"), list(zip(LAYOUTS, OPTIMIZERS, strict=True)))
def test_the_table_is_the_file_and_stays_so(vectors, layout, optimizer):
    alone, ((_, _, whole),) = trained(vectors, "table_wise", optimizer)
    wanted = torch.from_numpy(np.load(vectors)).float()
    assert torch.equal(whole, wanted)
    for losses, shards in run_distributed(trained, 2, vectors, layout, optimizer):
        np.testing.assert_allclose(losses, alone, rtol=1e-6, atol=1e-6)
        for row, column, weight in shards:
            rows, columns = weight.shape
            assert torch.equal(weight, wanted[row : row + rows, column : column + columns])


def test_a_run_resumes_bit_by_bit(vectors, tmp_path):
    assert resumes_bit_by_bit(tmp_path, options_of(vectors), 1)


@pytest.mark.parametrize(
    ("rows", "more", "message"),
    [
        (
            (40, 16),
            [],
            "holds 40 vectors of 16 columns, and table 'item' has 40 of 12; make a file",
        ),
        ((39, 12), [], "holds 39 vectors of 12 columns, and table 'item' has 40 of 12"),
        ((12,), [], "holds [12] float64; want a .npy file [rows, columns] of floats"),
        (None, [], "cannot be read ([Errno 2] No such file or directory"),
        (b"", [], "cannot be read (EOF: reading magic string"),
        (b"PK\x03\x04 an .npz", [], "cannot be read (the magic string is not correct"),
        ((40, 12), ["optimizer.embedding_l2=0.1"], "would move weights without a gradient"),
    ],
)
def test_what_cannot_be_is_refused_before_the_run(rows, more, message, tmp_path):
    path = tmp_path / "rows.npy"
    if isinstance(rows, bytes):
        path.write_bytes(rows)
    elif rows is not None:
        np.save(path, np.zeros(rows))
    with pytest.raises(ValueError, match=re.escape(message)):
        open_checked(compose_config(*options_of(path, *more)))


@pytest.mark.parametrize("number", [np.nan, 1e39])
def test_a_vector_that_is_not_finite_is_named(number, tmp_path):
    rows = np.zeros((40, 12), np.float64)
    rows[17, 3] = number
    np.save(tmp_path / "rows.npy", rows)
    with (
        ranks_of_cpu(),
        pytest.raises(
            ValueError, match=r"rows.npy: row 17 is not finite in the table's torch.float32; corr"
        ),
    ):
        build(compose_config(*options_of(tmp_path / "rows.npy")))


def test_a_file_without_a_width_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"model.pretrained names item without a width; set model.emb"
    ):
        compose_config(*options_of(tmp_path / "rows.npy", widths="{kind:3}"))
