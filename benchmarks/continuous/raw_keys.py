"""Speed of training on raw keys beside that on ids: the same rows, models and tables.

    python -m benchmarks.continuous.raw_keys --out DIR --turns 3

It writes three datasets: of ids, of raw keys in all tables, and of raw keys in tables of more than 100,000 rows. The rows repeat
in every epoch, so that keys are known after the first one; `--new` gives keys of later epochs no row of their own, but changes
that share of the keys in every batch of one long epoch.
"""

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from omegaconf import OmegaConf

from dataloading.dataset.dataset_directory import DatasetWriter, write_dataset
from dataloading.dataset.feature_spec import CategoricalFeature
from dataloading.dataset.source import Columns
from dataloading.synthetic import SyntheticSource

ROOT = Path(__file__).resolve().parents[2]
LARGE = 100_000
MULTIPLIER = 0x9E3779B97F4A7C15
CHUNK = 65_536
# Tables of more rows than this have keys.
KINDS = {"ids": None, "large tables": LARGE, "all tables": 0}


def main() -> None:
    """Write the datasets, train on each, and print the speeds."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--out", type=Path, required=True, help="directory of datasets and runs")
    parser.add_argument("--batches", type=int, default=16, help="of 65,536 rows per epoch")
    parser.add_argument("--steps", type=int, default=320)
    parser.add_argument("--turns", type=int, default=1, help="runs of each dataset, in turns")
    parser.add_argument("--new", type=float, default=0.0, help="share of keys that occur once")
    parser.add_argument("options", nargs="*", help="of dlrm.py, behind --")
    options = parser.parse_args()
    tables = OmegaConf.load(ROOT / "configs/data/criteo_t15.yaml").synthetic.cardinalities
    paths = {name: options.out / name.replace(" ", "_") for name in KINDS}
    for name, least in KINDS.items():
        _write(paths[name], list(tables), least, options)
    for turn in range(options.turns):
        found = {}
        for name, path in paths.items():
            found[name] = _speed(path, path.with_name(f"{path.name}_run_{turn}"), options)
            share = found[name] / found["ids"]
            print(
                f"{name:14} {found[name] / 1e6:6.2f} million samples/s, {share:.2f} of ids",
                flush=True,
            )


def _write(path: Path, tables: list[int], least: int | None, options: argparse.Namespace) -> None:
    """Write a dataset; tables of more than `least` rows have keys, none with None."""
    keyed = [least is not None and rows > least for rows in tables]
    rows = options.batches * CHUNK
    source = SyntheticSource(rows, CHUNK, 13, tables)
    # Row 0, and room for the keys of a batch that occur once.
    more = 1 + int(2 * options.new * CHUNK)
    features = [
        CategoricalFeature.of_keys(feature.name, feature.cardinality + more)
        if is_keyed
        else feature
        for feature, is_keyed in zip(source.spec.categorical, keyed, strict=True)
    ]
    with (
        write_dataset(
            path, categorical=features, numerical=source.spec.numerical, overwrite=True
        ) as dataset,
        ThreadPoolExecutor() as pool,
    ):
        for split, count in (("train", rows), ("test", CHUNK)):
            runs = [np.array([[first, first + CHUNK]]) for first in range(0, count, CHUNK)]
            for number, columns in enumerate(
                pool.map(lambda run, split=split: source.read(split, run), runs)
            ):
                _append(dataset, split, columns, keyed, options.new, number)


def _append(
    dataset: DatasetWriter,
    split: str,
    columns: Columns,
    keyed: list[bool],
    new: float,
    number: int,
) -> None:
    ids = {}
    rng = np.random.default_rng(number)
    for index, (values, is_keyed) in enumerate(zip(columns.ids, keyed, strict=True)):
        if is_keyed:
            with np.errstate(over="ignore"):
                keys = (values.astype(np.uint64) + np.uint64(1)) * np.uint64(MULTIPLIER + 2 * index)
            once = rng.random(len(keys)) < new
            keys[once] = rng.integers(1, 2**63, np.count_nonzero(once), dtype=np.uint64)
            values = keys.view(np.int64)
        ids[f"cat_{index}"] = values
    dataset[split].append(numerical=columns.numerical, labels=columns.labels, ids=ids)


def _speed(path: Path, run_dir: Path, options: argparse.Namespace) -> float:
    """Return the samples per second of a run, median of its records but the first three."""
    command = [sys.executable, "dlrm.py", "experiment=dlrm_criteo_t15", f"data.path={path}"]
    command += [f"run_dir={run_dir}", f"train.max_steps={options.steps}", "train.epochs=1000"]
    command += [
        "checkpoint.save=false",
        "eval.every=1000000",
        "eval.max_steps=1",
        "log.every=20",
        "log.pictures=false",
    ]
    subprocess.run([*command, *options.options], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    speeds = [json.loads(line).get("samples_per_s") for line in lines]
    known = [speed for speed in speeds if speed is not None]
    return float(np.median(known[3:] or known))


if __name__ == "__main__":
    main()
