"""Copies of files and folders of object stores on this machine: complete or absent, and made once.

A copy lies in the user's cache (`XDG_CACHE_HOME`, or `~/.cache`), under a name that depends on the address and on the size
and the time of every file, so that a changed source makes a new copy. A copy that was interrupted keeps its complete files.
Nothing removes old copies; the folder may be deleted when no run uses it.
"""

import hashlib
import json
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache
from pathlib import Path

from dataloading.dataset.durable_files import hold, replace_directory, replace_file, sync_tree
from dataloading.storage.object_store import ObjectStore, StoredFile, is_remote, matching_addresses

THREADS = 8
WAIT_S = 0.2
"""Seconds between looks at a copy that another process makes."""


def cache_directory() -> Path:
    """Return the folder of all copies."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "hybrid-parallel-recsys"


def local_path(path: str | Path) -> Path:
    """Return a path of this machine as it is, and the local copy of an address of an object store.

    Raises ValueError: there is nothing at the address, it cannot be read, or the disk has no room for it.
    """
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
    content = json.dumps([address, sorted((key, *_of(file)) for key, file in files.items())])
    target = cache_directory() / f"{name}-{hashlib.sha256(content.encode()).hexdigest()[:16]}"
    copied = target / name if "" in files else target
    while not target.exists():
        with ExitStack() as stack:
            try:
                stack.enter_context(hold(target, f"is copying {store.address}"))
            except ValueError:  # another process, such as another rank of this node
                time.sleep(WAIT_S)
                continue
            if not target.exists():
                download_folder(store, {key or name: file for key, file in files.items()}, target)
    return copied


def _of(file: StoredFile) -> tuple[int, int]:
    return file.size, file.mtime_ns


def download_folder(store: ObjectStore, files: dict[str, StoredFile], target: Path) -> None:
    """Copy files of a store into the new folder `target`, complete or absent.

    `target`: to write; a copy of these files that was interrupted is continued. Raises ValueError: the store cannot be
    read, or the disk has no room.
    """
    partial = target.with_name(f".{target.name}.partial")
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
