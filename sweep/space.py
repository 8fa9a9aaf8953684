"""The space of a sweep: options with the values that trials may have, read from a yaml file."""

import itertools
import math
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from configs.messages import shown
from configs.option_values import written
from configs.options import refuse, require
from dataloading.dataset.documents import read_yaml

COMMITTED = Path(__file__).parents[1] / "configs" / "sweep_spaces"
FLOAT = re.compile(r"[+-]?(?=\d*[.eE])(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
RANGE_FIELDS = {"low", "high", "log", "step"}
SET_BY_THE_SWEEP = (
    *("run_dir", "mode", "recipe", "config", "eval.split", "eval.best_metric", "data.path"),
    *("data.validation_fraction", "checkpoint.save", "checkpoint.restore"),
)
"""Options that trials cannot differ by: their values would not be comparable, or nothing would be learnt from them."""


Values = CategoricalDistribution | IntDistribution | FloatDistribution
"""Values that trials may have, choices as the command line writes them. Numbers are integers if both ends of their range are."""
Space = Mapping[str, Values]


def value_at(values: Values, share: float) -> Any:
    """Return the value at a share of an option's values, 0 to 1, on their scale."""
    if isinstance(values, CategoricalDistribution):
        return values.choices[min(int(share * len(values.choices)), len(values.choices) - 1)]
    low, high = values.low, values.high
    value = low * (high / low) ** share if values.log else low + share * (high - low)
    if values.step is not None:
        value = low + values.step * round((value - low) / values.step)
    return type(low)(min(max(value, low), high))


def allows(values: Values, value: Any) -> bool:
    """Return whether an option's value is one that trials may have."""
    if isinstance(values, CategoricalDistribution):
        return written(value) in values.choices
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and values._contains(value)


def all_of(values: Values) -> tuple[Any, ...] | None:
    """Return all values; None if there is no step between them."""
    if isinstance(values, CategoricalDistribution):
        return values.choices
    if values.step is None or values.log:
        return None
    count = round((values.high - values.low) / values.step) + 1
    return tuple(min(values.low + index * values.step, values.high) for index in range(count))


def read_space(name: str) -> tuple[Path, Space]:
    """Read a space file, `name` a path or a file in configs/sweep_spaces; return its path and the space.

    Raises ValueError: it is missing, empty or malformed; the message names file and option.
    """
    path = Path(name)
    if not path.exists() and (COMMITTED / f"{name}.yaml").is_file():
        path = COMMITTED / f"{name}.yaml"
    try:
        content = read_yaml(path)
    except FileNotFoundError:
        names = ", ".join(sorted(file.stem for file in COMMITTED.glob("*.yaml")))
        raise ValueError(
            f"space={name}: there is no such file; those of configs/sweep_spaces are {names}"
        ) from None
    require(
        isinstance(content, dict) and bool(content),
        f"{path}: the space {'is empty' if not content else f'is {shown(content)}'}; want options with values, such as "
        "optimizer.lr: {low: 0.001, high: 0.01, log: true}",
    )
    space = {}
    for option, values in content.items():
        require(isinstance(option, str), f"{path}: {shown(option)} is no option")
        require(
            option not in SET_BY_THE_SWEEP,
            f"{path}: {option} cannot differ between trials; leave it out, or set it for all of them",
        )
        space[option] = _parsed(f"{path}: {option}", values)
    return path, space


def grid_of(space: Space) -> Iterator[dict[str, Any]]:
    """Yield all combinations of the space; ValueError if an option has no finite number of values."""
    all_values = {option: all_of(values) for option, values in space.items()}
    for option, found in all_values.items():
        require(
            found is not None,
            f"sampler=grid needs choices or a step, and {option} is a range without; write step: or a list",
        )
    for values in itertools.product(*(found or () for found in all_values.values())):
        yield dict(zip(all_values, values, strict=True))


def corners(space: Space) -> Iterator[dict[str, Any]]:
    """Yield combinations in which every choice, and both ends of every range, occur."""
    ends = {
        option: values.choices
        if isinstance(values, CategoricalDistribution)
        else (values.low, values.high)
        for option, values in space.items()
    }
    first = {option: values[0] for option, values in ends.items()}
    yield first
    for option, values in ends.items():
        for value in values[1:]:
            yield first | {option: value}


def as_override(option: str, value: Any) -> str:
    return f"{option}={value!r}" if isinstance(value, float) else f"{option}={value}"


def as_plain(space: Space) -> dict[str, Any]:
    """Return the space as values of JSON, the same for equal spaces."""
    return {
        option: list(values.choices)
        if isinstance(values, CategoricalDistribution)
        # Of integers the step is 1 without a word.
        else {
            "low": values.low,
            "high": values.high,
            "log": values.log,
            "step": None if isinstance(values.low, int) and values.step == 1 else values.step,
        }
        for option, values in space.items()
    }


def _parsed(where: str, values: Any) -> Values:
    if isinstance(values, list):
        values = _as_numbers(values)
        texts = tuple(written(value) for value in values)
        require(bool(texts), f"{where} has no choices; name at least one")
        different = {written(v, lambda x: repr(int(x) if x.is_integer() else x)) for v in values}
        require(len(different) == len(texts), f"{where} has a choice twice: {', '.join(texts)}")
        return CategoricalDistribution(texts)
    require(
        isinstance(values, dict),
        f"{where}: got {shown(values)}, want a list of choices, or {{low: .., high: ..}} with log: true or step: ..",
    )
    for name in values:
        require(
            name in RANGE_FIELDS,
            f"{where}: there is no {shown(name)}; want low, high, and log or step",
        )
    require({"low", "high"} <= set(values), f"{where} needs low and high")
    low, high = (_number(f"{where}: {name}", values[name]) for name in ("low", "high"))
    log = values.get("log", False)
    require(isinstance(log, bool), f"{where}: log must be true or false, got {shown(log)}")
    step = None if values.get("step") is None else _number(f"{where}: step", values["step"])
    require(low < high, f"{where}: low must be below high, got {low} and {high}")
    is_integer = isinstance(low, int) and isinstance(high, int)
    require(
        step is None or isinstance(step, int) or not is_integer,
        f"{where}: a range of integers needs an integer step, got {step}",
    )
    found: IntDistribution | FloatDistribution
    try:
        with warnings.catch_warnings(action="ignore"):  # a step that does not divide the range
            if is_integer:
                whole = 1 if step is None else int(step)
                found = IntDistribution(int(low), int(high), log=log, step=whole)
            else:
                found = FloatDistribution(float(low), float(high), log=log, step=step)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    refuse(found.single(), f"{where}: a step of {step} leaves only {low} of {low} to {high}")
    return found


def _as_numbers(value: Any) -> Any:
    """Return what the command line reads: yaml takes 1e-2 for a text, since its numbers need a point."""
    if isinstance(value, list):
        return [_as_numbers(item) for item in value]
    return float(value) if isinstance(value, str) and FLOAT.fullmatch(value) else value


def _number(where: str, value: Any) -> int | float:
    value = _as_numbers(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    require(is_number and math.isfinite(value), f"{where} must be a number, got {shown(value)}")
    return value
