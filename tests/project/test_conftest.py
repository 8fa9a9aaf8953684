"""The lists of test files in tests/conftest.py: a file that moves must move there too."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import (
    FAST,
    LONGEST_FIRST,
    pytest_collection_modifyitems,
    pytest_ignore_collect,
)

TESTS = Path(__file__).resolve().parents[1]
# Every folder of tests but those that run whole commands, fuzzers and installs.
SUBPACKAGES = {
    path.parent.relative_to(TESTS).as_posix()
    for path in TESTS.rglob("test_*.py")
    if path.parent.name not in ("end_to_end", "fuzz", "installs")
}


class Item:
    """Stand-in for a collected test."""

    def __init__(self, name: str, *markers: str) -> None:
        self.path, self.markers = TESTS / name, list(markers)

    def add_marker(self, marker) -> None:
        self.markers.append(marker.name)

    def get_closest_marker(self, name: str) -> bool:
        return name in self.markers


def kept(items: list[Item], expression: str = "") -> list[Item]:
    """Return the items that pytest would run with `-m expression`, in their order."""
    left_out: list[Item] = []
    config: Any = SimpleNamespace(
        option=SimpleNamespace(markexpr=expression),
        hook=SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items)),
    )
    kept, every = list(items), list(items)
    pytest_collection_modifyitems(config, kept)
    assert {*map(id, kept), *map(id, left_out)} == set(map(id, every))
    return kept


def test_the_listed_files_exist():
    assert [name for name in (*FAST, *LONGEST_FIRST) if not (TESTS / name).is_file()] == []


def test_the_fast_subset_has_a_file_of_every_subpackage():
    assert SUBPACKAGES - {Path(name).parent.as_posix() for name in FAST} == set()


def test_long_files_come_first_and_the_others_keep_their_order():
    names = ("configs/test_schema.py", *reversed(LONGEST_FIRST), "test_x")
    items = kept([Item(name) for name in names])
    names = [item.path.relative_to(TESTS).as_posix() for item in items]
    assert names == [*LONGEST_FIRST, "configs/test_schema.py", "test_x"]
    assert [item.markers for item in items[-2:]] == [["fast"], []]


@pytest.mark.parametrize("expression", ["", "fast", "gpu", "doors", "doors or fast"])
def test_doors_run_only_where_m_names_them(expression):
    items = [Item("test_x", "doors"), Item("test_x")]
    assert kept(items, expression) == (items if "doors" in expression else items[1:])


def test_the_fast_subset_alone_imports_its_files_alone():
    def ignored(expression: str) -> set[str]:
        config: Any = SimpleNamespace(option=SimpleNamespace(markexpr=expression))
        files = {path for path in TESTS.rglob("*.py") if pytest_ignore_collect(path, config)}
        return {path.relative_to(TESTS).as_posix() for path in files}

    every = {path.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py")}
    assert ignored("fast") == every - FAST
    assert ignored("") == ignored("fast or doors") == set()
