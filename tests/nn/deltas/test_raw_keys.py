"""Deltas of tables for raw keys: rows get other keys, and a base and its deltas are the export of a later checkpoint."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from configs.export_schema import ExportFormat
from configs.schema import Component
from configs.serving_schema import ModelExportConfig
from nn.checkpoint.directory import list_checkpoints
from nn.checkpoint.tensor_index import read_index
from nn.deltas.delta import read_delta
from nn.deltas.table_rows import ChangedRows
from nn.deltas.writer import DeltaWriter
from nn.export.tables import Selection, export_tables
from nn.replay import replay
from serving.exporting.applied import apply_deltas
from serving.exporting.run import export_model
from serving.inference.key_rows import load_key_rows
from serving.inference.model import ServedModel
from serving.manifest import Manifest
from tests.fuzz.runs import write_checkpoint
from tests.helpers.distributed import run_distributed
from tests.nn.test_raw_keys import CAPACITY, STEPS, data, trained

__all__ = ["data"]

DELTAS = ("checkpoint.delta_every=2", "checkpoint.keep=99")
ROW_WISE = "sharding.tables={user: {type: row_wise}}"


@pytest.fixture(scope="module")
def run_dir(data, tmp_path_factory) -> Path:
    """A run with deltas that was stopped after five steps and resumed."""
    run_dir = tmp_path_factory.mktemp("run") / "run"
    trained(data, run_dir, 5, *DELTAS)
    trained(data, run_dir, STEPS, *DELTAS)
    return run_dir


def assert_replayed(run_dir: Path, room: Path, base: int, format: ExportFormat) -> None:
    """Compare the replay from a checkpoint with the export of the last one."""
    last = run_dir / f"checkpoints/step_{STEPS}"
    selection = Selection(parts=list(Component), optimizer=False)
    export_tables(last, room / "wanted", selection, format=format)
    replay(run_dir / f"checkpoints/step_{base}", [str(run_dir / "deltas")], room / "got", format)
    got, wanted = (
        {path.name: path.read_bytes() for path in (room / name).iterdir()}
        for name in ("got", "wanted")
    )
    assert got == wanted
    assert "keys.safetensors" in got


def keys_of(run_dir: Path, step: int) -> np.ndarray:
    stored = read_index(run_dir / f"checkpoints/step_{step}").tensors["keys.user.keys"]
    return np.concatenate([*stored.blocks()])


@pytest.mark.parametrize(("base", "format"), [(0, "npy"), (5, "safetensors"), (10, "npy")])
def test_the_replay_has_the_keys_of_the_export(run_dir, tmp_path, base, format):
    assert_replayed(run_dir, tmp_path, base, ExportFormat[format])


def test_a_delta_names_exactly_the_rows_that_got_other_keys(run_dir):
    before, evicted = keys_of(run_dir, 0), 0
    assert not before.any()
    for path in reversed(list_checkpoints(run_dir / "deltas")):
        delta = read_delta(path)
        assert delta.facts["delta"]["format"] == 2
        change, after = delta.keys["user"], before.copy()
        assert change.rows == CAPACITY
        for rows, keys in ChangedRows.of_keys(delta, "user").before(CAPACITY):
            evicted += np.count_nonzero(before[rows])
            assert (keys != before[rows]).all()
            after[rows] = keys
        assert np.count_nonzero(after != before) == change.changed
        before = after
    np.testing.assert_array_equal(before, keys_of(run_dir, STEPS))
    assert evicted > 10


@pytest.mark.parametrize("sharding", [(), (ROW_WISE,)])
def test_two_ranks_write_the_keys_of_one(data, run_dir, tmp_path, sharding):
    run_distributed(trained, 2, data, tmp_path / "run", STEPS, *DELTAS, *sharding)
    assert_replayed(tmp_path / "run", tmp_path, 0, ExportFormat.npy)
    np.testing.assert_array_equal(keys_of(tmp_path / "run", STEPS), keys_of(run_dir, STEPS))


def test_keys_that_expire_leave_the_deltas_on_any_ranks_and_after_a_stop(data, tmp_path):
    expiring = (*DELTAS, "data.dynamic.expire_after=3")
    trained(data, tmp_path / "run", 5, *expiring)
    trained(data, tmp_path / "run", STEPS, *expiring)
    assert_replayed(tmp_path / "run", tmp_path, 0, ExportFormat.npy)
    keys = keys_of(tmp_path / "run", STEPS)
    assert (keys[1:] == 0).any()
    run_distributed(trained, 2, data, tmp_path / "two", STEPS, *expiring, ROW_WISE)
    np.testing.assert_array_equal(keys_of(tmp_path / "two", STEPS), keys)
    (tmp_path / "of_two").mkdir()
    assert_replayed(tmp_path / "two", tmp_path / "of_two", 0, ExportFormat.npy)
    left = [
        keys
        for path in list_checkpoints(tmp_path / "run/deltas")
        for _, keys in ChangedRows.of_keys(read_delta(path), "user").before(CAPACITY)
    ]
    assert (np.concatenate(left) == 0).any()


def test_a_delta_that_was_not_written_leaves_its_keys_to_the_next(data, tmp_path, monkeypatch):
    commit, failed = DeltaWriter._commit, []

    def once(self, num_steps, *rest):
        if num_steps in (4, 6):
            failed.append(num_steps)
            raise OSError(28, "No space left on device")
        return commit(self, num_steps, *rest)

    monkeypatch.setattr(DeltaWriter, "_commit", once)
    trained(data, tmp_path / "run", STEPS, *DELTAS)
    assert failed == [4, 6]
    steps = [int(path.name[5:]) for path in list_checkpoints(tmp_path / "run/deltas")]
    assert 4 not in steps
    assert 6 not in steps
    assert_replayed(tmp_path / "run", tmp_path, 0, ExportFormat.npy)


def test_an_applied_version_serves_new_keys_and_no_evicted_ones(run_dir, tmp_path):
    for name, step in (("base", 5), ("wanted", STEPS)):
        checkpoint = run_dir / f"checkpoints/step_{step}"
        export_model(
            ModelExportConfig(checkpoint=str(checkpoint), output=str(tmp_path / name), rows=8)
        )
    deltas = [str(run_dir / "deltas")]
    manifest, _ = apply_deltas(tmp_path / "base", deltas, tmp_path / "got")
    wanted = ServedModel.load(tmp_path / "wanted")
    assert manifest.keys == wanted.manifest.keys
    for name, state in wanted.manifest.files.items():
        if name.startswith(("tables/", "keys/")):
            assert manifest.files[name] == state, name
    evicted = np.setdiff1d(keys_of(run_dir, 5), [0, *keys_of(run_dir, STEPS)])
    keys = load_key_rows(tmp_path / "got", Manifest.read(tmp_path / "got"))["user"]
    assert len(evicted) > 5
    assert not keys.rows(evicted).any()
    assert keys.rows(keys_of(run_dir, STEPS)[1:]).all()


def test_a_chain_without_keys_is_refused(run_dir, tmp_path):
    shutil.copytree(run_dir / "checkpoints/step_0", tmp_path / "base")
    index, facts = (
        json.loads((tmp_path / "base" / name).read_text()) for name in ("tensors.json", "run.json")
    )
    index["tensors"].pop("keys.user.keys")
    write_checkpoint(tmp_path / "base", facts, json.dumps(index))
    with pytest.raises(ValueError, match="has no raw keys of user; name the base and the deltas"):
        replay(tmp_path / "base", [str(run_dir / "deltas")], tmp_path / "got")
