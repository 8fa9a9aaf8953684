"""Raw Criteo logs to a dataset directory, out of core, in phases that survive the process.

parse: lines become a column store. shuffle: the training rows are permuted, with `shuffle=true`. encode: every column is written
by itself; values of categories are counted and ranked before. At the end the spec is written and the directory renamed to the
output. Completed phases are recorded (`preproc/work_directory.py`), and a killed run resumes after them.
"""

import glob
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import numpy as np

from configs.preproc_schema import OnBad, PreprocConfig, Split, VocabularyRows
from dataloading.dataset.feature_spec import CategoricalFeature
from preproc.column_store import StoredColumn
from preproc.complete_dataset import WrittenColumns, complete_dataset, draw_report
from preproc.criteo.as_table import criteo_table
from preproc.criteo.encode import CHUNK_BYTES, ColumnEncoder, EncodedColumn
from preproc.criteo.parse import ColumnStore, ParsedFiles, parse_files
from preproc.criteo.shuffle import BASE_BYTES, shuffle_training
from preproc.dataset_writer import RecordedFile
from preproc.line_blocks import blocks
from preproc.raw_files import (
    RawFile,
    find_files,
    find_gap,
    fingerprint,
    refuse_copies,
    refuse_shared,
)
from preproc.report.console import (
    ColumnSummary,
    LabelSum,
    Phase,
    Progress,
    RowCounts,
    SplitSummary,
    print_result,
)
from preproc.report.plot import load_library
from preproc.text_columns import TextColumns
from preproc.vocabulary_sql import CATEGORICAL, COLUMNS, LABEL, NUMERICAL
from preproc.work_directory import (
    Work,
    check_disk,
    connect,
    is_small,
    memory_bytes,
    same_disk,
    work_directory,
    work_directory_of,
)

# Memory per column in progress: counts in DuckDB, a chunk and a hash table.
COLUMN_BYTES = 256 << 20
CHUNK_ROWS = 1 << 20
# Rows of labels or numericals that are written at once, few enough for the cache.
PLAIN_ROWS = 1 << 16
NUMERICALS = "numerical"
# Bytes of the ids per row in the dataset of Criteo's terabyte (docs/criteo.md). The actual width is unknown
# until the values are counted.
IDS_BYTES = 63


@dataclass(frozen=True, slots=True)
class _Run:
    config: PreprocConfig
    work: Work
    store: ColumnStore
    parsed: ParsedFiles
    splits: dict[str, range]
    progress: Progress


def build_criteo(config: PreprocConfig, progress: Progress) -> None:
    """Write the dataset that `config` describes and print its summary."""
    assert config.output is not None
    output = Path(config.output).resolve()
    memory = memory_bytes(config)
    files = find_files(config.source, "source")
    test_files = find_files(config.test_source, "test_source") if config.test_source else []
    refuse_shared(files, test_files)
    refuse_copies(files + test_files)
    if config.plot and not is_small(config):
        load_library()
    gap = find_gap(files)
    if gap and config.split is Split.last_file and not test_files:
        raise ValueError(gap)
    if gap:
        progress.warn(gap)
    with work_directory(
        config, output, _identity(config, len(files), len(test_files)), progress
    ) as work:
        store = ColumnStore.below(work.directory, config.numerical_dtype.name)
        if not work.has_progress:
            _check_disks(config, output, store, estimated_rows(files + test_files))
        parsed = parse_files(files + test_files, config, memory - BASE_BYTES, work, store, progress)
        try:
            splits = split_rows(config, parsed.rows[: len(files)], parsed.rows[len(files) :])
        except ValueError:
            work.forget()  # the next run has other options or files, so it cannot resume
            raise
        # Files that only test may train on a later day.
        tests = test_files or (files[-1:] if config.split is Split.last_file else [])
        every = config.vocabulary is VocabularyRows.all
        counted = files + test_files
        read = [fingerprint(file) for file in counted if every or file not in tests]
        _write(_Run(config, work, store, parsed, splits, progress), read)
    print_result(progress, output, sum(parsed.rows))


