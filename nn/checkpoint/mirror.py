"""Mirror of a run directory on an object store: its checkpoints and records, for machines whose disks do not outlive them."""

import os
from collections.abc import Set
from contextlib import suppress
from logging import Logger
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread

from dataloading.dataset.durable_files import replace_link
from dataloading.storage.local_copy import download_folder
from dataloading.storage.object_store import ObjectStore
from dataloading.storage.upload import upload_folder
from nn.checkpoint.directory import (
    BEST,
    CHECKPOINTS,
    RUN_FILE,
    finish_commits,
    list_checkpoints,
    step_of,
)


class CheckpointMirror:
    """Uploads of checkpoints by a thread of rank 0, while the training continues.

    A checkpoint that is replaced before it has been uploaded is skipped. An upload that fails is reported in one line, and
    the next save tries again.
    """

    def __init__(self, run_dir: Path, address: str, logger: Logger) -> None:
        self._run_dir = run_dir
        self._store = ObjectStore(address)
        self._logger = logger
        self._thread: Thread | None = None
        self._is_behind = False
        # run.json of checkpoints that the mirror has.
        self._uploaded: dict[str, bytes] = {}
        # Checkpoints that were removed from the mirror; some stores keep their empty folders.
        self._removed: set[str] = set()

    def check(self) -> None:
        """Upload the configuration of the run, so that an address that cannot be written is refused at the start.

        Raises ValueError: it cannot be written.
        """
        for path in self._run_dir.glob("config.yaml"):
            self._store.upload(path, path.name)

    def start(self) -> None:
        """Upload what is new, beside the caller; call it when a checkpoint is complete."""
        self._is_behind = True
        if self._thread is None or not self._thread.is_alive():
            self._thread = Thread(target=self._follow, name="checkpoint-mirror", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Wait until the newest checkpoint is uploaded, or its upload has failed."""
        if self._thread is not None:
            self._thread.join()
        if self._is_behind:  # a save between the last look of the thread and its end
            self._follow()

    def _follow(self) -> None:
        while self._is_behind:
            self._is_behind = False
            try:
                self._upload()
            except (OSError, ValueError) as error:
                self._logger.warning(
                    f"the mirror of the checkpoints could not be written: {error}. The run continues, and the next save "
                    "tries again"
                )

    def _upload(self) -> None:
        local = {path.name: path for path in list_checkpoints(self._run_dir / CHECKPOINTS)}
        # Before these checkpoints: a run that resumes cuts records beyond its checkpoint, and cannot make those that lack.
        self._upload_records()
        self._removed -= local.keys()
        stored = set(complete_checkpoints(self._store, self._removed))
        for name, path in local.items():
            if name in stored and self._is_same(path):
                continue
            try:
                upload_folder(path, self._store, RUN_FILE, f"{CHECKPOINTS}/{name}/")
            except FileNotFoundError:
                # Pruned meanwhile, since a newer one is complete.
                continue
        self._upload_best()
        # Also parts of what a kill has left incomplete.
        for name in set(self._store.folders(CHECKPOINTS)) - set(local) - self._removed:
            self._store.remove(f"{CHECKPOINTS}/{name}/{RUN_FILE}")
            self._store.remove_folder(f"{CHECKPOINTS}/{name}")
            self._removed.add(name)

    def _upload_records(self) -> None:
        for path in sorted(self._run_dir.iterdir()):
            if path.is_file() and not path.name.startswith("."):
                with suppress(FileNotFoundError):  # removed meanwhile
                    self._store.upload(path, path.name)

    def _is_same(self, path: Path) -> bool:
        """Return whether the mirror's checkpoint of a step is that of the run directory, which may have saved it again."""
        try:
            own = (path / RUN_FILE).read_bytes()
        except FileNotFoundError:  # pruned meanwhile
            return True
        if self._uploaded.get(path.name) != own:
            if self._store.read(f"{CHECKPOINTS}/{path.name}/{RUN_FILE}") != own:
                return False
            self._uploaded[path.name] = own
        return True

    def _upload_best(self) -> None:
        """Upload which checkpoint `best` links to, as a file with its name: an object store has no links."""
        best = self._run_dir / CHECKPOINTS / BEST
        if not best.is_symlink():
            return
        with TemporaryDirectory() as folder:
            named = Path(folder) / BEST
            named.write_text(os.readlink(best) + "\n")
            self._store.upload(named, f"{CHECKPOINTS}/{BEST}")


def complete_checkpoints(store: ObjectStore, without: Set[str] = frozenset()) -> list[str]:
    """Return the names of the complete checkpoints of a mirror, oldest first; those in `without` are not looked at."""
    found = set(store.folders(CHECKPOINTS)) - without
    names = [name for name in found if name.startswith("step_")]
    complete = (name for name in names if store.has(f"{CHECKPOINTS}/{name}/{RUN_FILE}"))
    return sorted(complete, key=lambda name: step_of(Path(name)))


def catch_up(run_dir: Path, address: str | None, logger: Logger) -> None:
    """Complete what a killed run has committed, and copy what a run directory lacks from its mirror, if it has one.

    The run directory must be locked. Raises ValueError: the mirror cannot be read.
    """
    finish_commits(run_dir / CHECKPOINTS)
    step = None if address is None else fetch_run(run_dir, address)
    if step is not None:
        logger.info(f"checkpoints up to step {step:,} were copied from checkpoint.mirror")


def fetch_run(run_dir: Path, address: str) -> int | None:
    """Copy checkpoints and records from a mirror that is ahead of the run directory.

    Returns the step of the newest checkpoint that was copied; None if the run directory is not behind. Raises ValueError: the
    mirror cannot be read.
    """
    store, folder = ObjectStore(address), run_dir / CHECKPOINTS
    stored = complete_checkpoints(store)
    local = [path.name for path in list_checkpoints(folder)]
    newest = max((step_of(Path(name)) for name in stored), default=-1)
    if newest <= max((step_of(Path(name)) for name in local), default=-1):
        return None
    folder.mkdir(parents=True, exist_ok=True)
    files = store.list_files()
    for name, file in files.items():
        if "/" not in name:
            store.download(file, run_dir / name)
    # Mirrors of earlier versions do not say which is the best.
    if f"{CHECKPOINTS}/{BEST}" in files:
        best = folder / f".{BEST}.name"
        store.download(files[f"{CHECKPOINTS}/{BEST}"], best)
        if (target := best.read_text().strip()) in stored:
            replace_link(folder / BEST, target, folder / f".{BEST}.tmp")
        best.unlink()
    # The newest last: if this is interrupted, the run directory is still behind.
    for name in stored:
        if name not in local:
            source = ObjectStore(f"{address.rstrip('/')}/{CHECKPOINTS}/{name}")
            download_folder(source, source.list_files(), folder / name)
    return newest
