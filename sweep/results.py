"""Results of a sweep: the table of its trials, `trials.csv`, the test of the best one, and `sweep.json`."""

import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from optuna.trial import FrozenTrial, TrialState
from rich import box
from rich.console import Console
from rich.table import Table

from compare.run_record import RunRecord
from configs.option_values import short_names
from configs.options import require
from dataloading.dataset.durable_files import replace_json, replace_link
from nn.observability.records import METRICS
from sweep.driver import BEST_STEP, IDLE, POLL_SECONDS, PROBLEM, RUN_DIR, STATES
from sweep.plan import TrialPlan
from sweep.space import Space
from sweep.study import Study, settings_of
from sweep.trial import best_checkpoint
from sweep.trial_process import Start, environment_of, last_line

SWEEP, TABLE = "sweep.json", "trials.csv"
BEST = "best"
"""Link to the run directory of the best trial."""
STATE_NAMES = {state: ending.value for ending, state in STATES.items()}


def rows_of(directory: Path, study: Study, space: Space) -> list[dict[str, Any]]:
    """Return a row per trial, the best one first, those without a value last."""
    rows = []
    for trial in study.trials():
        run_dir = directory / trial.user_attrs.get(RUN_DIR, "")
        has_records = RUN_DIR in trial.user_attrs and (run_dir / METRICS).exists()
        run = RunRecord.read(run_dir) if has_records else None
        idle = trial.user_attrs.get(IDLE, ())
        value = trial.value
        if trial.state is TrialState.PRUNED and trial.intermediate_values:
            value = trial.intermediate_values[max(trial.intermediate_values)]  # its last one
        rows.append(
            {
                "trial": trial.number,
                "state": STATE_NAMES.get(trial.state, trial.state.name.lower()),
                **{
                    option: None if option in idle else trial.params.get(option) for option in space
                },
                "value": value,
                "best_step": trial.user_attrs.get(BEST_STEP),
                "steps": 0 if run is None else run.steps,
                "seconds": None if run is None else run.seconds(),
                "run_dir": trial.user_attrs.get(RUN_DIR),
                "problem": trial.user_attrs.get(PROBLEM, ""),
            }
        )
    sign = -1 if study.direction == "maximize" else 1
    order = {"complete": 0, "pruned": 1}
    rows.sort(key=lambda row: (order.get(row["state"], 2), sign * (row["value"] or 0.0)))
    return rows


def print_trials(console: Console, rows: Sequence[dict[str, Any]], space: Space, name: str) -> None:
    """Print a line per trial, with the options of the space; `name` is the metric's."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for title in ("trial", "state", *short_names(list(space)), name, "at step", "steps"):
        table.add_column(title, justify="left" if title == "state" else "right", no_wrap=True)
    for row in rows:
        values = [_text(row[option]) for option in space]
        value = "" if row["value"] is None else f"{row['value']:.4f}"
        step = "" if row["best_step"] is None else f"{row['best_step']:,}"
        table.add_row(str(row["trial"]), row["state"], *values, value, step, f"{row['steps']:,}")
    console.print(table)
    for row in rows:
        if row["problem"]:
            console.print(f"trial {row['trial']} failed: {row['problem']}", highlight=False)


def test_once(
    directory: Path, plan: TrialPlan, best: FrozenTrial, gpu: str | None, start: Start
) -> dict[str, Any]:
    """Evaluate the best trial's checkpoint on the test split; return the metrics.

    The command repeated reads them from the run directory of the first evaluation. Raises ValueError: the evaluation failed.
    """
    run_dir = directory / f"test_trial_{best.number:02d}"
    run = RunRecord.read(run_dir) if run_dir.exists() else None
    if run is None or not run.summary:
        checkpoint = best_checkpoint(directory / best.user_attrs[RUN_DIR])
        command = plan.test_command(best.params, checkpoint, run_dir)
        log = directory / "logs" / f"{run_dir.name}.log"
        process = start(command, environment_of(gpu, 1), log)
        while (exit_code := process.poll()) is None:
            time.sleep(POLL_SECONDS)
        require(
            exit_code == 0,
            f"trial {best.number} could not be tested (exit code {exit_code}): {last_line(log)}; {log} has more",
        )
        run = RunRecord.read(run_dir)
    return {key: value for key, value in run.summary.items() if run.metric_of(key) is not None}


def write_sweep(
    directory: Path,
    study: Study,
    plan: TrialPlan,
    space: Space,
    rows: Sequence[dict[str, Any]],
    measured: dict[str, Any],
) -> None:
    """Link the best trial, and write `sweep.json`, whose existence shows that the sweep is complete."""
    best = study.best()
    assert best is not None
    run_dir = directory / best.user_attrs[RUN_DIR]
    command = plan.command(best.params, run_dir)
    replace_link(directory / BEST, best.user_attrs[RUN_DIR])
    content = {
        **settings_of(study.config, space, plan.metric, plan.split),
        "sampler": study.config.sampler.value,
        "pruner": study.config.pruner.value,
        "direction": study.direction,
        "total_steps": sum(row["steps"] for row in rows),
        "best": {
            "trial": best.number,
            "values": plan.effective(best.params),
            "value": best.value,
            "step": best.user_attrs[BEST_STEP],
            "checkpoint": str(best_checkpoint(run_dir)),
            "command": shlex.join(["python", *command[1:]]),
        },
        **measured,
        "trials": sorted(rows, key=lambda row: row["trial"]),
    }
    replace_json(directory / SWEEP, content)


def _text(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
