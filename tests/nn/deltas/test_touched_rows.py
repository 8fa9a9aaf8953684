"""Deltas hold exactly the rows that updates have changed, whatever the sharding."""

import zlib
from collections import defaultdict
from logging import getLogger
from pathlib import Path

import numpy as np
import pytest
import torch

from configs.schema import Config
from nn.checkpoint.directory import list_checkpoints
from nn.checkpoint.tensor_index import Chunk, StoredTensor, TensorIndex, read_index
from nn.deltas import writer
from nn.deltas.delta import Delta, read_delta
from nn.deltas.row_ids import decode_ids, encode_ids
from nn.deltas.scaled_rows import quantize
from nn.deltas.table_rows import ChangedRows, replayed_table
from nn.deltas.writer import DeltaRun, DeltaWriter
from nn.distributed.process_group import process_group, ranks_from_environment
from nn.sharding.tables import TableShard
from nn.tiers.initial_rows import InitialRows
from serving.inference.tables import dequantized
from tests.helpers.checkpoints import save as save_checkpoint
from tests.helpers.command import run_command
from tests.helpers.composed import TINY, build, compose_config
from tests.helpers.distributed import run_distributed
from tests.nn.deltas.test_replay import assert_replayed

LAYOUTS = ["table_wise", "column_wise", "row_wise", "data_parallel", "row_wise"]
SHARDING = ",".join(f"cat_{index}:{layout}" for index, layout in enumerate(LAYOUTS))
# Three full batches and one of 5 rows, which two ranks pad; updates by a gradient of zero would show with Adam and L2.
CONFIG = (
    *TINY,
    *("data.synthetic.train_rows=197", "data.synthetic.hotness=[3,1,2,5,1]"),
    *("optimizer.name=adam", "optimizer.embedding_l2=0.01", "checkpoint.delta_every=4"),
)
NUM_STEPS = 4
STATE = {"loss_sum": 0.0, "loss_steps": 0, "test": {}, "best_step": None}


def write(directory: Path, options: tuple[str, ...], grown: dict[str, int]) -> None:
    """Train, write a delta and a checkpoint; tables had as many rows before as `grown` says."""
    config = compose_config(*CONFIG, *options)
    with process_group(ranks_from_environment("cpu")):
        built = build(config)
        run = DeltaRun({"format_version": 1, "feature_spec": ""}, None, grown)
        deltas = DeltaWriter(
            directory / "deltas",
            built.step.tables,
            built.step.dense_weights,
            run,
            config.checkpoint,
            built.ranks,
            getLogger(),
        )
        deltas.save(0, STATE)
        built.train(0, NUM_STEPS)
        built.score(2)
        deltas.save(NUM_STEPS, STATE)
        deltas.wait()
        save_checkpoint(directory, built.step, NUM_STEPS, built.source.spec, built.ranks)
        built.step.close()


def as_stored(values: np.ndarray, path: Path) -> StoredTensor:
    """Write an array as a tensor of one chunk."""
    path.write_bytes(values.tobytes())
    chunk = Chunk((0,) * values.ndim, values.shape, path, 0, (zlib.crc32(values.tobytes()),))
    return StoredTensor(str(values.dtype), values.shape, (chunk,))


def looked_up(config: Config) -> dict[str, set[int]]:
    """Return the ids of all batches by table."""
    ids = defaultdict(set)
    with process_group(ranks_from_environment("cpu")):
        for batch in build(config).train_loader.batches(0, NUM_STEPS):
            for feature in batch.ids.keys():  # noqa: SIM118
                rows = batch.ids[feature].values().view(len(batch.labels), -1)[: batch.num_valid]
                ids[feature] |= set(rows.flatten().tolist())
    return ids


GROWN = {"cat_3": 140, "cat_4": 700}


