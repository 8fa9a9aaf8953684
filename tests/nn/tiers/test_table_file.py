"""Files of tables on disk: newest rows, unchanged files between saves, full disks, and directories of killed runs."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from nn.distributed.errors import RankError
from nn.layers.initialization import fill_uniform_
from nn.tiers import table_file
from nn.tiers.disk_store import DiskStore
from nn.tiers.initial_rows import InitialRows
from nn.tiers.row_items import row_items
from nn.tiers.table_file import ShardOfFile, TableFile, TierDirectory, removable_bytes
from tests.helpers.command import run_command
from tests.helpers.composed import TINY
from tests.helpers.gpus import needs_gpus

ROWS = 5000
KINDS = {"weight": ([6], torch.bfloat16), "momentum1": ([], torch.float32)}
SHARDS = [
    ShardOfFile(2000, InitialRows(3, "a", 0.5), first_row=700, first_column=6),
    ShardOfFile(3000, InitialRows(3, "b", 0.25)),
]


def initial_rows() -> list[torch.Tensor]:
    weight = torch.empty(ROWS, 6, dtype=torch.bfloat16)
    for part, shard in zip(weight.split([2000, 3000]), SHARDS, strict=True):
        at = {"row_offset": shard.first_row, "col_offset": shard.first_column}
        initial = shard.initial
        fill_uniform_(part, seed=3, table=initial.table, bound=initial.bound, **at)
    return [weight, torch.zeros(ROWS)]


def read(file: TableFile, rows: np.ndarray) -> list[torch.Tensor]:
    targets = [torch.zeros(len(rows), *columns, dtype=dtype) for columns, dtype in KINDS.values()]
    file.read(rows, [row_items(target) for target in targets], np.arange(len(rows)))
    return targets


def test_changed_rows_are_read_and_reach_the_file_at_the_merge_only(tmp_path, monkeypatch):
    monkeypatch.setattr(table_file, "BLOCK_ROWS", 7)
    file = TableFile(TierDirectory(tmp_path), "t", SHARDS, KINDS)
    generator = torch.Generator().manual_seed(1)
    everything = np.arange(ROWS)
    assert all(map(torch.equal, read(file, everything), initial_rows()))
    weights = torch.rand(300, 6, generator=generator).bfloat16()
    file.fill(np.arange(100, 400), weights)
    stored = [rows.clone() for rows in file.rows.values()]
    newest = initial_rows()
    newest[0][100:400] = weights
    assert all(map(torch.equal, read(file, everything), newest))
    for _ in range(3):
        changed = torch.randperm(ROWS, generator=generator)[:900]
        values = [torch.rand(900, *part.shape[1:], generator=generator).to(part) for part in stored]
        for part, value in zip(newest, values, strict=True):
            part[changed] = value
        file.keep(changed.numpy(), [row_items(value) for value in values], np.arange(900))
        assert all(map(torch.equal, read(file, everything), newest))
        # A checkpoint may be written from these.
        assert all(map(torch.equal, file.rows.values(), stored))
    file.merge()
    assert all(map(torch.equal, read(file, everything), newest))
    # What the seed gives is not stored.
    weight, state = file.rows.values()
    initial, _ = initial_rows()
    assert torch.equal(
        weight.view(torch.int16), newest[0].view(torch.int16) ^ initial.view(torch.int16)
    )
    assert torch.equal(state, newest[1])


def test_rows_that_never_change_take_no_room(tmp_path):
    """Of 2 million rows 8 change; a page is 4 KiB."""
    kinds = {"weight": ([32], torch.float32), "momentum1": ([], torch.float32)}
    shards = [ShardOfFile(2_000_000, InitialRows(3, "a", 0.5))]
    file = TableFile(TierDirectory(tmp_path), "t", shards, kinds)
    assert file.num_bytes() == (0, 2_000_000 * 132)
    rows = np.array([0, 1, 2, 31, 32, 70_000, 1_000_000, 1_999_999])
    values = [torch.rand(8, 32), torch.rand(8)]
    file.store(rows, [*map(row_items, values)], np.arange(8))
    stored, _ = file.num_bytes()
    assert 0 < stored <= 2 * 8 * 2 * 4096
    found = [torch.zeros(8, 32), torch.zeros(8)]
    file.read(rows, [*map(row_items, found)], np.arange(8))
    assert all(map(torch.equal, found, values))


def test_room_is_asked_for_once_and_for_dense_stretches_as_one(tmp_path, monkeypatch):
    """Of pages of 4 KiB with 32 rows; 256 pages are an extent."""
    calls = []
    fallocate = os.posix_fallocate
    monkeypatch.setattr(
        os, "posix_fallocate", lambda *call: calls.append(call[1:]) or fallocate(*call)
    )
    shards = [ShardOfFile(32 * 600 + 1, InitialRows(3, "a", 0.5))]
    file = TableFile(TierDirectory(tmp_path), "t", shards, {"weight": ([32], torch.float32)})

    def store(pages: np.ndarray) -> list[tuple[int, int]]:
        calls.clear()
        values = torch.ones(len(pages), 32)
        file.store(pages * 32, [row_items(values)], np.arange(len(pages)))
        return [(first // 4096, num_bytes) for first, num_bytes in calls]

    few = np.array([0, 1, 9, 600])
    assert store(few) == [(0, 2 * 4096), (9, 4096), (600, 128)]
    assert store(few) == []
    # Half of the pages of the second extent.
    assert store(np.arange(256, 512, 2)) == [(256, 256 * 4096)]
    assert store(np.arange(257, 512, 2)) == []


def raising(error: Exception) -> Callable[..., None]:
    def call(*_: object, **__: object) -> None:
        raise error

    return call


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    directory = TierDirectory(tmp_path)

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    file = TableFile(directory, "t", SHARDS, KINDS)
    with pytest.raises(RankError, match=r"no room for 0\.00 GiB more .*No space left"):
        file.fill(np.arange(1), torch.zeros(1, 6, dtype=torch.bfloat16))
    monkeypatch.undo()
    for module, name, error in (
        (os, "open", OSError(errno.ENOSPC, "No space left on device")),
        (torch, "from_file", RuntimeError("unable to open file: No space left on device (28)")),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(module, name, raising(error))
            with pytest.raises(
                RankError, match=r"disk_path=.*: t_.* cannot be written: .*No space"
            ):
                TableFile(directory, "t", SHARDS, KINDS)
    with pytest.raises(ValueError, match=r"disk_path=/proc/1/x cannot be written: "):
        TierDirectory(Path("/proc/1/x"))


def test_directories_of_killed_runs_are_removed_and_those_of_others_stay(tmp_path):
    other = TierDirectory(tmp_path)
    killed = tmp_path / ".tables.partial-0123abcd"
    killed.mkdir()
    (killed / "t_weight").write_bytes(b"rows")
    own = TierDirectory(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {own.path.name, other.path.name}
    own.close()
    assert [path.name for path in tmp_path.iterdir()] == [other.path.name]
    del other
    assert not list(tmp_path.iterdir())


def test_a_process_that_ends_without_finalizers_has_removed_its_files(tmp_path, monkeypatch):
    """torchrun's ranks end so, after a run and after an error."""
    made = []

    class Kept(TierDirectory):
        def __init__(self, parent: Path) -> None:
            super().__init__(parent)
            made.append(self)

    monkeypatch.setattr("nn.tiers.host_tier.TierDirectory", Kept)
    on_disk = [
        *(*TINY, "log.loggers=[]", "train.max_steps=2", f"sharding.disk_path={tmp_path / 'disk'}"),
        *("train.batch_size=16", "eval.batch_size=32", "sharding.read_ahead_gib=0.0001"),
        "sharding.tables={cat_4: {tier: disk, cache: 0.2}}",
    ]
    assert run_command(*on_disk, f"run_dir={tmp_path / 'run'}").exit_code == 0
    monkeypatch.setattr(
        "nn.tiers.host_tier.TableFile", raising(RankError("no room for the tables"))
    )
    assert run_command(*on_disk, f"run_dir={tmp_path / 'full'}").exit_code == 2
    monkeypatch.undo()
    monkeypatch.setattr("nn.tiers.host_tier.TierDirectory", Kept)
    monkeypatch.setattr(
        "nn.sharding.sharded_tables.ShardedTables._fill", raising(RankError("no memory"))
    )
    assert run_command(*on_disk, f"run_dir={tmp_path / 'fill'}").exit_code == 2
    monkeypatch.undo()
    monkeypatch.setattr("nn.tiers.host_tier.TierDirectory", Kept)
    monkeypatch.setattr("nn.build.build_dense", raising(RankError("no memory")))
    assert run_command(*on_disk, f"run_dir={tmp_path / 'dense'}").exit_code == 2
    assert len(made) == 4
    assert not list((tmp_path / "disk").iterdir())


