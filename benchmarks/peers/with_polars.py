"""Preprocessing of Criteo's logs with Polars.

The text is converted to Parquet once. Columns are then encoded one at a time, so that the logs need not fit in memory.
"""

import glob
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from dataloading.dataset.feature_spec import id_dtype

LABEL = "label"
NUMERICAL = [f"num_{i}" for i in range(13)]
CATEGORICAL = [f"cat_{i}" for i in range(26)]
COLUMNS = [LABEL, *NUMERICAL, *CATEGORICAL]


@dataclass(frozen=True, slots=True)
class Job:
    """One job, with the options of `python -m preproc`.

    With `last_file` the last file is the test and validation split, as in `dataset=criteo_1tb`; else the last tenth of all rows
    is the test split.
    """

    files: list[str]
    output: Path
    frequency_limit: int
    last_file: bool
    threads: int

    def splits(self, rows: list[int]) -> dict[str, slice]:
        """Return the rows of each split; `rows` holds the number of rows per file."""
        total = sum(rows)
        if not self.last_file:
            return {"train": slice(0, total * 9 // 10), "test": slice(total * 9 // 10, total)}
        begin = total - rows[-1]
        half = begin + rows[-1] // 2
        return {
            "train": slice(0, begin),
            "test": slice(begin, half),
            "validation": slice(half, total),
        }

    def write(self, split: str, name: str, values: np.ndarray) -> None:
        """Append to one file of a split."""
        directory = self.output / split
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / f"{name}.bin").open("ab") as stream:
            values.tofile(stream)

    def write_ids(self, split: str, name: str, ids: np.ndarray, num_kept: int) -> None:
        """Append ids, in the dtype of NVIDIA's recipe for a table of `num_kept` values and id 0."""
        self.write(split, name, ids.astype(id_dtype(num_kept + 1)))


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


def main() -> None:
    """Run the job of the command line: SOURCE OUTPUT FREQUENCY_LIMIT criteo_1tb|criteo_kaggle THREADS."""
    source, output, limit, dataset, threads = sys.argv[1:]
    files = sorted(
        glob.glob(source), key=lambda path: [int(n) for n in re.findall(r"\d+", Path(path).name)]
    )
    preprocess(Job(files, Path(output), int(limit), dataset == "criteo_1tb", int(threads)))


if __name__ == "__main__":
    main()