def _identity(config: PreprocConfig, num_files: int, num_test_files: int) -> dict[str, Any]:
    """Return the options that the dataset depends on, without the files themselves."""
    keys = ["split", "train_fraction", "frequency_limit", "vocabulary", "numerical_dtype"]
    keys += ["shuffle", "on_bad", "seed", "plot"]
    options = {key: getattr(config, key) for key in keys}
    return {key: getattr(value, "name", value) for key, value in options.items()} | {
        "source_files": num_files,
        "test_files": num_test_files,
        "format": 3,
    }


def estimated_rows(files: list[RawFile]) -> float:
    rows = 0.0
    for file in files:
        piece = next(blocks(file, 0), b"")
        length = len(piece) / max(piece.count(b"\n"), 1)
        rows += file.plain_bytes / max(length, 1)
    return rows


def _check_disks(config: PreprocConfig, output: Path, store: ColumnStore, rows: float) -> None:
    """Raise ValueError if there is too little disk space for the work directory or the dataset.

    The column store exists once, and twice during the shuffle. The dataset needs space beside it: labels and
    numericals are written a second time, and ids take no more than the codes that they replace.
    """
    work_parent = work_directory_of(config, output).parent
    work_bytes = rows * store.row_bytes * (2.0 if config.shuffle else 1.0)
    if same_disk(work_parent, output.parent):
        grown_bytes = rows * store.row_bytes * 1.3
        check_disk(work_parent, max(work_bytes, grown_bytes), "the run")
        return
    check_disk(work_parent, work_bytes, "the work directory")
    plain_bytes = store.label.row_bytes + store.numerical.row_bytes
    check_disk(output.parent, rows * (plain_bytes + IDS_BYTES), "the dataset")


def split_rows(
    config: PreprocConfig, source_rows: list[int], test_rows: list[int]
) -> dict[str, range]:
    """Return the rows of each split as a range over all parsed rows; `train` begins at 0. ValueError: one has no rows."""
    num_rows = sum(source_rows)
    if test_rows:
        return {"train": range(num_rows), "test": range(num_rows, num_rows + sum(test_rows))}
    if config.split is not Split.last_file:
        # As a decimal fraction: 0.29 of 100 rows is 29, whereas floating point gives 28.
        num_train = int(num_rows * Fraction(str(config.train_fraction)))
        splits = {"train": range(num_train), "test": range(num_train, num_rows)}
        way = f"train_fraction={config.train_fraction} of {num_rows} rows"
        remedy = "change train_fraction or give more rows"
    else:
        num_train = num_rows - source_rows[-1]
        half = num_train + source_rows[-1] // 2
        splits = {
            "train": range(num_train),
            "test": range(num_train, half),
            "validation": range(half, num_rows),
        }
        way = f"split=last_file over {len(source_rows)} files, the last of {source_rows[-1]} rows,"
        remedy = "give at least two files, or choose split=fraction"
    for name, rows in splits.items():
        if not rows:
            raise ValueError(f"{way} leaves no rows for {name}; {remedy}")
    return splits


