"""Checks of overrides: options and flags that do not exist are refused, with the option that was probably meant."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import Any, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from configs.schema import describe, open_sections

HYDRA_FLAGS = (
    *(
        "--help",
        "--hydra-help",
        "--version",
        "--cfg",
        "--resolve",
        "--package",
        "--run",
        "--multirun",
    ),
    *("--config-name", "--config-path", "--config-dir", "--info", "--shell-completion"),
    "--experimental-rerun",
    *("-h", "-c", "-p", "-r", "-m", "-cn", "-cp", "-cd", "-i", "-sc"),
)


def to_config(composed: DictConfig) -> Any:
    """Convert composed yaml to the schema's classes; every check of an option runs here.

    An open section becomes its common options; `to_section` converts all of them, once their class is known.

    Raises:
        ValueError: an invalid value, or an option that does not exist: Hydra itself accepts `+key=value`.
    """
    try:
        OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:  # an interpolation refers to a missing key
        raise ValueError(one_line(error)) from None
    schema = OmegaConf.get_type(composed)
    assert schema is not None  # composed with a schema
    for key in unknown_keys(composed, schema):
        raise no_option(key, _options(schema))
    composed = copy.deepcopy(composed)
    for name in open_sections(schema):
        common = {key.partition(".")[0] for key in _options(get_type_hints(schema)[name])}
        for key in set(composed[name]) - common:
            del composed[name][key]
    return OmegaConf.to_object(composed)


def to_section(composed: DictConfig, schema: type, name: str) -> Any:
    """Convert an open section to `schema`, the class of all its options; their checks run here.

    Raises:
        ValueError: an invalid value, or an option that does not exist.
    """
    for key in unknown_keys(composed, schema, f"{name}."):
        raise no_option(key, [option for option, _ in describe(schema, f"{name}.")])
    try:
        values = OmegaConf.to_container(composed, resolve=True)
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), values))
    except OmegaConfBaseException as error:
        where = "" if error.full_key is None else f"{name}.{error.full_key}: "
        raise ValueError(where + one_line(error)) from None


def check_overrides(
    arguments: Sequence[str], schema: type, groups: Sequence[str], likely: Sequence[str] = ()
) -> None:
    """Refuse unknown options and flags before Hydra does, which would advise to add them with a plus sign.

    Args:
        arguments: arguments of the command line.
        schema: class of the options.
        groups: config groups, such as `experiment`.
        likely: options of open sections, to which a mistyped one may be close.

    Raises:
        ValueError: an option does not exist, or is written as a flag.
    """
    options = _options(schema)
    opened = tuple(f"{name}." for name in open_sections(schema))
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if argument.startswith("-") and name not in HYDRA_FLAGS:
            raise ValueError(
                f"there is no flag {name}; options are written key=value, as {options[0]}=..., and --help lists them "
                "(docs/tf2_flags.md has the flags of NVIDIA's TF2 recipe)"
            )
        is_option = any(f"{option}.".startswith(f"{name}.") for option in options)
        is_below_one = name.startswith((*(f"{option}." for option in options), *opened))
        is_hydras = name.startswith(("-", "+", "~", "hydra")) or name.split("@")[0] in groups
        if equals and not (is_option or is_below_one or is_hydras):
            raise no_option(name, [*options, *likely])


def no_option(key: str, options: Sequence[str]) -> ValueError:
    """Return the error of a mistyped option, with the one of `options` that was probably meant."""
    likely = _likely_option(key, options)
    hint = "" if likely is None else f"did you mean {likely}? "
    return ValueError(f"there is no option {key}; {hint}--help lists them all")


def one_line(error: Exception) -> str:
    """Join Hydra's or OmegaConf's error and its cause to one line, without search path and types."""
    texts = [
        str(cause).partition("Config search path")[0] for cause in (error, error.__cause__) if cause
    ]
    lines = [line.strip() for text in texts for line in text.splitlines()]
    details = ("full_key:", "reference_type=", "object_type=", "See https:")
    text = " ".join(line for line in lines if line and not line.startswith(details))
    return text + ("; a list is written as [a,b]" if "ListConfig" in text else "")


def _options(schema: type) -> list[str]:
    return [key for key, _ in describe(schema)]


def _likely_option(key: str, options: Sequence[str]) -> str | None:
    """Return the closest option to `key`, of section `train` first if `key` names no section."""
    names = {} if "." in key else {option: option.rpartition(".")[2] for option in options}
    close = get_close_matches(key, names.values(), n=1, cutoff=0.75)
    candidates = [option for option, name in names.items() if name in close]
    candidates = candidates or get_close_matches(key, options, n=1, cutoff=0.75)
    return max(candidates, key=lambda option: option.startswith("train."), default=None)


def unknown_keys(composed: DictConfig, schema: type, prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys that `schema` lacks; open sections are left out."""
    types, opened = get_type_hints(schema), open_sections(schema)
    known = {declared.name: types[declared.name] for declared in fields(schema)}
    for key in composed:
        if key not in known:
            yield f"{prefix}{key!s}"
        elif is_dataclass(known[key]) and key not in opened and OmegaConf.is_dict(composed[key]):
            yield from unknown_keys(composed[key], known[key], f"{prefix}{key}.")
