"""Shared code of the peers: the columns of Criteo's logs, the splits and the output files."""

import glob
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dataloading.dataset.feature_spec import id_dtype

LABEL = "label"
NUMERICAL = [f"num_{i}" for i in range(13)]
CATEGORICAL = [f"cat_{i}" for i in range(26)]
COLUMNS = [LABEL, *NUMERICAL, *CATEGORICAL]


@dataclass(frozen=True, slots=True)
class Job:
    """One job, with the options of `python -m preproc`.

    Attributes:
        files: raw files in order.
        output: directory of the split binary.
        frequency_limit: values that are rarer in the training rows get id 0.
        last_file: the last file is the test and validation split, as in `dataset=criteo_1tb`; else the last tenth of all rows
            is the test split.
        threads: number of threads.
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


def run(preprocess: Callable[[Job], None]) -> None:
    """Run the job of the command line: SOURCE OUTPUT FREQUENCY_LIMIT criteo_1tb|criteo_kaggle THREADS."""
    source, output, limit, dataset, threads = sys.argv[1:]
    files = sorted(
        glob.glob(source), key=lambda path: [int(n) for n in re.findall(r"\d+", Path(path).name)]
    )
    preprocess(Job(files, Path(output), int(limit), dataset == "criteo_1tb", int(threads)))
