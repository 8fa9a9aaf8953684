"""Raw days of Criteo 1TB to the one-hot dataset of MLPerf's DLRM-DCNv2, in phases that survive the process.

parse: lines become a column store of integers and codes. number: integers become logarithms, codes ids of capped
tables (`preproc/criteo/mlperf_columns.py`). shuffle: the training rows are permuted, with `shuffle=true`. write: the
splits. Training expands the ids to several (`data=criteo_mlperf`).
"""

import os
from collections.abc import Callable
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from configs.preproc_schema import PreprocConfig
from dataloading.dataset.feature_spec import CategoricalFeature, FeatureSpec
from dataloading.dataset.row_columns import RowColumn
from dataloading.dataset.split_files import SplitFiles
from preproc.column_store import StoredColumn
from preproc.criteo.mlperf_columns import codes_of_texts, log_days, number_column
from preproc.criteo.parse import ColumnStore, parse_files
from preproc.criteo.pipeline import CHUNK_ROWS, estimated_rows, finish_columns
from preproc.criteo.shuffle import BASE_BYTES, shuffle_training
from preproc.dataset_writer import RecordedFile, finish_dataset
from preproc.raw_files import find_files, find_gap, refuse_copies
from preproc.report.console import (
    LabelSum,
    Progress,
    RowCounts,
    SplitSummary,
    print_result,
    print_rows,
    print_splits,
)
from preproc.vocabulary_sql import CATEGORICAL, NUMERICAL
from preproc.work_directory import Work, check_disk, memory_bytes, work_directory

NUMBERING_BYTES = 48
"""Memory per distinct value of a column while it is numbered: the hash table, and its copy while it grows."""
MOST_VALUES = 1 << 28
"""More values than any column of the logs has."""


def build_mlperf(config: PreprocConfig, progress: Progress) -> None:
    assert config.output is not None
    output = Path(config.output).resolve()
    files = find_files(config.source, "source")
    refuse_copies(files)
    gap = find_gap(files)
    if gap or len(files) < 2:
        raise ValueError(
            gap or f"source names one file, {files[0].path}; want all days, the last one to test on"
        )
    # Options that the dataset depends on.
    identity = {
        "layout": config.layout.name,
        "table_rows": config.table_rows,
        "on_bad": config.on_bad.name,
        "shuffle": config.shuffle,
        "seed": config.seed,
        "source_files": len(files),
        "format": 1,
    }
    with work_directory(config, output, identity, progress) as work:
        store = ColumnStore.below(work.directory, "int32")
        if not work.has_progress:
            rows_expected = estimated_rows(files)
            check_disk(work.directory.parent, 2 * rows_expected * store.row_bytes, "the run")
        memory = memory_bytes(config) - BASE_BYTES
        parsed = parse_files(files, config, memory, work, store, progress)
        ends = [0, *accumulate(parsed.rows)]
        days = [range(start, stop) for start, stop in pairwise(ends)]
        columns = _numbered(config, work, store, days, progress)
        if config.shuffle:
            shuffle_training(list(columns.values()), days[-1].start, config, work, progress)
        half = days[-1].start + (len(days[-1]) + 1) // 2
        splits = {
            "train": range(days[-1].start),
            "test": range(days[-1].start, half),
            "validation": range(half, days[-1].stop),
        }
        _write(config, work, columns, splits, progress)
    num_rows, num_bad = sum(parsed.rows), parsed.num_bad
    print_rows(progress.console, RowCounts(num_rows + num_bad, num_rows, num_bad), [])
    print_result(progress, output, num_rows)


def _numbered(
    config: PreprocConfig, work: Work, store: ColumnStore, days: list[range], progress: Progress
) -> dict[str, StoredColumn]:
    """Write logarithms and ids, several columns at a time; return the columns of the dataset by the stem of their file."""
    width, num_rows = len(NUMERICAL), days[-1].stop
    logs = StoredColumn(work.directory / "numerical.f32", "<f4", width)
    ids = {name: StoredColumn(work.directory / f"{name}.i32", "<i4") for name in CATEGORICAL}
    assert config.table_rows is not None
    state = work.state.setdefault("numbered", {})

    def log() -> tuple[int, dict[str, Any]]:
        log_days(store.numerical, logs, days)
        return 0, work.synced_records(logs.path)

    def number(index: int, name: str, table_rows: int) -> tuple[int, dict[str, Any]]:
        texts = codes_of_texts(store.non_hex, index)
        distinct = number_column(
            store.codes[name], ids[name], table_rows, days[-1].start, num_rows, texts
        )
        return distinct, work.synced_records(ids[name].path)

    tasks: dict[str, Callable[[], tuple[int, dict[str, Any]]]] = {"numerical": log} | {
        name: partial(number, index, name, rows)
        for index, (name, rows) in enumerate(zip(CATEGORICAL, config.table_rows, strict=True))
    }
    per_column = NUMBERING_BYTES * min(num_rows, MOST_VALUES) + (64 << 20)
    threads = config.threads or os.cpu_count() or 1
    workers = max(1, min(threads, (memory_bytes(config) - BASE_BYTES) // per_column))
    sources = {"numerical": store.numerical, **store.codes}
    with progress.phase("number the values") as phase:
        finish_columns(tasks, sources, state, "checked", work, workers, phase)
    return {"label": store.label, "numerical": logs, **ids}


def _write(
    config: PreprocConfig,
    work: Work,
    columns: dict[str, StoredColumn],
    splits: dict[str, range],
    progress: Progress,
) -> None:
    """Write the splits, in the dtypes of the dataset, then its spec; rename it to the output."""
    assert config.table_rows is not None
    features = [
        CategoricalFeature.of(name, rows)
        for name, rows in zip(CATEGORICAL, config.table_rows, strict=True)
    ]
    dtypes = {feature.name: feature.dtype.newbyteorder("<") for feature in features}
    clicks: dict[str, int] = work.state.setdefault("clicks", {})
    done = work.state.setdefault("written", [])
    with progress.phase("write the splits") as phase:
        phase.total = len(columns)
        for name, column in columns.items():
            if name in done:
                continue
            for split, rows in splits.items():
                total = 0
                with RecordedFile(work.dataset, f"{split}/{name}.bin") as file:
                    for _, values in column.chunks(rows, CHUNK_ROWS):
                        file.append(values.astype(dtypes.get(name, column.dtype), copy=False))
                        total += int(np.count_nonzero(values)) if name == "label" else 0
                if name == "label":
                    clicks[split] = total
                work.state["files"] |= file.record
            done.append(name)
            work.state["checked"].pop(column.path.name, None)
            work.save()
            column.path.unlink()
            phase.update(len(done))
    spec = FeatureSpec(
        work.dataset,
        tuple(NUMERICAL),
        np.dtype(np.float32),
        (RowColumn("label"),),
        tuple(features),
        {split: SplitFiles(len(rows)) for split, rows in splits.items()},
        {"procedure": "mlperf"} | ({"shuffle_seed": config.seed} if config.shuffle else {}),
    )
    assert config.output is not None
    output = Path(config.output).resolve()
    finish_dataset(spec, work.state["files"], output, partial(work.record_complete, config))
    summaries = {
        split: SplitSummary(len(rows), {"label": LabelSum(clicks[split])})
        for split, rows in splits.items()
    }
    print_splits(progress.console, summaries)
