"""Files and directories that survive a power cut, and are complete or absent: sync, lock, write and rename.

All packages use these functions; no other module calls fsync, flock, os.rename or os.replace.
"""

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import IO, Any


class UnlockableError(OSError):
    """The file system cannot lock a directory, as some network file systems."""


def sync_descriptor(descriptor: int) -> None:
    """Make the bytes of an open file survive a power cut."""
    os.fsync(descriptor)


def sync_stream(stream: IO[Any]) -> None:
    """Flush an open file and make its bytes survive a power cut."""
    stream.flush()
    sync_descriptor(stream.fileno())


def sync_file(path: Path) -> None:
    """Make the bytes of `path`, which are written already, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        sync_descriptor(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(directory: Path) -> None:
    """Make the names in `directory` survive a power cut."""
    sync_file(directory)


def write_synced(path: Path, text: str) -> None:
    """Write a small text file, synced."""
    with path.open("w", encoding="utf-8") as stream:
        stream.write(text)
        sync_stream(stream)


def replace_text(path: Path, text: str, temporary: Path, *, synced: bool = True) -> None:
    """Write `text` to `path` by rename, so that `path` holds the text before or the complete new one.

    Args:
        path: file to replace or to make.
        text: its content.
        temporary: file in the same directory that is written first.
        synced: sync the file before the rename and its directory after it.
    """
    if synced:
        write_synced(temporary, text)
    else:
        temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
    if synced:
        sync_directory(path.parent)


def replace_link(link: Path, target: str, temporary: Path) -> None:
    """Make `link` a symbolic link to `target` by rename; `temporary` lies in the same directory."""
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    os.replace(temporary, link)


def replace_directory(source: Path, target: Path) -> None:
    """Remove `target`, if it exists, and rename `source` to it. Not synced."""
    shutil.rmtree(target, ignore_errors=True)
    os.rename(source, target)


@contextmanager
def new_directory(path: Path, temporary: Path) -> Iterator[Path]:
    """Yield `temporary`, empty; rename it to `path` at the end of the block, or remove it after an error.

    `path` must not exist. Not synced.
    """
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        os.rename(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def lock_directory(directory: Path, *, wait: bool = False) -> int:
    """Lock a directory against other processes; return the descriptor that holds the lock until it is closed.

    The lock ends with the process at the latest, however the process ends.

    Args:
        directory: to lock; only processes that lock it too are kept out.
        wait: wait until no other process holds the lock.

    Raises:
        BlockingIOError: another process holds the lock.
        UnlockableError: the file system has no locks for directories.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, OSError) and not isinstance(error, BlockingIOError):
            raise UnlockableError(error.errno, error.strerror) from None
        raise
    return descriptor


def partial_sibling(root: Path) -> Path:
    """Return a new name beside `root` for a directory that is renamed to `root` once it is complete."""
    return root.with_name(f".{root.name}.partial-{secrets.token_hex(4)}")


def clear_leftovers(root: Path, but: Path | None = None) -> list[Path]:
    """Remove the partial siblings of `root` that killed processes left.

    Args:
        root: the directory that those processes wrote.
        but: a sibling that stays.

    Returns:
        The siblings that another process has locked; they stay too.
    """
    locked = []
    for leftover in sorted(root.parent.glob(f".{escape(root.name)}.partial-*")):
        if leftover == but:
            continue
        try:
            lock = lock_directory(leftover)
        except BlockingIOError:
            locked.append(leftover)
            continue
        try:
            shutil.rmtree(leftover)
        finally:
            os.close(lock)
    return locked


def put_in_place(partial: Path, root: Path) -> None:
    """Rename `partial` to `root`; a directory at `root` is removed only after the new one is in place."""
    replaced = partial.with_name(partial.name.replace(".partial-", ".replaced-"))
    if root.exists():
        os.rename(root, replaced)
    try:
        os.rename(partial, root)
    except OSError:
        if replaced.exists():
            os.rename(replaced, root)
        raise
    sync_directory(root.parent)
    shutil.rmtree(replaced, ignore_errors=True)
