"""Steps that a sweep needs beside random search, on real data: studies of half of the steps against 20 random trials.

    python -m benchmarks.sweep_steps --data DIR --out DIR

Random search trains all of its trials to their end. A study prunes, and has as many trials as fit into half of the steps of
random search. The command prints the best validation AUC of either, and the median of the studies. Trials are those of
`python -m sweep`, but forked from a process that has imported torch, which takes longer than a trial; nothing is tested.
The same command resumes.
"""

import argparse
import os
import runpy
import signal
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

from configs.many_runs_schema import Pruner, Sampler, SweepConfig
from sweep.driver import Driver
from sweep.plan import plan_trials
from sweep.results import rows_of
from sweep.space import read_space
from sweep.study import Study, keep_settings, settings_of

SPACE = """optimizer.lr: {low: 1.0e-4, high: 3.0e-2, log: true}
optimizer.embedding_lr: {low: 1.0e-4, high: 1.0e-1, log: true}
model.dropout: [0.0, 0.2, 0.4]
"""
RANDOM_TRIALS = 20
MOST_TRIALS = 200
STEPS = 40
"""Of a trial that is not pruned."""
OPTIONS = (f"train.max_steps={STEPS}", "eval.every=8", "log.loggers=[]", "device=cpu")


class ForkedProcess:
    """A command in a forked process, with the interface of `subprocess.Popen` that a sweep uses."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        sys.stdout.flush()
        self.pid = os.fork()
        self._exit_code: int | None = None
        if self.pid == 0:
            _become(command, environment, log)

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""
        if self._exit_code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._exit_code = os.waitstatus_to_exitcode(status) if pid else None
        return self._exit_code


def _become(command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
    """Run the script of a command in this process, and end it."""
    code = 1
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.update(environment)
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, signal.SIG_DFL)
        sys.argv = list(command[1:])
        runpy.run_path(command[1], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """Run random search and the studies, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="dataset directory")
    parser.add_argument("--out", type=Path, required=True, help="folder for the sweeps")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--sampler", default="gp", choices=[sampler.value for sampler in Sampler])
    parser.add_argument("--pruner", default="reach", choices=[pruner.value for pruner in Pruner])
    args = parser.parse_args()
    # Once, for all trials.
    import_module("nn.run")
    args.out.mkdir(parents=True, exist_ok=True)
    found = _search(args, Sampler.random, Pruner.none, 0, trials=RANDOM_TRIALS)
    steps = _used(found)
    random_best = max(row["value"] for row in found)
    print(
        f"random search: best of {len(found)} trials {random_best:.4f}, {steps:,} steps", flush=True
    )
    bests = []
    for seed in args.seeds:
        found = _search(args, Sampler[args.sampler], Pruner[args.pruner], seed, steps=steps // 2)
        counted = [row for row in found if row["state"] == "complete"]
        bests.append(max(row["value"] for row in counted))
        used = _used(found)
        text = (
            f"best of {len(found)} trials ({len(counted)} complete) {bests[-1]:.4f}, {used:,} steps"
        )
        print(f"study {seed}: {text}", flush=True)
    is_reached = median(bests) >= random_best
    print(
        f"median of the studies {median(bests):.4f}: {'reached' if is_reached else 'not reached'}"
    )


def _search(
    args: argparse.Namespace,
    sampler: Sampler,
    pruner: Pruner,
    seed: int,
    *,
    trials: int = MOST_TRIALS,
    steps: int | None = None,
) -> list[dict[str, Any]]:
    """Search until there are so many trials, or until another one might need more than `steps`; return a row per trial."""
    (args.out / "space.yaml").write_text(SPACE)
    config = SweepConfig(
        recipe="dlrm_criteo_kaggle",
        space=str(args.out / "space.yaml"),
        overrides=[f"data.path={args.data}", *OPTIONS],
        trials=RANDOM_TRIALS,
        sampler=sampler,
        pruner=pruner,
        sampler_seed=seed,
    )
    assert config.space is not None
    _, space = read_space(config.space)
    plan = plan_trials(config, space)
    directory = args.out / f"{sampler.value}_{pruner.value}_{seed}"
    directory.mkdir(exist_ok=True)
    keep_settings(directory, settings_of(config, space, plan.metric, plan.split))
    study = Study(directory, config, space, plan.metric, plan.own_values)
    rows: list[dict[str, Any]] = []
    with (args.out / f"{directory.name}.log").open("a") as log:
        say = partial(print, file=log, flush=True)
        while len(rows) < trials and (steps is None or _used(rows) + STEPS <= steps):
            study.num_trials = max(len(rows) + 1, len(study.trials()))
            Driver(directory, config, space, plan, study, [None], say, ForkedProcess).run()
            rows = rows_of(directory, study, space)
    return rows


def _used(rows: Sequence[dict[str, Any]]) -> int:
    return sum(row["steps"] for row in rows)


if __name__ == "__main__":
    main()
