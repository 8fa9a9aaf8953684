"""Copies of files and folders of object stores on this machine: complete or absent, and made once.

A copy lies in the user's cache (`XDG_CACHE_HOME`, or `~/.cache`), under a name that depends on the address and on the size
and the time of every file, so that a changed source makes a new copy. A copy that was interrupted keeps its complete files.
The copies have a bound: those that were used last longest ago make room for a new one, unless a process uses them.
"""

import hashlib
import json
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path

from dataloading.dataset.durable_files import (
    UnlockableError,
    exclusive,
    lock_directory,
    replace_directory,
    replace_file,
    share_directory,
    sync_tree,
)
from dataloading.storage.object_store import ObjectStore, StoredFile, is_remote, matching_addresses

THREADS = 8
WAIT_S = 0.2
"""Seconds between looks at a copy that another process makes."""
OUTPUTS = "outputs"
"""Folder among the copies with what is still to be uploaded, which is no copy."""
DISK_SHARE = 0.8
"""Of its disk that the copies may take, unless RECSYS_CACHE_GIB says how much."""


def cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "hybrid-parallel-recsys"


def local_path(path: str | Path) -> Path:
    """Return a path of this machine as it is, or the local copy of an address; ValueError if there is none, or no room for it."""
    return _local_copy(str(path)) if is_remote(str(path)) else Path(path)


def local_paths(pattern: str) -> list[Path]:
    """Return the local copies of the files at an address, which may be a pattern; see `local_path`."""
    return [local_path(address) for address in matching_addresses(pattern)]


@cache
def _local_copy(address: str) -> Path:
    """Copy what is at `address`, unless an equal copy is there; other processes wait for the one that copies."""
    store = ObjectStore(address)
    files = store.list_files()
    name = store.path.rpartition("/")[2]
    states = sorted((key, file.size, file.mtime_ns) for key, file in files.items())
    content = json.dumps([address, states])
    target = cache_directory() / f"{name}-{hashlib.sha256(content.encode()).hexdigest()[:16]}"
    copied = target / name if "" in files else target
    while not _use(target):
        with ExitStack() as stack:
            try:
                stack.enter_context(exclusive(target, f"is copying {store.address}"))
            except ValueError:  # another process, such as another rank of this node
                time.sleep(WAIT_S)
                continue
            if not target.exists():
                partial = partial_of(target)
                partial.mkdir(parents=True, exist_ok=True)
                if not _use(partial):
                    continue
                needed = sum(file.size for file in files.values()) - _size(partial)
                try:
                    _make_room(needed, store.address)
                except FileNotFoundError:  # another process removes copies too
                    continue
                download_folder(store, {key or name: file for key, file in files.items()}, target)
    return copied


def _use(copy: Path) -> bool:
    """Make a copy the last one used, and keep others from removing it while this process lives; False if it is missing."""
    try:
        descriptor = share_directory(copy)
    except FileNotFoundError:
        return False
    with suppress(OSError):  # of another user, or on a disk that is only read
        os.utime(descriptor)
    with suppress(FileNotFoundError):  # removed while this process waited for the lock
        if os.path.samestat(os.fstat(descriptor), copy.stat()):
            return True
    os.close(descriptor)
    return False


def _make_room(needed: int, address: str) -> None:
    """Remove the copies last used longest ago until `needed` bytes are within the bound and fit; ValueError if they never do."""
    cache = cache_directory()
    disk, gib = shutil.disk_usage(cache), os.environ.get("RECSYS_CACHE_GIB")
    most = float(gib) * 2**30 if gib else disk.total * DISK_SHARE
    copies = [path for path in cache.iterdir() if path.is_dir() and path.name != OUTPUTS]
    room = min(most - sum(map(_size, copies)), disk.free)
    for path in sorted(copies, key=lambda path: path.stat().st_mtime):
        if needed <= room or needed > most:
            break
        with suppress(BlockingIOError, UnlockableError):  # a process may use it
            lock = lock_directory(path)
            room += _size(path)
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)
    if needed > room:
        raise ValueError(
            f"{address} needs {needed / 2**30:,.1f} GiB in {cache}, where {max(room, 0) / 2**30:,.1f} GiB of {most / 2**30:,.1f} "
            "are free, and copies of running commands stay; set RECSYS_CACHE_GIB to more, or XDG_CACHE_HOME to a folder with room"
        )


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def partial_of(target: Path) -> Path:
    """Return where a copy lies until it is complete."""
    return target.with_name(f".{target.name}.partial")


def download_folder(store: ObjectStore, files: dict[str, StoredFile], target: Path) -> None:
    """Copy files of a store into the new folder `target`, complete or absent; continues what was interrupted."""
    partial = partial_of(target)
    partial.mkdir(parents=True, exist_ok=True)
    missing = {name: file for name, file in files.items() if not (partial / name).exists()}
    needed, free = sum(file.size for file in missing.values()), shutil.disk_usage(partial).free
    if needed > free:
        raise ValueError(
            f"{store.address} needs {needed / 2**30:,.1f} GiB in {target.parent}, which has "
            f"{free / 2**30:,.1f} GiB free; set XDG_CACHE_HOME to a folder with room"
        )

    def fetch(item: tuple[str, StoredFile]) -> None:
        name, file = item
        path = partial / name
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.tmp")
        store.download(file, unfinished)
        size = unfinished.stat().st_size
        if size != file.size:
            raise ValueError(
                f"{store.address}: {name} changed while it was copied ({size} bytes, {file.size} before); rerun the command"
            )
        # The time of the source, by which a run recognises the files that it was trained on.
        os.utime(unfinished, ns=(file.mtime_ns, file.mtime_ns))
        replace_file(unfinished, path)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(fetch, missing.items()))
    sync_tree(partial)
    replace_directory(partial, target)
