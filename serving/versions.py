"""A directory of versions: `MODELS/1`, `MODELS/2`, ...; the newest one that can serve does.

An export is complete or absent, so a version appears by one rename. A rollback renames the newest to `N.withdrawn`. Clients
depend on the inputs and outputs of a version: the lowest-numbered complete version decides them, and one that has others does
not serve. Whatever was decided is in the directory, so a server that starts again decides as the one that ran.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dataloading.dataset.durable_files import replace_directory, sync_directory
from serving.manifest import Manifest, ModelError

NAME = re.compile(r"[1-9][0-9]{0,17}")


def list_versions(directory: Path) -> list[str]:
    """Return the versions of a directory, newest first.

    Raises:
        ValueError: it cannot be read.
    """
    try:
        names = [path.name for path in directory.iterdir() if NAME.fullmatch(path.name)]
    except OSError as error:
        raise ValueError(
            f"model={directory} cannot be read ({error.strerror}); name a model directory, or a directory of versions"
        ) from None
    return sorted(names, key=int, reverse=True)


def read_complete(directory: Path) -> Manifest:
    """Return the manifest of a version whose files have their sizes.

    Raises:
        ModelError: it is no version, or is not complete.
    """
    try:
        manifest = Manifest.read(directory)
    except OSError as error:
        raise ModelError(f"{directory} cannot be read ({error.strerror})") from None
    manifest.check_sizes(directory)
    return manifest


def complete_versions(directory: Path) -> dict[str, Manifest]:
    """Return the manifests of the versions that are complete, newest first.

    Raises:
        ValueError: the directory cannot be read.
    """
    found = {}
    for name in list_versions(directory):
        try:
            found[name] = read_complete(directory / name)
        except ModelError:
            continue
    return found


def deciding(versions: Mapping[str, Manifest]) -> tuple[str, dict[str, Any]] | None:
    """Return the complete version that decides inputs and outputs, and those; None if there is none."""
    name = min(versions, key=int, default=None)
    return None if name is None else (name, versions[name].interface())


def servable(versions: Mapping[str, Manifest]) -> list[str]:
    """Return those of the complete versions that can serve, newest first: their inputs and outputs are the decided ones."""
    decided = deciding(versions)
    if decided is None:
        return []
    return [name for name, manifest in versions.items() if not manifest.differing(decided[1])]


def note_of_others(path: Path) -> str | None:
    """Return a line about the versions beside a new one that do not serve, since another one decides inputs and outputs."""
    directory = path.parent
    if not NAME.fullmatch(path.name):
        return None
    versions = complete_versions(directory)
    names = set(servable(versions))
    others = [name for name in versions if name not in names]
    if not others:
        return None
    decided = deciding(versions)
    assert decided is not None
    differing = {part for name in others for part in versions[name].differing(decided[1])}
    return (
        f"{directory}: version {decided[0]} decides what clients send, so {', '.join(others)} will not serve (other "
        f"{', '.join(sorted(differing))}); withdraw what is before them with python -m serving.rollback model={directory} "
        f"before={min(others, key=int)}, or use a directory of their own"
    )


def withdraw(directory: Path, version: int | None) -> tuple[list[str], str]:
    """Return to `version`, or to the one before the version that serves: withdraw all after it.

    Returns:
        Names of the withdrawn versions, and the version that serves then.

    Raises:
        ValueError: there is no such version, or none to return to.
    """
    names = list_versions(directory)
    if version is not None and str(version) not in names:
        raise _no_version("version", version, directory, names)
    can_serve = servable(complete_versions(directory))
    if version is None and len(can_serve) > 1:
        version = int(can_serve[1])
    newer = [] if version is None else [name for name in names if int(name) > version]
    left = [name for name in can_serve if name not in newer]
    if not newer or not left:
        raise ValueError(
            f"model={directory}: nothing to return to; it has the versions {', '.join(names) or 'none'}, of which "
            f"{', '.join(can_serve) or 'none'} can serve; name a directory of two or more, such as MODELS of MODELS/1 and "
            "MODELS/2"
        )
    _rename(directory, newer)
    return newer, left[0]


def withdraw_before(directory: Path, version: int) -> tuple[list[str], str]:
    """Withdraw all versions before one, which decides inputs and outputs then; return as `withdraw` does.

    Raises:
        ValueError: there is no such version, it is not complete, or none is before it.
    """
    names = list_versions(directory)
    if str(version) not in names:
        raise _no_version("before", version, directory, names)
    read_complete(directory / str(version))
    # The newest first: if this is interrupted, the version that decided still does.
    older = [name for name in names if int(name) < version]
    if not older:
        raise ValueError(f"before={version}: {directory} has no version before it")
    _rename(directory, older)
    return older, servable(complete_versions(directory))[0]


def _no_version(option: str, version: int, directory: Path, names: Sequence[str]) -> ValueError:
    return ValueError(
        f"{option}={version}: {directory} has no such version, only {', '.join(names) or 'none'}"
    )


def _rename(directory: Path, names: Sequence[str]) -> None:
    for name in names:
        target, number = directory / f"{name}.withdrawn", 1
        while target.exists():
            number += 1
            target = directory / f"{name}.withdrawn-{number}"
        replace_directory(directory / name, target)
    sync_directory(directory)
