"""A sweep per model of FuxiCTR on validation rows, then five seeds of the chosen settings on test rows.

    python -m benchmarks.peers.with_fuxictr --data DIR --out DIR --python FUXICTR/bin/python --zoo FuxiCTR/model_zoo --jobs 16
    python -m benchmarks.peers.with_fuxictr ... --ours SWEEPS/results.json deepfm

`--data` and the results of `--ours` are those of `benchmarks.model_sweeps`, which sweeps our models on the same rows. FuxiCTR
trains by `benchmarks/peers/fuxictr_job.py` in an environment of its own, which has `fuxictr` from PyPI; model files are read from
a clone of reczoo/FuxiCTR. `with_fuxictr.yaml` has the first trial's settings and the space of every model. The best three of
20 trials by seed 1 get seeds 2 and 3, and the best mean of three is tested, once all models have chosen. An epoch is the better
one on validation rows, as in FuxiCTR's `fit`. A finished run is a file in OUT/results: the same command resumes.
"""

import argparse
import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import yaml

from benchmarks.launch import command_parser
from benchmarks.rows import ROOT

SPACES = Path(__file__).with_suffix(".yaml")
CONFIRMED = 3
"""Trials with more seeds than one."""
TEST_SEEDS = range(1, 6)

Run = tuple[str, int, int]
"""Model, number of the trial, seed."""


@dataclass(frozen=True, slots=True)
class Pair:
    """FuxiCTR's model, and its settings."""

    folder: str
    model_class: str
    peer_settings: dict[str, Any]
    batch_size: int
    epochs: int = 2


def train_peer(
    python: Path, zoo: Path, pair: Pair, data: Path, seed: int, splits: Iterable[str]
) -> list[dict[str, Any]]:
    """Train one of FuxiCTR's models in one thread; return AUC and log loss of each split after every epoch."""
    arguments = [str(zoo.resolve() / pair.folder), pair.model_class, str(data)]
    arguments += [json.dumps(pair.peer_settings), str(pair.epochs), str(pair.batch_size), str(seed)]
    # The path of Python stays a link: a virtual environment's is one.
    command = [os.path.abspath(python), "-m", "benchmarks.peers.fuxictr_job", *arguments, *splits]
    threads = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ | threads
    )
    return [json.loads(line) for line in done.stdout.splitlines()[-pair.epochs :]]


def trials_of(name: str, count: int) -> list[dict[str, Any]]:
    """Return the values of a model's trials: the file's, then drawn ones, each by a generator of its own."""
    every = yaml.safe_load(SPACES.read_text())
    own = every["models"][name]
    spaces = every["space"] | own["space"]
    drawing = [random.Random(f"{name}-{number}") for number in range(1, count)]
    drawn = [{key: draw(by, space) for key, space in spaces.items()} for by in drawing]
    return [every["first"] | own["first"], *drawn]


def draw(by: random.Random, space: list[Any] | dict[str, Any]) -> Any:
    """Return one of the values, or a number between two in equal shares of its logarithm, of three digits."""
    if isinstance(space, list):
        return by.choice(space)
    power = by.uniform(math.log(space["low"]), math.log(space["high"]))
    return float(f"{math.exp(power):.3g}")


def pair_of(name: str, values: dict[str, Any]) -> Pair:
    """Return the model with the values of a trial."""
    own = yaml.safe_load(SPACES.read_text())["models"][name]
    settings = options_of(name, values) | own.get("settings", {})
    batch_size = settings.pop("batch_size")
    return Pair(own.get("folder", own["class"]), own["class"], settings, batch_size)


def options_of(name: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return FuxiCTR's options for the values of a trial."""
    made = dict(values)
    if name == "dcnv2":
        made[f"{made['model_structure']}_dnn_hidden_units"] = made.pop("dnn")
    elif name == "finalmlp":
        made["mlp1_dropout"] = made["mlp2_dropout"] = made.pop("dropout")
    elif name == "autoint":
        made["attention_dim"] = made["embedding_dim"]
    elif name == "masknet":
        blocks = made.pop("blocks")
        if made["model_type"] == "SerialMaskNet":
            made["dnn_hidden_units"] = [64] * blocks
        else:
            made |= {"parallel_num_blocks": blocks, "parallel_block_dim": 64}
            made["dnn_hidden_units"] = [128]
    return made


def best_epochs(
    runs: list[Run], args: argparse.Namespace, *further: str
) -> dict[Run, dict[str, Any]]:
    """Train what has not finished; return AUC and log loss of the better epoch by validation rows, of further splits too."""
    with ThreadPoolExecutor(args.jobs) as pool:
        epochs = pool.map(lambda run: epochs_of(run, args, ["validation", *further]), runs)
        best = [max(lines, key=lambda line: line["validation"]["auc"]) for lines in epochs]
    return dict(zip(runs, best, strict=True))


def epochs_of(run: Run, args: argparse.Namespace, splits: list[str]) -> list[dict[str, Any]]:
    """Return the epochs of a run, which is trained unless its file is there; ends the program if that fails."""
    name, trial, seed = run
    pair = pair_of(name, trials_of(name, trial + 1)[trial])
    wanted = {"data": str(args.data), "seed": seed, **asdict(pair)}
    file = args.out / "results" / f"{name}-{trial}-{seed}-{splits[-1]}.json"
    if file.exists():
        found = json.loads(file.read_text())
        if found["run"] != wanted:
            sys.exit(f"error: {file} is of {found['run']}, this run of {wanted}: set another --out")
        return found["epochs"]
    try:
        epochs = train_peer(args.python, args.zoo, pair, args.data, seed, splits)
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: {file.stem}: exit code {error.returncode} of {' '.join(error.cmd)}")
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps({"run": wanted, "epochs": epochs}))
    partial.rename(file)
    print(f"{file.stem}: {epochs[-1]}", file=sys.stderr, flush=True)
    return epochs


