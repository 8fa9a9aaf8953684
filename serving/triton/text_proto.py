"""Text form of a protocol buffer, in which Triton reads `config.pbtxt`."""

import json
from collections.abc import Mapping, Sequence
from typing import Any


class Word(str):
    """A value of an enumeration, which is written without quotes."""

    __slots__ = ()


def text_proto(message: Mapping[str, Any], indent: str = "") -> str:
    """Return a message as text: mappings are messages, lists of mappings repeated ones, other lists repeated values."""
    lines = []
    for name, value in message.items():
        if isinstance(value, Mapping):
            lines.append(f"{indent}{name} {{\n{text_proto(value, indent + '  ')}{indent}}}\n")
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            lines += [text_proto({name: entry}, indent) for entry in value]
        elif isinstance(value, list):
            lines.append(f"{indent}{name}: [{', '.join(map(_scalar, value))}]\n")
        else:
            lines.append(f"{indent}{name}: {_scalar(value)}\n")
    return "".join(lines)


def entries(values: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return a map as its repeated entries."""
    return [{"key": name, "value": value} for name, value in values.items()]


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Word):
        return str(value)
    # Both escape quotes, backslashes and control characters in the same way.
    return json.dumps(value)
