"""Strategies of mutations: edits of documents (yaml, JSON), of bytes, of text, and of what a path is.

A mutation is plain data, so that a report can print it. `apply_edits`, `apply_bytes` and `apply_kind` apply one.
"""

import copy
import json
import os
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

Path_ = tuple[Hashable, ...]

HUGE = "x" * 100_000
HOSTILE_TEXTS = (
    *(
        "",
        " ",
        "\n",
        "a\nerror: b",
        "\x1b[31mred\x1b[0m",
        "\x00",
        "\x7f",
        "\u202eabc",
        "\u2028",
        "é",
    ),
    *("../outside/secret.bin", "../../outside/x", "/etc/hostname", "/dev/zero", ".", "..", "a/b"),
    *(
        "~",
        "null",
        "NaN",
        "1e999",
        "0x10",
        "-1",
        "%s%n",
        "{0.__class__}",
        "${oc.env:HOME}",
        "'",
        '"',
    ),
    *("ragged", "int64", "float16", "bool", "train", "test", "label", "rows", "=", "<<", "*", "&a"),
)
TEXTS = st.one_of(
    st.sampled_from(HOSTILE_TEXTS),
    st.just(HUGE),
    st.text(max_size=6),
)
INTEGERS = st.one_of(
    st.sampled_from([0, 1, -1, 2, 3, 127, 128, 255, 2**15, 2**31 - 1, 2**31, 2**32, 2**53, 2**62]),
    st.sampled_from([2**63 - 1, 2**63, 2**64, -(2**63), -(2**63) - 1, 10**18, 10**30, 10**400]),
    st.integers(-10, 1000),
)
FLOATS = st.sampled_from(
    [0.0, -0.0, 0.5, 1.0, 1.5, -1.5, 1e-320, 1e300, float("inf"), float("-inf"), float("nan")]
)
SCALARS = st.one_of(TEXTS, INTEGERS, FLOATS, st.sampled_from([None, True, False]))


@dataclass(frozen=True, slots=True)
class Literal:
    """Text that takes a value's place after the document is written; no writer would write it."""

    text: str

    def __repr__(self) -> str:
        return f"Literal({self.text[:40]!r}..., {len(self.text)})"


BOMB = "[" + ", ".join(f"&a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9)) + "]"
BOMB = BOMB.replace("&a1 [" + ", ".join(["*a0"] * 9) + "]", "&a1 [" + ", ".join("123456789") + "]")
DEEP = [
    Literal("[" * 500 + "]" * 500),
    Literal("[" * 100_000),
    Literal('{"a": ' * 90 + "1" + "}" * 90),
]
YAML_LITERALS = [
    *DEEP,
    Literal(BOMB),
    Literal("&self [*self]"),
    Literal("2001-99-99"),
    Literal("!!python/object/apply:os.mkdir ['trap']"),
    Literal("!!binary aGVsbG8="),
    Literal("!!set {a, b}"),
    Literal("!!omap [a: 1]"),
    Literal("!!float not"),
    Literal("{[1, 2]: 3}"),
    Literal("{{}: 3}"),
    Literal("*nowhere"),
    Literal("9" * 5000),
    Literal("0b12"),
    Literal("190:20:30"),
    Literal('"\\ud800"'),
    Literal("\t- x"),
]
JSON_LITERALS = [*DEEP, Literal("9" * 5000), Literal("1e400"), Literal("-"), Literal('"\\ud800"')]


@dataclass(frozen=True, slots=True)
class Edit:
    """One change of a document, at the node of a path."""

    path: Path_
    action: str
    value: Any = None


ACTIONS = ("replace", "drop", "rename", "repeat", "wrap", "unwrap", "add", "near", "retype")


