"""A sweep per model on validation rows, then several seeds of the chosen settings on test rows.

    python -m benchmarks.model_sweeps --data DIR --out DIR --jobs 16
    python -m benchmarks.model_sweeps --data DIR --out DIR --trials 2 --seeds 2 deepfm train.epochs=1

`benchmarks/model_sweeps.yaml` has the options and the space of every model. The same command resumes: sweeps and runs that are
complete stay. DIR/MODEL has `space.yaml`, `sweep` with `sweep.json` (all trials, the chosen settings, the command), and a run
directory per seed, which `python -m compare DIR` reads; DIR/results.json has settings and test metrics of all models. The sweep
tests its winner once too, so rows that must stay unread until the end belong into neither split of this dataset.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import yaml

from benchmarks.launch import command_parser
from benchmarks.rows import ROOT
from configs.option_values import written

SPACES = Path(__file__).with_suffix(".yaml")
QUIET = ("log.loggers=[]", "log.pictures=false", "log.every=1000")
COLUMNS = ("test_auc", "test_log_loss", "test_calibration")


@dataclass(frozen=True, slots=True)
class ModelSweep:
    """One model: the options of all of its runs, and the space of its sweep."""

    name: str
    options: list[str]
    space: dict[str, Any]

    @classmethod
    def read(cls, name: str, further: Iterable[str]) -> "ModelSweep":
        """Return what the yaml file says of a model, with further options."""
        every = yaml.safe_load(SPACES.read_text())
        own = every["models"][name]
        options = [f"model.name={name}", *every["options"], *own.get("options", ()), *further]
        return cls(name, options, every["space"] | own["space"])

    def chosen(self, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
        """Sweep, unless that is done; return the settings of the best trial, by validation rows."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "space.yaml").write_text(yaml.safe_dump(self.space, sort_keys=False))
        settings = [f"space={folder / 'space.yaml'}", f"output={folder / 'sweep'}"]
        settings += [f"trials={args.trials}", f"parallel={args.jobs}", f"data.path={args.data}"]
        command = ["-m", "sweep", f"recipe={self.name}", *settings, *self.options, *QUIET]
        run([sys.executable, *command], folder / "sweep.log")
        best = json.loads((folder / "sweep/sweep.json").read_text())["best"]
        return {"values": best["values"], "validation": best["value"]}

    def test(self, folder: Path, values: dict[str, Any], seed: int, data: Path) -> dict[str, float]:
        """Train the chosen settings with a seed, unless that is done; return the metrics on test rows.

        Validation rows choose among the checkpoints, as in the sweep.
        """
        run_dir, tested = folder / f"seed-{seed}", folder / f"seed-{seed}-tested"
        settings = [f"{key}={written(value)}" for key, value in values.items()]
        settings += [f"seed={seed}", "eval.split=validation", f"data.path={data}"]
        main = [sys.executable, str(ROOT / "main.py")]
        if not (run_dir / "summary.json").exists():
            command = [*main, *self.options, *settings, f"run_dir={run_dir}", *QUIET]
            run(command, folder / f"seed-{seed}.log")
        if not (tested / "summary.json").exists():
            best = [
                f"config={run_dir}/config.yaml",
                f"checkpoint.restore={run_dir}/checkpoints/best",
            ]
            command = [*main, "mode=eval", *best, "eval.split=test", f"run_dir={tested}"]
            run(command, folder / f"seed-{seed}-tested.log")
        summary = json.loads((tested / "summary.json").read_text())
        return {key: value for key, value in summary.items() if key.startswith("test_")}


def other_split(folder: Path) -> Path | None:
    """Return the configuration of a seed's run whose checkpoints were not chosen on validation rows, if there is one."""
    for path in sorted(folder.glob("seed-*[0-9]/config.yaml")):
        if yaml.safe_load(path.read_text())["eval"]["split"] != "validation":
            return path
    return None


def run(command: list[str], log: Path) -> None:
    """Run a command, whose output goes to a file; ends the program if it fails."""
    with log.open("w") as stream:
        ended = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT, cwd=ROOT)
    if ended.returncode:
        sys.exit(f"{' '.join(command)}: exit code {ended.returncode}; {log} has more")


def line_of(name: str, seeds: list[dict[str, float]]) -> str:
    """Return a row of the table: mean and deviation over seeds."""
    cells = []
    for column in COLUMNS:
        found = [metrics[column] for metrics in seeds if column in metrics]
        spread = f" ± {stdev(found):.5f}" if len(found) > 1 else ""
        cells.append(f"{mean(found):.5f}{spread}" if found else "")
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    """Sweep and test the models of the command line, all by default; print a table and write results.json."""
    known = list(yaml.safe_load(SPACES.read_text())["models"])
    parser = command_parser(__doc__)
    parser.add_argument("names", nargs="*", help=f"models ({', '.join(known)}) and options of runs")
    parser.add_argument("--data", type=Path, required=True, help="dataset directory")
    parser.add_argument("--out", type=Path, required=True, help="folder of all results")
    parser.add_argument("--trials", type=int, default=20, help="trials per model, of one seed")
    parser.add_argument("--seeds", type=int, default=5, help="runs of the chosen settings")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    args = parser.parse_args()
    args.data, args.out = args.data.resolve(), args.out.resolve()
    further = [name for name in args.names if "=" in name]
    models = [name for name in args.names if "=" not in name] or known
    if unknown := set(models) - set(known):
        parser.error(f"no space of {', '.join(sorted(unknown))}; {SPACES} has {', '.join(known)}")
    for name in models:
        if path := other_split(args.out / name):
            parser.error(
                f"{path} has another eval.split than validation, of an earlier version; give another --out, or remove the "
                f"seed-* directories of {path.parent.parent}"
            )
    results = {}
    print(f"| model | {' | '.join(COLUMNS)} |\n|---|{'---|' * len(COLUMNS)}")
    for name in models:
        model, folder = ModelSweep.read(name, further), args.out / name
        chosen = model.chosen(folder, args)
        seeds = range(1, args.seeds + 1)
        with ThreadPoolExecutor(args.jobs) as pool:
            started = [
                pool.submit(model.test, folder, chosen["values"], seed, args.data) for seed in seeds
            ]
            tested = [future.result() for future in started]
        results[name] = {**chosen, "options": model.options, "seeds": [*seeds], "tested": tested}
        print(line_of(name, tested), flush=True)
        (args.out / "results.json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
