"""Mirror of a run directory on an object store, with its checkpoints, deltas and records; the machine may be lost."""

import os
from contextlib import suppress
from logging import Logger
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock, Thread

from dataloading.dataset.durable_files import replace_link
from dataloading.storage.local_copy import download_folder
from dataloading.storage.object_store import ObjectStore
from dataloading.storage.upload import upload_folder
from nn.checkpoint.directory import (
    BEST,
    CHECKPOINTS,
    DELTAS,
    RUN_FILE,
    finish_commits,
    list_checkpoints,
    remove,
    step_of,
)

FOLDERS = (DELTAS, CHECKPOINTS)
"""In the order in which they are copied: a checkpoint names the delta that leads to it."""


class CheckpointMirror:
    """Uploads of checkpoints and deltas by a thread of rank 0; replaced ones are skipped, and the next save tries again."""

    def __init__(self, run_dir: Path, address: str, logger: Logger) -> None:
        self._run_dir = run_dir
        self._store = ObjectStore(address)
        self._logger = logger
        self._thread: Thread | None = None
        self._starting = Lock()  # checkpoints and deltas have a thread each
        self._is_behind = False
        # run.json of what the mirror has, by its name there.
        self._uploaded: dict[str, bytes] = {}
        # Folders that were removed from the mirror; some stores keep their empty folders.
        self._removed: set[str] = set()

    def check(self) -> None:
        """Upload the configuration, so that an address that cannot be written is refused at the start, by a ValueError."""
        for path in self._run_dir.glob("config.yaml"):
            self._store.upload(path, path.name)

    def start(self) -> None:
        """Upload what is new, beside the caller; call it when a checkpoint or delta is complete."""
        self._is_behind = True
        with self._starting:
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
        checkpoints = list_checkpoints(self._run_dir / CHECKPOINTS)
        # The oldest first: a chain with a gap leads nowhere.
        deltas = list_checkpoints(self._run_dir / DELTAS)[::-1]
        # Before these checkpoints: a run that resumes cuts records beyond its checkpoint, and cannot make those that lack.
        for path in sorted(self._run_dir.iterdir()):
            if path.is_file() and not path.name.startswith("."):
                with suppress(FileNotFoundError):  # removed meanwhile
                    self._store.upload(path, path.name)
        for folder, paths in zip(FOLDERS, (deltas, checkpoints), strict=True):
            self._upload_steps(folder, {f"{folder}/{path.name}": path for path in paths})
        best = self._run_dir / CHECKPOINTS / BEST
        if best.is_symlink():
            # As a file with its name: an object store has no links.
            with TemporaryDirectory() as directory:
                named = Path(directory) / BEST
                named.write_text(os.readlink(best) + "\n")
                self._store.upload(named, f"{CHECKPOINTS}/{BEST}")

    def _upload_steps(self, folder: str, local: dict[str, Path]) -> None:
        self._removed -= local.keys()
        found = {f"{folder}/{name}" for name in self._store.folders(folder)} - self._removed
        for name, path in local.items():
            if name in found and self._is_same(name, path):
                continue
            try:
                upload_folder(path, self._store, RUN_FILE, f"{name}/")
            except FileNotFoundError:
                # Pruned meanwhile, since a newer one is complete.
                continue
        # Also parts of what a kill has left incomplete.
        for name in found - local.keys():
            self._store.remove(f"{name}/{RUN_FILE}")
            self._store.remove_folder(name)
            self._removed.add(name)
            self._uploaded.pop(name, None)

    def _is_same(self, name: str, path: Path) -> bool:
        """Return whether the mirror's checkpoint or delta is that of the run directory, which may have saved it again."""
        try:
            own = (path / RUN_FILE).read_bytes()
        except FileNotFoundError:  # pruned meanwhile
            return True
        if self._uploaded.get(name) != own:
            file = f"{name}/{RUN_FILE}"
            if not self._store.has(file) or self._store.read(file) != own:
                return False
            self._uploaded[name] = own
        return True


def complete_steps(store: ObjectStore, folder: str) -> list[str]:
    """Return the complete checkpoints or deltas of a mirror, as `FOLDER/step_N`, oldest first."""
    names = [f"{folder}/{name}" for name in store.folders(folder) if name.startswith("step_")]
    complete = (name for name in names if store.has(f"{name}/{RUN_FILE}"))
    return sorted(complete, key=lambda name: step_of(Path(name)))


def catch_up(run_dir: Path, address: str | None, logger: Logger) -> None:
    """Complete what a killed run has committed, and copy what the locked run directory lacks from its mirror, if it has one."""
    finish_commits(run_dir / CHECKPOINTS)
    step = None if address is None else fetch_run(run_dir, address)
    if step is not None:
        logger.info(f"checkpoints up to step {step:,} were copied from checkpoint.mirror")


def fetch_run(run_dir: Path, address: str) -> int | None:
    """Copy checkpoints and records from a mirror that is ahead; return the step of the newest one, None if it is not."""
    store, checkpoints = ObjectStore(address), run_dir / CHECKPOINTS
    stored = {folder: complete_steps(store, folder) for folder in FOLDERS}
    newest = max((step_of(Path(name)) for name in stored[CHECKPOINTS]), default=-1)
    if newest <= max((step_of(path) for path in list_checkpoints(checkpoints)), default=-1):
        return None
    checkpoints.mkdir(parents=True, exist_ok=True)
    files = store.list_files()
    for name, file in files.items():
        if "/" not in name:
            store.download(file, run_dir / name)
    # Mirrors of earlier versions do not say which is the best.
    if f"{CHECKPOINTS}/{BEST}" in files:
        best = checkpoints / f".{BEST}.name"
        store.download(files[f"{CHECKPOINTS}/{BEST}"], best)
        target = best.read_text().strip()
        if f"{CHECKPOINTS}/{target}" in stored[CHECKPOINTS]:
            replace_link(checkpoints / BEST, target)
        best.unlink()
    # The newest checkpoint last: if this is interrupted, the run directory is still behind.
    for name in (name for folder in FOLDERS for name in stored[folder]):
        facts = run_dir / name / RUN_FILE
        # Deltas of a machine that went on without the mirror are others of the same steps.
        if not facts.exists() or facts.read_bytes() != store.read(f"{name}/{RUN_FILE}"):
            if (run_dir / name).exists():
                remove(run_dir / name)
            source = ObjectStore(f"{address.rstrip('/')}/{name}")
            download_folder(source, source.list_files(), run_dir / name)
    return newest
