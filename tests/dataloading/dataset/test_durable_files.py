import ast
import errno
import fcntl
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from dataloading.dataset.durable_files import (
    AppendedFile,
    UnlockableError,
    append_line,
    clear_leftovers,
    cut_incomplete_line,
    exclusive,
    lock_directory,
    new_output,
    partial_sibling,
    put_in_place,
    replace_directory,
    replace_link,
    replace_text,
    sync_directory,
    sync_file,
    sync_tree,
    write_synced,
)

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("configs", "dataloading", "preproc", "nn", "compare", "sweep")
HERE_ONLY = {"os.fsync", "os.rename", "os.replace", "fcntl.flock", "fcntl.lockf"}


@pytest.fixture
def calls(monkeypatch):
    """Record (function, path or content at the time of the call) of every sync and rename."""
    recorded = []
    fsync, replace, rename = os.fsync, os.replace, os.rename

    def path_of(descriptor):
        return Path(os.readlink(f"/proc/self/fd/{descriptor}")).name

    monkeypatch.setattr(os, "fsync", lambda fd: recorded.append(("sync", path_of(fd))) or fsync(fd))
    for name, function in (("replace", replace), ("rename", rename)):
        monkeypatch.setattr(
            os,
            name,
            lambda source, target, name=name, function=function: (
                recorded.append((name, Path(source).name, Path(target).name))
                or function(source, target)
            ),
        )
    return recorded


def test_a_text_is_synced_then_renamed_then_its_name_is_synced(tmp_path, calls):
    path = tmp_path / "state.json"
    path.write_text("old")
    replace_text(path, "new")
    assert path.read_text() == "new"
    assert calls == [
        ("sync", ".state.json.tmp"),
        ("replace", ".state.json.tmp", "state.json"),
        ("sync", tmp_path.name),
    ]
    assert os.listdir(tmp_path) == ["state.json"]


def test_a_text_may_be_renamed_without_a_sync(tmp_path, calls):
    replace_text(tmp_path / "a", "text", synced=False)
    assert calls == [("replace", ".a.tmp", "a")]


def test_a_written_text_is_synced(tmp_path, calls):
    write_synced(tmp_path / "a", "é")
    assert calls == [("sync", "a")]
    assert (tmp_path / "a").read_bytes() == "é".encode()


def test_a_link_is_replaced_by_rename(tmp_path, calls):
    (tmp_path / "best").symlink_to("step_1")
    (tmp_path / ".best.tmp").symlink_to("left by a killed process")
    replace_link(tmp_path / "best", "step_2")
    assert os.readlink(tmp_path / "best") == "step_2"
    assert calls == [("replace", ".best.tmp", "best")]


