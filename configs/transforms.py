"""Transforms of the numericals of a table: the built-in ones, and those of a user by `package.module:NAME`.

Both engines evaluate the SQL, so it has to mean the same in DuckDB and in Spark. A server computes raw values in Python.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from configs.messages import shown
from configs.options import is_import_path
from configs.user_objects import load_user_object


@dataclass(frozen=True, slots=True, kw_only=True)
class Transform:
    """A transform of doubles, in which a missing value is null."""

    # (expression, numbers) -> expression, computed several times, so always alike: no random(). The numbers are SQL too: the
    # arguments, or the two that are fitted.
    sql: Callable[..., str]
    # (values, *numbers) -> values, each a double or None. Models of data with a transform without it take no raw values.
    python: Callable[..., list[float | None]] | None = None
    arguments: int = 0  # numbers that the description gives
    # Two numbers of the training rows: `range` (smallest, largest - smallest) or `moments` (mean, deviation). A size of
    # 0, of a column with a single value, is given as 1.
    fits: str | None = None
    counts: str | None = None  # what the report counts: values that are `emptied` or `clipped`
    # (expression, numbers) -> condition of such a value, if it takes less time than a comparison with the result
    counted: Callable[..., str] | None = None

    def __post_init__(self) -> None:
        good = self.fits in (None, "range", "moments") and not (self.fits and self.arguments)
        good &= self.counts is not None or self.counted is None
        if not good or self.counts not in (None, "emptied", "clipped"):
            raise ValueError(
                f"a Transform with fits={self.fits!r}, arguments={self.arguments} and counts={self.counts!r}; fits is range, "
                "moments or None, and then it takes no arguments; counts is emptied, clipped or None, without counted"
            )


def _scaled(x: str, first: str, size: str) -> str:
    return f"((({x}) - {first}) / {size})"


def _python_scaled(values: list[float | None], first: float, size: float) -> list[float | None]:
    return [None if x is None else (x - first) / size for x in values]


TRANSFORMS = {
    "fill": Transform(
        sql=lambda x, value: f"coalesce({x}, {value})",
        python=lambda values, value: [value if x is None else x for x in values],
        arguments=1,
    ),
    # A missing value meets no condition. least(greatest()) takes half as long again, and would ignore one.
    "clip": Transform(
        sql=lambda x, low, high: (
            f"(CASE WHEN ({x}) < {low} THEN {low} WHEN ({x}) > {high} THEN {high} ELSE {x} END)"
        ),
        python=lambda values, low, high: [
            None if x is None else min(max(x, low), high) for x in values
        ],
        arguments=2,
        counts="clipped",
        counted=lambda x, low, high: f"(({x}) < {low} OR ({x}) > {high})",
    ),
    "log": Transform(
        sql=lambda x, shift: f"(CASE WHEN ({x}) + {shift} > 0 THEN ln(({x}) + {shift}) END)",
        python=lambda values, shift: [
            None if x is None or not x + shift > 0 else math.log(x + shift) for x in values
        ],
        arguments=1,
        counts="emptied",
        counted=lambda x, shift: f"NOT (({x}) + {shift} > 0)",
    ),
    "minmax": Transform(sql=_scaled, python=_python_scaled, fits="range"),
    "standardise": Transform(sql=_scaled, python=_python_scaled, fits="moments"),
}


def is_served(name: str) -> bool:
    """Return whether a server computes a transform of raw values: a built-in one, since it imports no module of a user."""
    return name in TRANSFORMS and TRANSFORMS[name].python is not None


def transform_named(name: str) -> Transform:
    """Return a transform by its name; ValueError if it is none, or cannot be imported."""
    if name in TRANSFORMS:
        return TRANSFORMS[name]
    if not is_import_path(name):
        raise ValueError(f"no transform {shown(name)}, only {', '.join(TRANSFORMS)}")
    found = load_user_object(name, "transform")
    if not isinstance(found, Transform):
        raise ValueError(
            f"transform={name} is a {type(found).__name__}, want a Transform (configs.transforms)"
        )
    return found
