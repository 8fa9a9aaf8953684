"""The space of a sweep: options with the values that trials may have, read from a yaml file."""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from configs.messages import shown
from configs.option_values import written
from configs.schema import require
from dataloading.dataset.documents import read_yaml

COMMITTED = Path(__file__).parents[1] / "configs" / "sweep_spaces"
RANGE_KEYS = {"low", "high", "log", "step"}
SET_BY_THE_SWEEP = (
    *("run_dir", "mode", "recipe", "config", "eval.split", "eval.best_metric", "data.path"),
    *("data.validation_fraction", "checkpoint.save", "checkpoint.restore"),
)
"""Options that trials cannot differ by: their values would not be comparable, or nothing would be learnt from them."""


@dataclass(frozen=True, slots=True)
class Choices:
    """Values of an option, one of which a trial has; each as the command line writes it."""

    values: tuple[str, ...]

    def suggest(self, trial: optuna.Trial, key: str) -> str:
        """Return the trial's value."""
        return trial.suggest_categorical(key, self.values)

    def distribution(self) -> BaseDistribution:
        """Return the values as Optuna describes them."""
        return CategoricalDistribution(self.values)

    def at(self, share: float) -> str:
        """Return the value at a share of them, 0 to 1."""
        return self.values[min(int(share * len(self.values)), len(self.values) - 1)]

    def holds(self, value: Any) -> bool:
        """Return whether an option's value is one of them."""
        return written(value) in self.values

    def ends(self) -> tuple[str, ...]:
        """Return the values to check before anything starts."""
        return self.values

    def grid(self) -> tuple[str, ...] | None:
        """Return all values."""
        return self.values


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `low` to `high`, both included; integers if both are; on a logarithmic scale with `log`."""

    low: int | float
    high: int | float
    log: bool = False
    step: int | float | None = None

    @property
    def is_integer(self) -> bool:
        """Return whether its values are integers."""
        return isinstance(self.low, int)

    def suggest(self, trial: optuna.Trial, key: str) -> int | float:
        """Return the trial's value."""
        if self.is_integer:
            step = 1 if self.step is None else int(self.step)
            return trial.suggest_int(key, int(self.low), int(self.high), log=self.log, step=step)
        return trial.suggest_float(key, self.low, self.high, log=self.log, step=self.step)

    def distribution(self) -> BaseDistribution:
        """Return the numbers as Optuna describes them."""
        if self.is_integer:
            step = 1 if self.step is None else int(self.step)
            return IntDistribution(int(self.low), int(self.high), log=self.log, step=step)
        return FloatDistribution(self.low, self.high, log=self.log, step=self.step)

    def at(self, share: float) -> int | float:
        """Return the number at a share of the range, 0 to 1, on its scale."""
        if self.log:
            value = self.low * (self.high / self.low) ** share
        else:
            value = self.low + share * (self.high - self.low)
        step = self.step if self.step is not None else 1 if self.is_integer else None
        if step is not None:
            value = self.low + step * round((value - self.low) / step)
        value = min(
            max(value, self.low), self.low + step * self._steps(step) if step else self.high
        )
        return int(value) if self.is_integer else value

    def holds(self, value: Any) -> bool:
        """Return whether an option's value is a number of the range."""
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not self.low <= value <= self.high:
            return False
        return self.distribution()._contains(value)

    def _steps(self, step: int | float) -> int:
        """Return the number of steps from `low` to the last value."""
        return math.floor((self.high - self.low) / step + 1e-9)

    def ends(self) -> tuple[int | float, ...]:
        """Return the values to check before anything starts."""
        return (self.low, self.high)

    def grid(self) -> tuple[int | float, ...] | None:
        """Return all values; None if there is no step between them."""
        step = self.step if self.step is not None else 1 if self.is_integer else None
        if step is None or self.log:
            return None
        count = self._steps(step) + 1
        return tuple(self.low + index * step for index in range(count))


