"""Uploads to object stores: a folder whose last file tells that it is complete, or one file.

A store shows a file when all of its bytes have arrived. Of a folder, one file is uploaded after all others: the one without
which no reader takes the folder for complete.
"""

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

from dataloading.storage.local_copy import OUTPUTS, THREADS, cache_directory
from dataloading.storage.object_store import ObjectStore, is_remote


def upload_folder(folder: Path, store: ObjectStore, last: str, prefix: str = "") -> None:
    """Upload all files below `folder` to `prefix`, the file `last` after all others; ValueError: the store cannot be written.

    A file `last` of an earlier upload is removed first, so that a mixture of both never looks complete.
    """
    store.remove(f"{prefix}{last}")
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    with ThreadPoolExecutor(THREADS) as pool:
        others = (name for name in names if name != last)
        list(pool.map(lambda name: store.upload(folder / name, f"{prefix}{name}"), others))
    if last in names:
        store.upload(folder / last, f"{prefix}{last}")


@contextmanager
def writable(output: str, last: str, overwrite: bool = False) -> Iterator[Path]:
    """Yield the path that a command writes as its `output`; what it wrote at an address is uploaded at the end.

    The path of an address is in the cache and depends on the address alone, so that a command that resumes finds its work.
    `last`: file without which a folder is not complete; not used if the command writes one file. `overwrite`: whether something
    complete may be there. Raises ValueError: something complete is there already, or the store cannot be written.
    """
    if not is_remote(output):
        yield Path(output)
        return
    store = ObjectStore(output)
    if not overwrite and (store.has(last) or store.has("")):
        raise ValueError(f"{store.address} exists already; choose another output, or remove it")
    path = path_before_upload(output)
    yield path
    try:
        if path.is_dir():
            upload_folder(path, store, last)
        else:
            store.upload(path, "")
    except ValueError as error:
        raise ValueError(f"{error}. What was to be uploaded is complete in {path}") from None
    shutil.rmtree(path.parent)


def path_before_upload(output: str) -> Path:
    """Return the path in the cache of what is uploaded to an address; the folder that it lies in exists, and is its own."""
    folder = cache_directory() / OUTPUTS / sha256(output.encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    return folder / ObjectStore(output).path.rpartition("/")[2]
