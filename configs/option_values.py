"""Values of options that no single declaration checks: numbers that no computation can hold, texts, home directories."""

import math
import os
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from configs.messages import shown
from configs.schema import require

INT64_MAX = 2**63 - 1
# The normal numbers of float32, in which weights, learning rates and losses are computed; GPUs may flush smaller ones to zero.
FLOAT32_MIN, FLOAT32_MAX = 2.0**-126, (2 - 2.0**-23) * 2.0**127


def check_values(config: Any, prefix: str = "") -> None:
    """Refuse values of typed options that lie beyond every limit.

    Args:
        config: instance of a class of options.
        prefix: prefix of every key.

    Raises:
        ValueError: an integer beyond 64 bits or the option's `most`, a number that is not finite or that float32 cannot
            hold, or a text that no file can hold.
    """
    for declared in fields(config):
        key, value = f"{prefix}{declared.name}", getattr(config, declared.name)
        if is_dataclass(value):
            check_values(value, f"{key}.")
        for item in value if isinstance(value, list) else [value]:
            _check_value(key, item, declared.metadata.get("most"))


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
