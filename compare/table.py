"""Runs as a table: on the terminal, as CSV and as JSON; the best run comes first."""

import csv
import io
import json
import math
import os
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from compare.run_record import RunRecord, differing
from configs.option_values import short_names, written
from nn.models.metric import Metric, best_of
from nn.observability.records import BASELINE

MAX_OPTION_COLUMNS = 5
LEAST_FOLDED = 16
"""Characters that a column of long texts gets at least; they are folded."""
RUN, STATE, DIFFERS = "run", "state", "differs"
OWN_COLUMNS = (RUN, STATE, DIFFERS, "at step", "steps", "samples/s", "GPU GiB", "time")
"""Titles beside those of options and metrics."""
GIB = 2**30
SEED = "seed"
UNSEEN = ("log.", "checkpoint.save", "checkpoint.keep", "checkpoint.mirror", "eval.baseline")
"""Beginnings of options that change no result."""


def groups_of(runs: Sequence[RunRecord]) -> list[list[RunRecord]]:
    """Return the runs whose metrics can be compared with each other: on the same data, split, day and rows.

    One without an evaluation yet is in the first group of its data and split.
    """
    groups: dict[tuple[Any, ...], list[RunRecord]] = {}
    for run in sorted(runs, key=lambda run: run.measured_on["rows"] is None):
        data, identity, *where, rows = run.measured_on.values()
        # A copy, and another way to write a path, are the same data.
        where = [data if identity is None else identity, *where]
        same = [key for key in groups if key[:-1] == (*where,)] if rows is None else []
        groups.setdefault(same[0] if same else (*where, rows), []).append(run)
    return list(groups.values())


def recipe_of(run: RunRecord) -> str:
    """Return the recipe of a run, with its model where the name does not tell it.

    The recipe of `main.py` without an experiment is DLRM's, which tells nothing of another model.
    """
    recipe, model = (str(run.options.get(key, "")) for key in ("recipe", "model.name"))
    if recipe == "dlrm" and model:
        return model
    return recipe if model in recipe else f"{recipe}, model {model}"


def recipes_of(runs: Sequence[RunRecord]) -> dict[str, list[RunRecord]]:
    recipes: dict[str, list[RunRecord]] = {}
    for run in runs:
        recipes.setdefault(recipe_of(run), []).append(run)
    return recipes


def settings_of(runs: Sequence[RunRecord]) -> dict[str, list[RunRecord]]:
    """Return the runs of each setting, which differ in their seeds alone, by recipe and what differs within it."""
    settings: dict[str, list[RunRecord]] = {}
    for recipe, found in recipes_of(runs).items():
        options = [
            option
            for option in differing(found)
            if option != SEED and not option.startswith(UNSEEN)
        ]
        for run in found:
            settings.setdefault(f"{recipe} {_differences(run, options)}".rstrip(), []).append(run)
    return settings


def names_of(runs: Sequence[RunRecord]) -> list[str]:
    """Return what tells each run from the others, for a legend: its recipe and options, or its path where these are equal."""
    recipes = recipes_of(runs)
    names = []
    for run, label in zip(runs, labels(runs), strict=True):
        options = [
            option for option in differing(recipes[recipe_of(run)]) if not option.startswith(UNSEEN)
        ]
        parts = [recipe_of(run)] * (len(recipes) > 1) + [_differences(run, options)]
        names.append(" ".join(filter(None, parts)) or label)
    return [
        name if names.count(name) == 1 else label
        for name, label in zip(names, labels(runs), strict=True)
    ]


def title_of(group: Sequence[RunRecord]) -> str:
    data, identity, split, day, rows = group[0].measured_on.values()
    parts = [data if identity is None else f"{data} ({identity[:8]})", f"split {split}"]
    parts += [] if day is None else [f"day {day}"]
    parts += [] if rows is None else [f"{rows:,} rows"]
    return "on " + ", ".join(parts)


def choose_metric(runs: Sequence[RunRecord], name: str | None) -> Metric | None:
    """Return the metric that runs are sorted by: the named one, or the first run's own.

    Raises ValueError: no run has a metric of that name.
    """
    measured = list(dict.fromkeys(metric for run in runs for metric in run.metrics()))
    if name is None:
        return next((metric for run in runs if (metric := run.main_metric()) is not None), None)
    try:
        return best_of(measured, name)
    except ValueError:
        names = ", ".join(metric.key for metric in measured) or "none yet"
        raise ValueError(f"metric={name} is in none of the runs; they have {names}") from None


def sorted_runs(runs: Sequence[RunRecord], metric: Metric | None) -> list[RunRecord]:
    """Return the runs by their best value, the best first; those without a value come last, by path."""
    if metric is None:
        return list(runs)
    sign = -1 if metric.larger_is_better else 1

    def rank(run: RunRecord) -> float:
        value, _ = run.best(metric)
        return math.inf if value is None else sign * value

    return sorted(runs, key=rank)


def labels(runs: Sequence[RunRecord]) -> list[str]:
    """Return the path of each run without the folders that all have in common; of a single one the name of its directory."""
    paths = [str(run.path) for run in runs]
    if len(paths) == 1:
        return [runs[0].path.resolve().name]
    # Absolute and relative ones have none in common.
    absolute = [os.path.abspath(path) for path in paths]
    common = os.path.commonpath(absolute)
    return [os.path.relpath(path, common) for path in absolute]


