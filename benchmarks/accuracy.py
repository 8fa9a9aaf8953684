"""Effect of precision and CUDA graphs on what a model learns: losses step by step, and the test AUC over seeds.

    python -m benchmarks.accuracy --data DIR --out DIR precision dlrm_criteo_kaggle dcnv2_criteo_kaggle
    python -m benchmarks.accuracy --data DIR --out DIR fp8 dcnv2_criteo_kaggle
    python -m benchmarks.accuracy --steps 2048 --out DIR fp8 dcnv2

The first argument names what is compared:

- `precision`: float32 launched kernel by kernel, bf16 launched kernel by kernel, bf16 captured as a CUDA graph, and the last
  one a second time with the same seed. It needs a GPU.
- `fp8`: float32, bf16, and the products of `train.fp8`. The difference of the first two says how much any rounding changes. A
  CPU rounds to the same values of 8 bits and multiplies them in float32.

The others are experiments, or recipes with their default sizes. They train on a preprocessed dataset (--data) or on built-in
synthetic clicks for some steps (--steps). `--jobs` runs share the device, since nothing is timed.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean

from benchmarks.rows import ROOT

BF16 = ("train.amp=bf16",)
COMPARISONS: dict[str, dict[str, tuple[str, ...]]] = {
    "precision": {
        "float32, launched": ("train.amp=off", "train.tf32=false", "train.capture=false"),
        "bf16, launched": (*BF16, "train.capture=false"),
        "bf16, captured": BF16,
        "bf16, captured, again": BF16,
    },
    "fp8": {
        "float32": ("train.amp=off", "train.tf32=false"),
        "bf16": BF16,
        "fp8 partial": (*BF16, "train.fp8=partial"),
        "fp8 full": (*BF16, "train.fp8=full"),
    },
}
COMPARED_STEPS = 200
"""First steps of which single losses are compared; later ones differ by what a training makes of a rounding."""
LAST_SHARE = 0.1
"""Share of the steps, the last ones, whose mean loss is printed."""
SYNTHETIC_BATCH = 1024


@dataclass(frozen=True, slots=True)
class Result:
    """One run: its test AUC, and the training loss of each step."""

    auc: float
    losses: Sequence[float]


def main() -> None:
    """Train all variants of the experiments of the command line, and print one table per experiment."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("comparison", choices=COMPARISONS)
    parser.add_argument("experiments", nargs="+", help="in configs/experiment/; or dlrm, dcnv2")
    rows = parser.add_mutually_exclusive_group(required=True)
    rows.add_argument("--data", type=Path, help="dataset directory")
    rows.add_argument("--steps", type=int, help=f"built-in clicks, {SYNTHETIC_BATCH} per step")
    parser.add_argument("--out", type=Path, required=True, help="folder for the run directories")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=6, help="runs at a time")
    args = parser.parse_args()
    variants = COMPARISONS[args.comparison]
    for experiment in args.experiments:
        with ThreadPoolExecutor(args.jobs) as pool:
            started = {
                name: [pool.submit(_run, experiment, name, seed, args) for seed in args.seeds]
                for name in variants
            }
            runs = {
                name: [future.result() for future in futures] for name, futures in started.items()
            }
        print(table(experiment, runs), flush=True)


def command_of(
    experiment: str, variant: Sequence[str], seed: int, args: argparse.Namespace
) -> list[str]:
    """Return the command of one run, without its directory."""
    recipe, _, rest = experiment.partition("_")
    if args.data is not None:
        rows = [f"data.path={args.data}"]
    else:
        rows = [
            f"data.synthetic.train_rows={args.steps * SYNTHETIC_BATCH}",
            f"train.batch_size={SYNTHETIC_BATCH}",
        ]
    return [
        *(sys.executable, str(ROOT / f"{recipe}.py")),
        *([f"experiment={experiment}"] if rest else []),
        *rows,
        *(f"seed={seed}", "log.every=1", "log.loggers=[]", "log.pictures=false"),
        *("eval.per_epoch=1", "checkpoint.save=false"),
        *variant,
    ]


def _run(experiment: str, name: str, seed: int, args: argparse.Namespace) -> Result:
    run_dir = args.out / f"{experiment}-{name.replace(', ', '-').replace(' ', '-')}-{seed}"
    variant = COMPARISONS[args.comparison][name]
    command = [*command_of(experiment, variant, seed, args), f"run_dir={run_dir}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    losses = [line["loss"] for line in lines if "loss" in line]
    return Result(json.loads((run_dir / "summary.json").read_text())["test_auc"], losses)


def table(experiment: str, runs: Mapping[str, Sequence[Result]]) -> str:
    """Return the results of all variants, each compared with the one before."""
    lines = [
        f"| {experiment} | test AUC per seed | mean | loss of the last {LAST_SHARE:.0%} of the steps "
        f"| largest difference of a loss to the row above, first {COMPARED_STEPS} steps |",
        "|---|---|---|---|---|",
    ]
    for before, name in pairwise([None, *runs]):
        assert name is not None, "only the first has none before it"
        aucs = [result.auc for result in runs[name]]
        last = mean(_last_loss(result.losses) for result in runs[name])
        difference = ""
        if before is not None:
            difference = f"{_largest_difference(runs[before], runs[name]):.2g}"
        lines.append(
            f"| {name} | {' '.join(f'{auc:.4f}' for auc in aucs)} | {mean(aucs):.5f} | {last:.5f} "
            f"| {difference} |"
        )
    return "\n".join(lines)


def _last_loss(losses: Sequence[float]) -> float:
    return mean(losses[-max(int(len(losses) * LAST_SHARE), 1) :])


def _largest_difference(one: Sequence[Result], other: Sequence[Result]) -> float:
    """Return the largest relative difference of a step's losses, over the first steps of all seeds."""
    return max(
        abs(a - b) / a
        for first, second in zip(one, other, strict=True)
        for a, b in zip(first.losses[:COMPARED_STEPS], second.losses[:COMPARED_STEPS], strict=True)
    )


if __name__ == "__main__":
    main()
