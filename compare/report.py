"""Output of a comparison: per dataset the means over seeds, a table of the runs of each recipe, and the baseline."""

from collections.abc import Sequence
from statistics import mean, stdev

from rich import box
from rich.console import Console
from rich.table import Table

from compare.run_record import RunRecord, State
from compare.table import (
    choose_metric,
    groups_of,
    labels,
    print_table,
    recipes_of,
    settings_of,
    sorted_runs,
    title_of,
)
from configs.console import print_line
from nn.models.metric import Metric
from nn.observability.records import BASELINE, baseline_text

Ordered = list[tuple[list[RunRecord], Metric | None]]
"""The runs of each dataset, the best first, and the metric that says so."""

LEAST_TITLE, COLUMN = 26, 19
"""Characters of the name of a setting and its number of runs, and of a mean with its deviation."""


def print_comparison(console: Console, runs: Sequence[RunRecord], name: str | None) -> Ordered:
    """Print runs that have trained and return them as they are ordered; `name` is that of a metric.

    Raises ValueError: no run has that metric.
    """
    # One that no run has is refused here.
    named = name and choose_metric(runs, name)

    ordered: Ordered = []
    for group in groups_of(runs):
        metric = named or choose_metric(group, None)
        ordered.append((sorted_runs(group, metric), metric))
    every = [run for group, _ in ordered for run in group]
    names = {run.path: label for run, label in zip(every, labels(every), strict=True)}
    for dataset, metric in ordered:
        if len(ordered) > 1:
            print_line(console, title_of(dataset))
        _print_means(console, dataset, metric)
        recipes = recipes_of(dataset)
        for recipe, of_recipe in recipes.items():
            if len(recipes) > 1:
                print_line(console, recipe)
            print_table(console, of_recipe, [names[run.path] for run in of_recipe], metric)
            if len(recipes) > 1:
                console.print()
        measured = max(dataset, key=lambda run: run.summary.get(f"{BASELINE}rows", 0))
        if baseline := baseline_text(measured.summary, measured.metrics()):
            print_line(console, f"baseline: {baseline}")
        if len(ordered) > 1:
            console.print()
    if len(ordered) > 1:
        print_line(
            console,
            f"{len(ordered)} groups: metrics on different data, splits, days or rows cannot be compared",
        )
    return ordered


def _print_means(console: Console, runs: Sequence[RunRecord], metric: Metric | None) -> None:
    """Print mean and standard deviation of the finished runs of each setting, if one was run with several seeds."""
    settings = settings_of([run for run in runs if run.state is State.finished])
    if metric is None or all(len(found) == 1 for found in settings.values()):
        return
    measured = list(dict.fromkeys(m for run in runs for m in run.metrics()))
    measured = measured[: max((console.width - LEAST_TITLE) // COLUMN - 1, 0)]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("mean ± deviation over seeds", overflow="fold", min_width=16)
    for title in ("runs", f"best {metric.key}", *(f"last {m.key}" for m in measured)):
        table.add_column(title, justify="right")
    for title, found in settings.items():
        best = _mean([run.best(metric)[0] for run in found])
        last = (_mean([run.last(m) for run in found]) for m in measured)
        table.add_row(title, str(len(found)), best, *last)
    console.print(table)
    console.print()


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    deviation = f" ± {stdev(known):.4f}" if len(known) > 1 else ""
    return f"{mean(known):.4f}{deviation}" if known else ""
