"""The version of a model that serves, and the search for a better one."""

import os
import random
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from configs.messages import shown
from dataloading.dataset.documents import read_regular
from serving.inference.model import Sampled, ServedModel
from serving.inference.model_rows import RaggedIds, Rows
from serving.inference.raw_values import RawValues
from serving.inference.requests import IdInputs
from serving.manifest import MANIFEST, Manifest, ModelError
from serving.versions import Deciding, list_versions, read_complete

SINGLE = "1"
"""Version of a model directory that is not in a directory of versions."""
MOST_THREADS = 8
"""Most threads that compare files before the first version serves."""
_Files = tuple[tuple[str, int, int], ...]


class Model(Protocol):
    """A model directory that is loaded, on some device."""

    manifest: Manifest
    raw: RawValues | None
    id_inputs: IdInputs
    sampled: Sampled

    def scores(self, *parts: Rows) -> Tensor:
        """Return the scores of rows, one part after another, float32 [B, O] in host memory."""


LoadModel = Callable[[Path, Manifest], Model]


class _OtherInterface(ModelError):
    """A version is whole, and clients of the one that decides would send it something wrong."""


@dataclass(frozen=True, slots=True, eq=False)
class Version:
    name: str  # its number, which may be used again once it is withdrawn
    model: Model
    identity: str  # of its weights, vocabularies and transformation


def load_version(
    directory: Path,
    name: str,
    decided: Deciding | None,
    *,
    load: LoadModel = ServedModel.load,
    verify: bool = True,
    threads: int = 1,
) -> Version:
    """Verify and load a version, and score a row with it.

    `decided`: the version whose inputs, outputs and ids of values it must have; None accepts any. `verify`: compare the
    SHA-256 of every file, not only its size. Raises ValueError: it is damaged, does not score, scores no finite number, or
    has another interface.
    """
    manifest = read_complete(directory)
    differing = [] if decided is None else decided.differing(directory, manifest)
    if decided is not None and differing:
        raise _OtherInterface(
            f"{directory} has other {' and '.join(differing)} than version {decided.name}, which decides; serve it from another "
            f"directory, or withdraw the versions before it (python -m serving.rollback before={name})"
        )
    if verify:
        manifest.verify(directory, threads)
    model = load(directory, manifest)
    one = torch.zeros(1, dtype=torch.int64)
    row = Rows(
        torch.zeros(1, len(manifest.numerical)),
        torch.zeros(1, manifest.id_columns, dtype=torch.int64),
        {feature.name: RaggedIds(one, one + 1) for feature in manifest.ragged},
        numbers={
            name: RaggedIds(torch.ones(1), one + 1)
            for sequence in manifest.sequences
            for name in sequence.numbers
        },
    )
    try:
        score = model.scores(row)
    except Exception as error:
        raise ModelError(f"{directory} does not score a row: {shown(str(error))}") from error
    if score.shape != (1, len(manifest.outputs)):
        raise ModelError(
            f"{directory} has {len(manifest.outputs)} outputs, and scores {list(score.shape)}"
        )
    if not score.isfinite().all():
        raise ModelError(
            f"{directory} scores a row of zeros as {score.flatten().tolist()}, want finite numbers; export a checkpoint of a "
            "training that has not diverged"
        )
    return Version(name, model, manifest.identity)


@dataclass(slots=True)
class _Refused:
    tried: _Files  # its files when it was
    seen: _Files  # its files at the last look
    decided: Deciding | None


