"""A small dataset of a sequence group, and models of it as options of the command."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from dataloading.dataset.dataset_directory import write_dataset
from dataloading.dataset.feature_spec import CategoricalFeature
from dataloading.dataset.sequences import EventColumn, SequenceGroup

LONGEST = 6
ROWS = {"train": 96, "test": 40}
SIZES = {
    "item": 300,
    "genre": 12,
    "user": 50,
    "hist_item": 300,
    "hist_genre": 12,
    "query": 40,
    "tags": 30,
}
TABLES = {"hist_item": "item", "hist_genre": "genre"}
RAGGED = ("hist_item", "hist_genre", "query", "tags")
HISTORY = SequenceGroup(
    "history",
    ("hist_item", "hist_genre"),
    LONGEST,
    (
        EventColumn("hist_time", np.dtype(np.int64)),
        EventColumn("hist_rating", np.dtype(np.float32)),
    ),
    "hist_time",
)
SEARCHES = SequenceGroup("searches", ("query",), LONGEST)
MODELS = {
    "din": ["name=din", "attention_hidden=[9]", "hidden=[8]", "item_features=[item]"],
    "sasrec": ["name=sasrec", "hidden=[8]", "item_features=[item]", "relative_bias=true"],
    "bst": ["name=bst", "hidden=[8]", "item_features=[item,genre]"],
    "transact": ["name=transact", "hidden=[8]", "item_features=[item]", "recent=3", "outputs=2"],
    "onetrans": ["name=onetrans", "hidden=[8]", "item_features=[item]", "token_dim=8", "tokens=3"],
    "sim": ["name=sim", "hidden=[8]", "item_features=[item]", "found=2", "recent=2"],
    "hstu": [
        # Of the default, a score depends on the rows beside it.
        *("name=hstu", "attention_norm=capacity", "item_features=[item,genre]"),
        *("width=16", "heads=2", "head_dim=8", "layers=2", "relative_bias=true", "hour=price"),
    ],
}


def overrides(name: str, data: Path) -> list[str]:
    """Return the options of a training of a model."""
    model = ["embedding_dim=8", "sequence=history", *MODELS[name]]
    return [
        *(f"model.{option}" for option in model),
        *("train.batch_size=16", "eval.batch_size=16", "train.epochs=2", "eval.per_epoch=1"),
        *("optimizer.lr=0.3", "device=cpu", "log.pictures=false", "log.loggers=[]"),
        *("train.tf32=false", f"data.path={data}"),
    ]


def write_sequences(root: Path, splits: Mapping[str, int] = ROWS) -> Path:
    """Write a Parquet dataset whose labels the last event decides; the first row of a split has no events."""
    random = np.random.default_rng(1)
    features = [
        CategoricalFeature.of(name, size, None if name in RAGGED else 1, TABLES.get(name))
        for name, size in SIZES.items()
    ]
    with write_dataset(
        root,
        categorical=features,
        numerical=("price",),
        numerical_dtype="float32",
        sequences=(HISTORY, SEARCHES),
        file_format="parquet",
        splits=list(splits),
    ) as dataset:
        for split, rows in splits.items():
            lengths = {
                "history": np.minimum(random.geometric(0.25, rows), LONGEST),
                "searches": random.integers(0, 4, rows),
                "tags": random.integers(0, 3, rows),
            }
            lengths["history"][0] = 0
            count = dict.fromkeys(SIZES, rows)
            count |= dict.fromkeys(HISTORY.features, lengths["history"].sum())
            count |= {"query": lengths["searches"].sum(), "tags": lengths["tags"].sum()}
            ids = {name: random.integers(0, SIZES[name], number) for name, number in count.items()}
            last = ids["hist_genre"][np.maximum(lengths["history"].cumsum(), 1) - 1]
            steps = random.integers(1, 1000, count["hist_item"])
            dataset[split].append(
                numerical=random.normal(size=(rows, 1)),
                labels=np.where(lengths["history"] > 0, last % 2, 0),
                ids=ids,
                lengths=lengths,
                events={
                    "hist_time": 10**9 + steps.cumsum(),
                    "hist_rating": random.random(count["hist_item"]),
                },
                moments={"history": 10**9 + steps.sum() + 1 + np.arange(rows)},
            )
    return root
