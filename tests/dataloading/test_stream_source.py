"""Rows of a dataset and of parts that follow it, read as those of one dataset; and parts that are not taken."""

import shutil
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import yaml

from dataloading.dataset.feature_spec import SPEC_NAME, FeatureSpec
from dataloading.dataset.open_dataset import open_dataset
from dataloading.dataset.source import BatchTarget, Columns, Source
from dataloading.stream_source import Part, PartFinder, StreamSource
from tests.helpers.datasets import USERS, plant, write_rows
from tests.helpers.event_datasets import write_events

ENDS = [40, 70, 71, 120]
ROWS = ENDS[-1]


@pytest.fixture
def stream(tmp_path) -> StreamSource:
    (tmp_path / "parts").mkdir()
    write_rows(tmp_path / "first", 0, ENDS[0])
    return StreamSource(opened(tmp_path / "first"), tmp_path / "parts")


def opened(root: Path) -> Source:
    return open_dataset(FeatureSpec.load(root))


def add(stream: StreamSource, name: str, first: int = 40, last: int = 70, **options) -> Path:
    return write_rows(stream.directory / name, first, last, test_rows=0, **options)


def taken(finder: PartFinder, stream: StreamSource, looks: int = 2) -> list[str]:
    """Take what a finder finds, and return the names."""
    names = []
    for _ in range(looks):
        part, _ = finder.look()
        if part is not None:
            stream.append(part)
            names.append(part.name)
    return names


def finder_of(stream: StreamSource) -> tuple[PartFinder, list[str]]:
    lines: list[str] = []
    return PartFinder(stream, lines.append), lines


@pytest.mark.parametrize("file_format", ["binary", "parquet"])
def test_rows_across_parts_are_those_of_one_dataset(stream, tmp_path, file_format):
    for number, (first, last) in enumerate(pairwise(ENDS)):
        add(stream, f"{number}", first, last, file_format=file_format)
    finder, lines = finder_of(stream)
    assert taken(finder, stream, 4) == ["0", "1", "2"]
    assert (stream.known_rows, lines) == (ROWS, [])
    whole = opened(write_rows(tmp_path / "whole", 0, ROWS))
    for runs in ([[0, 40]], [[39, 41]], [[45, 60]], [[10, 110]], [[69, 72], [0, 3]], [[5, 5]]):
        rows = np.array(runs)
        padded = BatchTarget(int((rows[:, 1] - rows[:, 0]).sum()) + 2)
        for into in (None, padded):
            got, wanted = (s.read("train", rows, into) for s in (stream, whole))
            for one, other in zip(columns_of(got), columns_of(wanted), strict=True):
                np.testing.assert_array_equal(one, other)
        got, wanted = (s.read_keys("train", rows, 2) for s in (stream, whole))
        np.testing.assert_array_equal(got.values(), wanted.values())
    np.testing.assert_array_equal(
        stream.read("test", np.array([[0, 5]])).numerical,
        whole.read("test", np.array([[0, 5]])).numerical,
    )


def test_rows_of_parts_have_their_own_events(tmp_path):
    own = opened(write_events(tmp_path / "first"))
    stream = StreamSource(own, tmp_path / "parts")
    write_events(stream.directory / "1")
    finder, _ = finder_of(stream)
    assert taken(finder, stream) == ["1"]
    rows = own.num_rows("train")
    counts = stream.event_counts("train", np.array([[rows - 3, rows + 4], [0, 2]]))
    wanted = own.event_counts("train", np.array([[rows - 3, rows], [0, 4], [0, 2]]))
    assert counts.tolist() == wanted.tolist()


def columns_of(columns: Columns) -> list[np.ndarray]:
    # The ids of raw keys are undefined.
    lengths = [counts for counts in columns.lengths if counts is not None]
    return [columns.numerical, columns.labels, *columns.ids[:2], *lengths]