@pytest.mark.parametrize(
    ("world_size", "sharding", "grown"),
    [
        (1, SHARDING, {"cat_0": 490, "cat_4": 7}),
        (2, SHARDING, GROWN),
        (2, SHARDING.replace("column_wise", "{type: table_wise, exchange: least}"), GROWN),
        (4, SHARDING, GROWN),
    ],
)
def test_a_delta_holds_the_rows_that_were_looked_up(tmp_path, world_size, sharding, grown):
    options = [f"sharding.tables={{{sharding}}}"]
    # Two groups, of which the first writes.
    options += ["sharding.group_size=2"] * (world_size == 4)
    if world_size == 1:
        write(tmp_path, options, grown)
    else:
        run_distributed(write, world_size, tmp_path, options, grown)
    delta, stored = read_delta(tmp_path / "deltas/step_4"), read_index(tmp_path / "step_4")
    wanted = looked_up(compose_config(*CONFIG))
    for table, change in delta.tables.items():
        new = range(grown.get(table, change.rows), change.rows)
        ids = np.concatenate(list(decode_ids(delta.ids_of(table))))
        assert set(ids.tolist()) == wanted[table] | set(new), table
        assert len(ids) == change.touched
        weight = np.concatenate(list(stored.tensors[f"tables.{table}.weight"].blocks()))
        assert np.array_equal(np.concatenate(list(delta.rows_of(table).blocks())), weight[ids])
        # On a base of the size before, without the rows of the delta, the chain makes the table.
        weight_before = weight[: grown.get(table, change.rows)].copy()
        weight_before[ids[ids < len(weight_before)]] = 0
        base = as_stored(weight_before, tmp_path / f"{table}.bin")
        replayed = replayed_table(table, base, [delta])
        assert np.array_equal(np.concatenate(list(replayed.blocks())), weight)
    assert sum(change.touched for change in delta.tables.values()) < sum(
        change.rows for change in delta.tables.values()
    )


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_integers_of_two_ranks_are_those_of_the_whole_rows(tmp_path, dtype):
    """A rank that has some columns of a table writes their numbers as they are."""
    options = (f"sharding.tables={{{SHARDING}}}", f"checkpoint.delta_dtype={dtype}")
    options += ("model.embedding_dim=16", "model.bottom_mlp=[16,16]")
    options += ("data.synthetic.cardinalities=[500,4000,7,300,1000]",)
    run_distributed(write, 2, tmp_path, options, {})
    delta, stored = read_delta(tmp_path / "deltas/step_4"), read_index(tmp_path / "step_4")
    assert_integers(delta, stored, dtype, cut="cat_1")


def assert_integers(delta: Delta, stored: TensorIndex, dtype: str, cut: str = "") -> None:
    """Compare the changed rows with those of the checkpoint of the same step; `cut`: a table whose shards have columns."""
    for table, change in delta.tables.items():
        rows = torch.from_numpy(stored.tensors[f"tables.{table}.weight"].array())
        changed = ChangedRows.of_table(delta, table)
        ids, found = map(np.concatenate, zip(*changed.before(change.rows), strict=True))
        changed.check_end()
        if table == cut:
            assert (changed.integers, delta.scales_of(table)) == (None, None)
            assert np.array_equal(found, rows[ids].numpy())
            continue
        integers, scales = quantize(rows[ids], dtype)
        assert changed.integers == dtype
        assert np.array_equal(delta.rows_of(table).array(), integers.numpy())
        assert np.array_equal(delta.scales_of(table).array(), scales.numpy())
        assert np.array_equal(found, dequantized(integers, scales, change.columns).numpy())


@pytest.mark.parametrize("most", [1, 300, 10**6, 2**48])
def test_row_numbers_are_read_back(tmp_path, most):
    draw = np.random.default_rng(0)
    wanted = np.unique(draw.integers(0, most, 40_000))
    data = encode_ids(wanted)
    stored = as_stored(data, tmp_path / "ids")
    assert np.array_equal(np.concatenate(list(decode_ids(stored))), wanted)
    assert len(data) <= len(wanted) * (1.01 if most <= 10**6 else 6)


def test_rows_that_a_table_has_grown_by_must_be_in_a_delta(tmp_path):
    write(tmp_path, (), {"cat_0": 490})
    delta = read_delta(tmp_path / "deltas/step_4")
    base = as_stored(np.zeros((480, 8), np.float32), tmp_path / "base.bin")
    with pytest.raises(ValueError, match="table cat_0 has grown to 500 rows, and row 48"):
        list(replayed_table("cat_0", base, [delta]).blocks())


def test_a_delta_that_could_not_be_written_costs_nothing(tmp_path, monkeypatch):
    """Its rows are in the next one."""
    original, calls = writer.commit, []

    def commit(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            raise OSError(28, "No space left on device", "delta")
        return original(*arguments)

    monkeypatch.setattr(writer, "commit", commit)
    options = ("train.max_steps=8", "checkpoint.delta_every=2", "checkpoint.keep=9")
    ended = run_command(*TINY, *options, f"run_dir={tmp_path / 'run'}")
    assert "the delta of step 2 could not be written" in ended.err + ended.out
    assert [path.name for path in list_checkpoints(tmp_path / "run/deltas")] == [
        *("step_8", "step_6", "step_4")
    ]
    assert_replayed(tmp_path / "run", tmp_path)


def test_rows_of_a_table_on_disk_are_copied_where_they_lie(monkeypatch):
    """Of a GPU's table on disk, the mask of changed rows and so their numbers are on another device than the rows."""
    devices = []
    monkeypatch.setattr(
        InitialRows, "toggle", lambda _, values, rows, column: devices.append(rows.device)
    )
    weight = torch.empty(5, 2, device="meta")
    shard = TableShard("a", weight, 0, 0, InitialRows(3, "a", 0.5))
    assert shard.rows(torch.tensor([1, 4])).shape == (2, 2)
    assert devices == [weight.device]