def test_what_others_remove_or_own_is_not_counted_as_removable(tmp_path, monkeypatch):
    left = tmp_path / ".tables.partial-0123abcd"
    left.mkdir()
    (left / "t_weight").write_bytes(b"rows" * 2000)
    assert removable_bytes(tmp_path) >= 8000
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert removable_bytes(tmp_path) == 0
    monkeypatch.undo()
    locked = table_file.lock_directory

    def removed_meanwhile(path: Path) -> int:
        lock = locked(path)
        shutil.rmtree(path)
        return lock

    monkeypatch.setattr(table_file, "lock_directory", removed_meanwhile)
    assert removable_bytes(tmp_path) == 0


@pytest.mark.parametrize("fills", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpus(1))])
def test_rows_that_a_device_keeps_begin_without_a_read(device, fills, tmp_path, monkeypatch):
    kept, counts, read = np.arange(1500, 2500), [], TableFile.read

    def counted(file, rows, *others):
        counts.append(len(rows))
        read(file, rows, *others)

    monkeypatch.setattr(TableFile, "read", counted)
    file = TableFile(TierDirectory(tmp_path), "t", SHARDS, KINDS)
    store = DiskStore(file, 100, 2000, KINDS, kept, torch.device(device))
    wanted = [part[kept] for part in initial_rows()]
    if fills:
        # Of vectors that were trained elsewhere.
        store.fill(torch.arange(2400, 2600), torch.ones(200, 6).bfloat16())
        wanted[0][900:] = 1
    rows = torch.from_numpy(kept).to(device)
    # The second load finds a file that has changed.
    for reads in (fills, True):
        for part in store.arena.values():
            part.fill_(7)
        counts.clear()
        store.load(rows, rows - 1000)
        arena = [part[500:1500].cpu() for part in store.arena.values()]
        assert all(map(torch.equal, arena, wanted))
        assert sum(counts) == (1000 if reads else 0)


class Untouched:
    """Items of a mapped file that nobody may take."""

    def take(self, rows: np.ndarray) -> np.ndarray:
        raise AssertionError(f"{len(rows)} rows were read from a hole")


def test_rows_that_nothing_was_written_to_are_read_without_the_file(tmp_path, monkeypatch):
    file = TableFile(TierDirectory(tmp_path), "t", SHARDS, KINDS)
    wanted, everything = initial_rows(), np.arange(len(initial_rows()[0]))
    with monkeypatch.context() as patch:
        for part in file._parts:
            patch.setattr(part.table, "items", Untouched())
        assert all(map(torch.equal, read(file, everything), wanted))
    # Pages of their own, of which other rows have a part.
    changed = np.array([0, 1700, len(everything) - 1])
    values = [torch.full_like(part[changed], 3) for part in wanted]
    file.store(changed, [*map(row_items, values)], np.arange(len(changed)))
    for part in wanted:
        part[changed] = 3
    assert all(map(torch.equal, read(file, everything), wanted))
    # A checkpoint is copied into the memory of the file.
    for bits in (file.rows["weight"], wanted[0]):
        bits.view(torch.int16)[900] ^= 1
    file.note_other_writes()
    assert all(map(torch.equal, read(file, everything), wanted))
