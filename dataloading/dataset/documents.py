"""Small text files with facts, yaml, JSON and file lists, that may come from anybody: read with limits, never executed.

All packages read such files here. What a file may cost is limited before its content is built: a yaml of 2 kB may otherwise
fill the memory through nested aliases, a FIFO blocks without end, and deep nesting ends with a RecursionError.
"""

import errno
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import yaml

from configs.messages import shortened, shown

MAX_NESTING = 64
MAX_NODES = 5_000_000
"""Nodes of a yaml document with its aliases written out."""
MAX_DOCUMENT_BYTES = 1 << 30
MAX_YAML_BYTES = 64 << 20
"""PyYAML reads about a megabyte in a second, in ten without libyaml."""
# libyaml's are ten times as fast, and in all wheels.
YamlLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
YamlDumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
FILE_LIST = "_file_list.txt"
MAX_DIGITS = 4300
"""Python's own limit for integers."""
_DIGITS = frozenset("0123456789_:.+-xabcdefABCDEF")
# A socket and a terminal that is not there cannot be opened; links may lead in a circle; a name may be too long.
_NO_FILE = {errno.ENXIO, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL, errno.EISDIR}


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file, or a link to one, for reading without a buffer.

    Raises FileNotFoundError, NotADirectoryError: nothing lies there; ValueError: it is a directory, a FIFO, a device, a
    socket or a circle of links, or no file can have this name; OSError: it cannot be read, at least not now.
    """
    with _reported(path):
        # Without O_NONBLOCK, opening a FIFO waits for a writer. On a regular file it has no effect.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _refuse_special(path, os.fstat(descriptor))
    except ValueError:
        os.close(descriptor)
        raise
    return open(descriptor, "rb", buffering=0)


def check_regular(path: Path) -> os.stat_result:
    """Return the size and times of a regular file that a library opens next; errors as of `open_regular`."""
    with _reported(path):
        facts = path.stat()
    _refuse_special(path, facts)
    return facts


def resolved(path: Path) -> Path:
    """Return a path with its symbolic links resolved; ValueError if they lead in a circle or no file can have this name."""
    try:
        return path.resolve()
    except RuntimeError:  # Python 3.13 and later return the path
        reason = "its symbolic links lead in a circle"
    except ValueError:
        reason = "no file can have this name"
    raise ValueError(f"{path}: {reason}; want a regular file")


def read_regular(path: Path, max_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
    """Return the bytes of a regular file; errors as of `open_regular`, and a ValueError beyond `max_bytes`."""
    with open_regular(path) as stream:
        num_bytes = os.fstat(stream.fileno()).st_size
        if num_bytes > max_bytes:
            raise ValueError(f"{path}: {num_bytes:,} bytes; want at most {max_bytes:,}")
        return stream.read()


def read_text(path: Path, max_bytes: int = MAX_DOCUMENT_BYTES) -> str:
    """Return the text of a regular file, without a byte order mark; errors as of `read_regular`, a ValueError if not UTF-8."""
    try:
        # A mark would be a part of the first word, such as that of the first feature of a schema.
        return read_regular(path, max_bytes).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text: {shortened(str(error))}") from None


def read_yaml(path: Path) -> Any:
    """Return the content of a plain yaml file; errors as of `read_text` and `parse_yaml`."""
    return parse_yaml(read_text(path, MAX_YAML_BYTES), str(path))


def parse_yaml(text: str, where: str) -> Any:
    """Return the content of plain yaml.

    Raises ValueError, with `where` first: not plain yaml, a key twice, more than `MAX_NESTING` levels or `MAX_NODES` nodes.
    """
    try:
        return _limited_yaml(text)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
    except (RecursionError, ArithmeticError, AttributeError, LookupError, TypeError) as error:
        # PyYAML lets these through from a value that is not what its tag says, as `!!bool x` or `!!timestamp x`.
        reason = f"a value is not of its type ({type(error).__name__}: {error})"
    except ValueError as error:
        reason = str(error)
    raise ValueError(f"{where}: not plain yaml: {shortened(reason, 300)}")


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; errors as of `read_text` and `parse_json`."""
    return parse_json(read_text(path), str(path))


def parse_json(text: str | bytes, where: str) -> Any:
    """Return the content of a JSON text.

    Raises ValueError: not JSON, a key twice in an object, or deeper than `MAX_NESTING` levels; starts with `where`.
    """
    try:
        document = decode_json(text)
        if not _is_flat(document):
            raise ValueError(f"nested deeper than {MAX_NESTING} levels")
        return document
    except RecursionError:
        reason = f"nested deeper than {MAX_NESTING} levels"
    except ValueError as error:
        reason = str(error)
    raise ValueError(f"{where}: not JSON: {shortened(reason, 300)}")