def test_a_directory_is_replaced(tmp_path):
    for name in ("source", "target"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    replace_directory(tmp_path / "source", tmp_path / "target")
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == [
        "target",
        "target/source",
    ]


def test_an_output_is_complete_or_absent(tmp_path):
    path = tmp_path / "deep" / "out"
    partial_sibling(path).mkdir(parents=True)  # left by a killed process

    def interrupted():
        with new_output(path) as directory:
            assert os.listdir(directory) == []
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert os.listdir(path.parent) == []
    with new_output(path) as directory:
        (directory / "file").touch()
        assert not path.exists()
    assert os.listdir(path) == ["file"]
    with pytest.raises(ValueError, match="out exists; name a new directory"), new_output(path):
        pass
    assert os.listdir(path) == ["file"]


def test_a_lock_keeps_others_out_until_its_descriptor_is_closed(tmp_path):
    lock = lock_directory(tmp_path)
    with pytest.raises(BlockingIOError):
        lock_directory(tmp_path)
    os.close(lock)
    os.close(lock_directory(tmp_path))


def test_a_lock_ends_with_the_process_that_held_it(tmp_path):
    holder = (
        f"from pathlib import Path; from dataloading.dataset.durable_files import lock_directory; import time; "
        f"lock_directory(Path({str(tmp_path)!r})); print(flush=True); time.sleep(600)"
    )
    other = subprocess.Popen([sys.executable, "-c", holder], cwd=ROOT, stdout=subprocess.PIPE)
    other.stdout.readline()
    with pytest.raises(BlockingIOError):
        lock_directory(tmp_path)
    other.kill()
    other.communicate()
    os.close(lock_directory(tmp_path))


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """Let files end at a size, as on a full disk: the last write is a partial one."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_replaced_file_is_as_before_on_a_full_disk_and_named(tmp_path):
    path = tmp_path / "file"
    replace_text(path, "before")
    with file_size_limit(1000), pytest.raises(OSError, match=r"File too large: '.*\.file\.tmp'"):
        replace_text(path, "x" * 2000)
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["file"]


def test_an_appended_piece_is_complete_or_absent(tmp_path):
    file = AppendedFile(tmp_path / "file", is_text=True)
    file.append(b"one\n")
    with file_size_limit(1000), pytest.raises(OSError, match=r"File too large: '.*/file'"):
        file.append(b"x" * 2000)
    file.append(b"two\n")
    file.sync()
    file.close()
    file.close()
    assert (tmp_path / "file").read_text() == "one\ntwo\n"


@pytest.mark.parametrize("torn", ["", "tor", "\0\0\0"])
def test_a_torn_last_line_is_removed_before_another_is_appended(tmp_path, torn):
    path = tmp_path / "lines"
    append_line(path, "one")
    with path.open("a") as stream:
        stream.write(torn)
    append_line(path, "two")
    assert path.read_text() == "one\ntwo\n"


def test_a_torn_last_line_is_cut_and_a_complete_file_is_not_opened_for_writing(
    tmp_path, monkeypatch
):
    path = tmp_path / "lines"
    for before, after in (("one\ntwo\n", "one\ntwo\n"), ("one\ntw", "one\n"), ("on", ""), ("", "")):
        path.write_text(before)
        cut_incomplete_line(path)
        assert path.read_text() == after

    path.write_text("one\n")
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("opened for writing"))
    cut_incomplete_line(path)
    cut_incomplete_line(tmp_path / "missing")
    # Reading a FIFO would wait without end.
    os.mkfifo(tmp_path / "fifo")
    cut_incomplete_line(tmp_path / "fifo")
    # A pipe would wait for its other end, and /dev/zero has none.
    for path in (tmp_path / "fifo", Path("/dev/zero")):
        with pytest.raises(OSError, match="it is no regular file"):
            append_line(path, "x")


def test_a_file_system_without_locks_raises_an_error_of_its_own(tmp_path, monkeypatch):
    def no_locks(descriptor, operation):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(UnlockableError, match="Operation not supported"):
        lock_directory(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(FileNotFoundError):
        lock_directory(tmp_path / "absent")


HOLD = """
import sys, time
from pathlib import Path
from dataloading.dataset.durable_files import exclusive
with exclusive(Path(sys.argv[1]), "is writing it"):
    print(flush=True)
    time.sleep(600)
"""


def test_an_output_is_held_until_its_process_ends_and_names_it(tmp_path):
    root = tmp_path / "new" / "out"
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(root)], cwd=ROOT, stdout=subprocess.PIPE
    )
    other.stdout.readline()
    message = f"process {other.pid} on {socket.gethostname()} is writing it; wait for it, or choose another output"
    with (
        pytest.raises(ValueError, match=f"^{re.escape(message)}$"),
        exclusive(root, "is writing it"),
    ):
        pass
    with exclusive(tmp_path / "new" / "other", "is writing it") as alone:
        assert alone
    other.kill()
    other.communicate()
    assert os.listdir(root.parent) == [".out.lock"]
    with exclusive(root, "is writing it") as alone:
        assert alone
        assert (
            root.parent / ".out.lock"
        ).read_text() == f"process {os.getpid()} on {socket.gethostname()}"
    assert os.listdir(root.parent) == []


@pytest.mark.parametrize("text", [b"", b"\xff\n\x1b[2J" + b"x" * 1000])
def test_whatever_a_lock_file_holds_the_message_is_one_short_line(tmp_path, text):
    (tmp_path / ".out.lock").write_bytes(text)
    descriptor = os.open(tmp_path / ".out.lock", os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with (
        pytest.raises(ValueError, match="is writing") as refused,
        exclusive(tmp_path / "out", "is writing"),
    ):
        pass
    os.close(descriptor)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("elsewhere", path)])
def test_a_lock_file_that_is_no_file_blocks_nothing_for_ever(tmp_path, make):
    make(tmp_path / ".out.lock")
    with suppress(OSError), exclusive(tmp_path / "out", "is writing"):
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_nothing_is_kept_out_without_locks(tmp_path, monkeypatch):
    def no_locks(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with (
        exclusive(tmp_path / "out", "is writing") as one,
        exclusive(tmp_path / "out", "is writing") as two,
    ):
        assert not one
        assert not two
    assert os.listdir(tmp_path) == []


def test_a_directory_that_was_being_replaced_comes_back(tmp_path):
    root = tmp_path / "out"
    (tmp_path / ".out.replaced-1").mkdir()
    (tmp_path / ".out.replaced-1" / "old").touch()
    clear_leftovers(root)
    assert os.listdir(root) == ["old"]
    (tmp_path / ".out.replaced-2").mkdir()
    clear_leftovers(root)
    assert os.listdir(tmp_path) == ["out"]


def test_only_partial_siblings_that_nobody_writes_are_removed(tmp_path):
    root = tmp_path / "out[1]"
    dead, alive, kept = (partial_sibling(root) for _ in range(3))
    for path in (dead, alive, kept, tmp_path / ".other.partial-0"):
        path.mkdir()
    lock = lock_directory(alive)
    assert clear_leftovers(root, but=kept) == [alive]
    os.close(lock)
    assert {path.name for path in tmp_path.iterdir()} == {alive.name, kept.name, ".other.partial-0"}


@pytest.mark.parametrize("when", ["before the lock", "after the lock"])
def test_several_processes_may_remove_the_same_leftovers(tmp_path, monkeypatch, when):
    dead = partial_sibling(tmp_path / "out")
    dead.mkdir()

    def another_is_faster(path):
        if when == "before the lock":
            shutil.rmtree(path)
        lock = lock_directory(path)
        if when == "after the lock":
            shutil.rmtree(path)
        return lock

    monkeypatch.setattr("dataloading.dataset.durable_files.lock_directory", another_is_faster)
    assert clear_leftovers(tmp_path / "out") == []
    assert list(tmp_path.iterdir()) == []


def test_a_directory_is_restored_if_the_new_one_cannot_be_renamed(tmp_path):
    root = tmp_path / "out"
    root.mkdir()
    (root / "old").touch()
    absent = partial_sibling(root)
    with pytest.raises(FileNotFoundError):
        put_in_place(absent, root)
    assert os.listdir(root) == ["old"]
    absent.mkdir()
    put_in_place(absent, root)
    assert os.listdir(root) == []
    assert os.listdir(tmp_path) == ["out"]


def test_no_other_module_syncs_locks_or_renames():
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        if path.name == "durable_files.py":
            continue
        text = path.read_text()
        if not any(name.rpartition(".")[2] in text for name in [*HERE_ONLY, "rename"]):
            continue
        tree = ast.parse(text)
        used = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert not used & HERE_ONLY, path
        renames = [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        assert "rename" not in renames, path


@pytest.mark.parametrize("function", [sync_file, sync_directory, sync_tree])
def test_a_failed_sync_names_its_path(tmp_path, monkeypatch, function):
    path = tmp_path / "file"
    path.write_text("text")

    def fails(descriptor):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match=re.escape(str(tmp_path))):
        function(path if function is sync_file else tmp_path)