def test_a_part_is_taken_once_all_of_its_bytes_are_there(stream, tmp_path):
    finder, lines = finder_of(stream)
    whole = write_rows(tmp_path / "whole", 40, 70, test_rows=0)
    files = sorted(path for path in whole.rglob("*") if path.is_file())
    for path in files:
        assert finder.look() == (None, 0)
        copy = stream.directory / "5" / path.relative_to(whole)
        copy.parent.mkdir(parents=True, exist_ok=True)
        content = path.read_bytes()
        for end in (0, len(content) // 2):
            copy.write_bytes(content[:end])
            assert finder.look() == (None, 0), copy
        copy.write_bytes(content)
    assert taken(finder, stream, 1) == ["5"]
    assert lines == []


def with_bad_row(root: Path) -> None:
    plant(root / "train" / "user.bin", 3, USERS, "int8")
    document = yaml.safe_load((root / SPEC_NAME).read_text())
    # A writer of such rows would list their checksum.
    del document["metadata"]["files"]
    (root / SPEC_NAME).write_text(yaml.safe_dump(document))


def without_rows(root: Path) -> None:
    for path in (root / "train").iterdir():
        path.write_bytes(b"")


BAD = {
    "a bad row": (with_bad_row, f"feature 'user': id {USERS} at row 3 of "),
    "changed bytes": (lambda root: plant(root / "train" / "user.bin", 3, 1, "int8"), "has changed"),
    "no rows": (without_rows, "is empty"),
    "no file": (lambda root: (root / "train" / "user.bin").unlink(), "is missing"),
    "no spec": (lambda root: (root / SPEC_NAME).write_text("{"), SPEC_NAME),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_part_costs_one_line_and_holds_nothing_up(stream, case):
    damage, reason = BAD[case]
    finder, lines = finder_of(stream)
    root = add(stream, "1")
    damage(root)
    add(stream, "2", 70, 120)
    assert finder.look()[0].name == "2"
    assert taken(finder, stream, 4) == ["2"]
    (line,) = lines
    assert line.startswith(f"{root} is left out until it changes: ")
    assert reason in line
    assert "\n" not in line
    # Written again, it comes late.
    shutil.rmtree(root)
    add(stream, "1")
    assert taken(finder, stream, 3) == ["1"]
    assert lines[1:] == [f"{root} came late, after 2; its rows come next"]


def test_parts_of_other_features_or_another_fit_are_left_out(stream):
    finder, lines = finder_of(stream)
    add(stream, "1", users=USERS + 1)
    stream.spec.metadata["files"] = {"vocabulary/user.parquet": {"bytes": 1, "crc32": "0"}}
    other = {"user": "1"}
    add(stream, "2", metadata={"mode": "transform", "fitted_vocabularies": other})
    add(stream, "3", metadata={"mode": "transform", "fitted_vocabularies": {"user": "0"}})
    assert taken(finder, stream, 3) == ["3"]
    assert len(lines) == 2
    assert all("has other features or vocabularies than" in line for line in lines)


def test_the_dataset_itself_is_no_part(tmp_path):
    write_rows(tmp_path / "0", 0, 40)
    stream = StreamSource(opened(tmp_path / "0"), tmp_path)
    add(stream, "1")
    finder, lines = finder_of(stream)
    assert taken(finder, stream, 3) == ["1"]
    assert len(lines) == 1
    assert "0 is left out until it changes: it is data.path" in lines[0]


def test_parts_are_taken_by_name_and_the_others_counted(stream):
    finder, lines = finder_of(stream)
    for number, name in enumerate("bca"):
        add(stream, name, 40 + number)
    (stream.directory / "notes.txt").write_text("no part")
    (stream.directory / ".d.partial").mkdir()
    assert [finder.look()[1]] == [2]
    assert taken(finder, stream, 4) == ["a", "b", "c"]
    assert lines == []


def test_a_part_that_changes_after_it_was_taken_costs_one_line(stream):
    finder, lines = finder_of(stream)
    roots = [add(stream, name, first) for name, first in (("a", 40), ("b", 41))]
    assert taken(finder, stream, 2) == ["a", "b"]
    plant(roots[1] / "train" / "user.bin", 0, 5, "int8")
    shutil.rmtree(roots[0])
    assert taken(finder, stream) == []
    add(stream, "a", 70, 120)
    assert taken(finder, stream, 3) == []
    assert [line.split(" has changed")[0] for line in lines] == [str(roots[1]), str(roots[0])]


def test_a_part_that_is_renamed_or_copied_is_not_trained_again(stream):
    finder, lines = finder_of(stream)
    root = add(stream, "a")
    assert taken(finder, stream) == ["a"]
    shutil.copytree(root, stream.directory / "b")
    root.rename(stream.directory / "c")
    add(stream, "d", 70, 120)
    assert taken(finder, stream, 4) == ["d"]
    # Equal messages of other offsets are other rows.
    for name in "ef":
        add(stream, name, metadata={"offsets": {"0": ord(name)}})
    assert taken(finder, stream, 4) == ["e", "f"]
    assert len(lines) == 2
    assert all("it has the bytes of a, whose rows were taken" in line for line in lines)


def test_a_checkpoint_restores_the_parts_that_were_begun(stream):
    finder, _ = finder_of(stream)
    roots = [add(stream, "a", 40, 70), add(stream, "b", 70, 120), add(stream, "c", 120, 130)]
    assert taken(finder, stream, 3) == ["a", "b", "c"]
    assert [part["name"] for part in stream.begun(40)] == []
    assert [part["name"] for part in stream.begun(41)] == ["a"]
    begun = stream.begun(100)
    assert [part["name"] for part in begun] == ["a", "b"]
    assert Part(**begun[0]) == stream.parts[0]
    wanted = stream.read("train", np.array([[80, 120]]))
    # What is trained may be gone; what is not begun may change.
    shutil.rmtree(roots[0])
    again = restored(stream, begun, 100)
    assert (again.known_rows, [asdict(part) for part in again.parts]) == (120, begun)
    np.testing.assert_array_equal(
        again.read("train", np.array([[80, 120]])).numerical, wanted.numerical
    )
    for row in (60, 120):
        with pytest.raises(ValueError, match=r"a has changed or is gone|row 121 .* has not come"):
            again.read("train", np.array([[row, row + 1]]))
    plant(roots[1] / "train" / "user.bin", 1, 7, "int8")
    for change in (lambda: None, lambda: shutil.rmtree(roots[1])):
        change()
        with pytest.raises(ValueError, match="b has changed or is gone since its rows were taken"):
            restored(stream, begun, 100)


def restored(stream: StreamSource, begun: list[dict], rows: int) -> StreamSource:
    again = StreamSource(opened(stream.directory.parent / "first"), stream.directory)
    for facts in begun:
        again.append(Part(**facts), rows)
    return again