def read_mapping(path: Path) -> dict[str, Any] | None:
    """Return the mapping that a yaml or JSON file holds; None if it is missing or damaged."""
    try:
        content = read_yaml(path) if path.suffix == ".yaml" else read_json(path)
    except (FileNotFoundError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def is_file_list(path: Path | str) -> bool:
    """Return whether a path has a name of HugeCTR's file lists: `_file_list.txt`, `file_list.txt`, `file_list_test.txt`."""
    return re.fullmatch(r"_?file_list[^/]*\.txt", PurePosixPath(path).name) is not None


def read_file_list(path: Path) -> list[str]:
    """Return the paths of a file list in order, as they are written.

    HugeCTR reads and NVTabular writes such lists: the number of files, then one path per line, relative to the list.
    Raises ValueError: the first line is no number, there are more or fewer paths, or a path is listed twice; OSError:
    the file cannot be read.
    """
    first, *names = [line.strip() for line in read_text(path).splitlines() if line.strip()] or [""]
    if not re.fullmatch("[0-9]{1,9}", first) or int(first) == 0:
        raise ValueError(
            f"{path}, line 1: got {shown(first)}, want the number of files, then one path per line"
        )
    if len(names) != int(first):
        raise ValueError(
            f"{path}: its first line says {int(first)} files, and {len(names)} follow; correct the list"
        )
    refuse_doubled(path, names)
    return names


def refuse_doubled(path: Path, names: Sequence[str]) -> None:
    """Raise ValueError if two paths of the file list `path` are the same."""
    doubled = [name for name, times in Counter(map(os.path.normpath, names)).items() if times > 1]
    if doubled:
        raise ValueError(
            f"{path}: lists {shown(doubled[0])} twice; its rows would count twice, so drop one"
        )


@contextmanager
def reading(file: str, remedy: str) -> Iterator[None]:
    """Raise ValueError for a file that is missing, with the remedy, or that cannot be read; `file` as messages name it."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{file}: no such file; {remedy}") from None
    except OSError as error:
        raise ValueError(f"{file}: cannot be read ({error.strerror})") from None


def file_list_text(names: Sequence[str]) -> str:
    """Return the text of a list of files, by their paths relative to it."""
    return "\n".join([str(len(names)), *names]) + "\n"


class DoubleKeyError(ValueError):
    """An object of JSON has a key twice."""


def decode_json(text: str | bytes) -> Any:
    """Return the content of a JSON text without `parse_json`'s limit of levels, which takes a walk through all values.

    Raises DoubleKeyError: an object has a key twice; ValueError: it is no JSON; RecursionError: it is very deep.
    """
    return json.loads(text, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; a second value of a key would replace the first one without a word."""
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise DoubleKeyError(f"an object has the key {shown(twice)} twice")
    return content


def _is_flat(document: Any) -> bool:
    level = [document] if isinstance(document, dict | list) else []
    for _ in range(MAX_NESTING):
        children = (
            child
            for value in level
            for child in (value.values() if isinstance(value, dict) else value)
        )
        level = [child for child in children if isinstance(child, dict | list)]
        if not level:
            return True
    return False


def _limited_yaml(text: str) -> Any:
    """Return the content of a yaml document whose events are within the limits: they are read before any value is built.

    Refused are documents that are too deep or too large, and those with a key twice.
    """
    levels = [_Collection("", is_mapping=False)]  # the first entry is the document
    nodes_of: dict[str, int] = {}
    for event in yaml.parse(text, Loader=YamlLoader):
        parent = levels[-1]
        if isinstance(event, yaml.CollectionStartEvent):
            parent.num_children += 1
            is_mapping = isinstance(event, yaml.MappingStartEvent)
            levels.append(_Collection(event.anchor or "", is_mapping))
        elif isinstance(event, yaml.CollectionEndEvent):
            nodes_of[parent.anchor] = parent.num_nodes
            levels.pop()
            levels[-1].num_nodes += parent.num_nodes
        elif isinstance(event, yaml.AliasEvent):
            parent.num_children += 1
            # An alias inside its own anchor has no end.
            is_open = any(event.anchor == collection.anchor for collection in levels)
            parent.num_nodes += MAX_NODES + 1 if is_open else nodes_of.get(event.anchor or "", 1)
        elif isinstance(event, yaml.ScalarEvent):
            parent.add_scalar(event)
        if len(levels) > MAX_NESTING:
            raise ValueError(f"nested deeper than {MAX_NESTING} levels")
        if levels[-1].num_nodes > MAX_NODES:
            raise ValueError(f"more than {MAX_NODES:,} values once its aliases are written out")
    return YamlLoader(text).get_single_data()


@dataclass(slots=True)
class _Collection:
    """A collection of a yaml document whose end has not been read."""

    anchor: str  # name by which aliases refer to it, or an empty text
    is_mapping: bool  # whether keys and values take turns
    num_children: int = 0  # its keys, values or items so far
    num_nodes: int = 1  # all nodes below it so far, and itself, with aliases written out
    keys: set[str] = field(default_factory=set)  # its plain keys so far

    def add_scalar(self, scalar: yaml.ScalarEvent) -> None:
        is_key = self.is_mapping and self.num_children % 2 == 0
        self.num_children += 1
        self.num_nodes += 1
        # Integers of base 60 take time with the square of their length.
        if len(scalar.value) > MAX_DIGITS and set(scalar.value) <= _DIGITS:
            raise ValueError(f"a number of {len(scalar.value):,} digits")
        if is_key and scalar.value != "<<":
            if scalar.value in self.keys:
                raise ValueError(f"a mapping has the key {shown(scalar.value)} twice")
            self.keys.add(scalar.value)


@contextmanager
def _reported(path: Path) -> Iterator[None]:
    """Convert errors of a path that can never be a file, which differ from those of a disk."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_FILE:
            raise
        raise ValueError(f"{path}: {error.strerror}; want a regular file") from None
    except ValueError:  # a name with a NUL, or with half of a character
        raise ValueError(f"{path}: no file can have this name; want a regular file") from None


def _refuse_special(path: Path, facts: os.stat_result) -> None:
    kinds = {
        stat.S_IFDIR: "a directory",
        stat.S_IFIFO: "a FIFO",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
        stat.S_IFSOCK: "a socket",
    }
    if not stat.S_ISREG(facts.st_mode):
        kind = kinds.get(stat.S_IFMT(facts.st_mode), "not a regular file")
        raise ValueError(f"{path}: {kind}; want a regular file")
