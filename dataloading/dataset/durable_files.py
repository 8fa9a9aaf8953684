"""Files and directories that survive a power cut, and are complete or absent: sync, lock, write and rename.

All packages use these functions; no other module calls fsync, flock, os.rename or os.replace.
"""

import errno
import fcntl
import json
import os
import secrets
import shutil
import socket
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import IO, Any

from configs.messages import printable, shortened


class UnlockableError(OSError):
    """The file system cannot lock a directory, as some network file systems."""


def sync_descriptor(descriptor: int) -> None:
    """Make the bytes of an open file survive a power cut."""
    os.fsync(descriptor)


def sync_stream(stream: IO[Any]) -> None:
    """Flush an open file and make its bytes survive a power cut."""
    stream.flush()
    sync_descriptor(stream.fileno())


@contextmanager
def _errors_name(path: Path) -> Iterator[None]:
    """Add the path to an error of the system: that of a write, unlike that of an open, does not name its file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def sync_file(path: Path) -> None:
    """Make the bytes of `path`, which are written already, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with _errors_name(path):
            sync_descriptor(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(directory: Path) -> None:
    """Make the names in `directory` survive a power cut."""
    sync_file(directory)


def sync_tree(directory: Path) -> None:
    """Make all files and names below `directory` survive a power cut."""
    for path in directory.rglob("*"):
        sync_file(path)
    sync_directory(directory)


def write_synced(path: Path, text: str) -> None:
    with _errors_name(path), path.open("w", encoding="utf-8") as stream:
        stream.write(text)
        sync_stream(stream)


def replace_text(path: Path, text: str, *, synced: bool = True) -> None:
    """Write `text` to `path` by rename, so that `path` holds the text before or the complete new one."""
    replace_bytes(path, text.encode(), synced=synced)


def replace_json(path: Path, content: Any) -> None:
    """Write values of JSON as `replace_text` does; ValueError: a number is nan or infinite."""
    replace_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def replace_bytes(path: Path, content: bytes, *, synced: bool = True) -> None:
    """Write `content` to `path` by rename; see `replace_text`. An error leaves no temporary file."""
    temporary = _temporary(path)
    try:
        with _errors_name(temporary), temporary.open("wb") as stream:
            stream.write(content)
            if synced:
                sync_stream(stream)
        os.replace(temporary, path)
    except OSError:
        # On a full disk the next attempt needs the space.
        with suppress(OSError):
            temporary.unlink()
        raise
    if synced:
        sync_directory(path.parent)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")


class AppendedFile:
    """File that grows by complete pieces: a piece that cannot be written completely leaves no part of it.

    Only the last piece can be incomplete, after the process was killed while writing it. `is_text`: whether a last line
    without line end is removed first.
    """

    def __init__(self, path: Path, *, is_text: bool) -> None:
        self.path = path
        if path.exists() and not path.is_file():
            # A pipe would wait for its other end, and a device has no end.
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        if is_text:
            with open(self._descriptor, "rb", closefd=False) as stream:
                num_bytes = stream.read().rfind(b"\n") + 1
            if num_bytes != os.fstat(self._descriptor).st_size:
                os.ftruncate(self._descriptor, num_bytes)

    def append(self, piece: bytes | memoryview) -> None:
        """Append a piece. Raises OSError: with the path; the file is as before."""
        num_bytes = os.fstat(self._descriptor).st_size
        left = memoryview(piece)
        try:
            with _errors_name(self.path):
                while left:
                    left = left[os.write(self._descriptor, left) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._descriptor, num_bytes)
            raise

    def sync(self) -> None:
        """Make all pieces survive a power cut."""
        with _errors_name(self.path):
            sync_descriptor(self._descriptor)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def cut_incomplete_line(path: Path) -> None:
    """Remove a last line without line end, which a killed process has left, from a small text file, if the file exists."""
    # Files of a complete run may be read-only.
    if path.is_file() and path.read_bytes()[-1:] not in (b"", b"\n"):
        AppendedFile(path, is_text=True).close()


def append_line(path: Path, line: str) -> None:
    """Append a line to a small text file, after removing a last line without line end."""
    with closing(AppendedFile(path, is_text=True)) as file:
        file.append(f"{line}\n".encode())


def replace_file(temporary: Path, path: Path) -> None:
    """Rename a complete file to `path`, which it replaces. Not synced."""
    os.replace(temporary, path)


def replace_link(link: Path, target: str) -> None:
    """Make `link` a symbolic link to `target` by rename."""
    temporary = _temporary(link)
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    os.replace(temporary, link)


def replace_directory(source: Path, target: Path) -> None:
    """Remove `target`, if it exists, and rename `source` to it. Not synced."""
    shutil.rmtree(target, ignore_errors=True)
    os.rename(source, target)


def require_absent(output: Path) -> None:
    """Raise ValueError if the option `output` names something that exists."""
    if os.path.lexists(output):
        raise ValueError(f"output={output} exists; name a new directory, or remove that one")


@contextmanager
def new_output(path: Path, check: Callable[[Path], object] = require_absent) -> Iterator[Path]:
    """Yield an empty directory, synced and renamed to `path` at the end of the block; removed after an error.

    `check` refuses what may lie at `path`, before and after the block. Raises ValueError: it does, or another process writes it.
    """
    with exclusive(path, f"is writing {path}") as alone:
        check(path)
        if alone:
            clear_leftovers(path)
        temporary = partial_sibling(path)
        temporary.mkdir()
        try:
            yield temporary
            sync_tree(temporary)
            check(path)
            put_in_place(temporary, path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def edited_copy(directory: Path, changed: Collection[str]) -> Iterator[Path]:
    """Yield a copy of a directory that replaces it at the end of the block.

    `changed`: names of files that the block may change in place; the others are hard links where there can be any.
    """

    def take(source: str, target: str) -> None:
        if os.path.relpath(source, directory) not in changed:
            with suppress(OSError):  # a file system without links
                os.link(source, target, follow_symlinks=False)
                return
        shutil.copy2(source, target)

    with new_output(directory, lambda _: None) as copy:
        try:
            shutil.copytree(directory, copy, symlinks=True, copy_function=take, dirs_exist_ok=True)
        except shutil.Error as error:  # a list of what happened to all files
            raise OSError(error.args[0][0][2]) from None
        yield copy


def lock_directory(directory: Path) -> int:
    """Lock a directory against other processes; return the descriptor that holds the lock until it is closed.

    The lock ends with the process at the latest, however the process ends. `directory`: to lock; only processes that
    lock it too are kept out. Raises BlockingIOError: another process holds the lock; UnlockableError: the file system
    has no locks for directories.
    """
    return _locked(os.open(directory, os.O_RDONLY))


def lock_file(path: Path) -> int:
    """Lock a file, which is created if it is missing; otherwise as `lock_directory`.

    NFS locks files that are open for writing, but no directories.
    """
    return _locked(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666))


def share_directory(directory: Path) -> int:
    """Keep `lock_directory` of other processes from a directory until the descriptor is closed; wait for theirs.

    On a file system without locks it keeps nobody out. Raises FileNotFoundError: there is no such directory.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


@contextmanager
def locked_among(descriptor: int, *, shared: bool) -> Iterator[None]:
    """Hold a lock among the processes that have a file open, shared or alone; the system takes it from one that dies."""
    fcntl.lockf(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.lockf(descriptor, fcntl.LOCK_UN)


def _locked(descriptor: int) -> int:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, OSError) and not isinstance(error, BlockingIOError):
            raise UnlockableError(error.errno, error.strerror) from None
        raise
    return descriptor


@contextmanager
def exclusive(directory: Path, doing: str) -> Iterator[bool]:
    """Keep other processes from writing `directory`, which need not exist, until the block ends.

    The lock is on a file beside it, `.NAME.lock`, that names its holder and is removed at the end. A killed process
    leaves the file, without a lock. The parents of `directory` are created. `directory`: to write; only processes that
    hold it too are kept out. Yields whether others are kept out; False on a file system without locks. Raises
    ValueError: another process holds it; the message names that process and its host.
    """
    absolute = Path(os.path.abspath(directory))
    absolute.parent.mkdir(parents=True, exist_ok=True)
    path = absolute.parent / f".{absolute.name.removeprefix('.')}.lock"
    descriptor, is_locked = _locked_file(path, doing)
    try:
        yield is_locked
    finally:
        # Removed before the lock ends. A process that has opened it meanwhile notices that and opens a new one.
        with suppress(OSError):
            path.unlink()
        os.close(descriptor)


def _locked_file(path: Path, doing: str) -> tuple[int, bool]:
    """Return the descriptor of a file at `path` that exists and is locked, and whether the file system has locks."""
    while True:
        # O_NONBLOCK: opening a FIFO would wait for a reader.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = ""
            with suppress(OSError):  # processes write it right after they lock the file
                text = os.pread(descriptor, 256, 0).decode(errors="replace")
            holder = shortened(printable(text)) or "another process"
            os.close(descriptor)
            raise ValueError(f"{holder} {doing}; wait for it, or choose another output") from None
        except OSError:
            return descriptor, False
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.lstat(path)):
                with suppress(OSError):  # a full disk: the lock holds without the text too
                    os.ftruncate(descriptor, 0)
                    os.pwrite(
                        descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0
                    )
                return descriptor, True
        os.close(descriptor)


def partial_sibling(root: Path) -> Path:
    """Return a new name beside `root` for a directory that is renamed to `root` once it is complete."""
    return root.with_name(f".{root.name}.partial-{secrets.token_hex(4)}")


def clear_leftovers(root: Path, but: Path | None = None) -> list[Path]:
    """Remove what killed processes left beside `root`: partial siblings, and a directory that they were replacing.

    If they were killed between the two renames of `put_in_place`, `root` is missing and gets the latter back. Several processes
    may remove the same leftovers at once. `root`: the directory that those processes wrote; the caller holds it, so nobody else
    writes it. Returns the siblings that another process has locked; they stay too, as do those of another user.
    """
    for replaced in sorted(root.parent.glob(f".{escape(root.name)}.replaced-*")):
        if root.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            with suppress(FileNotFoundError):
                os.rename(replaced, root)
    locked = []
    for leftover in sorted(root.parent.glob(f".{escape(root.name)}.partial-*")):
        if leftover == but:
            continue
        try:
            lock = lock_directory(leftover)
        except (FileNotFoundError, PermissionError):  # removed meanwhile, or of another user
            continue
        except BlockingIOError:
            locked.append(leftover)
            continue
        except UnlockableError:
            lock = None
        try:
            with suppress(FileNotFoundError, PermissionError):
                shutil.rmtree(leftover)
        finally:
            if lock is not None:
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
