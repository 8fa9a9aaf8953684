"""Checks of overrides: options and flags that do not exist are refused, with the option that was probably meant."""

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import Any

from omegaconf import DictConfig, OmegaConf

from configs.schema import describe

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

    Raises:
        ValueError: an invalid value, or an option that does not exist: Hydra itself accepts `+key=value`.
    """
    schema = OmegaConf.get_type(composed)
    for key in _unknown_keys(composed, schema):
        raise ValueError(_no_option(key, schema))
    return OmegaConf.to_object(composed)


def check_overrides(arguments: Sequence[str], schema: type, groups: Sequence[str]) -> None:
    """Refuse unknown options and flags before Hydra does, which would advise to add them with a plus sign.

    Args:
        arguments: arguments of the command line.
        schema: class of the options.
        groups: config groups, such as `experiment`.

    Raises:
        ValueError: an option does not exist, or is written as a flag.
    """
    options = [key for key, _ in describe(schema)]
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if argument.startswith("-") and name not in HYDRA_FLAGS:
            raise ValueError(
                f"there is no flag {name}; options are written key=value, as {options[0]}=..., and --help lists them "
                "(docs/tf2_flags.md has the flags of NVIDIA's TF2 recipe)"
            )
        is_option = any(f"{option}.".startswith(f"{name}.") for option in options)
        is_below_one = any(name.startswith(f"{option}.") for option in options)
        is_hydras = name.startswith(("-", "+", "~", "hydra")) or name.split("@")[0] in groups
        if equals and not (is_option or is_below_one or is_hydras):
            raise ValueError(_no_option(name, schema))


def _no_option(key: str, schema: type) -> str:
    likely = _likely_option(key, [option for option, _ in describe(schema)])
    hint = "" if likely is None else f"did you mean {likely}? "
    return f"there is no option {key}; {hint}--help lists them all"


def _likely_option(key: str, options: Sequence[str]) -> str | None:
    """Return the closest option to `key`, of section `train` first if `key` names no section."""
    names = {} if "." in key else {option: option.rpartition(".")[2] for option in options}
    close = get_close_matches(key, names.values(), n=1, cutoff=0.75)
    candidates = [option for option, name in names.items() if name in close]
    candidates = candidates or get_close_matches(key, options, n=1, cutoff=0.75)
    return max(candidates, key=lambda option: option.startswith("train."), default=None)


def _unknown_keys(composed: DictConfig, schema: type, prefix: str = "") -> Iterator[str]:
    known = {declared.name: declared.type for declared in fields(schema)}
    for key in composed:
        if key not in known:
            yield f"{prefix}{key}"
        elif is_dataclass(known[key]):
            yield from _unknown_keys(composed[key], known[key], f"{prefix}{key}.")