class Versions:
    """The version that serves, and the search for a better one.

    `directory`: a model directory, or a directory of versions. `verify`: compare the SHA-256 of every file, not only its size.
    `canary_share`: share of requests that the newest version answers, the one before it the others; None: all. `serving`: those
    that serve, newest first. `swaps`: number of changes of the newest. Raises ValueError: there is no version that can serve.
    """

    def __init__(
        self,
        directory: Path,
        log: Callable[[str], None],
        *,
        load: LoadModel = ServedModel.load,
        verify: bool = True,
        canary_share: float | None = None,
    ) -> None:
        self._directory, self._log = directory, log
        self._load, self._verify = load, verify
        self._canary_share = canary_share
        self._is_single = (directory / MANIFEST).exists()
        self._refused: dict[str, _Refused] = {}
        self._complete: dict[str, tuple[_Files, Manifest]] = {}
        # Files and deciding version of those that serve, when they were last compared.
        self._compared: dict[str, tuple[_Files, Deciding | None]] = {}
        self.refused = self.swaps = 0
        # All cores: nothing is served yet that would wait for them.
        threads = min(os.cpu_count() or 1, MOST_THREADS)
        if self._is_single:
            self.serving = [
                load_version(directory, SINGLE, None, load=load, verify=verify, threads=threads)
            ]
            return
        self.serving = self._newest([], threads)
        if not self.serving:
            names = ", ".join(self._refused) or "none"
            raise ValueError(
                f"{directory} is no model directory and has no version that can serve (refused: {names}); write one "
                f"with python -m serving.export output={directory}/1"
            )

    @property
    def current(self) -> Version:
        return self.serving[0]

    @property
    def name(self) -> str:
        """The name of the model in requests."""
        return self.current.model.manifest.name

    def shares(self) -> list[tuple[Version, float]]:
        """Return the versions that serve with the share of requests that each answers, newest first."""
        serving, share = self.serving, self._canary_share
        if share is None or len(serving) < 2:
            return [(serving[0], 1.0)]
        return [(serving[0], share), (serving[1], 1 - share)]

    def choose(self, key: str | None) -> Version:
        """Return the version that answers a request: requests of one key are answered by the same one."""
        (newest, share), *others = self.shares()
        if not others:
            return newest
        # The version too, so that not the same keys are the first to meet each.
        text = f"{newest.name} {key}".encode()
        draw = random.random() if key is None else zlib.crc32(text) / 2**32
        return newest if draw < share else others[0][0]

    def update(self) -> bool:
        """Look for a newer version, or an older one after a rollback; return whether another one serves now."""
        if self._is_single:
            return False
        try:
            serving = self._newest(self.serving)
        except (ValueError, OSError) as error:
            self._log(f"versions cannot be read: {error}; {self.current.name} serves on")
            return False
        before, self.serving = self.current, serving
        found = self.current
        if found is before:
            return False
        differing = found.model.manifest.differing(before.model.manifest.interface())
        more = f", which has other {' and '.join(differing)}" if differing else ""
        if found.name == before.name:
            more += (
                f": its number is used again, by the model {found.identity} after {before.identity}"
            )
        (_, share), *others = self.shares()
        if others:
            more += f" in {share:.3g} of the requests; {others[0][0].name} answers the others"
        self._log(f"version {found.name} replaces {before.name}{more}")
        self.swaps += 1
        return True

    def _newest(self, serving: Sequence[Version], threads: int = 1) -> list[Version]:
        """Return the newest versions that can serve, as many as may at a time; a refusal is reported once.

        What serves depends on the directory alone, not on `serving`: a server that starts again must decide the same. So the
        number of a version says nothing of what is in it. But one that serves is not replaced by an older one because its
        directory is damaged, as long as that is no other model: it is in memory, and so is what it decides.
        """
        names = list_versions(self._directory)
        self._refused = {name: self._refused[name] for name in names if name in self._refused}
        decided = self._deciding(names, serving)
        found: list[Version] = []
        for name in names:
            if len(found) == (1 if self._canary_share is None else 2):
                break
            path = self._directory / name
            files = _files_of(path)
            loaded = next((version for version in serving if version.name == name), None)
            if self._is_tried(name, files, decided):
                found += [loaded] if loaded is not None else []
                continue
            if loaded is not None and self._is_unchanged(loaded, path, files, decided):
                found.append(loaded)
                continue
            try:
                version = load_version(
                    path, name, decided, load=self._load, verify=self._verify, threads=threads
                )
                if _files_of(path) != files:
                    raise ModelError(f"{path} has changed while it was loaded")
            except (ValueError, OSError) as error:
                self._refused[name] = _Refused(files, files, decided)
                if loaded is not None and not isinstance(error, _OtherInterface):
                    self._log(
                        f"version {name} cannot be loaded again: {error}; it serves on as it was loaded, but a mapped file that "
                        "was overwritten in place has its new bytes; write the next version, or withdraw this one"
                    )
                    found.append(loaded)
                    continue
                self.refused += 1
                more = "" if not serving or loaded else f"; {serving[0].name} serves on"
                self._log(f"version {name} is refused: {error}{more}")
            else:
                self._refused.pop(name, None)
                self._compared[name] = files, decided
                found.append(version)
        return found or list(serving)

    def _is_unchanged(
        self, version: Version, path: Path, files: _Files, decided: Deciding | None
    ) -> bool:
        """Return whether the directory of a version that serves still holds it, and whether it may still serve."""
        files_before, decided_before = self._compared[version.name]
        try:
            if files != files_before:
                manifest = read_complete(path)
                if manifest.identity != version.identity:
                    return False
                if self._verify:
                    manifest.verify(path)
            if (
                decided is not None
                and decided != decided_before
                and decided.differing(path, version.model.manifest)
            ):
                return False
        except (ValueError, OSError):
            return False
        self._compared[version.name] = files, decided
        return True

    def _is_tried(self, name: str, files: _Files, decided: Deciding | None) -> bool:
        """Return whether a version was refused as it is, or is still being written: its files changed since the last look."""
        refused = self._refused.get(name)
        if refused is None or refused.decided != decided:
            return False
        is_changing, refused.seen = files != refused.seen, files
        return is_changing or files == refused.tried

    def _deciding(self, names: Sequence[str], serving: Sequence[Version]) -> Deciding | None:
        """Return the lowest-numbered version that is complete, or serves."""
        for name in reversed(names):
            path = self._directory / name
            files = _files_of(path)
            known = self._complete.get(name)
            if known is None or known[0] != files:
                try:
                    known = files, read_complete(path)
                except ModelError:
                    loaded = [version for version in serving if version.name == name]
                    if not loaded:
                        continue
                    known = files, loaded[0].model.manifest
            self._complete = {name: known}
            return Deciding(name, path, known[1])
        return None


def _files_of(path: Path) -> _Files:
    """Return name, size and time of change of every file of a version, and a checksum of its manifest.

    Copies of artifacts may all have one time of change.
    """
    found = []
    for folder, _, names in os.walk(path):
        for name in names:
            file = os.path.join(folder, name)
            with suppress(OSError):  # it has gone
                state = os.stat(file)
                found.append((file, state.st_size, state.st_mtime_ns))
    with suppress(OSError, ValueError):
        found.append((MANIFEST, 0, zlib.crc32(read_regular(path / MANIFEST))))
    return tuple(sorted(found))
