"""Declaration, checks and lists of options: the base of the classes in `configs/schema.py` and of those like it."""

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING as DATACLASS_MISSING
from dataclasses import field, fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType
from typing import Any, ClassVar, get_args, get_type_hints

FILLED = "filled"
"""Among the bounds of a list that is not empty."""
SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<=", "most": "<="}
# Largest values of options: a mistyped number ends with a message instead of filling the memory.
MOST_COLUMNS = 65_536
MOST_SAMPLES = 2**31 - 1
MOST_ROWS = 2**48
# Ranks of a plan; the planner takes minutes for so many.
MOST_RANKS = 16_384
LEAST_GIB = 2**-20
OPEN_SECTION = {"open": True}
"""Metadata of a section with further options, whose class is known only once the section's values are."""
_COMPARED = {"gt": operator.gt, "ge": operator.ge, "lt": operator.lt, "le": operator.le}


type_hints = cache(get_type_hints)
"""Types of a dataclass's fields, by name; a command asks for them some hundred times."""


def option(
    default: Any,
    meaning: str,
    *,
    gt: float | None = None,
    ge: float | None = None,
    lt: float | None = None,
    le: float | None = None,
    most: int | None = None,
    filled: bool = False,
    path: bool = False,
    paths: bool = False,
    numerical: bool = False,
    replaces: str | None = None,
    required: str = "",
    only: str = "",
) -> Any:
    """Declare one option; `--help` prints its meaning with the bounds, and `(required)`.

    `gt`, `ge`, `lt` and `le` bound the option, or each of its elements; null is within all bounds. `most` is the largest
    value, checked before any class is made (`configs/option_values.py`). A list that is `filled` names at least one. With
    `path` the option names files, so `~` is the home directory; with `paths` it names one by name. One of a model that is
    `numerical` names a numerical feature with a meaning of its own, which `model.numerical_encoding` leaves as it is. The
    option `replaces` of the same section has no effect while this one has a value, and `configs/overrides.py` lets the command
    line name only one of them. An option that is `required` has a value, which this text describes; its default is null or
    empty. One that is `only` of values of other options in its section, such as `mode=eval`, has its default with others.
    """
    bounds = {
        name: bound
        for name, bound in (("gt", gt), ("ge", ge), ("lt", lt), ("le", le))
        if bound is not None
    }
    if filled:
        bounds[FILLED] = True
    meaning += " (required)" * bool(required) + f" (with {only})" * bool(only)
    metadata: dict[str, Any] = {"help": meaning, "most": most, "path": path, "bounds": bounds}
    metadata |= {"paths": paths, "numerical": numerical, "replaces": replaces, "required": required}
    metadata["only"] = dict(part.split("=") for part in only.split())
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


class Section:
    """Base of a class of options, which checks the bounds that they state; `section` is the prefix of their names.

    A class that relates options to each other does so in a `check_relations` of its own, which yields what is wrong, or raises
    ValueError; those of its bases are called before it. Bounds of an option hold in classes that declare it again, too.
    """

    __slots__ = ()
    section: ClassVar[str] = ""

    def __post_init__(self) -> None:
        check_section(self, self.section)
        for kind in reversed(type(self).__mro__):
            if "check_relations" in vars(kind):
                for mistake in vars(kind)["check_relations"](self) or ():
                    raise ValueError(mistake)


def check_section(options: Any, section: str) -> None:
    """Raise `ValueError` if one of `options` is beyond its bounds, missing, or of another mode."""
    kind: Any = type(options)
    for name, (hint, bounds) in bounds_of(kind).items():
        check_bounds(f"{section}.{name}".lstrip("."), getattr(options, name), bounds, hint)
    for declared in fields(options):
        value = getattr(options, declared.name)
        if (wanted := declared.metadata.get("required")) and not value:
            raise ValueError(f"no {declared.name}: set {declared.name}={wanted}")
        if (only := declared.metadata.get("only")) and value not in (declared.default, []):
            _check_only(options, section, f"{declared.name}={value}", only)
        # A section within one, of a model of the user, need not be derived from `Section`.
        if is_dataclass(value) and not isinstance(value, Section):
            check_section(value, f"{section}.{declared.name}".lstrip("."))


def _check_only(options: Any, section: str, written: str, only: Mapping[str, str]) -> None:
    start = f"{section}." if section else ""
    of = " ".join(f"{start}{name}={text}" for name, text in only.items())
    for name, text in only.items():
        got = getattr(options, name)
        require(
            got == text,
            f"{start}{written} is of {of}, and {start}{name}={got} would ignore it; leave it out, or set {of}",
        )


@cache
def bounds_of(section: type) -> dict[str, tuple[Any, dict[str, float]]]:
    """Return type and bounds of every option that has bounds, there or in a base of its class."""
    found: dict[str, tuple[Any, dict[str, float]]] = {}
    for declaring in reversed(section.__mro__):
        for declared in declaring.__dict__.get("__dataclass_fields__", {}).values():
            _, bounds = found.get(declared.name, (None, {}))
            found[declared.name] = (declared.type, bounds | declared.metadata.get("bounds", {}))
    return {name: (hint, bounds) for name, (hint, bounds) in found.items() if bounds}


