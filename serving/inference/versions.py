"""The version of a model that serves, and the search for a better one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from configs.messages import shown
from serving.inference.key_rows import KeyRows
from serving.inference.model import ServedModel
from serving.inference.model_rows import RaggedIds, Rows
from serving.inference.raw_values import RawValues
from serving.manifest import MANIFEST, Manifest, ModelError
from serving.versions import list_versions

SINGLE = "1"
"""Version of a model directory that is not in a directory of versions."""


class Model(Protocol):
    """A model directory that is loaded, on some device."""

    manifest: Manifest
    raw: RawValues | None
    keys: Mapping[str, KeyRows]

    def scores(self, *parts: Rows) -> Tensor:
        """Return the scores of rows, one part after another, float32 [B, O] in host memory."""


LoadModel = Callable[[Path, Manifest], Model]


@dataclass(frozen=True, slots=True, eq=False)
class Version:
    """A version that is loaded."""

    name: str
    model: Model


def load_version(
    directory: Path,
    name: str,
    interface: dict[str, Any] | None,
    *,
    load: LoadModel = ServedModel.load,
    verify: bool = True,
) -> Version:
    """Verify and load a version, and score a row with it.

    Args:
        directory: of the model.
        name: of the version.
        interface: that it must have, as the version before it; None accepts any.
        load: loads a model directory.
        verify: compare the SHA-256 of every file.

    Raises:
        ValueError: it is damaged, does not score, scores no finite number, or has another interface.
    """
    manifest = Manifest.read(directory)
    if verify:
        manifest.verify(directory)
    if interface is not None and manifest.interface() != interface:
        differing = [key for key, value in manifest.interface().items() if value != interface[key]]
        raise ModelError(
            f"{directory} has other {' and '.join(differing)} than the version that serves; serve it under another address"
        )
    model = load(directory, manifest)
    try:
        score = model.scores(_one_row(manifest))
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
    return Version(name, model)


def _one_row(manifest: Manifest) -> Rows:
    one = torch.zeros(1, dtype=torch.int64)
    return Rows(
        torch.zeros(1, len(manifest.numerical)),
        torch.zeros(1, manifest.id_columns, dtype=torch.int64),
        {feature.name: RaggedIds(one, one + 1) for feature in manifest.ragged},
    )


class Versions:
    """The version that serves, and the search for a better one.

    Args:
        directory: a model directory, or a directory of versions.
        log: called with one line about every change and refusal.
        load: loads a model directory.
        verify: compare the SHA-256 of every file.

    Attributes:
        current: the version that serves.
        refused: number of versions that were refused.
        swaps: number of changes of the version that serves.

    Raises:
        ValueError: there is no version that can serve.
    """

    def __init__(
        self,
        directory: Path,
        log: Callable[[str], None],
        *,
        load: LoadModel = ServedModel.load,
        verify: bool = True,
    ) -> None:
        self._directory, self._log = directory, log
        self._load, self._verify = load, verify
        self._is_single = (directory / MANIFEST).exists()
        self._refused: dict[str, tuple[int, int]] = {}
        self.refused = self.swaps = 0
        if self._is_single:
            self.current = load_version(directory, SINGLE, None, load=load, verify=verify)
            return
        found = self._newest(None)
        if found is None:
            names = ", ".join(self._refused) or "none"
            raise ValueError(
                f"model={directory} is no model directory and has no version that can serve (refused: {names}); write one "
                f"with python -m serving.export output={directory}/1"
            )
        self.current = found

    def update(self) -> bool:
        """Look for a newer version, or an older one after a rollback; return whether another one serves now."""
        if self._is_single:
            return False
        try:
            found = self._newest(self.current)
        except (ValueError, OSError) as error:
            self._log(f"versions cannot be read: {error}; {self.current.name} serves on")
            return False
        if found is None or found is self.current:
            return False
        self._log(f"version {found.name} replaces {self.current.name}")
        self.current = found
        self.swaps += 1
        return True

    def _newest(self, current: Version | None) -> Version | None:
        """Return the newest version that can serve, `current` if it is that; refused ones are reported once."""
        interface = None if current is None else current.model.manifest.interface()
        for name in list_versions(self._directory):
            path = self._directory / name
            if current is not None and name == current.name:
                return current
            facts = _facts(path)
            if self._refused.get(name) == facts:
                continue
            try:
                return load_version(path, name, interface, load=self._load, verify=self._verify)
            except (ValueError, OSError) as error:
                self._refused[name] = facts
                self.refused += 1
                more = "" if current is None else f"; {current.name} serves on"
                self._log(f"version {name} is refused: {error}{more}")
        return current


def _facts(path: Path) -> tuple[int, int]:
    """Return what changes if a version is written again."""
    try:
        facts = (path / MANIFEST).stat()
    except OSError:
        return 0, 0
    return facts.st_ino, facts.st_mtime_ns
