"""Small documents from anybody: read with limits, and refused with one line."""

import os
import socket
import time
from pathlib import Path

import pytest

from dataloading.dataset.documents import (
    MAX_NESTING,
    check_regular,
    open_regular,
    parse_json,
    parse_yaml,
    read_json,
    read_regular,
    read_text,
    read_yaml,
)


def laughing(depth: int) -> str:
    lines = ["a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    for level in range(1, depth):
        lines.append(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]")
    return "\n".join(lines)


YAMLS = {
    "nested aliases": laughing(12),
    "merged aliases": "a0: &a0 {x: 1}\n"
    + "\n".join(f"a{n}: &a{n} {{y: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, 12)),
    "an alias of itself": "a: &a [*a]",
    "500 brackets": "[" * 500 + "]" * 500,
    "brackets without an end": "[" * 100_000,
    "500 mappings": "\n".join(" " * n + "a:" for n in range(500)),
    "500 dashes": "- " * 500 + "1",
    "an object": "!!python/object/apply:os.mkdir [x]",
    "an unknown tag": "!x 1",
    "an unknown alias": "*x",
    "a key of a list": "[1]: 2",
    "a key twice": "a: 1\na: 2",
    "a key twice below": "x: [{a: 1, b: 2, a: 3}]",
    "two documents": "a: 1\n---\na: 2",
    "tab": "a:\n\t- 1",
    "a NUL": "a: \0",
    "an int of 5,000 digits": "a: " + "9" * 5000,
    "no int": "a: !!int x",
    "an empty int": 'a: !!int ""',
    "no bool": "a: !!bool x",
    "an empty float": 'a: !!float ""',
    "no time": "a: !!timestamp x",
    "an impossible date": "a: 2021-13-45",
    "no base64": "a: !!binary é",
    "a value tag": "a: =",
    "control character": "a: \x1b",
    "a percent": "%",
    "a huge repeat of base 60": "a: " + ":".join(["59"] * 200_000),
    "an unfinished quote": "a: '" + "x" * 10_000,
}


@pytest.mark.parametrize("text", YAMLS.values(), ids=YAMLS)
def test_a_yaml_that_is_no_plain_and_small_document_is_refused_with_one_line(text):
    start = time.perf_counter()
    with pytest.raises(ValueError, match=r"^file\.yaml: not plain yaml: ") as caught:
        parse_yaml(text, "file.yaml")
    assert time.perf_counter() - start < 5
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert len(message) < 400


def test_aliases_anchors_and_merged_mappings_of_a_usual_size_are_read():
    text = "base: &b {dtype: int8, rows: 3}\ncat: {<<: *b, rows: 4}\nagain: *b\nlist: [*b, *b]"
    base = {"dtype": "int8", "rows": 3}
    assert parse_yaml(text, "x") == {
        "base": base,
        "cat": {"dtype": "int8", "rows": 4},
        "again": base,
        "list": [base, base],
    }
    nested = "[" * (MAX_NESTING - 2) + "]" * (MAX_NESTING - 2)
    assert parse_yaml(nested, "x")
    assert parse_yaml("", "x") is None


JSONS = {
    "brackets": "[" * 100_000,
    "closed brackets": "[" * 5000 + "]" * 5000,
    "500 brackets": "[" * 500 + "]" * 500,
    "500 objects": '{"a":' * 500 + "1" + "}" * 500,
    "nothing": "",
    "half": '{"a": 1',
    "two": "{} {}",
    "a key twice": '{"a": 1, "a": 2}',
    "a key twice below": '[{"x": {"a": 1, "b": 2, "a": 1}}]',
    "an int of 5,000 digits": "9" * 5000,
    "a comment": "{} // x",
    "a long word": "x" * 10**6,
    "a line break": '"a\nb"',
}


@pytest.mark.parametrize("text", JSONS.values(), ids=JSONS)
def test_a_text_that_is_no_json_is_refused_with_one_line(text):
    for content in (text, text.encode()):
        with pytest.raises(ValueError, match=r"^file\.json: not JSON: ") as caught:
            parse_json(content, "file.json")
        assert len(str(caught.value).splitlines()) == 1
        assert len(str(caught.value)) < 400


def test_bytes_that_are_no_text_are_no_json():
    with pytest.raises(ValueError, match=r"^x: not JSON: "):
        parse_json(b"\xff\xfe{", "x")


def test_json_of_a_usual_depth_is_read():
    nested = "[" * (MAX_NESTING - 1) + "]" * (MAX_NESTING - 1)
    assert parse_json(nested, "x")
    assert parse_json('"' + "[" * 1000 + '\\""', "x")
    assert parse_json(b'{"a": [1, 2.5, null, "\xc3\xa9"]}', "x") == {"a": [1, 2.5, None, "é"]}


READERS = [read_regular, read_text, read_yaml, read_json, open_regular, check_regular]


def special(path: Path, kind: str) -> Path:
    match kind:
        case "FIFO":
            os.mkfifo(path)
        case "directory":
            path.mkdir()
        case "socket":
            with socket.socket(socket.AF_UNIX) as bound:
                bound.bind(str(path))
        case "device":
            path.symlink_to("/dev/zero")
        case "terminal":
            path.symlink_to("/dev/tty")
        case "link to itself":
            path.symlink_to(path.name)
        case "link to a FIFO":
            os.mkfifo(path.with_name("fifo"))
            path.symlink_to("fifo")
    return path


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(
    "kind",
    ["FIFO", "directory", "socket", "device", "terminal", "link to itself", "link to a FIFO"],
)
def test_only_regular_files_are_opened(tmp_path, read, kind):
    path = special(tmp_path / "it", kind)
    with pytest.raises(ValueError, match=r"want a regular file") as caught:
        read(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("read", READERS)
def test_a_missing_file_is_told_apart(tmp_path, read):
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "it")
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "not/it")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        read(tmp_path / "file/it")


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 300])
def test_a_name_that_no_file_can_have_is_refused(tmp_path, read, name):
    with pytest.raises(ValueError, match="want a regular file"):
        read(tmp_path / name)


def test_links_to_files_are_followed(tmp_path):
    (tmp_path / "file").write_text("é", encoding="utf-8")
    (tmp_path / "link").symlink_to("file")
    assert read_text(tmp_path / "link") == "é"
    assert check_regular(tmp_path / "link").st_size == 2
    with open_regular(tmp_path / "link") as stream:
        assert stream.read() == "é".encode()


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    with (tmp_path / "sparse").open("wb") as stream:
        stream.truncate(1 << 40)
    with pytest.raises(ValueError, match="want at most"):
        read_text(tmp_path / "sparse")
    with pytest.raises(ValueError, match=r"sparse: not UTF-8|want at most"):
        read_yaml(tmp_path / "sparse")


def test_bytes_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"a\xffb")
    with pytest.raises(ValueError, match=r"file: not UTF-8 text") as caught:
        read_text(tmp_path / "file")
    assert len(str(caught.value)) < 400
