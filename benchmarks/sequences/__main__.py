"""Test AUC of the sequence models over seeds, with and without the order of the events and the history.

    python -m benchmarks.sequences --source DIR --out DIR --workers 16
    python -m benchmarks.sequences --source DIR --out DIR --models din bst --fuxictr PYTHON --zoo FuxiCTR/model_zoo

`--source` has `ratings.csv` and `movies.csv` (or .gz) of ml-latest-small for `liked`, and the files of the other datasets
(`datasets.py`, which says what they and their variants are). A model has the settings of its experiment
`MODEL_movielens_events`; `--validate` with `--set` is for choosing them on validation rows. Every run is a process on one
core, or on the GPU that all share; a finished one is a file in `--out`/results, and is not run again. `--fuxictr` trains
FuxiCTR's model of the same name on the same rows too, by the Python of an environment that has it.
"""

import argparse
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import product
from math import sqrt
from pathlib import Path
from statistics import mean, stdev

from benchmarks.launch import command_parser
from benchmarks.sequences.datasets import DATASETS, VARIANTS, dataset
from benchmarks.sequences.job import PEERS, Job

MODELS = ("din", "sasrec", "hstu", "bst", "transact", "onetrans", "sim")


def main() -> None:
    """Run what is missing, and print the tables."""
    parser = command_parser(__doc__)
    parser.add_argument("--source", type=Path, required=True, help="folder of raw files")
    parser.add_argument("--out", type=Path, required=True, help="folder of datasets and results")
    parser.add_argument("--datasets", nargs="+", default=DATASETS, choices=DATASETS)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--variants", nargs="+", default=VARIANTS, choices=VARIANTS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--workers", type=int, default=1, help="runs at a time; 0: only print")
    parser.add_argument("--validate", action="store_true", help="evaluate on validation rows")
    parser.add_argument("--set", nargs="+", default=[], help="more settings of ours")
    parser.add_argument("--fuxictr", type=Path, help="Python of FuxiCTR's environment")
    parser.add_argument("--zoo", type=Path, help="model_zoo of FuxiCTR's clone")
    parser.add_argument("--peer-lr", type=float, default=1e-3, help="FuxiCTR's learning rate")
    args = parser.parse_args()
    args.source, args.out = args.source.absolute(), args.out.absolute()
    (args.out / "results").mkdir(parents=True, exist_ok=True)
    kinds = [False, True] if args.fuxictr else [False]
    jobs = [
        Job(data, model, variant, seed, args, is_peer)
        for seed, data, variant, model in product(
            args.seeds, args.datasets, args.variants, args.models
        )
        for is_peer in kinds
        if not is_peer or (model in PEERS and variant == "as_is")
    ]
    if args.workers:
        run_missing(jobs, args)
    for data in args.datasets:
        print("\n".join(tables(data, [job for job in jobs if job.data == data])), flush=True)


def run_missing(jobs: Sequence[Job], args: argparse.Namespace) -> None:
    """Run the jobs without a result, each in a process of its own, `--workers` at a time."""
    missing = [job for job in jobs if job.auc() is None]
    for data, variant in product(args.datasets, args.variants):
        dataset(data, variant, args.source, args.out)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["benchmarks.sequences.job", "nn.library.own_training", "torchrec"]
    )
    with ProcessPoolExecutor(args.workers, context, max_tasks_per_child=1) as pool:
        running = {pool.submit(job.run): job for job in missing}
        for done in as_completed(running):
            done.result()
            job = running[done]
            print(f"{job.file.stem}: {job.auc():.4f}", file=sys.stderr, flush=True)


def tables(data: str, jobs: Sequence[Job]) -> Iterator[str]:
    """Yield the lines of two tables: AUC of every model and variant, and differences over the seeds that both have."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for job in jobs:
        if (auc := job.auc()) is not None:
            found.setdefault((job.column, job.variant), {})[job.seed] = auc
    yield f"\n| {data} | variant | AUC by seed | mean | deviation | standard error |"
    yield "|---|---|---|---|---|---|"
    for (model, variant), aucs in found.items():
        by_seed = " ".join(f"{auc:.4f}".lstrip("0") for auc in aucs.values())
        spread = stdev(aucs.values()) if len(aucs) > 1 else 0.0
        yield (
            f"| {model} | {variant} | {by_seed} | {mean(aucs.values()):.4f} | {spread:.4f} "
            f"| {spread / sqrt(len(aucs)):.4f} |"
        )
    yield f"\n| {data}: difference | mean | standard error | seeds above 0 |"
    yield "|---|---|---|---|"
    pairs = [((m, "as_is"), (m, v)) for m, v in found if v != "as_is"]
    others = [m for m, v in found if v == "as_is"]
    pairs += [((m, "as_is"), (o, "as_is")) for i, m in enumerate(others) for o in others[i + 1 :]]
    for one, other in pairs:
        seeds = found.get(one, {}).keys() & found[other].keys()
        changes = [found[one][seed] - found[other][seed] for seed in sorted(seeds)]
        if len(changes) > 1:
            yield (
                f"| {one[0]}, {one[1]} - {other[0]}, {other[1]} | {mean(changes):+.4f} "
                f"| {stdev(changes) / sqrt(len(changes)):.4f} | {sum(c > 0 for c in changes)} of {len(changes)} |"
            )


if __name__ == "__main__":
    main()