def nodes(document: Any, path: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    """Yield all nodes of a document, with their paths."""
    yield path, document
    if isinstance(document, dict):
        for key, value in document.items():
            yield from nodes(value, (*path, key))
    elif isinstance(document, list):
        for index, value in enumerate(document):
            yield from nodes(value, (*path, index))


def document_edits(
    document: Any, literals: Sequence[Literal] = (), max_edits: int = 3
) -> st.SearchStrategy[list[Edit]]:
    """Return a strategy of edits of `document`.

    Args:
        document: of dicts, lists and scalars.
        literals: texts that only a writer by hand would write.
        max_edits: of one mutation.
    """
    paths = [path for path, _ in nodes(document)]
    # Shallow nodes are few and decide most, so they are drawn as often as all deeper ones together.
    shallow = [path for path in paths if len(path) <= 2]
    leaves = [value for _, value in nodes(document) if not isinstance(value, dict | list)]
    values = st.one_of(
        SCALARS,
        st.sampled_from(leaves) if leaves else SCALARS,
        st.sampled_from([[], {}, [[]], [None], {"a": 1}, {"": ""}, {1: 2}, {None: None}]),
        st.lists(SCALARS, max_size=3),
        *([st.sampled_from(list(literals))] if literals else []),
    )
    edit = st.builds(
        Edit,
        st.one_of(st.sampled_from(paths), st.sampled_from(shallow)),
        st.sampled_from(ACTIONS),
        values,
    )
    one = edit.map(lambda only: [only])
    return st.one_of(one, one, st.lists(edit, min_size=1, max_size=max_edits))


def apply_edits(document: Any, edits: Sequence[Edit]) -> Any:
    """Return a copy of `document` with the edits; an edit whose node another one has removed is left out."""
    holder = {"document": copy.deepcopy(document)}
    for edit in edits:
        parent, *keys = ["document", *edit.path]
        container: Any = holder
        key: Any = parent
        try:
            for following in keys:
                container, key = container[key], following
            _apply(container, key, edit)
        except (KeyError, IndexError, TypeError, AttributeError, StopIteration):
            continue
    return holder.get("document")


def _apply(container: Any, key: Any, edit: Edit) -> None:
    # A value may be a part of the document, which would then hold itself.
    edit = replace(edit, value=copy.deepcopy(edit.value))
    old = container[key]
    if edit.action == "replace":
        container[key] = edit.value
    elif edit.action == "drop":
        del container[key]
    elif edit.action == "rename":
        new = edit.value if isinstance(edit.value, Hashable) else str(edit.value)
        if isinstance(container, dict):
            container[new] = container.pop(key)
        else:
            container[key] = new
    elif edit.action == "repeat":
        if isinstance(container, list):
            container.insert(key, copy.deepcopy(old))
        elif isinstance(old, list):
            container[key] = old * 2
        else:
            container[key] = [old, old]
    elif edit.action == "wrap":
        container[key] = [old] if isinstance(edit.value, int | float) else {"x": old}
    elif edit.action == "unwrap":
        container[key] = next(iter(old.values())) if isinstance(old, dict) else old[0]
    elif edit.action == "add":
        if isinstance(old, dict):
            old[str(edit.value)[:50]] = edit.value
        else:
            old.append(edit.value)
    else:
        container[key] = _near(old, edit)


def _near(old: Any, edit: Edit) -> Any:
    """Return a value close to the old one, or the same in another type."""
    if edit.action == "retype":
        types = [str, lambda value: [value], float, int, bool, json.dumps]
        with_type = types[len(repr(edit.value)) % len(types)]
        try:
            return with_type(old)
        except (ValueError, TypeError, OverflowError):
            return str(old)
    if isinstance(old, bool) or old is None:
        return not old
    if isinstance(old, int | float):
        changes = [old + 1, old - 1, -old, old * 2, old * 1000, old / 3, old * 2**40]
        return changes[len(repr(edit.value)) % len(changes)]
    if isinstance(old, str):
        return [f"{old}\n", f"{old}x", old[:-1], f"../{old}", f"{old}\x1b[0m", f"./{old}"][
            len(repr(edit.value)) % 6
        ]
    return type(old)()


def as_json(document: Any) -> str:
    """Write a document as JSON; NaN, and texts that are no Unicode, are allowed, as Python's reader allows them."""
    held: list[Literal] = []
    text = json.dumps(_held(document, held, as_key=str), allow_nan=True)
    return _with_literals(text, held)


def as_yaml(document: Any) -> str:
    """Write a document as yaml."""
    held: list[Literal] = []
    text = yaml.safe_dump(_held(document, held, as_key=None), sort_keys=False, width=10**6)
    return _with_literals(text, held)


def _held(value: Any, held: list[Literal], as_key: Any) -> Any:
    """Return a copy in which placeholders stand for literals."""
    if isinstance(value, Literal):
        held.append(value)
        return f"LITERAL_{len(held) - 1}_"
    if isinstance(value, dict):
        return {
            (_held(key, held, as_key) if as_key is None else as_key(key)): _held(item, held, as_key)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_held(item, held, as_key) for item in value]
    if isinstance(value, int) and value.bit_length() > 10_000:
        return 10**4000
    return value


def _with_literals(text: str, held: Sequence[Literal]) -> str:
    for number, literal in enumerate(held):
        text = text.replace(f'"LITERAL_{number}_"', literal.text)
        text = text.replace(f"LITERAL_{number}_", literal.text)
    return text


@dataclass(frozen=True, slots=True)
class BytesEdit:
    """One change of bytes; `at` and `length` are parts of the file's length."""

    action: str
    at: float
    length: float
    data: bytes


BYTES_ACTIONS = ("flip", "truncate", "extend", "zero", "overwrite", "repeat", "cut", "insert")
DATA = st.one_of(
    st.binary(max_size=8),
    st.sampled_from(
        [
            b"\xff" * 8,
            b"\x00" * 8,
            b"\xff\xff\xff\x7f",
            (2**63 - 1).to_bytes(8, "little"),
            (-(2**62)).to_bytes(8, "little", signed=True),
            b"\n",
            b"\r\n",
            b"\t",
            b",",
            b'"',
            b"'",
            b"\x80\x81",
            b"\xef\xbb\xbf",
            b"\x1b[31m",
            b"PAR1",
            b"\x93NUMPY",
            b"\x1f\x8b\x08",
            b"\x28\xb5\x2f\xfd",
            b"nan",
            b"1e999",
            b"-",
            b"{",
            b"[",
            b"x" * 70_000,
        ]
    ),
)
PART = st.one_of(st.sampled_from([0.0, 1.0, 0.999, 0.5]), st.floats(0, 1))


def bytes_edits(max_edits: int = 3) -> st.SearchStrategy[list[BytesEdit]]:
    """Return a strategy of changes of a file's bytes."""
    edit = st.builds(BytesEdit, st.sampled_from(BYTES_ACTIONS), PART, st.floats(0, 0.3), DATA)
    return st.lists(edit, min_size=1, max_size=max_edits)


def apply_bytes(data: bytes, edits: Sequence[BytesEdit]) -> bytes:
    """Return the bytes with the changes."""
    for edit in edits:
        at = int(edit.at * max(len(data) - 1, 0))
        end = min(len(data), at + 1 + int(edit.length * len(data)))
        if edit.action == "flip" and data:
            bit = 1 << len(edit.data) % 8
            data = data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :]
        elif edit.action == "truncate":
            data = data[:at]
        elif edit.action == "extend":
            data += edit.data or b"\0"
        elif edit.action == "zero":
            data = data[:at] + bytes(end - at) + data[end:]
        elif edit.action == "overwrite":
            data = data[:at] + edit.data + data[at + len(edit.data) :]
        elif edit.action == "repeat":
            data = data[:end] + data[at:end] + data[end:]
        elif edit.action == "cut":
            data = data[:at] + data[end:]
        elif edit.action == "insert":
            data = data[:at] + edit.data + data[at:]
    return data


KINDS = ("missing", "empty", "directory", "fifo", "loop", "nowhere", "outside", "device", "null")


def apply_kind(path: Path, kind: str) -> None:
    """Replace a file by what is no such file."""
    path.unlink()
    if kind == "empty":
        path.touch()
    elif kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind != "missing":
        targets = {
            "loop": path.name,
            "nowhere": "nowhere",
            "outside": "../../outside/secret.bin",
            "device": "/dev/zero",
            "null": "/dev/null",
        }
        path.symlink_to(targets[kind])


def kinds_of_file(names: Sequence[str]) -> st.SearchStrategy[tuple[str, str]]:
    """Return a strategy of (name of a file, what it becomes)."""
    return st.tuples(st.sampled_from(sorted(names)), st.sampled_from(KINDS))
