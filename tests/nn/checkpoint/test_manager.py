"""Saving during training: the order of waits, and a complete checkpoint after the death of the process at any moment."""

import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from logging import getLogger
from pathlib import Path
from threading import Event

import pytest
import torch

from nn.checkpoint import tensor_files
from nn.checkpoint.directory import (
    clear,
    find_damage,
    finish_commits,
    list_checkpoints,
    read_facts,
    step_of,
    unfinished,
)
from nn.checkpoint.manager import CheckpointManager, SavedRun
from nn.checkpoint.state import facts_of, restore
from nn.tiers.host_rows import HostRows
from tests.helpers.command import run_command
from tests.helpers.composed import TINY, Built, build, compose_config, ranks_of_cpu
from tests.helpers.rank_processes import wait_until
from tests.helpers.runs import at_step, jsonl, stored_bytes, wait_for_writer

SHORT = [*TINY, "log.loggers=[]", "train.max_steps=10", "train.tf32=false"]
SAVING = "checkpoint.save_every=4"
SLOW_S = 0.3


@pytest.fixture(autouse=True)
def without_curves(monkeypatch) -> None:
    monkeypatch.setattr("nn.observability.run_directory.draw_curves", lambda *_: None)


def test_training_continues_while_the_state_of_an_earlier_step_is_written(tmp_path, monkeypatch):
    may_write, seen = Event(), []
    write_arrays = tensor_files.write_arrays

    def wait_and_write(path, parts):
        assert may_write.wait(60)
        return write_arrays(path, parts)

    def record_and_release() -> None:
        # The writer is a thread, which may not run during three short steps.
        checkpoints = tmp_path / "run" / "checkpoints"
        wait_until((checkpoints / ".step_4.unfinished").exists, 60)
        seen.extend(path.name for path in checkpoints.iterdir())
        may_write.set()

    monkeypatch.setattr(tensor_files, "write_arrays", wait_and_write)
    at_step(monkeypatch, 7, record_and_release)
    ended = run_command(*SHORT, SAVING, "checkpoint.keep=9", f"run_dir={tmp_path / 'run'}")
    assert (ended.exit_code, ended.err) == (0, "")
    assert seen == [".step_4.unfinished"], "three steps after its save it was not written"
    monkeypatch.undo()
    four = [*SHORT, "train.max_steps=4", f"run_dir={tmp_path / 'four'}"]
    assert run_command(*four).exit_code == 0
    stored = tmp_path / "run" / "checkpoints" / "step_4" / "rank_00000.bin"
    weights = tmp_path / "four" / "checkpoints" / "step_4" / "rank_00000.bin"
    assert stored.read_bytes()[: weights.stat().st_size] == weights.read_bytes()


def test_a_save_waits_for_the_previous_one(tmp_path, monkeypatch):
    may_write, waited = Event(), []
    write_arrays, wait = tensor_files.write_arrays, CheckpointManager.wait

    def wait_and_write(path, parts):
        assert may_write.wait(60)
        return write_arrays(path, parts)

    def record(self):
        waited.append(self.is_writing)
        if len(waited) > 1:
            # Training waits for the previous checkpoint.
            time.sleep(SLOW_S if len(waited) == 2 else 0)
            may_write.set()
        return wait(self)

    monkeypatch.setattr(tensor_files, "write_arrays", wait_and_write)
    monkeypatch.setattr(CheckpointManager, "wait", record)
    assert run_command(*SHORT, SAVING, f"run_dir={tmp_path / 'run'}").exit_code == 0
    assert waited[:2] == [False, True]
    saved = jsonl(tmp_path / "run" / "checkpoints" / "saved.jsonl")
    assert [record["step"] for record in saved] == [4, 8, 10]
    assert all(record["paused_s"] > 0 for record in saved)
    assert saved[1]["paused_s"] >= SLOW_S


def test_the_pause_is_all_the_time_that_training_stood_still(tmp_path, monkeypatch):
    """Without room for a copy it waits for the files. Tables on disk are flushed first, by a delta too."""
    write_arrays, flush = tensor_files.write_arrays, HostRows.flush

    def write_slowly(path, parts):
        time.sleep(SLOW_S)
        return write_arrays(path, parts)

    def flush_slowly(self):
        if self._is_changed.any():
            time.sleep(SLOW_S)
        return flush(self)

    small = ["data.synthetic.cardinalities=[5000,40,7,300,3000]", "train.batch_size=16"]
    on_disk = [
        *(*SHORT, *small, SAVING, "eval.batch_size=32", f"sharding.disk_path={tmp_path / 'disk'}"),
        *("sharding.tables={cat_0: {tier: disk, cache: 0.04}}", "sharding.read_ahead_gib=0.0001"),
    ]

    def saved(name: str, *overrides: str) -> list[dict]:
        assert run_command(*overrides, f"run_dir={tmp_path / name}").exit_code == 0
        records = jsonl(tmp_path / name / "checkpoints" / "saved.jsonl")
        return [record for record in records if record["step"] in (4, 8)]

    with monkeypatch.context() as patched:
        patched.setattr("nn.checkpoint.manager.SPARE_MEMORY", 0)
        patched.setattr(tensor_files, "write_arrays", write_slowly)
        waited = saved("waited", *SHORT, SAVING)
    assert all(record["paused_s"] >= SLOW_S for record in waited)
    assert all("deltas_paused_s" not in record for record in waited)
    monkeypatch.setattr(HostRows, "flush", flush_slowly)
    deltas = "checkpoint.delta_every=2"
    for name, overrides in (("flushed", on_disk), ("with_deltas", [*on_disk, deltas])):
        flushed = saved(name, *overrides)
        assert all(record["paused_s"] >= SLOW_S for record in flushed), name
    # At steps 2 and 6.
    assert all(record["deltas_paused_s"] >= SLOW_S for record in flushed)


