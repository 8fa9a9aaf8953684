"""Records described by plain yaml: a dataclass is made of a mapping, whose keys and values are checked.

Fields of text, lists of texts and flags are checked by their types; `one_of`, `whole` and `records` say what else a value may
be.
"""

from collections.abc import Mapping
from dataclasses import MISSING, Field, field, fields
from typing import Any

from configs.messages import printable, shortened, shown
from configs.options import require


def one_of(default: str | None, *choices: str) -> Any:
    return field(default=default, metadata={"choices": choices})


def whole(least: int, most: int, default: Any = MISSING) -> Any:
    return field(default=default, metadata={"least": least, "most": most})


def records(kind: type) -> Any:
    """Declare a list of records, each of which is described by a mapping, or by its name alone if it needs no more."""
    return field(default_factory=list, metadata={"of": kind})


def list_of(kind: type, content: Any, where: str) -> list[Any]:
    check_list(where, content)
    return [make(kind, item, f"{where}[{i}]") for i, item in enumerate(content)]


def make(kind: type, content: Any, where: str) -> Any:
    """Return a record of the values that a mapping has; null is the default. Raises ValueError: a value is of another kind."""
    needed = [f.name for f in fields(kind) if f.default is f.default_factory is MISSING]
    is_named = "name" in {f.name for f in fields(kind)} and needed in ([], ["name"])
    if isinstance(content, str) and is_named:
        content = {"name": content}
    content = known_keys(content, where, kind)
    absent = [key for key in needed if content.get(key) is None]
    require(not absent, f"{where}: got no {', '.join(absent)}; want at least {', '.join(needed)}")
    name = content.get("name")
    start = f"{where}." if name is None else f"{where.partition('[')[0]}: {shown(name)}: "
    return kind(
        **{
            declared.name: _checked(declared, content[declared.name], f"{start}{declared.name}")
            for declared in fields(kind)
            if content.get(declared.name) is not None
        }
    )


def _checked(declared: Field[Any], value: Any, where: str) -> Any:
    """Return the value of a field, with records in the place of their descriptions."""
    rule = declared.metadata
    if "of" in rule:
        return list_of(rule["of"], value, where)
    if "choices" in rule:
        choices = rule["choices"]
        require(value in choices, f"{where}: got {shown(value)}, want one of {', '.join(choices)}")
    elif "least" in rule:
        require(
            type(value) is int and rule["least"] <= value <= rule["most"],
            f"{where}: got {shown(value)}, want a whole number, {rule['least']} to {rule['most']:,}",
        )
    elif declared.type in (str, str | None):
        _check_text(where, value)
    elif declared.type in (bool, bool | None):
        require(isinstance(value, bool), f"{where}: got {shown(value)}, want true or false")
    elif declared.type == list[str]:
        check_list(where, value, " of texts")
        for text in value:
            _check_text(where, text)
    elif declared.type == list[Any]:
        check_list(where, value)
    return value


def _check_text(where: str, value: Any) -> None:
    require(isinstance(value, str), f"{where}: got {shown(value)}, want text; put it in quotes")
    require("\0" not in value, f"{where}: got {shown(value)}, want text without a null character")
    # An escape in yaml can make a lone surrogate.
    is_utf8 = not any("\ud800" <= char <= "\udfff" for char in value)
    require(is_utf8, f"{where}: got {shown(value)}, want text that UTF-8 can encode")


def check_list(where: str, value: Any, of: str = "") -> None:
    require(isinstance(value, list), f"{where}: got {shown(value)}, want a list{of}")


def known_keys(content: Any, where: str, kind: type) -> Mapping[str, Any]:
    """Return a mapping; ValueError if it is none, or has a key that no field of `kind` has."""
    require(isinstance(content, Mapping), f"{where}: got {shown(content)}, want a mapping")
    known = [declared.name for declared in fields(kind)]
    for key in content:
        name = shortened(printable(str(key)))
        require(key in known, f"{where}.{name}: no such key; want one of {', '.join(known)}")
    return content
