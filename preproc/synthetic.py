"""The built-in click stream as a dataset directory. It needs numpy only."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from configs.preproc_schema import PreprocConfig
from dataloading.dataset.dataset_directory import write_dataset
from dataloading.dataset.source import Columns
from dataloading.synthetic import SyntheticSource
from preproc.ordered_map import ordered_map
from preproc.report.console import LabelSum, Progress, SplitSummary, print_result, print_splits

# Rows per thread and chunk: about 10 MB for 26 tables.
CHUNK_ROWS = 1 << 16
MOMENT = 1_700_000_000


def build_synthetic(config: PreprocConfig, progress: Progress) -> None:
    """Write the stream of `config.data.synthetic`, the rows that training on it reads, and print its summary."""
    assert config.output is not None
    output, stream = Path(config.output), config.data.synthetic
    source = SyntheticSource.of(stream, config.seed)
    threads = config.threads or os.cpu_count() or 1
    summaries = {}
    with write_dataset(
        output,
        categorical=source.spec.categorical,
        numerical=source.spec.numerical,
        label=source.spec.labels,
        numerical_dtype=config.numerical_dtype.name,
        metadata={"synthetic": {"exponent": stream.exponent, "seed": config.seed}},
        overwrite=config.overwrite,
        sequences=source.spec.sequences,
    ) as dataset:
        for split in source.spec.splits:
            labels = LabelSum()
            name = source.spec.labels[0].name
            summary = summaries[split] = SplitSummary(source.num_rows(split), {name: labels})
            starts = range(0, summary.rows, CHUNK_ROWS)
            chunks = [
                np.array([[start, min(start + CHUNK_ROWS, summary.rows)]]) for start in starts
            ]
            read = partial(source.read, split)
            with progress.phase(f"make and write {split}: {summary.rows:,} rows"):
                for columns in ordered_map(read, chunks, threads, ahead=2 * threads):
                    dataset[split].append(
                        numerical=columns.numerical if source.spec.numerical else None,
                        labels=columns.labels,
                        ids={
                            feature.name: ids.reshape(-1, feature.hotness)
                            if feature.hotness
                            else ids
                            for feature, ids in zip(
                                source.spec.categorical, columns.ids, strict=True
                            )
                        },
                        **_events(source, columns),
                    )
                    labels.add(columns.labels)
    print_splits(progress.console, summaries)
    print_result(progress.console, progress, output, sum(s.rows for s in summaries.values()))


def _events(source: SyntheticSource, columns: Columns) -> dict[str, Any]:
    """Return lengths, times and moments of the history, as `SplitWriter.append` takes them; all rows are of one moment."""
    if not source.spec.sequences:
        return {}
    [group], lengths = source.spec.sequences, columns.lengths[-1]
    assert lengths is not None, "its features are the last ones"
    return {
        "lengths": {group.name: lengths},
        "events": {"hist_time": MOMENT - columns.events[0].astype(np.int64)},
        "moments": {group.name: np.full(len(lengths), MOMENT)},
    }
