"""The lists of test files in tests/conftest.py: a file that moves must move there too."""

from pathlib import Path

from tests.conftest import FAST, LONGEST_FIRST, pytest_collection_modifyitems

TESTS = Path(__file__).resolve().parents[1]
# Every folder of tests but those that run whole commands and fuzzers.
ROOMS = {
    path.parent.relative_to(TESTS).as_posix()
    for path in TESTS.rglob("test_*.py")
    if path.parent.name not in ("end_to_end", "fuzz")
}


class Item:
    """Stand-in for a collected test."""

    def __init__(self, name: str) -> None:
        self.path, self.marks = TESTS / name, []

    def add_marker(self, mark) -> None:
        self.marks.append(mark.name)


def test_the_listed_files_exist():
    assert [name for name in (*FAST, *LONGEST_FIRST) if not (TESTS / name).is_file()] == []


def test_the_fast_subset_has_a_file_of_every_room():
    assert ROOMS - {Path(name).parent.as_posix() for name in FAST} == set()


def test_long_files_come_first_and_the_others_keep_their_order():
    items = [Item(name) for name in ("configs/test_schema.py", *reversed(LONGEST_FIRST), "test_x")]
    pytest_collection_modifyitems(items)
    names = [item.path.relative_to(TESTS).as_posix() for item in items]
    assert names == [*LONGEST_FIRST, "configs/test_schema.py", "test_x"]
    assert [item.marks for item in items[-2:]] == [["fast"], []]
