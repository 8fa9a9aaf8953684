"""constraints.txt and its copy in pyproject.toml have one version of every package, within the bounds of pyproject.toml."""

import sys
import tomllib
from importlib.metadata import PackageNotFoundError, requires

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.installs.constraints import FILE, PYPROJECT, resolved

PROJECT = tomllib.loads(PYPROJECT.read_text())
LINES = FILE.read_text().splitlines()
PINS = [Requirement(line) for line in LINES]
PYTHONS = ("3.11", "3.12", "3.13")


def pins_of(python: str) -> dict[str, str]:
    """Name -> version for one Python."""
    environment = {"python_full_version": f"{python}.0", "python_version": python}
    pins = [pin for pin in PINS if pin.marker is None or pin.marker.evaluate(environment)]
    assert len({pin.name for pin in pins}) == len(pins)
    return {pin.name: str(pin.specifier).removeprefix("==") for pin in pins}


def asked() -> list[Requirement]:
    project = PROJECT["project"]
    extras = project["optional-dependencies"].values()
    lists = [project["dependencies"], *extras, *PROJECT["dependency-groups"].values()]
    return [Requirement(text) for texts in lists for text in texts]


def test_uv_and_pip_read_the_same_versions_and_no_address():
    assert PROJECT["tool"]["uv"]["constraint-dependencies"] == LINES
    assert [line for line in LINES if "/" in line or "--" in line or "==" not in line] == []


@pytest.mark.parametrize("python", PYTHONS)
def test_every_requirement_has_a_version_within_its_bounds(python):
    pins = pins_of(python)
    wrong = [
        f"{need}: {pins.get(canonicalize_name(need.name))}"
        for need in asked()
        if not need.specifier.contains(pins.get(canonicalize_name(need.name), "0"))
    ]
    assert wrong == []


def test_whatever_is_installed_for_the_project_has_a_version():
    """Follow the requirements of the installed packages, as far as they are installed."""
    pins = pins_of(f"{sys.version_info[0]}.{sys.version_info[1]}")
    found: set[tuple[str, str]] = set()
    waiting = [(canonicalize_name(need.name), ("", *need.extras)) for need in asked()]
    while waiting:
        name, extras = waiting.pop()
        for extra in extras:
            if (name, extra) in found:
                continue
            found.add((name, extra))
            try:
                needs = [Requirement(text) for text in requires(name) or []]
            except PackageNotFoundError:
                continue
            waiting += [
                (canonicalize_name(need.name), ("", *need.extras))
                for need in needs
                if need.marker is None or need.marker.evaluate({"extra": extra})
            ]
    assert sorted({name for name, _ in found} - set(pins)) == []


@pytest.mark.doors
def test_a_new_resolution_within_the_versions_changes_none():
    """Two installs a week apart agree: nothing is left to choose on any Python."""
    assert resolved(FILE) == LINES
