"""A directory of versions: `MODELS/1`, `MODELS/2`, ...; the newest intact one serves.

An export is complete or absent, so a version appears by one rename. A rollback renames the newest to `N.withdrawn`. Whatever
was decided is in the names, so a server that starts again decides the same.
"""

import re
from pathlib import Path

from dataloading.dataset.durable_files import replace_directory, sync_directory

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


def withdraw(directory: Path, version: int | None) -> tuple[list[str], str]:
    """Withdraw the newest version, or all after `version`; return their names and that of the newest left.

    Raises:
        ValueError: there is no such version, or none before the newest.
    """
    names = list_versions(directory)
    if version is not None and str(version) not in names:
        raise ValueError(
            f"version={version}: {directory} has no such version, only {', '.join(names) or 'none'}"
        )
    newer = names[:1] if version is None else [name for name in names if int(name) > version]
    if not newer or len(newer) == len(names):
        raise ValueError(
            f"model={directory}: nothing to return to; it has the versions {', '.join(names) or 'none'}; name a directory of two "
            "or more, such as MODELS of MODELS/1 and MODELS/2"
        )
    for name in newer:
        target, number = directory / f"{name}.withdrawn", 1
        while target.exists():
            number += 1
            target = directory / f"{name}.withdrawn-{number}"
        replace_directory(directory / name, target)
    sync_directory(directory)
    return newer, names[len(newer)]