def test_without_room_for_a_copy_training_waits_and_the_files_are_the_same(tmp_path, monkeypatch):
    assert run_command(*SHORT, SAVING, f"run_dir={tmp_path / 'copied'}").exit_code == 0
    monkeypatch.setattr("nn.checkpoint.manager.SPARE_MEMORY", 0)
    monkeypatch.setattr("nn.checkpoint.manager.StagingBuffer.take", None)
    at_step(monkeypatch, 4, lambda: wait_for_nothing(tmp_path / "waited"))
    ended = run_command(*SHORT, SAVING, f"run_dir={tmp_path / 'waited'}")
    assert (ended.exit_code, ended.err) == (0, "")
    assert (
        ended.out.count("checkpoints: no room in host memory for a copy of 0.0 GiB, so that") == 1
    )
    assert stored_bytes(tmp_path / "waited") == stored_bytes(tmp_path / "copied")


def wait_for_nothing(run_dir: Path) -> None:
    assert (run_dir / "checkpoints" / "step_4").exists()


class Killed(BaseException):
    """Replacement of SIGKILL."""


class Mortal:
    """Counter of this process's changes of files; from the n-th on every change raises `Killed`."""

    def __init__(self) -> None:
        self.count = self.dies_at = 0
        self.is_on = self.has_died = False
        # An audit hook cannot be removed.
        sys.addaudithook(self._hear)

    @contextmanager
    def until(self, dies_at: int) -> Iterator[None]:
        self.count, self.dies_at = 0, dies_at
        self.is_on, self.has_died = True, False
        try:
            yield
        finally:
            self.is_on = False

    def act(self) -> None:
        if not self.is_on:
            return
        if self.count >= self.dies_at:
            self.has_died = True
            raise Killed
        self.count += 1

    def _hear(self, event: str, arguments: tuple) -> None:
        is_change = event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.symlink")
        if is_change or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            self.act()


@pytest.fixture
def mortal(monkeypatch) -> Mortal:
    """Return the counter of opens for writing, renames, removals, links, new directories, writes and syncs."""
    mortal = Mortal()
    for name in ("pwrite", "fsync"):
        real = getattr(os, name)

        def act(*arguments, real=real):
            mortal.act()
            return real(*arguments)

        monkeypatch.setattr(os, name, act)
    return mortal


def manager_of(built: Built, directory: Path) -> CheckpointManager:
    facts = facts_of(built.config, built.source.spec, built.ranks)
    keep_one = compose_config(*TINY, "checkpoint.keep=1").checkpoint
    return CheckpointManager(
        directory,
        built.step,
        SavedRun(facts, built.source.spec),
        keep_one,
        built.ranks,
        getLogger(),
    )


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_process_that_dies_at_any_moment_of_a_save_leaves_a_complete_checkpoint(tmp_path, mortal):
    """Every change of a file in writing, renaming and pruning is tried; then the next start cleans up."""

    def save(manager: CheckpointManager, step: int, best_step: int) -> None:
        manager.save(step, {"best_step": best_step}, {})
        wait_for_writer()

    with ranks_of_cpu():
        built = build(compose_config(*TINY))
        before = tmp_path / "before"
        built.train(0, 1)
        save(manager_of(built, before), 1, best_step=1)
        built.train(1, 1)
        save(manager_of(built, before), 2, best_step=1)
        weights = [shard.weight.clone() for shard in built.step.tables.shards()]
        built.train(2, 1)
        newer = [shard.weight.clone() for shard in built.step.tables.shards()]
        left, dies_at = [], 0
        while True:
            directory = tmp_path / f"dies_at_{dies_at}"
            shutil.copytree(before, directory, symlinks=True)
            manager = manager_of(built, directory)
            with mortal.until(dies_at):
                save(manager, 3, best_step=3)
            finish_commits(directory)
            latest = list_checkpoints(directory)[0]
            left.append(step_of(latest))
            assert find_damage(latest, read_facts(latest), 0, 1) is None
            best = directory / "best"
            assert not best.exists() or find_damage(best, read_facts(best), 0, 1) is None
            clear(directory, left[-1])
            assert not list(directory.glob(".step*"))
            restore(latest, built.step, with_optimizer=True)
            wanted = newer if left[-1] == 3 else weights
            for shard, weight in zip(built.step.tables.shards(), wanted, strict=True):
                assert torch.equal(shard.weight, weight)
            restore(before / "step_2", built.step, with_optimizer=True)
            built.train(2, 1)
            if not mortal.has_died:
                break
            dies_at += 1
    assert dies_at > 15
    assert left == sorted(left), "once it is there it stays"
    assert set(left) == {2, 3}


def test_a_complete_checkpoint_that_was_not_renamed_is_kept(tmp_path):
    """Its run was killed after it had removed the earlier one of the step; others were killed a moment before or after."""
    with ranks_of_cpu():
        built = build(compose_config(*TINY))
        manager = manager_of(built, tmp_path)
        manager.save(12, {"best_step": 12}, {})
        wait_for_writer()
    whole = tmp_path / "step_12"
    for num_steps in (4, 8, 10, 12):
        shutil.copytree(whole, unfinished(tmp_path, num_steps))
    (unfinished(tmp_path, 8) / "run.json").write_text("")
    (unfinished(tmp_path, 10) / "rank_00000.bin").unlink()
    finish_commits(tmp_path)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_12", "step_4"]
    clear(tmp_path, 12)
    assert not list(tmp_path.glob(".*"))
