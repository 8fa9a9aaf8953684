"""Terminal output of a run: header and result. `plan_table` prints its plan, `progress` what happens between.

All output is printed by one rich `Console` from `make_console`; only rank 0 prints.
"""

import math
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from logging import WARNING, Handler, Logger, LogRecord
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from configs.console import LiteralConsole
from configs.messages import printable
from nn.distributed.process_group import process_rank
from nn.models.metric import AUC, Metric
from nn.models.tasks import auc_key
from nn.observability.gpu_topology import topology_text
from nn.observability.layout import bare_table, grid, print_columns
from nn.observability.progress import is_number, shown_number, shown_speed
from nn.observability.records import baseline_text
from nn.observability.run_directory import (
    ALL_STEPS_DONE,
    LAST_AUC,
    LAUNCHED,
    RESTORED_AUC,
    RESULT_STEP,
    UNTRAINED_AUC,
)

GIB = 1 << 30
CLEAR_FALL = 0.002
"""A fall of the test AUC by less since the best evaluation gets no note."""
GAP = 2
"""Columns between two of a table."""
NAME_WIDTH = 18
"""Width of the names of features at least, beside as many metrics as fit."""


def make_console(rank: int) -> Console:
    """Return the console of this rank; it is silent unless `rank` is 0."""
    # A file or a pipe has no width; rich would wrap lines at 80 columns.
    width = None if sys.stdout and sys.stdout.isatty() else 120
    return LiteralConsole(quiet=rank != 0, highlight=False, width=width)


class _ConsoleHandler(Handler):
    """Prints records as lines that no terminal's width breaks; warnings begin with that word.

    Those of a quiet training in Python are Python's warnings.
    """

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: LogRecord) -> None:
        level = "warning: " if record.levelno >= WARNING else ""
        if level and self._console.quiet and process_rank() == 0:
            warnings.warn(record.getMessage(), stacklevel=2)
        self._console.print(f"{level}{record.getMessage()}", soft_wrap=True)


class _AlwaysEnabled(Logger):
    """A logger that `logging.disable` does not silence: libraries call it, and so does the planner for TorchRec's messages."""

    def isEnabledFor(self, level: int) -> bool:
        return True


def make_logger(console: Console) -> Logger:
    """Return a logger that prints to a console, and shares nothing with other loggers of the process."""
    logger = _AlwaysEnabled("nn")
    logger.addHandler(_ConsoleHandler(console))
    return logger


def print_header(
    console: Console, environment: Mapping[str, Any], facts: Mapping[str, str]
) -> None:
    """Print the header of a run: recipe, versions, devices and further facts."""
    started = environment["started"].replace("T", " ")
    if commit := environment["git_commit"]:
        started += f", commit {commit[:10]}"
        started += " with uncommitted changes" * commit.endswith("-dirty")
    versions = [
        f"{name} {environment[name]}"
        for name in ("python", "torch", "torchrec", "fbgemm", "cuda")
        if environment[name] is not None
    ]
    lines = {"started": started, "versions": ", ".join(versions), "devices": _devices(environment)}
    if gpus := environment.get("gpus"):
        lines["GPUs"] = topology_text(gpus) + " (first host)" * (environment["num_hosts"] > 1)
    lines |= facts
    recipe, model = environment["recipe"], environment.get("model", "")
    console.print(recipe if recipe.startswith(model) else f"{model} ({recipe})", style="bold")
    print_columns(console, grid(lines))


def print_summary(
    console: Console, summary: Mapping[str, Any], metrics: Sequence[Metric], run_dir: Path
) -> None:
    """Print the result and the files of the run directory.

    `summary`: the argument of `RunDirectory.finish`. Entries that are None were not measured and are left out.
    `untrained_test_auc`, `restored_test_auc` and `teacher_auc` are printed beside the test AUC.
    """
    if console.quiet:
        return
    titles = {UNTRAINED_AUC: "untrained", RESTORED_AUC: "restored", "teacher_auc": "ceiling"}
    bounds = [
        f"{title} {summary[name]:.4f}"
        for name, title in titles.items()
        if summary.get(name) is not None
    ]
    lines: dict[str, str | Text] = {}
    best = next((metric.key for metric in metrics if metric.best_key in summary), None)
    auc = auc_key(summary, best)
    for metric in metrics:
        if summary[metric.test_key] is None:
            continue
        bounds_text = f"  ({', '.join(bounds)})" if bounds and metric.test_key == auc else ""
        lines[metric.title] = shown_number(summary[metric.test_key]) + bounds_text
    if baseline := baseline_text(summary, metrics):
        lines["baseline"] = baseline
    if RESULT_STEP in summary:
        lines["result of"] = (
            f"the final evaluation, of the model after step {summary[RESULT_STEP]:,}"
        )
    if summary.get("stopped") not in (None, ALL_STEPS_DONE):
        lines["stopped"] = f"after step {summary['steps']:,}: {summary['stopped']}"
    for metric in metrics:
        if metric.best_key in summary:
            lines |= _best_lines(summary, metric, run_dir)
    if summary["samples_per_s"] is not None:
        step_ms = shown_number(summary["step_ms"], ".1f")
        lines["speed"] = f"{shown_speed(summary)}, {step_ms} ms/step, {summary['steps']:,} steps"
    if summary.get(LAUNCHED):
        lines["launched"] = (
            f"{summary[LAUNCHED]:,} steps operation by operation, without CUDA graph"
        )
    if summary["peak_hbm_bytes"] is not None:
        lines["GPU memory"] = f"{summary['peak_hbm_bytes'] / GIB:,.1f} GiB at its peak"
    if summary.get("checkpoint") not in (None, summary.get("best_checkpoint")):
        lines["checkpoint"] = Text(printable(f"{run_dir}/{summary['checkpoint']}"))
    names = sorted(path.name + "/" * path.is_dir() for path in run_dir.iterdir())
    lines["written to"] = Text(f"{printable(str(run_dir))}/\n{printable('  '.join(names))}")
    console.print(Text("\nresult", style="bold"))
    print_columns(console, grid(lines))