def rows_of(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Return a row per run: numbers and texts by column, the same columns for all runs, None where nothing is known."""
    options = differing(runs)
    metrics = list(dict.fromkeys(metric for run in runs for metric in run.metrics()))
    rows = []
    for run, label in zip(runs, labels(runs), strict=True):
        row: dict[str, Any] = {"run": label, "path": str(run.path), "state": run.state.value}
        row |= run.measured_on
        row |= {option: run.options.get(option) for option in options}
        for metric in metrics:
            if metric.larger_is_better is not None:
                row[f"best_{metric.key}"], row[f"best_{metric.key}_step"] = run.best(metric)
            row[f"last_{metric.key}"] = run.last(metric)
            row[f"result_{metric.key}"] = run.summary.get(metric.test_key)
            if any(f"{BASELINE}{metric.test_key}" in other.summary for other in runs):
                row[f"{BASELINE}{metric.key}"] = run.summary.get(f"{BASELINE}{metric.test_key}")
        row |= {
            "steps": run.steps,
            "samples_per_s": run.speed(),
            "gpu_bytes": run.memory_bytes(),
            "seconds": run.seconds(),
            "started": run.header.get("started"),
            "message": run.message,
        }
        rows.append(row)
    return rows


def print_table(
    console: Console, runs: Sequence[RunRecord], names: Sequence[str], metric: Metric | None
) -> None:
    """Print a line per run; columns without a value, and those for which the terminal is too narrow, are left out."""
    shown = _fitting(_columns(runs, names, metric), console.width)
    if _width(shown) > console.width:
        shown = _fitting(_columns(runs, names, metric, most=0), console.width)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for title in shown:
        can_fold = title in (RUN, DIFFERS)
        is_text = can_fold or title == STATE
        table.add_column(
            title, justify="left" if is_text else "right", overflow="fold", no_wrap=not can_fold
        )
    for texts in zip(*shown.values(), strict=True):
        table.add_row(*texts)
    console.print(table)
    for run, name in zip(runs, names, strict=True):
        if run.message:
            console.print(f"{name}: {run.state}: {run.message}", highlight=False)


def _columns(
    runs: Sequence[RunRecord],
    names: Sequence[str],
    metric: Metric | None,
    most: int = MAX_OPTION_COLUMNS,
) -> dict[str, list[str]]:
    """Return the texts of each column by its title; more than `most` options are one column."""
    options = [option for option in differing(runs) if not option.startswith(UNSEEN)]
    has_columns = len(options) <= most
    columns: dict[str, list[str]] = {RUN: [*names], STATE: [run.state for run in runs]}
    if has_columns:
        columns |= {
            name: [_text(run.options.get(option)) for run in runs]
            for option, name in zip(options, short_names(options, OWN_COLUMNS), strict=True)
        }
    if metric is not None:
        best = [run.best(metric) for run in runs]
        columns[f"best {metric.key}"] = [_decimal(value) for value, _ in best]
        columns["at step"] = ["" if step is None else f"{step:,}" for _, step in best]
        columns[f"last {metric.key}"] = [_decimal(run.last(metric)) for run in runs]
    columns["steps"] = [f"{run.steps:,}" for run in runs]
    columns["samples/s"] = ["" if (v := run.speed()) is None else f"{v:,.0f}" for run in runs]
    columns["GPU GiB"] = [
        "" if (v := run.memory_bytes()) is None else f"{v / GIB:.1f}" for run in runs
    ]
    columns["time"] = ["" if (v := run.seconds()) is None else _duration(v) for run in runs]
    if not has_columns:
        columns[DIFFERS] = [_differences(run, options) for run in runs]
    return columns


def _fitting(columns: dict[str, list[str]], width: int) -> dict[str, list[str]]:
    shown = {title: texts for title, texts in columns.items() if any(texts)}
    for title in ("at step", "steps", "GPU GiB", "samples/s", "time"):
        if _width(shown) > width:
            shown.pop(title, None)
    return shown


def _width(columns: dict[str, list[str]]) -> int:
    return sum(
        LEAST_FOLDED if title in (RUN, DIFFERS) else 3 + max(len(title), *map(len, texts))
        for title, texts in columns.items()
    )


def as_csv(rows: Sequence[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def as_json(runs: Sequence[RunRecord]) -> str:
    """Return a list with an object per run: its row, all of its options, its evaluations and its summary."""
    objects = [
        row | {"options": run.options, "evaluations": run.evaluations, "summary": run.summary}
        for run, row in zip(runs, rows_of(runs), strict=True)
    ]
    # A damaged record may have numbers that JSON lacks.
    plain = json.loads(json.dumps(objects, default=str), parse_constant=lambda _: None)
    return json.dumps(plain, indent=2, allow_nan=False) + "\n"


def _differences(run: RunRecord, options: Sequence[str]) -> str:
    pairs = zip(short_names(options), (run.options.get(option) for option in options), strict=True)
    return " ".join(f"{name}={_text(value)}" for name, value in pairs if value is not None)


def _text(value: Any) -> str:
    return written(value, "{:.6g}".format)


def _decimal(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _duration(seconds: float) -> str:
    """Return hours, minutes and seconds, as 0:01:05; tenths of seconds below a minute."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
