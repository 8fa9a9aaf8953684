"""Effect of precision and CUDA graphs on a model on real data: losses step by step, and the test AUC over seeds.

    python -m benchmarks.accuracy --data DIR --out DIR dlrm_criteo_kaggle dcnv2_criteo_kaggle

Each experiment is trained in four variants: float32 launched kernel by kernel, bf16 launched kernel by kernel, bf16 recorded
as a CUDA graph, and the last one a second time with the same seed. It needs a GPU and a preprocessed dataset directory.
`--jobs` runs share the GPU, since nothing is timed.
"""

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from statistics import mean

from benchmarks.rows import ROOT

VARIANTS = {
    "float32, launched": ("train.amp=off", "train.tf32=false", "train.capture=false"),
    "bf16, launched": ("train.amp=bf16", "train.capture=false"),
    "bf16, recorded": ("train.amp=bf16",),
    "bf16, recorded, again": ("train.amp=bf16",),
}
COMPARED_STEPS = 200


def main() -> None:
    """Train all variants of the experiments of the command line, and print one table per experiment."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("experiments", nargs="+", help="in configs/experiment/")
    parser.add_argument("--data", type=Path, required=True, help="dataset directory")
    parser.add_argument("--out", type=Path, required=True, help="folder for the run directories")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=6, help="runs at a time")
    args = parser.parse_args()
    for experiment in args.experiments:
        with ThreadPoolExecutor(args.jobs) as pool:
            started = {
                name: [pool.submit(_run, experiment, name, seed, args) for seed in args.seeds]
                for name in VARIANTS
            }
            runs = {
                name: [future.result() for future in futures] for name, futures in started.items()
            }
        print(f"| {experiment} | test AUC per seed | mean | largest difference of a loss |")
        print("|---|---|---|---|")
        names = [None, *VARIANTS]
        for before, name in pairwise(names):
            aucs = [auc for auc, _ in runs[name]]
            difference = ""
            if before is not None:
                difference = f"{_largest_difference(runs[before], runs[name]):.2g} to the row above"
            print(
                f"| {name} | {' '.join(f'{auc:.4f}' for auc in aucs)} | {mean(aucs):.4f} | {difference} |",
                flush=True,
            )


def _run(
    experiment: str, name: str, seed: int, args: argparse.Namespace
) -> tuple[float, list[float]]:
    """Train one run; return its test AUC and the loss of each step."""
    run_dir = args.out / f"{experiment}-{name.replace(', ', '-').replace(' ', '')}-{seed}"
    command = [
        *(sys.executable, str(ROOT / f"{experiment.split('_')[0]}.py")),
        f"experiment={experiment}",
        f"data.path={args.data}",
        f"run_dir={run_dir}",
        *(f"seed={seed}", "log.every=1", "log.loggers=[]", "checkpoint.save=false"),
        *VARIANTS[name],
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    losses = [line["loss"] for line in lines if "loss" in line]
    return json.loads((run_dir / "summary.json").read_text())["test_auc"], losses


def _largest_difference(
    one: list[tuple[float, list[float]]], other: list[tuple[float, list[float]]]
) -> float:
    """Return the largest relative difference of a step's losses, over the first steps of all seeds."""
    return max(
        abs(a - b) / a
        for (_, losses), (_, others) in zip(one, other, strict=True)
        for a, b in zip(losses[:COMPARED_STEPS], others[:COMPARED_STEPS], strict=True)
    )


if __name__ == "__main__":
    main()
