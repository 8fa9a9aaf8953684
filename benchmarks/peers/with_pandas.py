"""Preprocessing of Criteo's logs with pandas, all in memory."""

import csv

import numpy as np
import pandas as pd

from benchmarks.peers.criteo_job import CATEGORICAL, COLUMNS, LABEL, NUMERICAL, Job, run


def preprocess(job: Job) -> None:
    """Write the split binary."""
    types = (
        {LABEL: np.uint8} | dict.fromkeys(NUMERICAL, np.float64) | dict.fromkeys(CATEGORICAL, "str")
    )
    frames = [
        pd.read_csv(
            path,
            sep="\t",
            header=None,
            names=COLUMNS,
            dtype=types,
            keep_default_na=False,
            na_values=[""],
            quoting=csv.QUOTE_NONE,
        )
        for path in job.files
    ]
    splits = job.splits([len(frame) for frame in frames])
    data = pd.concat(frames, ignore_index=True)
    del frames
    numbers = data[NUMERICAL].to_numpy()
    logs = np.log(np.where(numbers > -3, numbers, -2) + 3).astype(np.float32)
    logs[np.isnan(logs)] = 0
    for split, part in splits.items():
        job.write(split, "label", data[LABEL].to_numpy()[part])
        job.write(split, "numerical", logs[part].astype(np.float16))
    del numbers, logs
    for name in CATEGORICAL:
        column = data.pop(name)
        counts = column.iloc[splits["train"]].value_counts().rename("count").reset_index()
        kept = counts[counts["count"] >= job.frequency_limit]
        kept = kept.sort_values(["count", name], ascending=[False, True])
        vocabulary = pd.Series(np.arange(1, len(kept) + 1), index=kept[name])
        ids = column.map(vocabulary).fillna(0).to_numpy().astype(np.int64)
        for split, part in splits.items():
            job.write_ids(split, name, ids[part], len(kept))


if __name__ == "__main__":
    run(preprocess)
