"""Lock of a run directory: who is kept out, and directories that two starts create at the same time."""

import os
import re
from logging import getLogger
from pathlib import Path

import pytest

from dataloading.dataset.durable_files import UnlockableError
from nn.observability import run_lock
from nn.observability.run_lock import RunLock

LOGGER = getLogger("test")


def unlockable(*_: object) -> int:
    raise UnlockableError(9, "Bad file descriptor")


@pytest.mark.parametrize("locks_directories", [True, False])
def test_a_second_run_is_refused_and_told_who_holds_the_lock(
    tmp_path, monkeypatch, locks_directories
):
    if not locks_directories:
        monkeypatch.setattr(run_lock, "lock_directory", unlockable)
    with RunLock(LOGGER) as first, RunLock(LOGGER) as second:
        first.take(tmp_path)
        wanted = re.escape(f"run_dir={tmp_path} is in use: process {os.getpid()} is writing to it")
        with pytest.raises(ValueError, match=wanted):
            second.take(tmp_path)
    with RunLock(LOGGER) as third:
        third.take(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"] * (not locks_directories)


def test_a_file_system_without_locks_is_reported(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(run_lock, "lock_directory", unlockable)
    monkeypatch.setattr(run_lock, "lock_file", unlockable)
    with RunLock(LOGGER) as lock:
        lock.take(tmp_path)
        lock.create(tmp_path)
    (message,) = caplog.messages
    assert message.startswith(f"the file system of run_dir={tmp_path} has no locks (Bad file")


def test_a_directory_that_is_missing_is_locked_once_it_is_created(tmp_path):
    run_dir = tmp_path / "a" / "run"
    with RunLock(LOGGER) as lock, RunLock(LOGGER) as other:
        lock.take(run_dir)
        assert not run_dir.exists()
        lock.create(run_dir)
        with pytest.raises(ValueError, match="is in use"):
            other.take(run_dir)


def test_of_two_starts_that_create_a_directory_one_is_refused(tmp_path):
    with RunLock(LOGGER) as lock:
        lock.take(tmp_path / "run")
        (tmp_path / "run").mkdir()
        with pytest.raises(ValueError, match="was created by another process a moment ago"):
            lock.create(tmp_path / "run")


@pytest.mark.parametrize("method", ["take", "create"])
def test_a_run_directory_that_is_a_file_is_named(tmp_path, method):
    taken = tmp_path / "notes.txt"
    taken.touch()
    wanted = re.escape(f"run_dir={taken} cannot be created (File exists); set another run_dir")
    with RunLock(LOGGER) as lock, pytest.raises(ValueError, match=wanted):
        getattr(lock, method)(taken)


def test_two_runs_within_a_second_get_two_directories(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = []
    for _ in range(3):
        with RunLock(LOGGER) as lock:
            run_dir = lock.create_new("dlrm")
            assert run_dir.parent == Path("runs/dlrm")
            names.append(run_dir.name)
    assert len(set(names)) == 3
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d(_\d)?", name) for name in names)


def test_a_name_that_another_run_has_taken_since_is_left_to_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    taken = []

    class Taken(type(Path())):
        """A path whose first directory is made by another run at the last moment."""

        def mkdir(self, *arguments, **options):
            if not options and not taken:
                taken.append(self.name)
                super().mkdir()
            super().mkdir(*arguments, **options)

    monkeypatch.setattr(run_lock, "Path", Taken)
    with RunLock(LOGGER) as lock:
        run_dir = lock.create_new("dlrm")
    assert run_dir.parent == Path("runs/dlrm")
    assert run_dir.name == f"{taken[0]}_2"


def test_a_file_in_the_place_of_the_recipe_is_refused(tmp_path, monkeypatch):
    """Its error is that of a directory which another run has created, after which the next name is tried."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "dlrm").touch()
    with RunLock(LOGGER) as lock, pytest.raises(ValueError, match="cannot be created"):
        lock.create_new("dlrm")
