"""Lock of a run directory, so that two runs never read, rename and write one directory at the same time."""

import os
from contextlib import AbstractContextManager, suppress
from datetime import datetime
from itertools import count
from logging import Logger
from pathlib import Path

from dataloading.dataset.durable_files import UnlockableError, lock_directory, lock_file

LOCK_FILE = ".lock"
"""Locked instead of the directory where the file system locks files only, as NFS."""


class RunLock(AbstractContextManager["RunLock"]):
    """Lock of the run directory of this process; a context manager that releases it.

    Only rank 0 takes it, before it reads or renames anything in the directory. The lock ends with the process at the latest.
    """

    def __init__(self, logger: Logger) -> None:
        self.logger = logger
        self._run_dir: Path | None = None
        self._descriptor: int | None = None

    def __exit__(self, *exception: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = self._run_dir = None

    def take(self, run_dir: Path | None) -> None:
        """Lock a directory; do nothing if there is none, or if it does not exist yet.

        Raises ValueError: another process has locked it, or it is no directory.
        """
        if run_dir is None:
            return
        try:
            self._descriptor = _lock(run_dir)
        except FileNotFoundError:
            return
        except NotADirectoryError as error:
            raise ValueError(_cannot_be_created(run_dir, error)) from None
        except UnlockableError as error:
            self.logger.warning(
                f"the file system of run_dir={run_dir} has no locks ({error.strerror}); start no second run there while "
                "this one is running"
            )
        self._run_dir = run_dir

    def create(self, run_dir: Path) -> None:
        """Create a directory and lock it; do nothing if `take` has locked it.

        Raises ValueError: another process has created it since, or it cannot be created.
        """
        if self._run_dir == run_dir:
            return
        try:
            run_dir.parent.mkdir(parents=True, exist_ok=True)
            run_dir.mkdir()
        except FileExistsError as error:
            if not run_dir.is_dir():
                raise ValueError(_cannot_be_created(run_dir, error)) from None
            raise ValueError(
                f"run_dir={run_dir} was created by another process a moment ago; wait until that ends, or set another run_dir"
            ) from None
        except OSError as error:
            raise ValueError(_cannot_be_created(run_dir, error)) from None
        self.take(run_dir)

    def create_new(self, recipe: str) -> Path:
        """Create and lock `runs/<recipe>/<time>`, with a number appended if that exists, and return it.

        Raises ValueError: `runs/<recipe>` cannot be created, for example because it is a file.
        """
        first = Path("runs") / recipe / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
        try:
            first.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(_cannot_be_created(first, error)) from None
        for number in count(1):
            run_dir = first.with_name(f"{first.name}_{number}") if number > 1 else first
            with suppress(FileExistsError):
                run_dir.mkdir()
                break
        self.take(run_dir)
        return run_dir


def is_running(run_dir: Path) -> bool:
    """Return whether a process has locked a run directory: one of this machine, or on NFS of any.

    A free lock is not touched, so that a run which starts at this moment is not kept out; only on NFS it is held for
    microseconds. Processes of other containers are not seen.
    """
    try:
        if _listed_holder(run_dir.stat().st_ino) is not None:
            os.close(lock_directory(run_dir))
        if (run_dir / LOCK_FILE).exists():
            os.close(lock_file(run_dir / LOCK_FILE))
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _lock(run_dir: Path) -> int:
    locked = run_dir
    try:
        if not run_dir.is_dir() and run_dir.exists():
            raise NotADirectoryError(20, "File exists")
        try:
            return lock_directory(run_dir)
        except UnlockableError:
            locked = run_dir / LOCK_FILE
            return lock_file(locked)
    except BlockingIOError:
        # Its id is unknown on another host, in another container and without Linux.
        pid = _listed_holder(locked.stat().st_ino)
        holder = "a process of another host or container" if pid is None else f"process {pid}"
        raise ValueError(
            f"run_dir={run_dir} is in use: {holder} is writing to it; wait until it ends, stop it (SIGTERM saves a "
            "checkpoint), or set another run_dir"
        ) from None


def _listed_holder(inode: int) -> int | None:
    """Return the process that the kernel lists as holder of a lock on an inode; None if it lists none."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/locks").read_text().splitlines():
            _, _, _, _, pid, device_inode, *_ = line.split()
            if device_inode.endswith(f":{inode}") and int(pid) > 0:
                return int(pid)
    return None


def _cannot_be_created(run_dir: Path, error: OSError) -> str:
    return f"run_dir={run_dir} cannot be created ({error.strerror}); set another run_dir"
