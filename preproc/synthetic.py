"""The built-in click stream as a dataset directory. It needs numpy only."""

import os
from functools import partial
from pathlib import Path

import numpy as np

from configs.preproc_schema import PreprocConfig
from dataloading.dataset.dataset_directory import write_dataset
from dataloading.synthetic import SyntheticSource
from preproc.ordered_map import ordered_map
from preproc.report.console import LabelSum, Progress, SplitSummary, print_result, print_splits

# Rows per thread and chunk: about 10 MB for 26 tables.
CHUNK_ROWS = 1 << 16


def build_synthetic(config: PreprocConfig, progress: Progress) -> None:
    """Write the stream of `config.data.synthetic` and print its summary.

    Training on the dataset reads the same rows as training on the stream itself, with numericals rounded to
    `numerical_dtype`.
    """
    assert config.output is not None
    output, stream = Path(config.output), config.data.synthetic
    source = SyntheticSource(
        stream.train_rows,
        stream.test_rows,
        stream.num_numerical,
        stream.tables,
        stream.hotness,
        stream.exponent,
        config.seed,
    )
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
            with progress.stage(f"make and write {split}: {summary.rows:,} rows"):
                for columns in ordered_map(read, chunks, threads, ahead=2 * threads):
                    dataset[split].append(
                        numerical=columns.numerical if source.spec.numerical else None,
                        labels=columns.labels,
                        ids={
                            feature.name: ids.reshape(-1, feature.hotness or 1)
                            for feature, ids in zip(
                                source.spec.categorical, columns.ids, strict=True
                            )
                        },
                    )
                    labels.add(columns.labels)
    print_splits(progress.console, summaries)
    print_result(progress.console, progress, output, sum(s.rows for s in summaries.values()))
