"""A directory of versions: `MODELS/1`, `MODELS/2`, ...; the newest one that can serve does.

An export is complete or absent, so a version appears by one rename. A rollback renames the newest to `N.withdrawn`. Clients
depend on the inputs and outputs of a version, and on the ids of values: the lowest-numbered complete version decides
them, and one that has others does not serve. Vocabularies may grow, as those of days do. Whatever was decided is in the
directory, so a server that starts again decides as the one that ran.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from configs.messages import first_of, shown
from dataloading.dataset.durable_files import replace_directory, sync_directory
from serving.manifest import VOCABULARIES, Manifest, ModelError
from serving.raw_records import RawDescription
from serving.vocabulary import Vocabulary

NAME = re.compile(r"[1-9][0-9]{0,17}")
WITHDRAWN = re.compile(rf"({NAME.pattern})\.withdrawn(-[0-9]+)?")


@dataclass(frozen=True, slots=True)
class Deciding:
    """The version that decides what clients send: inputs and outputs, and the ids of values."""

    name: str
    path: Path
    manifest: Manifest

    def differing(self, path: Path, manifest: Manifest) -> list[str]:
        """Return what clients of this version would send wrongly to another one, in `path`.

        Raises ModelError: a vocabulary is damaged, or cannot be read.
        """
        parts = manifest.differing(self.manifest.interface())
        if parts or manifest == self.manifest:
            return parts
        try:
            names = _other_ids(self.path, self.manifest, path, manifest)
        except OSError as error:
            raise ModelError(f"{error.filename} cannot be read ({error.strerror})") from None
        return [f"ids of values of {first_of([*map(shown, names)])}"] if names else []


def _other_ids(before: Path, manifest: Manifest, after: Path, changed: Manifest) -> list[str]:
    """Return the features in which values have other ids in a second model, as far as the two tell; growth changes none."""
    sizes = {feature.name: feature.cardinality for feature in changed.categorical}
    found = [f.name for f in manifest.categorical if sizes[f.name] < f.cardinality]
    known, now = (m.source.get(VOCABULARIES) or {} for m in (manifest, changed))
    if manifest.raw is None:
        return found or [name for name in known if now.get(name, known[name]) != known[name]]
    described = [RawDescription.of(m.raw).by_feature for m in (manifest, changed) if m.raw]
    same: dict[tuple[str, str], bool] = {}
    for name, feature in described[0].items():
        other_feature = described[1][name]
        files = feature.vocabulary, other_feature.vocabulary
        if feature.buckets != other_feature.buckets or (None in files and files[0] != files[1]):
            found.append(name)
        elif files[0] is not None and files[1] is not None:
            (file, size), (other, other_size) = files
            if (file, other) not in same:
                same[file, other] = manifest.files[file] == changed.files[other] or Vocabulary(
                    before / file, size
                ).is_kept_by(Vocabulary(after / other, other_size))
            found += [name] * (not same[file, other])
    return list(dict.fromkeys(found))


def list_versions(directory: Path) -> list[str]:
    """Return the versions of a directory, newest first. Raises ValueError: it cannot be read."""
    try:
        names = [path.name for path in directory.iterdir() if NAME.fullmatch(path.name)]
    except OSError as error:
        raise ValueError(
            f"{directory} cannot be read ({error.strerror}); name a model directory, or a directory of versions"
        ) from None
    return sorted(names, key=int, reverse=True)


def read_complete(directory: Path) -> Manifest:
    """Return the manifest of a version whose files have their sizes; ModelError: it is no version, or is not complete."""
    try:
        manifest = Manifest.read(directory)
    except OSError as error:
        raise ModelError(f"{directory} cannot be read ({error.strerror})") from None
    manifest.check_sizes(directory)
    return manifest


def differing_versions(directory: Path) -> tuple[Deciding | None, dict[str, list[str]]]:
    """Return the version that decides, and in what each complete version differs from it, newest first: one in nothing serves.

    Raises ValueError: the directory cannot be read.
    """
    versions = {}
    for version in list_versions(directory):
        with suppress(ModelError):
            versions[version] = read_complete(directory / version)
    name = min(versions, key=int, default=None)
    if name is None:
        return None, {}
    decided = Deciding(name, directory / name, versions[name])
    found = {}
    for name, manifest in versions.items():
        try:
            found[name] = decided.differing(directory / name, manifest)
        except ModelError:
            found[name] = ["vocabularies, of which one is damaged"]
    return decided, found


def servable(directory: Path) -> list[str]:
    """Return the complete versions that can serve, newest first: clients of the one that decides may send them the same."""
    return [name for name, parts in differing_versions(directory)[1].items() if not parts]


def next_version(directory: Path) -> str:
    """Return a number that no version has had: a withdrawn one is not given again."""
    names = (path.name for path in directory.iterdir())
    found = (NAME.fullmatch(name) or WITHDRAWN.fullmatch(name) for name in names)
    return str(1 + max((int(match[0].partition(".")[0]) for match in found if match), default=0))


def note_of_others(path: Path) -> str | None:
    """Return a line about the versions beside a new one that do not serve, since another one decides inputs and outputs."""
    directory = path.parent
    if not NAME.fullmatch(path.name):
        return None
    decided, versions = differing_versions(directory)
    others = [name for name, parts in versions.items() if parts]
    if decided is None or not others:
        return None
    differing = {part for name in others for part in versions[name]}
    return (
        f"{directory}: version {decided.name} decides what clients send, so {', '.join(others)} will not serve (other "
        f"{', '.join(sorted(differing))}); withdraw what is before them with python -m serving.rollback model={directory} "
        f"before={min(others, key=int)}, or use a directory of their own"
    )


def withdraw(directory: Path, version: int | None) -> tuple[list[str], str]:
    """Return to `version`, or to the one before the version that serves: withdraw all after it.

    Returns names of the withdrawn versions, and the version that serves then. Raises ValueError: there is no such version, or
    none to return to.
    """
    names = list_versions(directory)
    if version is not None and str(version) not in names:
        raise _no_version("version", version, directory, names)
    can_serve = servable(directory)
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

    Raises ValueError: there is no such version, it is not complete, or none is before it.
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
    return older, servable(directory)[0]


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
