"""The built-in click stream as a dataset directory."""

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from configs.preproc_schema import PreprocConfig
from dataloading.dataset.sequences import SequenceGroup
from dataloading.dataset.source import Columns
from dataloading.synthetic import SyntheticSource
from preproc.convert.rows import Chunk, SourceRows
from preproc.convert.writing import write_rows
from preproc.ordered_map import ordered_map
from preproc.report.console import Progress, print_result, print_splits

MOMENT = 1_700_000_000
"""Of all rows."""


def build_synthetic(config: PreprocConfig, progress: Progress) -> None:
    """Write the stream of `config.data.synthetic`, the rows that training on it reads, and print its summary."""
    assert config.output is not None
    output = Path(config.output)
    summaries = write_rows(StreamRows(config), output, config, progress)
    print_splits(progress.console, summaries)
    print_result(progress, output, sum(s.rows for s in summaries.values()))


class StreamRows(SourceRows):
    """Rows of the stream, which several threads make."""

    def __init__(self, config: PreprocConfig) -> None:
        stream = config.data.synthetic
        super().__init__(SyntheticSource(stream, config.seed), "the built-in click stream")
        self.spec = replace(
            self.spec,
            numerical_dtype=np.dtype(config.numerical_dtype.name),
            metadata={"synthetic": {"exponent": stream.exponent, "seed": config.seed}},
        )
        self._threads = config.threads or os.cpu_count() or 1

    def chunks(self, split: str) -> Iterator[Chunk]:
        make = partial(self._chunk, split)
        return ordered_map(make, self._starts(split), self._threads, ahead=2 * self._threads)

    def _read_times(
        self, split: str, runs: np.ndarray, group: SequenceGroup, columns: Columns
    ) -> tuple[np.ndarray, np.ndarray]:
        return MOMENT - columns.events[0].astype(np.int64), np.full(len(columns.labels), MOMENT)
