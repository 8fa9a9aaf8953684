"""Small dataset directories, and damage to them."""

from pathlib import Path

import numpy as np
import torch

from configs.schema import SyntheticConfig
from dataloading.dataset.dataset_directory import write_dataset
from dataloading.dataset.feature_spec import CategoricalFeature
from dataloading.dataset.source import Source
from dataloading.loader import Loader, LoaderSettings
from dataloading.synthetic import SyntheticSource

ROWS = {"train": 256, "test": 128}
CARDINALITY = 100
USERS, TAGS, QUERIES = 100, 30, 40
"""Values of the features of `write_rows`."""


def synthetic_source(seed: int = 0, **options) -> SyntheticSource:
    return SyntheticSource(SyntheticConfig(**options), seed)


def write_clicks(root: Path, num_items: int = CARDINALITY) -> Path:
    """Write two single-hot features, two numericals and a label that depends on the first id; return `root`.

    The ids of `item` are below `CARDINALITY` for any `num_items`.
    """
    features = [
        CategoricalFeature.of("user", CARDINALITY),
        CategoricalFeature.of("item", num_items),
    ]
    generator = np.random.default_rng(1)
    with write_dataset(
        root, categorical=features, numerical=("n", "m"), numerical_dtype="float32"
    ) as dataset:
        for split, rows in ROWS.items():
            ids = generator.integers(0, CARDINALITY, (2, rows))
            dataset[split].append(
                numerical=generator.normal(size=(rows, 2)),
                labels=(ids[0] + generator.integers(0, 50, rows)) % CARDINALITY > 50,
                ids={"user": ids[0], "item": ids[1]},
            )
    return root


def write_rows(
    root: Path, first: int, last: int, *, users: int = USERS, test_rows: int = 64, **options
) -> Path:
    """Write rows `first` to `last` of the stream as the training rows of a dataset; return `root`.

    A feature has one id, one is ragged, one has raw keys of which new ones come with later rows.
    """
    features = [
        CategoricalFeature.of("user", users),
        CategoricalFeature.of("tags", TAGS, hotness=None),
        CategoricalFeature.of_keys("query", QUERIES),
    ]
    splits = {"train": (first, last), "test": (10_000, 10_000 + test_rows)}
    splits = {split: ends for split, ends in splits.items() if ends[0] < ends[1]}
    with write_dataset(
        root, categorical=features, numerical=["n"], splits=[*splits], **options
    ) as dataset:
        for split, ends in splits.items():
            rows = np.arange(*ends)
            draws = np.random.default_rng(7).integers(0, 1 << 30, (20_000, 3))[rows]
            counts = draws[:, 0] % 4
            of_tag = (
                np.repeat(draws[:, 1], counts)
                + np.arange(counts.sum())
                - np.repeat(np.cumsum(counts) - counts, counts)
            )
            dataset[split].append(
                labels=(draws[:, 0] + rows) % 3 == 0,
                numerical=draws[:, 2:] / (1 << 30),
                ids={
                    "user": draws[:, 0] % USERS,
                    "tags": of_tag % TAGS,
                    "query": draws[:, 2] % (20 + rows // 10) + 1,
                },
                lengths={"tags": counts},
            )
    return root


def plant(path: Path, index: int, value: float | int, dtype: str) -> None:
    """Overwrite one value of a .bin file."""
    values = np.memmap(path, dtype, mode="r+")
    values[index] = value
    values.flush()


def make_loader(
    source: Source,
    split: str,
    *,
    rank: int = 0,
    world_size: int = 1,
    device: torch.device | str = "cpu",
    **settings: int,
) -> Loader:
    """Return a loader of these settings."""
    return Loader(
        source,
        split,
        LoaderSettings(**settings),
        rank=rank,
        world_size=world_size,
        device=device,
    )
