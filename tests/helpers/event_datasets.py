"""A dataset with two sequence groups, one of them as events of the rows or as slices of a log."""

import numpy as np

from dataloading.dataset.dataset_directory import write_dataset
from dataloading.dataset.feature_spec import CategoricalFeature
from dataloading.dataset.sequences import EventColumn, SequenceGroup

ROWS = {"train": 50, "test": 21}
EVENTS = 60
FEATURES = [
    CategoricalFeature.of("item", 1000, table="item"),
    CategoricalFeature.of("hist_item", 1000, None, "item"),
    CategoricalFeature.of("tags", 30, None),
    CategoricalFeature.of("hist_genre", 20, None),
    CategoricalFeature.of("query", 40, None),
]
HISTORY = SequenceGroup(
    "history",
    ("hist_item", "hist_genre"),
    max_length=8,
    numbers=(
        EventColumn("hist_time", np.dtype(np.int64)),
        EventColumn("hist_rating", np.dtype(np.float32)),
    ),
    time="hist_time",
)
SEARCHES = SequenceGroup("searches", ("query",), max_length=5)
GROUPS = (HISTORY, SEARCHES)
# A log of one user, oldest first; two events are of one time.
TIMES = np.sort(np.r_[1_700_000_000 + 60 * np.arange(EVENTS - 1), 1_700_000_060])
LOG = {
    "hist_item": np.arange(EVENTS) * 7 % 1000,
    "hist_genre": np.arange(EVENTS) % 20,
    "hist_time": TIMES,
    "hist_rating": np.arange(EVENTS) / 8,
}


def rows_of(split):
    """Return slices of the log, moments and the other columns of a split."""
    rows = np.arange(ROWS[split])
    ends = rows * 11 % EVENTS + 1
    slices = np.stack([ends - np.minimum(rows % 9, ends), ends], axis=1)
    others = {
        "ids": {"item": rows * 3, "tags": rows % 30},
        "lengths": {"tags": np.ones(len(rows), int), "searches": rows % 4},
        "labels": rows % 2,
    }
    others["ids"]["query"] = np.arange(others["lengths"]["searches"].sum()) % 40
    return slices, TIMES[ends - 1] + 1 + rows, others


def write_events(root, form="own", file_format="binary", change=lambda columns: None):
    """Write the rows with events of their own, or as slices of a log; `change` changes what the writer gets."""
    with write_dataset(
        root, categorical=FEATURES, sequences=GROUPS, file_format=file_format
    ) as dataset:
        if form == "log":
            for part in (slice(0, 20), slice(20, EVENTS)):
                dataset.append_events(
                    ids={name: LOG[name][part] for name in HISTORY.features},
                    events={c.name: LOG[c.name][part] for c in HISTORY.numbers},
                )
        for split, num_rows in ROWS.items():
            slices, moments, others = rows_of(split)
            columns = {**others, "moments": {"history": moments}}
            if form == "log":
                columns["slices"] = {"history": slices}
            else:
                at = np.concatenate([np.arange(*ends) for ends in slices])
                columns["ids"] |= {name: LOG[name][at] for name in HISTORY.features}
                columns["events"] = {c.name: LOG[c.name][at] for c in HISTORY.numbers}
                columns["lengths"]["history"] = slices[:, 1] - slices[:, 0]
            change(columns)
            dataset[split].append(**columns)
            assert num_rows == len(moments)
    return root
