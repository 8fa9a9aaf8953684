"""A sweep from its options: check, lock its directory, run the trials, test the best one, write the results."""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from compare.table import as_csv
from configs.console import print_line
from configs.many_runs_schema import Sampler, SweepConfig
from configs.options import require
from dataloading.dataset.durable_files import exclusive, replace_text
from nn.plots.style import title_of
from sweep.driver import Driver
from sweep.gpus import visible_gpus
from sweep.pictures import COORDINATES, IMPORTANCES, draw_coordinates, draw_importances
from sweep.plan import TEST, TrialPlan, plan_trials
from sweep.results import SWEEP, TABLE, print_trials, rows_of, test_once, write_sweep
from sweep.space import Space, grid_of, read_space
from sweep.study import DATA, Study, check_same_data, keep_settings, settings_of
from sweep.trial_process import Start, TrialProcess, TrialServer


def run_sweep(config: SweepConfig, console: Console, start: Start | None = None) -> None:
    """Run a sweep, or what is left of it; `start` starts a trial's command; None: `TrialServer`.

    Raises ValueError: an option is invalid, the directory is in use or holds another sweep, or no trial is complete;
    StoppedSweepError: a signal arrived.
    """
    server = TrialServer()
    start_trial = start or server.start
    assert config.space is not None, "SweepConfig refuses a configuration without"
    path, space = read_space(config.space)
    if config.sampler is Sampler.grid:
        next(grid_of(space))
    plan = plan_trials(config, space)
    slots = _slots(config, plan)
    directory = Path(config.output or f"sweeps/{config.recipe.rpartition(':')[2]}-{path.stem}")
    with ExitStack() as stack:
        stack.callback(server.close)
        stack.enter_context(exclusive(directory, f"is sweeping in {directory}"))
        directory.mkdir(exist_ok=True)
        data = plan.data_state()
        settings = settings_of(config, space, plan.metric, plan.split)
        keep_settings(directory, settings | {DATA: data})

        def start_on_same_data(*command: Any) -> TrialProcess:
            check_same_data(directory, data, plan.data_state())
            return start_trial(*command)

        study = Study(directory, config, space, plan.metric, plan.own_values)
        ended = len(study.trials())
        known = f", {ended} of them started by an earlier command" if ended else ""
        for text in (
            f"sweep of {study.num_trials} trials{known}, {config.parallel} at once, sampler {config.sampler.value}, pruner "
            f"{config.pruner.value}",
            f"chosen by {plan.metric.key} ({'larger' if plan.metric.larger_is_better else 'smaller'} is better) on split "
            f"{plan.split}",
            f"output {directory}/",
        ):
            print_line(console, text)
        if study.has_more():
            # It shows that a sweep is complete, and this one is not.
            (directory / SWEEP).unlink(missing_ok=True)
        say = partial(print_line, console)
        Driver(directory, config, space, plan, study, slots, say, start_on_same_data).run()
        _conclude(directory, study, plan, space, slots, console, start_on_same_data)


def _slots(config: SweepConfig, plan: TrialPlan) -> Sequence[str | None]:
    """Return the GPU of each trial that may run at once; None for each on a machine without.

    Raises ValueError: there are fewer GPUs.
    """
    gpus = visible_gpus() if plan.uses_gpus else []
    if not gpus:
        return [None] * config.parallel
    require(
        config.parallel <= len(gpus),
        f"parallel={config.parallel}, and there are {len(gpus)} GPUs, of which each trial has one; set parallel={len(gpus)}, or "
        "device=cpu",
    )
    return gpus[: config.parallel]


def _conclude(
    directory: Path,
    study: Study,
    plan: TrialPlan,
    space: Space,
    slots: Sequence[str | None],
    console: Console,
    start: Start,
) -> None:
    rows = rows_of(directory, study, space)
    about = title_of({"recipe": study.config.recipe, "data": plan.data.path})
    console.print()
    print_trials(console, rows, space, f"{plan.split} {plan.metric.key}")
    replace_text(directory / TABLE, as_csv(rows))
    draw_coordinates(rows, space, plan.metric, plan.split, about, directory / COORDINATES)
    importances = study.importances()
    num_complete = sum(row["state"] == "complete" for row in rows)
    draw_importances(importances, num_complete, about, directory / IMPORTANCES)
    best = study.best()
    if best is None:
        raise ValueError(
            f"none of the {len(rows)} trials is complete; {directory}/logs has their output"
        )
    test = test_once(directory, plan, best, slots[0], start)
    write_sweep(directory, study, plan, space, rows, {TEST: test, "importances": importances})
    value = "" if best.value is None else f"{best.value:.4f}"
    shown = ", ".join(
        f"{key.removeprefix('test_')} {number:.4f}"
        for key, number in test.items()
        if number is not None
    )
    console.print()
    for text in (
        f"best        trial {best.number}: {plan.split} {plan.metric.key} {value}",
        f"test        {shown}",
        f"written to  {directory}/",
        f"            {SWEEP}  {TABLE}  {COORDINATES}  {IMPORTANCES}  best/  trials/  logs/",
    ):
        print_line(console, text)
