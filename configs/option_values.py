"""Values of options that no single declaration checks: numbers that no computation can hold, texts, home directories."""

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, ListConfig, OmegaConf

from configs.messages import shown
from configs.schema import require

INT64_MAX = 2**63 - 1
# The normal numbers of float32, in which weights, learning rates and losses are computed; GPUs may flush smaller ones to zero.
FLOAT32_MIN, FLOAT32_MAX = 2.0**-126, (2 - 2.0**-23) * 2.0**127


def check_values(values: Mapping[Any, Any], schema: type, prefix: str = "") -> None:
    """Refuse values of options that lie beyond every limit, before the classes of the options check them further.

    Args:
        values: composed values of the options; those that are not set may be absent.
        schema: class of the options.
        prefix: prefix of every key.

    Raises:
        ValueError: a value of another kind, an integer beyond 64 bits or the option's `most`, a number that is not finite or
            that float32 cannot hold, or a text that no file can hold.
    """
    types = get_type_hints(schema)
    for declared in fields(schema):
        if declared.name not in values:
            continue
        key, hint, value = f"{prefix}{declared.name}", types[declared.name], values[declared.name]
        if is_dataclass(hint) and isinstance(value, Mapping):
            check_values(value, hint, f"{key}.")  # type: ignore[arg-type]
            continue
        is_list = isinstance(value, list) and takes(hint, list)
        is_plain = is_list or hint is Any or not isinstance(value, list | Mapping)
        require(is_plain and not _is_missing(value, hint), _want(key, value, hint))
        for item in value if is_list else [value]:
            is_nested = is_list and (item is None or isinstance(item, list | Mapping))
            require(not is_nested, _want(key, value, hint))
            _check_value(key, item, declared.metadata.get("most"))
            is_named = item != "" or not declared.metadata.get("path")
            require(
                is_named,
                f"{key} is empty, perhaps from an unset shell variable: name a path, or null",
            )


def _is_missing(value: Any, hint: Any) -> bool:
    """Return whether an option has no value: OmegaConf writes three question marks for one."""
    return value == "???" or (value is None and hint is not Any and not takes(hint, NoneType))


def _want(key: str, value: Any, hint: Any) -> str:
    return f"{key}: got {shown(value)}, want {wanted(hint)}"


def _check_value(key: str, value: Any, most: int | None) -> None:
    if isinstance(value, bool):
        return
    if isinstance(value, int):
        limit = INT64_MAX if most is None else most
        require(abs(value) <= limit, f"{key} must be at most {limit:,}, got {shown(value)}")
    elif isinstance(value, float):
        require(math.isfinite(value), f"{key} must be a finite number, got {value}")
        require(
            value == 0 or FLOAT32_MIN <= abs(value) <= FLOAT32_MAX,
            f"{key}: float32 cannot hold {value}; want 0, or a size between {FLOAT32_MIN:.2g} and {FLOAT32_MAX:.2g}",
        )
        require(most is None or value <= most, f"{key} must be at most {most}, got {value}")
    elif isinstance(value, str):
        # Bytes of the command line that are not UTF-8 arrive as surrogates.
        is_text = "\0" not in value and not any("\ud800" <= char <= "\udfff" for char in value)
        require(is_text, f"{key}: got {shown(value)}, want UTF-8 text")


def expand_home(composed: DictConfig, schema: type) -> None:
    """Replace a leading `~` by the home directory in all options that name files, as a shell does.

    Raises:
        ValueError: there is no such user.
    """
    for key in _path_keys(schema):
        value = OmegaConf.select(composed, key)
        if isinstance(value, str):
            OmegaConf.update(composed, key, _expanded(key, value))
        elif isinstance(value, ListConfig):
            expanded = [_expanded(key, item) if isinstance(item, str) else item for item in value]
            OmegaConf.update(composed, key, expanded)


def _path_keys(schema: type, prefix: str = "") -> Iterator[str]:
    for declared in fields(schema):
        key = f"{prefix}{declared.name}"
        if declared.metadata.get("path"):
            yield key
        elif is_dataclass(declared.type):
            yield from _path_keys(declared.type, f"{key}.")  # type: ignore[arg-type]


def _expanded(key: str, path: str) -> str:
    if not path.startswith("~"):
        return path
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        user = path.partition("/")[0]
        raise ValueError(
            f"{key}={shown(path)}: there is no home directory of {shown(user)}; a file of that name is './{path}'"
        )
    return expanded


def hints(schema: type, prefix: str = "") -> dict[str, Any]:
    """Return the type of every section and option, by dotted key."""
    found: dict[str, Any] = {}
    types = get_type_hints(schema)
    for declared in fields(schema):
        key, hint = f"{prefix}{declared.name}", types[declared.name]
        found[key] = str | list[str] if hint is Any and declared.metadata.get("path") else hint
        if is_dataclass(hint):
            found |= hints(hint, f"{key}.")  # type: ignore[arg-type]
    return found


def takes(hint: Any, kind: type) -> bool:
    """Return whether an option of type `hint` may be of `kind`."""
    members = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    return any((get_origin(member) or member) is kind for member in members)


def wanted(hint: Any) -> str:
    """Return what an option of type `hint` may be, in words."""
    if isinstance(hint, UnionType):
        return " or ".join(wanted(member) for member in get_args(hint))
    if is_dataclass(hint):
        return "the options of this section"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return f"one of {', '.join(member.name for member in hint)}"
    words = {int: "an integer", float: "a number", bool: "true or false", NoneType: "null"}
    return words.get(hint, "a list" if get_origin(hint) is list else "a value")