def _write(run: _Run, read: list[str]) -> None:
    config, work, store, splits = run.config, run.work, run.store, run.splits
    dataset, num_bad = work.dataset, run.parsed.num_bad
    num_rows = max(rows.stop for rows in splits.values())
    counted = splits["train"] if config.vocabulary is VocabularyRows.train else range(num_rows)
    for name in ("vocabulary", *splits):
        (dataset / name).mkdir(parents=True, exist_ok=True)
    state = _encode(run, counted)
    encoded = {name: EncodedColumn(**state[name]) for name in CATEGORICAL}
    columns = _missing_numericals(store, counted) | {
        name: ColumnSummary(
            1 - column.seen / len(counted),
            column.distinct,
            column.kept,
            column.coverage,
            len(counted),
            table_rows=column.kept + 1,
        )
        for name, column in encoded.items()
    }
    summaries = {
        split: SplitSummary(
            len(rows),
            {LABEL: LabelSum(state[LABEL][split][0])},
            {name: encoded[name].zeros[split] for name in CATEGORICAL},
            emptied=dict(zip(NUMERICAL, state[NUMERICALS][split], strict=True)),
        )
        for split, rows in splits.items()
    }
    if config.on_bad is OnBad.quarantine:
        shutil.copyfile(work.directory / "bad_rows.tsv", dataset / "bad_rows.tsv")
    table = criteo_table(config)
    with run.progress.phase("draw the report"):
        numerical_bin = dataset / "train" / f"{NUMERICALS}.bin"
        draw_report(dataset, numerical_bin, columns, summaries, config, table)
    are_text = {name.lower(): True for name in COLUMNS}
    written = WrittenColumns(
        categorical=[CategoricalFeature.of(name, encoded[name].kept + 1) for name in CATEGORICAL],
        files=work.state["files"],
        columns=columns,
        splits=summaries,
        # The transforms of the numericals have no statistics.
        statistics={name: [[], []] for name in NUMERICAL},
        counted=config.vocabulary.name,
        rows=RowCounts(num_rows + num_bad, num_rows, num_bad),
        source_columns={name: "label" if name == LABEL else "feature" for name in COLUMNS},
        text_columns=TextColumns({name: are_text for name in table.sources}, are_text),
        read=read,
    )
    complete_dataset(written, config, table, work, run.progress)


