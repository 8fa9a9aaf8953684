"""Small text files with facts, yaml and JSON, that may come from anybody: read with limits, never executed.

All packages read such files here. What a file may cost is limited before its content is built: a yaml of 2 kB may otherwise
fill the memory through nested aliases, a FIFO blocks for ever, and deep nesting ends with a RecursionError.
"""

import json
import os
import stat
from pathlib import Path
from typing import Any

import yaml

from configs.messages import shortened

MAX_NESTING = 64
MAX_NODES = 5_000_000
"""Nodes of a yaml document with its aliases written out."""
MAX_DOCUMENT_BYTES = 1 << 30


def read_regular(path: Path, max_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
    """Return the bytes of a regular file, or of a link to one.

    Raises:
        FileNotFoundError, NotADirectoryError: nothing lies there.
        ValueError: it is a directory, a FIFO, a device or a socket, or has more than `max_bytes`.
        OSError: it cannot be read.
    """
    # Without O_NONBLOCK, opening a FIFO waits for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode):
        os.close(descriptor)
        raise ValueError(f"{path}: {_kind(facts.st_mode)}; want a regular file")
    with open(descriptor, "rb") as stream:
        if facts.st_size > max_bytes:
            raise ValueError(f"{path}: {facts.st_size:,} bytes; want at most {max_bytes:,}")
        return stream.read()


def read_text(path: Path) -> str:
    """Return the text of a regular file; errors as of `read_regular`, and a ValueError if it is not UTF-8."""
    try:
        return read_regular(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text: {error}") from None


def read_yaml(path: Path) -> Any:
    """Return the content of a plain yaml file; errors as of `read_text`, and a ValueError for anything that is not plain yaml."""
    return parse_yaml(read_text(path), str(path))


def parse_yaml(text: str, where: str) -> Any:
    """Return the content of plain yaml.

    Raises:
        ValueError: not plain yaml, or beyond `MAX_NESTING` levels or `MAX_NODES` nodes; starts with `where`.
    """
    try:
        _check_size(text)
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        reason = shortened(" ".join(str(error).split()), 300)
    except (RecursionError, OverflowError, TypeError, ValueError) as error:
        # Also what PyYAML lets through from a date, an integer or a key that Python refuses.
        reason = shortened(str(error), 300)
    raise ValueError(f"{where}: not plain yaml: {reason}")


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; errors as of `read_text`, and a ValueError for anything that is not JSON."""
    return parse_json(read_text(path), str(path))


def parse_json(text: str | bytes, where: str) -> Any:
    """Return the content of a JSON text; ValueError, which starts with `where`, if it is not JSON."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(f"{where}: not JSON: nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{where}: not JSON: {shortened(str(error))}") from None


def _check_size(text: str) -> None:
    """Refuse a document that is too deep or too large, from its events, before any value is built."""
    # Nodes of every collection that is open; the first entry is the document.
    open_nodes, open_anchors = [0], [""]
    nodes_of: dict[str, int] = {}
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append(1)
            open_anchors.append(event.anchor or "")
        elif isinstance(event, yaml.CollectionEndEvent):
            nodes = open_nodes.pop()
            nodes_of[open_anchors.pop()] = nodes
            open_nodes[-1] += nodes
        elif isinstance(event, yaml.AliasEvent):
            # An alias inside its own anchor has no end.
            open_nodes[-1] += (
                MAX_NODES + 1 if event.anchor in open_anchors else nodes_of.get(event.anchor, 1)
            )
        else:
            open_nodes[-1] += 1
        if len(open_nodes) > MAX_NESTING:
            raise ValueError(f"nested deeper than {MAX_NESTING} levels")
        if open_nodes[-1] > MAX_NODES:
            raise ValueError(f"more than {MAX_NODES:,} values once its aliases are written out")


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFDIR: "a directory",
        stat.S_IFIFO: "a FIFO",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
        stat.S_IFSOCK: "a socket",
    }
    return kinds.get(stat.S_IFMT(mode), "not a regular file")