def choose(models: list[str], args: argparse.Namespace) -> dict[str, int]:
    """Return the number of every model's best trial: of the best by seed 1, that with the best mean of three seeds."""
    trials = [(name, trial, 1) for name in models for trial in range(args.trials)]
    found = {run: line["validation"]["auc"] for run, line in best_epochs(trials, args).items()}
    ranked = sorted(trials, key=found.__getitem__, reverse=True)
    best = {name: [trial for of, trial, _ in ranked if of == name][:CONFIRMED] for name in models}
    more = [(name, trial, seed) for name in models for trial in best[name] for seed in (2, 3)]
    found |= {run: line["validation"]["auc"] for run, line in best_epochs(more, args).items()}
    chosen = {}
    for name in models:
        means = {
            trial: mean(found[name, trial, seed] for seed in (1, 2, 3)) for trial in best[name]
        }
        chosen[name] = max(means, key=means.__getitem__)
    return chosen


def row(name: str, values: dict[str, Any], aucs: list[float], ours: list[float]) -> str:
    """Return a line of the table; ours less FuxiCTR has the standard error over the seeds of both."""
    by_seed = " ".join(f"{auc:.4f}" for auc in aucs)
    line = f"| {name} | `{json.dumps(values)}` | {by_seed} | {mean(aucs):.4f} ± {stdev(aucs):.4f} |"
    if not ours:
        return f"{line} |"
    error = math.sqrt(stdev(ours) ** 2 / len(ours) + stdev(aucs) ** 2 / len(aucs))
    return f"{line} {mean(ours) - mean(aucs):+.4f} ({error:.4f}) |"


def main() -> None:
    """Sweep and test the models of the command line, all by default; print a table."""
    known = list(yaml.safe_load(SPACES.read_text())["models"])
    parser = command_parser(__doc__)
    parser.add_argument("models", nargs="*", help=", ".join(known))
    parser.add_argument("--data", type=Path, required=True, help="dataset directory")
    parser.add_argument("--out", type=Path, required=True, help="folder of all results")
    parser.add_argument("--python", type=Path, required=True, help="of FuxiCTR's environment")
    parser.add_argument("--zoo", type=Path, required=True, help="model_zoo of FuxiCTR's clone")
    parser.add_argument("--ours", type=Path, help="results.json of benchmarks.model_sweeps")
    parser.add_argument("--trials", type=int, default=20, help="trials per model, of one seed")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    args = parser.parse_args()
    args.data, args.out = args.data.resolve(), args.out.resolve()
    models = list(dict.fromkeys(args.models)) or known
    if unknown := set(models) - set(known):
        parser.error(f"no space of {', '.join(sorted(unknown))}; {SPACES} has {', '.join(known)}")
    for path in (args.data / "validation", args.data / "test", args.python, args.zoo):
        if not path.exists():
            parser.error(f"{path} does not exist")
    ours = json.loads(args.ours.read_text()) if args.ours else {}
    (args.out / "results").mkdir(parents=True, exist_ok=True)
    chosen = choose(models, args)
    runs = [(name, chosen[name], seed) for name in models for seed in TEST_SEEDS]
    tested = best_epochs(runs, args, "test")
    print("| model | chosen | FuxiCTR, by seed | mean | ours less FuxiCTR |\n|---|---|---|---|---|")
    for name in models:
        values = trials_of(name, args.trials)[chosen[name]]
        aucs = [tested[name, chosen[name], seed]["test"]["auc"] for seed in TEST_SEEDS]
        own = [metrics["test_auc"] for metrics in ours.get(name, {}).get("tested", [])]
        print(row(name, values, aucs, own))


if __name__ == "__main__":
    main()