Space = Mapping[str, Choices | Range]


def read_space(name: str) -> tuple[Path, Space]:
    """Read a space file, `name` a path or a file in configs/sweep_spaces; return its path and the space.

    Raises:
        ValueError: it is missing, empty or malformed; the message names file and key.
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
    for key, values in content.items():
        require(isinstance(key, str), f"{path}: {shown(key)} is no option")
        require(
            key not in SET_BY_THE_SWEEP,
            f"{path}: {key} cannot differ between trials; leave it out, or set it for all of them",
        )
        space[key] = _parsed(f"{path}: {key}", values)
    return path, space


def suggest(trial: optuna.Trial, space: Space) -> dict[str, Any]:
    """Return the values of a trial by option; those that it has already are kept."""
    return {key: values.suggest(trial, key) for key, values in space.items()}


def grid_of(space: Space) -> Iterator[dict[str, Any]]:
    """Yield all combinations of the space.

    Raises:
        ValueError: an option has no finite number of values.
    """
    all_values = {key: values.grid() for key, values in space.items()}
    for key, found in all_values.items():
        require(
            found is not None,
            f"sampler=grid needs choices or a step, and {key} is a range without; write step: or a list",
        )
    for values in itertools.product(*(found or () for found in all_values.values())):
        yield dict(zip(all_values, values, strict=True))


def corners(space: Space) -> Iterator[dict[str, Any]]:
    """Yield combinations in which every end of every option occurs."""
    first = {key: values.ends()[0] for key, values in space.items()}
    yield first
    for key, values in space.items():
        for value in values.ends()[1:]:
            yield first | {key: value}


def as_override(key: str, value: Any) -> str:
    """Return an option as the command line writes it."""
    return f"{key}={value!r}" if isinstance(value, float) else f"{key}={value}"


def as_plain(space: Space) -> dict[str, Any]:
    """Return the space as values of JSON, the same for equal spaces."""
    return {
        key: list(values.values)
        if isinstance(values, Choices)
        else {"low": values.low, "high": values.high, "log": values.log, "step": values.step}
        for key, values in space.items()
    }


def _parsed(where: str, values: Any) -> Choices | Range:
    if isinstance(values, list):
        texts = tuple(written(value) for value in values)
        require(bool(texts), f"{where} has no choices; name at least one")
        require(len(set(texts)) == len(texts), f"{where} has a choice twice: {', '.join(texts)}")
        return Choices(texts)
    require(
        isinstance(values, dict),
        f"{where}: got {shown(values)}, want a list of choices, or {{low: .., high: ..}} with log: true or step: ..",
    )
    for name in values:
        require(
            name in RANGE_KEYS,
            f"{where}: there is no {shown(name)}; want low, high, and log or step",
        )
    require({"low", "high"} <= set(values), f"{where} needs low and high")
    low, high = (_number(f"{where}: {name}", values[name]) for name in ("low", "high"))
    log = values.get("log", False)
    require(isinstance(log, bool), f"{where}: log must be true or false, got {shown(log)}")
    step = None if values.get("step") is None else _number(f"{where}: step", values["step"])
    is_integer = isinstance(low, int) and isinstance(high, int)
    if not is_integer:
        low, high = float(low), float(high)
    require(low < high, f"{where}: low must be below high, got {low} and {high}")
    require(not log or low > 0, f"{where}: low must be positive with log: true, got {low}")
    require(step is None or step > 0, f"{where}: step must be positive, got {step}")
    require(
        step is None or not log, f"{where}: log and step exclude each other; leave one of them out"
    )
    require(
        step is None or isinstance(step, int) or not is_integer,
        f"{where}: a range of integers needs an integer step, got {step}",
    )
    return Range(low, high, log, step)


def _number(where: str, value: Any) -> int | float:
    # yaml reads 1e-3 as a text: its numbers need a point.
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            value = None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    require(is_number and math.isfinite(value), f"{where} must be a number, got {shown(value)}")
    return value
