"""Tables of a file's vectors: they are read by the sharding, stay as they are, and train the projection."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from configs.serving_schema import ModelExportConfig
from nn.checks import open_checked
from nn.embedding import pretrained
from nn.embedding.optimizer import TableRule, table_rule
from serving.exporting.run import export_model
from serving.inference.model import ServedModel
from tests.helpers.command import run_command
from tests.helpers.composed import TINY, build, compose_config, ranks_of_cpu
from tests.helpers.distributed import run_distributed
from tests.helpers.runs import summary
from tests.nn.training.plain_training import resumes_bit_by_bit

NAMES = "data.synthetic.names=[user,item,kind,page,tag]"
# The table of `item` has 40 rows.
LAYOUTS = ["row_wise", "column_wise", "data_parallel", "table_wise"]
OPTIMIZERS = ["adam", "lion", "rowwise_adagrad", "ftrl"]
HERE, OWN = "tests.nn.models.test_pretrained", "optimizer.embedding_name="


def _decay(tables, gradients, states, group):
    """Make all rows smaller that are looked up, also with a gradient of zero."""
    for table, gradient in zip(tables, gradients, strict=True):
        table.mul_(1 - group["lr"]).sub_(group["lr"] * gradient)


DECAY = TableRule(name="decay", update=_decay)
KEEPS = replace(table_rule("sgd"), name="keeps")


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


def as_parquet(npy, *, fixed: bool = False):
    """Write the vectors in another order, of which each part has some, or `fixed` ones in that of ids."""
    rows = np.load(npy).astype(np.float32)
    order = np.arange(len(rows)) if fixed else np.random.default_rng(2).permutation(len(rows))
    kind = pa.list_(pa.float32(), rows.shape[1] if fixed else -1)
    table = {
        "item": pa.array(order, pa.int32()),
        "title": pa.array([f"t{i}" for i in order]),
        "vector": pa.array(rows[order].tolist(), kind),
    }
    path = npy.with_suffix(".parquet")
    pq.write_table(pa.table(table), path, row_group_size=16)
    return path


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


@pytest.mark.parametrize("fixed", [False, True])
def test_parquet_gives_the_table_of_the_npy(vectors, fixed, monkeypatch):
    monkeypatch.setattr(pretrained, "ROWS_AT_ONCE", 7)
    path, wanted = as_parquet(vectors, fixed=fixed), torch.from_numpy(np.load(vectors)).float()
    open_checked(compose_config(*options_of(path)))
    losses, ((_, _, whole),) = trained(vectors, "table_wise", "adam")
    found, ((_, _, of_parquet),) = trained(path, "table_wise", "adam")
    assert found == losses
    assert torch.equal(of_parquet, whole)
    for layout in ("row_wise", "column_wise"):
        for _, shards in run_distributed(trained, 2, path, layout, "adam"):
            for row, column, weight in shards:
                rows, columns = weight.shape
                assert torch.equal(weight, wanted[row : row + rows, column : column + columns])


ROW = [0.5] * 12
BAD_FILES = [
    ([*range(39)], [ROW] * 39, "lacks 1 of 40 ids, the first 39; want a vector for each, also for 0"),
    ([*range(1, 40)], [ROW] * 39, "lacks 1 of 40 ids, the first 0; want a vector for each, also for 0"),
    ([*range(40), 3], [ROW] * 41, "has id 3 twice; want a vector per id"),
    ([*range(40), 40], [ROW] * 41, "has id 40, and the table ids 0 to 39; leave it out"),
    ([-1, *range(40)], [ROW] * 41, "has id -1, and the table ids 0 to 39; leave it out"),
    ([None, *range(40)], [ROW] * 41, "'id' is missing in a row; fill it"),
    ([*range(40)], [*[ROW] * 39, None], "'vector' is missing in a row; fill it"),
    ([*range(40)], [*[ROW] * 39, [*ROW[1:], None]], "a vector lacks a number; fill it"),
    ([*range(40)], [*[ROW] * 39, ROW[1:]], "the vector of id 39 has 11 columns, and the first one 12"),
    ([*range(40)], [ROW[1:]] * 40, "holds 40 vectors of 11 columns, and table 'item' has 40 of 12"),
    ([f"i{i}" for i in range(40)], [ROW] * 40, "has columns id string, vector list<element: double>; want one of int"),
]  # fmt: skip


@pytest.mark.parametrize(("ids", "rows", "message"), BAD_FILES)
def test_parquet_without_a_vector_per_id_is_refused(ids, rows, message, tmp_path):
    pq.write_table(pa.table({"id": ids, "vector": rows}), tmp_path / "rows.parquet")
    config = compose_config(*options_of(tmp_path / "rows.parquet"))
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        open_checked(config)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_no_parquet_is_refused(tmp_path):
    path = tmp_path / "rows.parquet"
    for content in (None, b"PAR1", b""):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(
            ValueError, match=r"^model.pretrained.item=.*rows.parquet cannot be read"
        ):
            open_checked(compose_config(*options_of(path)))


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


@pytest.mark.parametrize("memory", ["device", "disk"])
def test_scores_and_exports_of_a_checkpoint_need_no_file(vectors, tmp_path, memory):
    options = [*options_of(vectors), "log.loggers=[]"]
    if memory == "disk":
        options += [
            f"sharding.disk_path={tmp_path}",
            "sharding.tables={item: {tier: disk, cache: 1}}",
        ]
    ended = run_command(*options, "train.max_steps=4", f"run_dir={tmp_path / 'run'}")
    assert ended.exit_code == 0, ended.err
    step = tmp_path / "run/checkpoints/step_4"
    scored = [*options, f"checkpoint.restore={step}"]

    def scores(name: str) -> tuple[bytes, dict, dict]:
        room = tmp_path / name
        predict = ["mode=predict", f"output={room}.csv"]
        for words in (["mode=eval", f"run_dir={room}"], predict):
            ended = run_command(*scored, *words)
            assert ended.exit_code == 0, ended.err
        export_model(ModelExportConfig(checkpoint=str(step), output=f"{room}_served", rows=8))
        served = ServedModel.load(Path(f"{room}_served"))
        return Path(f"{room}.csv").read_bytes(), summary(room), served.manifest.files

    wanted = scores("with")
    vectors.unlink()
    assert scores("without") == wanted
    grown = run_command(*scored, "mode=eval", "checkpoint.grow=true", f"run_dir={tmp_path / 'g'}")
    assert grown.exit_code == 2
    assert "model.pretrained.item=" in grown.err


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
        (
            (40, 12),
            ["optimizer.embedding_l2=0.1"],
            "optimizer.embedding_l2=0.1 or the tables' optimizer",
        ),
        ((40, 12), [f"{OWN}{HERE}:DECAY"], "DECAY may move weights without"),
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


def test_a_rule_of_ones_own_that_says_it_keeps_them_is_taken(vectors):
    """The table is that of the file after some steps, also in the hands of a user's rule."""
    open_checked(compose_config(*options_of(vectors, f"{OWN}{HERE}:KEEPS")))
    _, ((_, _, whole),) = trained(vectors, "table_wise", f"{HERE}:KEEPS")
    assert torch.equal(whole, torch.from_numpy(np.load(vectors)).float())
    _, ((_, _, moved),) = trained(vectors, "table_wise", f"{HERE}:DECAY")
    assert not torch.equal(whole, moved)


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