def _encode(run: _Run, counted: range) -> dict[str, Any]:
    """Shuffle the training rows if `shuffle` is set, and write all columns; return what their writers count."""
    config, work, store, splits = run.config, run.work, run.store, run.splits
    memory = memory_bytes(config)
    threads = config.threads or os.cpu_count() or 1
    # Half of the remaining memory is for DuckDB, half for arrays. DuckDB reports a limit that is too low.
    spare = max(memory - BASE_BYTES, memory // 2)
    with connect(config, work.directory, spare // 2) as connection:
        if config.shuffle:
            _shuffle(run)
        _view_non_hex(connection, run)
        workers = max(1, min(threads, spare // COLUMN_BYTES))
        room = max(spare // 2 // workers - CHUNK_BYTES, 1 << 20)
        encoder = ColumnEncoder(
            connection, work.dataset, splits, counted, config.frequency_limit, room
        )
        plain = {LABEL: store.label, NUMERICALS: store.numerical}
        encoders = {
            name: partial(encoder, number, name, store.codes[name])
            for number, name in enumerate(CATEGORICAL)
        }
        tasks: dict[str, Callable[[], Any]] = {name: encoders[name] for name in CATEGORICAL[:13]}
        # On the disk, where those columns were, and beside others, so that no thread waits for the last.
        tasks |= {name: partial(_write_plain, run, name, plain[name]) for name in plain} | encoders
        state = work.state.setdefault("encoded", {})
        with run.progress.phase("encode categoricals, write labels and numericals") as phase:
            finish_columns(tasks, plain | store.codes, state, "files", work, workers, phase)
    return state


def _shuffle(run: _Run) -> None:
    """Shuffle the training rows; note the old rows for texts without a code."""
    work, store, num_rows = run.work, run.store, len(run.splits["train"])
    columns = list(store.columns)
    if run.parsed.has_non_hex:
        origin = _origin(store)
        if "shuffle" not in work.state:
            with origin.path.open("wb") as stream:
                for start in range(0, num_rows, CHUNK_ROWS):
                    np.arange(start, min(start + CHUNK_ROWS, num_rows)).tofile(stream)
            work.state["checked"] |= work.synced_records(origin.path)
        columns.append(origin)
    shuffle_training(columns, num_rows, run.config, work, run.progress)


def _origin(store: ColumnStore) -> StoredColumn:
    """Return the column with the original row of every shuffled row."""
    return StoredColumn(store.non_hex.with_name("origin.i64"), "<i8")


def _view_non_hex(connection: duckdb.DuckDBPyConnection, run: _Run) -> None:
    """Create the relation `non_hex` (column, row, value): texts without a code, by their current rows."""
    store, shuffled_rows = run.store, len(run.splits["train"]) * run.config.shuffle
    if not run.parsed.has_non_hex:
        connection.execute('CREATE TABLE non_hex ("column" INTEGER, "row" BIGINT, value VARCHAR)')
        return
    files = (glob.escape(str(store.non_hex)) + "/*.parquet").replace("'", "''")
    if not shuffled_rows:
        connection.execute(f"CREATE VIEW non_hex AS FROM read_parquet('{files}')")
        return
    connection.execute(
        f"CREATE TABLE non_hex AS FROM read_parquet('{files}') WHERE \"row\" >= {shuffled_rows}"
    )
    for start, rows in _origin(store).chunks(range(shuffled_rows), CHUNK_ROWS):
        moved = {"origin": rows, "now": np.arange(start, start + len(rows))}  # noqa: F841
        connection.execute(
            'INSERT INTO non_hex SELECT o."column", m.now, o.value '
            f"FROM read_parquet('{files}') AS o JOIN moved AS m ON o.\"row\" = m.origin"
        )


def finish_columns(
    tasks: Mapping[str, Callable[[], tuple[Any, dict[str, Any]]]],
    sources: Mapping[str, StoredColumn],
    state: dict[str, Any],
    records: str,
    work: Work,
    workers: int,
    phase: Phase,
) -> None:
    """Run what `state` lacks, several at a time: record each result with its files in `records`, and remove its source."""
    phase.total = len(tasks)
    with ThreadPoolExecutor(workers) as pool:
        running = {pool.submit(task): name for name, task in tasks.items() if name not in state}
        try:
            for done in as_completed(running):
                name = running[done]
                state[name], files = done.result()
                work.state[records] |= files
                work.state["checked"].pop(sources[name].path.name, None)
                work.save()
                sources[name].path.unlink()
                phase.detail = name
                phase.update(len(state))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _write_plain(
    run: _Run, name: str, column: StoredColumn
) -> tuple[dict[str, list[int]], dict[str, Any]]:
    """Write labels or numericals; return per split the clicks, or the values without a logarithm per column, and the files."""
    bits = np.dtype(f"u{column.dtype.itemsize}")
    # As integers: NumPy computes float16 slowly.
    noted = 1 if name == LABEL else np.array(-0.0, column.dtype).view(bits)
    counts: dict[str, list[int]] = {}
    files: dict[str, Any] = {}
    for split, rows in run.splits.items():
        of_split = np.zeros(column.width, np.int64)
        with RecordedFile(run.work.dataset, f"{split}/{name}.bin") as file:
            for _, values in column.chunks(rows, PLAIN_ROWS):
                stored = values.view(bits).ravel()
                found = np.flatnonzero(stored == noted)
                of_split += np.bincount(found % column.width, minlength=column.width)
                if name != LABEL:
                    stored[found] = 0
                file.append(stored)
        counts[split] = of_split.tolist()
        files |= file.record
    return counts, files


def _missing_numericals(store: ColumnStore, counted: range) -> dict[str, ColumnSummary]:
    """Return the fraction of missing values per numerical in the rows `counted`."""
    # Rows by which of their numericals are missing, of which there are few kinds.
    num_bytes = store.missing.width
    rows_of = np.zeros(1 << 8 * num_bytes, np.int64)
    for _, bits in store.missing.chunks(counted, CHUNK_ROWS):
        rows_of += np.bincount(bits.view(f"<u{num_bytes}").ravel(), minlength=len(rows_of))
    kinds = np.arange(len(rows_of), dtype=f"<u{num_bytes}").view("u1").reshape(-1, num_bytes)
    missing = rows_of @ np.unpackbits(kinds, axis=1, count=len(NUMERICAL))
    return {
        name: ColumnSummary(int(count) / len(counted), rows=len(counted))
        for name, count in zip(NUMERICAL, missing, strict=True)
    }
