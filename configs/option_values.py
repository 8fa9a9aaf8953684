"""Values of options that no single declaration checks: numbers that no computation can hold, texts, home directories."""

import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from omegaconf import Container, DictConfig, ListConfig, OmegaConf

from configs.messages import shown
from configs.options import require, type_hints

INT64_MAX = 2**63 - 1
# The normal numbers of float32, in which weights, learning rates and losses are computed; GPUs may flush smaller ones to zero.
FLOAT32_MIN, FLOAT32_MAX = 2.0**-126, (2 - 2.0**-23) * 2.0**127


def check_values(values: Mapping[Any, Any], schema: type, prefix: str = "") -> None:
    """Refuse values of options that lie beyond every limit, before the classes of the options check them further.

    Raises ValueError: a value of another kind, an integer beyond 64 bits or the option's `most`, a number that is not finite
    or that float32 cannot hold, or a text that no file can hold.
    """
    types = type_hints(schema)
    for declared in fields(schema):
        if declared.name not in values:
            continue
        option, hint = f"{prefix}{declared.name}", types[declared.name]
        value = values[declared.name]
        if is_dataclass(hint) and isinstance(value, Mapping):
            check_values(value, hint, f"{option}.")  # type: ignore[arg-type]
            continue
        require(_has_form(value, hint), f"{option}: got {shown(value)}, want {wanted(hint)}")
        for item in [value] if hint is Any else _leaves(value):
            _check_value(option, item, declared.metadata.get("most"))
            is_named = item != "" or not declared.metadata.get("path")
            require(
                is_named,
                f"{option} is empty, perhaps from an unset shell variable: name a path, or null",
            )


def _has_form(value: Any, hint: Any) -> bool:
    """Return whether a value is a list, a mapping, null or an integer only where its type is; OmegaConf checks the rest."""
    if hint is Any:
        return value != "???"  # in OmegaConf's words: no value
    if value is None:
        return takes(hint, NoneType)
    if isinstance(value, list):
        # Of a model of the user the elements may be lists or mappings too.
        elements = [_element(member) for member in _members(hint) if _kind(member) in (list, tuple)]
        return any(all(_has_form(item, element) for item in value) for element in elements)
    if isinstance(value, Mapping):
        if any(is_dataclass(member) for member in _members(hint)):
            return True
        elements = [_element(member) for member in _members(hint) if _kind(member) is dict]
        return any(all(_has_form(v, element) for v in value.values()) for element in elements)
    if type(value) is int and {_kind(member) for member in _members(hint)} <= {bool, NoneType}:
        return False  # OmegaConf would take 5 for true
    return value != "???" and any(
        _kind(member) not in (list, tuple, dict) for member in _members(hint)
    )


def _element(container: Any) -> Any:
    """Return the type of the elements of a list, or of the values of a mapping; Any if they differ."""
    types = [kind for kind in get_args(container) if kind is not Ellipsis]
    if _kind(container) is tuple:
        return types[0] if len(types) == 1 else Any
    return types[-1] if types else Any


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list | Mapping):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(item)
    else:
        yield value


def _check_value(option: str, value: Any, most: int | None) -> None:
    if isinstance(value, bool):
        return
    if isinstance(value, int):
        limit = INT64_MAX if most is None else most
        require(abs(value) <= limit, f"{option} must be at most {limit:,}, got {shown(value)}")
    elif isinstance(value, float):
        require(math.isfinite(value), f"{option} must be a finite number, got {value}")
        require(
            value == 0 or FLOAT32_MIN <= abs(value) <= FLOAT32_MAX,
            f"{option}: float32 cannot hold {value}; want 0, or a size between {FLOAT32_MIN:.2g} and {FLOAT32_MAX:.2g}",
        )
        require(most is None or value <= most, f"{option} must be at most {most}, got {value}")
    elif isinstance(value, str):
        # Bytes of the command line that are not UTF-8 arrive as surrogates.
        is_text = "\0" not in value and not any("\ud800" <= char <= "\udfff" for char in value)
        require(is_text, f"{option}: got {shown(value)}, want UTF-8 text")


def plain_values(options: Any) -> dict[str, Any]:
    """Return options, an instance of their class, as values of JSON."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, list):
            return [plain(item) for item in value]
        return value.value if isinstance(value, Enum) else value

    return plain(asdict(options))


def written(value: Any, number: Callable[[float], str] = repr) -> str:
    """Return a value as it is typed behind `key=`; `number` returns the text of a floating-point number."""
    if isinstance(value, Container):
        value = OmegaConf.to_container(value, resolve=True)
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(written(item, number) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{written(item, number)}' for key, item in value.items())}}}"
    if isinstance(value, Enum):
        return value.name
    return number(value) if isinstance(value, float) else str(value)


def short_names(options: Sequence[str], taken: Collection[str] = ()) -> list[str]:
    """Return the last parts of the names of options, and the complete name where two would be equal, or one is taken."""
    last = [option.rpartition(".")[2] for option in options]
    return [
        name if last.count(name) == 1 and name not in taken else option
        for option, name in zip(options, last, strict=True)
    ]


def expand_home(composed: DictConfig, schema: type, prefix: str = "") -> None:
    """Replace a leading `~` by the home directory in options that name files, as a shell does; ValueError for no such user."""
    for option in _path_options(schema):
        value = OmegaConf.select(composed, option)
        if value is not None:
            OmegaConf.update(composed, option, _expanded(f"{prefix}{option}", value))


def _path_options(schema: type, prefix: str = "") -> Iterator[str]:
    for declared in fields(schema):
        option = f"{prefix}{declared.name}"
        if declared.metadata.get("path") or declared.metadata.get("paths"):
            yield option
        elif is_dataclass(declared.type):
            yield from _path_options(declared.type, f"{option}.")  # type: ignore[arg-type]


def _expanded(option: str, path: Any) -> Any:
    if isinstance(path, ListConfig):
        return [_expanded(option, item) for item in path]
    if isinstance(path, DictConfig):
        return {name: _expanded(f"{option}.{name!s}", item) for name, item in path.items()}
    if not isinstance(path, str) or not path.startswith("~"):
        return path
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        user = path.partition("/")[0]
        raise ValueError(
            f"{option}={shown(path)}: there is no home directory of {shown(user)}; a file of that name is './{path}'"
        )
    return expanded


@cache
def hints(schema: type, prefix: str = "") -> Mapping[str, Any]:
    """Return the type of every section and option, by dotted name."""
    found: dict[str, Any] = {}
    types = type_hints(schema)
    for declared in fields(schema):
        option, hint = f"{prefix}{declared.name}", types[declared.name]
        is_path = declared.metadata.get("path")
        found[option] = str | list[str] | None if hint is Any and is_path else hint
        if is_dataclass(hint):
            found |= hints(hint, f"{option}.")  # type: ignore[arg-type]
    return found


def takes(hint: Any, kind: type) -> bool:
    return any(_kind(member) is kind for member in _members(hint))


def _members(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union, written `int | None` or `Optional[int]`; of another type, the type."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _kind(hint: Any) -> Any:
    return get_origin(hint) or hint


def wanted(hint: Any) -> str:
    """Return what an option of type `hint` may be, in words."""
    if len(_members(hint)) > 1:
        return " or ".join(wanted(member) for member in _members(hint))
    if is_dataclass(hint):
        return "the options of this section"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return f"one of {', '.join(member.name for member in hint)}"
    words = {int: "an integer", float: "a number", bool: "true or false", NoneType: "null"}
    return words.get(hint, "a list" if _kind(hint) is list else "a value")
