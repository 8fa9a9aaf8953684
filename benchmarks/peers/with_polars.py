"""Preprocessing of Criteo's logs with Polars.

The text is converted to Parquet once. Columns are then encoded one at a time, so that the logs need not fit in memory.
"""

import tempfile

import numpy as np
import polars as pl

from benchmarks.peers.criteo_job import CATEGORICAL, COLUMNS, LABEL, NUMERICAL, Job, run


def preprocess(job: Job) -> None:
    """Write the split binary."""
    types = {LABEL: pl.UInt8} | dict.fromkeys(NUMERICAL, pl.Int64)
    types |= dict.fromkeys(CATEGORICAL, pl.String)
    with tempfile.TemporaryDirectory(dir=job.output.parent) as parquet_dir:
        rows = []
        for number, path in enumerate(job.files):
            lines = pl.scan_csv(
                path, separator="\t", has_header=False, quote_char=None, schema=types
            )
            lines.sink_parquet(f"{parquet_dir}/{number:04d}.parquet", compression="lz4")
            rows.append(
                pl.scan_parquet(f"{parquet_dir}/{number:04d}.parquet")
                .select(pl.len())
                .collect()
                .item()
            )
        splits = job.splits(rows)
        data = pl.scan_parquet(f"{parquet_dir}/*.parquet").select(COLUMNS)
        numerical = [
            pl.when(pl.col(name) > -3)
            .then((pl.col(name) + 3).cast(pl.Float64).log())
            .otherwise(0.0)
            .fill_null(0.0)
            .cast(pl.Float32)
            for name in NUMERICAL
        ]
        for split, part in splits.items():
            frame = (
                data.slice(part.start, part.stop - part.start).select(LABEL, *numerical).collect()
            )
            job.write(split, "label", frame[LABEL].to_numpy())
            job.write(
                split, "numerical", frame.select(NUMERICAL).to_numpy(order="c").astype(np.float16)
            )
        for name in CATEGORICAL:
            column = data.select(name).collect()
            train = column[splits["train"]]
            vocabulary = (
                train.drop_nulls()
                .group_by(name)
                .len()
                .filter(pl.col("len") >= job.frequency_limit)
                .sort(["len", name], descending=[True, False])
                .with_row_index("id", offset=1)
                .select(name, "id")
            )
            ids = column.join(vocabulary, on=name, how="left", maintain_order="left")[
                "id"
            ].fill_null(0)
            for split, part in splits.items():
                job.write_ids(split, name, ids[part].to_numpy(), len(vocabulary))


if __name__ == "__main__":
    run(preprocess)