def check_bounds(option: str, value: Any, bounds: Mapping[str, float], hint: Any) -> None:
    if FILLED in bounds and value == []:
        raise ValueError(f"{option} must name at least one, got []")
    bounds = {name: bound for name, bound in bounds.items() if name != FILLED}
    values = value if isinstance(value, list) else [] if value is None else [value]
    # Not a number is within no bounds.
    if not all(
        _COMPARED[name](number, bound) for number in values for name, bound in bounds.items()
    ):
        of_all = "all " * isinstance(value, list)
        or_null = (" or be null" if {"lt", "le"} & set(bounds) else " or null") * (
            NoneType in get_args(hint)
        )
        raise ValueError(f"{option} must {of_all}{_in_words(bounds)}{or_null}, got {value}")


def _in_words(bounds: Mapping[str, float]) -> str:
    match list(bounds.items()):
        case [("gt", 0), ("lt", most)]:
            return f"lie between 0 and {most}"
        case [("ge", least), ("lt", most)]:
            return f"lie in [{least}, {most})"
        case [("gt", least), ("le", most)]:
            return f"lie in ({least}, {most}]"
        case [("gt", 0)]:
            return "be positive"
        case [("ge", 0)]:
            return "not be negative"
    return "be " + " and ".join(f"{SIGNS[name]} {bound}" for name, bound in bounds.items())


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def refuse(mistake: object, message: str) -> None:
    """Raise `ValueError` if there is a mistake, such as two options that exclude each other."""
    require(not mistake, message)


def require_rate(name: str, rate: float) -> None:
    """Raise `ValueError` unless `rate`, of the option `name`, is a dropout rate."""
    check_bounds(name, rate, {"ge": 0, "lt": 1}, float)


def is_import_path(text: str) -> bool:
    """Return whether `text` has the form `package.module:NAME`, which names an object outside the project."""
    module, colon, name = text.partition(":")
    return bool(colon) and all(part.isidentifier() for part in (*module.split("."), name))


def is_file_name(text: str) -> bool:
    """Return whether `text` is a plain name of a file or folder, without a path in it."""
    return bool(text) and not text.startswith(".") and not {"/", "\0"} & set(text)


def open_sections(config: type) -> list[str]:
    return [declared.name for declared in fields(config) if declared.metadata.get("open")]


def default_values(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return the default of every option below a section by dotted name, as values of JSON.

    A section of names that the user chooses, such as `tasks`, has none. `config` is an instance of the section: the options
    of the model depend on its name.
    """
    defaults: dict[str, Any] = {}
    for declared in fields(config):
        key, value = f"{prefix}{declared.name}", getattr(config, declared.name)
        if is_dataclass(value):
            defaults |= default_values(value, f"{key}.")
            continue
        if isinstance(value, dict):
            continue
        factory = declared.default_factory
        default = declared.default if factory is DATACLASS_MISSING else factory()
        items = default if isinstance(default, list) else [default]
        plain = [item.value if isinstance(item, Enum) else item for item in items]
        defaults[key] = plain if isinstance(default, list) else plain[0]
    return defaults


def replaced_options(config: type, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted names (replacing option, replaced option) of every option that replaces another."""
    types = type_hints(config)
    for declared in fields(config):
        if is_dataclass(types[declared.name]):
            yield from replaced_options(types[declared.name], f"{prefix}{declared.name}.")
        elif declared.metadata.get("replaces"):
            yield f"{prefix}{declared.name}", f"{prefix}{declared.metadata['replaces']}"


@cache
def option_names(config: type, prefix: str = "") -> Sequence[str]:
    """Return the dotted name of every option below `config`, in the order of declaration."""
    return [name for name, _ in describe(config, prefix)]


def describe(
    config: type, prefix: str = "", sections: Mapping[str, type] | None = None
) -> Iterator[tuple[str, str]]:
    """Yield (dotted name, meaning) of every option below `config`, in the order of declaration.

    `sections` are the classes of open sections, where they are known.
    """
    types = type_hints(config) | dict(sections or {})
    for declared in fields(config):
        if is_dataclass(types[declared.name]):
            yield from describe(types[declared.name], f"{prefix}{declared.name}.")
        else:
            _, bounds = bounds_of(config).get(declared.name, (None, {}))
            most = declared.metadata["most"]
            # Those of 32 bits and more say nothing.
            bounds = bounds | ({} if most is None or most >= MOST_SAMPLES else {"most": most})
            within = ", ".join(
                "at least one" if name == FILLED else f"{SIGNS[name]}{bound:,}"
                for name, bound in bounds.items()
            )
            yield (
                f"{prefix}{declared.name}",
                declared.metadata["help"] + (f" ({within})" if within else ""),
            )