def _best_lines(summary: Mapping[str, Any], metric: Metric, run_dir: Path) -> dict[str, str | Text]:
    """Return the best evaluation of a training with its step and checkpoint, and a note if the last one is clearly worse."""
    best, step = summary[metric.best_key], summary["best_step"]
    name = metric.title.removeprefix("test ")
    if step is None or not is_number(best):
        return {
            f"best {name}": f"none: no evaluation had a defined {name}, so that no checkpoint is marked as the best"
        }
    if summary["best_checkpoint"] is not None:
        where = f"{run_dir}/{summary['best_checkpoint']}"
    elif step == summary["first_step"]:
        restored = summary.get(RESTORED_AUC) is not None
        where = "the model of checkpoint.restore" if restored else "the untrained model"
    elif summary.get("checkpoint") is None and summary.get("checkpoint_problem") is None:
        where = "not saved; set checkpoint.save=true to keep the best model"
    else:
        where = "not saved: its checkpoint could not be written"
    of_last = ", the last" if step == summary["steps"] else ""
    lines: dict[str, str | Text] = {
        f"best {name}": Text(printable(f"{best:.4f} at step {step:,}{of_last}: {where}"))
    }
    is_of_best = summary.get(RESULT_STEP) == step
    last = summary.get(LAST_AUC, summary[metric.test_key])
    # A fall within the sampling error of the AUC, which is below 1 / sqrt(rows), says nothing.
    noise = max(CLEAR_FALL, 1 / math.sqrt(max(summary["test_rows"] or 0, 1)))
    if metric.name == AUC.name and is_number(last) and best - last > noise and not is_of_best:
        lines["note"] = (
            f"the {metric.title} has fallen by {best - last:.4f} since step {step:,}: the model over-fits, or the learning rate "
            "is too high. Use the best checkpoint, train fewer steps (train.epochs, train.max_steps), or lower optimizer.lr"
        )
    return lines


def _devices(environment: Mapping[str, Any]) -> str:
    num_hosts, world_size = environment["num_hosts"], environment["world_size"]
    hosts = "1 host" if num_hosts == 1 else f"{num_hosts} hosts"
    cpus = f"{environment['num_cpus']} CPU cores"
    if environment["gpu"] is None:
        processes = "1 process" if world_size == 1 else f"{world_size} processes"
        return f"{processes} on {hosts}, {cpus}, no GPU"
    driver = f", driver {environment['gpu_driver']}" if environment["gpu_driver"] else ""
    return f"{world_size} x {environment['gpu']} on {hosts}{driver}, {cpus}"


def print_inference(console: Console, results: Sequence[Mapping[str, Any]]) -> None:
    titles = ("batch size", "samples/s", "p50 ms", "p90 ms", "p99 ms")
    table = bare_table(numbers=titles)
    for result in results:
        table.add_row(
            f"{result['batch_size']:,}",
            f"{result['samples_per_s']:,.0f}",
            *(f"{result[name]:,.3f}" for name in ("p50_ms", "p90_ms", "p99_ms")),
        )
    print_columns(console, table)


def print_importance(console: Console, importance: Mapping[str, Any]) -> None:
    """Print one line per feature, the most important first; several tables if one is too wide for the metrics."""
    features: Mapping[str, Any] = importance["features"]
    keys = list(importance["unpermuted"])
    cells = {
        name: {
            # Of one repeat the deviation is unknown, not 0.
            key: f"{change['mean']:+.5f}"
            + f" ± {change['deviation']:.5f}" * (importance["repeats"] > 1)
            for key, change in changes.items()
        }
        for name, changes in features.items()
    }
    widths = [
        max(map(len, [f"{key} change", *(row[key] for row in cells.values())])) for key in keys
    ]
    for first, last in _parts(widths, console.width - NAME_WIDTH):
        table = bare_table()
        table.add_column("feature permuted", overflow="fold", min_width=NAME_WIDTH - 1)
        for key in keys[first:last]:
            table.add_column(
                f"{key} change", justify="right", no_wrap=last - first > 1, overflow="fold"
            )
        for name, row in cells.items():
            table.add_row(Text(printable(name)), *(row[key] for key in keys[first:last]))
        print_columns(console, table)


def _parts(widths: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Yield the first and the last column, exclusive, of parts that are at most so wide, or have one column."""
    first = taken = 0
    for index, width in enumerate(widths):
        if index > first and taken + width + GAP > most:
            yield first, index
            first, taken = index, 0
        taken += width + GAP
    if first < len(widths):
        yield first, len(widths)
