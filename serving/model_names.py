"""Names of the models of one server, by which requests choose."""

from collections.abc import Sequence
from pathlib import Path

from serving.manifest import MANIFEST, Manifest, ModelError
from serving.versions import list_versions


def require_names(names: Sequence[str]) -> None:
    """Raise ValueError: two models have one name."""
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"two models are named {name}; export one of them with another name=, by which requests choose"
            )


def name_of(path: Path) -> str | None:
    """Return the name that the newest version of a model has, or its directory; None if it cannot be read, as the server says."""
    versions = [] if (path / MANIFEST).exists() else list_versions(path)
    try:
        return Manifest.read(path / versions[0] if versions else path).name
    except (ModelError, OSError):
        return None
