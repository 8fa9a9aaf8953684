"""Datasets of the comparison of sequence models, and their variants.

`liked`: MovieLens, whether a user likes a movie (`dataset/movielens_liked.yaml`). The others ask for the next item of lists:
`next` of ml-100k, whose events have times, `beauty` and `toys` of S3-Rec (`data/Beauty.txt`, `data/Toys_and_Games.txt` of
RUCAIBox/CIKM2020-S3Rec; a line has a user and its items, oldest first), whose times are places in the list. From the second
on, every item of a list is a row of label 1; the last one tests, the one before validates. The rule of negatives: each such
row is followed by one of label 0 with an item that the user never has, drawn with the frequency of the items in training
rows, so that no item is likelier than another by its popularity.
"""

import gzip
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from benchmarks.dataset import preprocess
from dataloading.dataset.sequences import EVENTS

FILES = {"next": "u.data.gz", "beauty": "Beauty.txt", "toys": "Toys_and_Games.txt"}
DATASETS = ("liked", *FILES)
VARIANTS = ("as_is", "shuffled", "without")


def dataset(name: str, variant: str, source: Path, out: Path) -> Path:
    """Return the directory of a variant below `out`, which is made if it is missing."""
    root = out / f"{name}-as_is"
    if not root.exists():
        preset = "movielens_liked" if name == "liked" else "next_item"
        files = (
            source if name == "liked" else write_rows(read_lists(source / FILES[name]), out / name)
        )
        settings = (f"dataset={preset}", f"source={files}", f"output={root}")
        preprocess("--config-dir", "benchmarks/sequences", *settings)
    other = out / f"{name}-{variant}"
    if not other.exists():
        change(root, other, variant)
    return other


def read_lists(path: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return items and times of every user, oldest first; ratings of one second stay in the order of the file."""
    if path.suffix != ".gz":
        users = [np.array(line.split()[1:], np.int64) for line in path.read_text().splitlines()]
        return [(items, np.arange(len(items))) for items in users]
    with gzip.open(path, "rt") as stream:
        user, item, _, time = np.loadtxt(stream, np.int64).T
    order = np.lexsort((time, user))
    borders = np.flatnonzero(np.diff(user[order])) + 1
    return list(zip(np.split(item[order], borders), np.split(time[order], borders), strict=True))


def write_rows(lists: Sequence[tuple[np.ndarray, np.ndarray]], directory: Path) -> Path:
    """Write `events.parquet` and `rows.parquet`, with negatives; return their directory."""
    generator = np.random.default_rng(0)
    popular = np.concatenate([items[:-2] for items, _ in lists])
    rows: dict[str, list[np.ndarray]] = {
        name: [] for name in ("user", "item", "time", "label", "split")
    }
    for user, (items, times) in enumerate(lists):
        drawn = generator.choice(popular, len(items) - 1)
        while (had := np.isin(drawn, items)).any():
            drawn[had] = generator.choice(popular, had.sum())
        splits = np.array(["train"] * (len(items) - 3) + ["validation", "test"])
        for label, chosen in ((1, items[1:]), (0, drawn)):
            rows["user"].append(np.full(len(chosen), user))
            rows["item"].append(chosen)
            rows["time"].append(times[1:])
            rows["label"].append(np.full(len(chosen), label, np.int8))
            rows["split"].append(splits)
    directory.mkdir(parents=True, exist_ok=True)
    joined = {name: pa.array(np.concatenate(parts)) for name, parts in rows.items()}
    pq.write_table(pa.table(joined), directory / "rows.parquet")
    users = np.repeat(np.arange(len(lists)), [len(items) for items, _ in lists])
    items, times = (np.concatenate(part) for part in zip(*lists, strict=True))
    pq.write_table(
        pa.table({"user": users, "item": items, "time": times}), directory / "events.parquet"
    )
    return directory


def change(root: Path, other: Path, variant: str) -> None:
    """Copy a dataset directory with changed histories.

    `without`: they are empty. `shuffled`: each row's own history, the same events, in a random order of its own; the times stay
    where they are, so that an event has the time of another one.
    """
    shutil.copytree(root, partial := other.with_suffix(".partial"), dirs_exist_ok=True)
    spec = yaml.safe_load((root / "feature_spec.yaml").read_text())
    ((name, group),) = spec["sequence_spec"].items()
    files = {split: Path(split, f"{name}.slices.bin") for split in spec["source_spec"]}
    slices = {
        split: np.fromfile(root / file, np.int64).reshape(-1, 2) for split, file in files.items()
    }
    starts, ends = np.concatenate(list(slices.values())).T
    lengths = ends - starts if variant == "shuffled" else np.zeros_like(starts)
    new = np.cumsum(lengths)
    places = np.arange(lengths.sum()) + np.repeat(starts - (new - lengths), lengths)
    row = np.repeat(np.arange(len(lengths)), lengths)
    mixed = places[np.lexsort((np.random.default_rng(0).random(len(row)), row))]
    for column in (*group["features"], *group["numbers"]):
        path = Path(EVENTS, f"{column}.bin")
        values = np.fromfile(root / path, spec["feature_spec"][column]["dtype"])
        if variant == "shuffled":
            values[places if column == group["time"] else mixed].tofile(partial / path)
    borders = np.cumsum([len(rows) for rows in slices.values()])[:-1]
    for file, part in zip(
        files.values(), np.split(np.stack([new - lengths, new], 1), borders), strict=True
    ):
        part.tofile(partial / file)
    del spec["metadata"]["files"]
    (partial / "feature_spec.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))
    partial.rename(other)
