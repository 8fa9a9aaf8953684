"""Rows of raw files, transformed by the fit of a dataset as they are read, without a dataset of their own.

The SQL and the arrays are those of preprocessing (`preproc/table/staging.py`, `preproc/table/transformation.py`), applied to
`CHUNK_ROWS` rows at a time, so the features are those of `mode=transform`, bit by bit, and memory does not grow with the
files. Labels and weights are not read.
"""

import glob
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import duckdb
import numpy as np
import pyarrow as pa

from configs.messages import shown
from configs.preproc_schema import Layout, Mode, PreprocConfig
from configs.table_schema import Categorical, EventLists, EventLog, SplitRule, TableConfig
from dataloading.dataset.feature_spec import CategoricalFeature, FeatureSpec
from dataloading.dataset.parquet_writer import as_arrow
from preproc.criteo.as_table import columns_of
from preproc.fitted_state import FittedState, described_rows, load_fitted, vocabulary_name
from preproc.table.duckdb_engine import DuckDBEngine, QueryError, checked_order, nulls_first
from preproc.table.expressions import NO_CODE, quoted, text
from preproc.table.feature_values import ids_of_codes
from preproc.table.known_values import note_of_new_values, refuse_other_numbers
from preproc.table.mistakes import bad_row, overflow
from preproc.table.source_files import find_source, read_columns
from preproc.table.staging import Staging
from preproc.table.text_codes import coded_texts, flat_codes
from preproc.table.transformation import (
    NO_VALUE,
    length_columns,
    numerical_columns,
    stored_ids,
    stored_numericals,
)
from preproc.vocabulary_sql import COLUMNS
from preproc.work_directory import is_disk_error

CHUNK_ROWS = 1 << 18
MEMORY_LIMIT = "4GB"
"""Memory of DuckDB; vocabularies beyond it lie on disk while rows are read."""
ROWS, TEXTS = "rows_", "texts_"
"""Relations of the rows of a chunk, and of the texts of a feature in them."""
OF_LOG = re.compile(r"c0|(time|past|event)\d+_.*")
"""Staged columns that tell the events of a log: the first feature's values, times, filters and numbers."""


class RowBatch(NamedTuple):
    # as in a Parquet dataset: numericals, ids or lists of ids, and the keep rate if the files have it; of a log those of OF_LOG
    features: pa.RecordBatch
    kept: pa.RecordBatch  # raw columns as they stand, in the order in which they were named


def check_sources(fitted: Path, source: Path) -> None:
    """Raise ValueError if a file of raw rows is missing, or the fit in `fitted` cannot transform rows as they are read."""
    table = described_rows(fitted, [str(source)])
    refuse_histories(fitted, table)
    for name, of in table.sources.items():
        find_source(name, of)


def open_transformed_rows(
    fitted: Path,
    sources: Sequence[Path],
    keep: Sequence[str] = (),
    event_weights: Mapping[str, str] | None = None,
) -> "TransformedRows":
    """Open raw files whose rows are transformed by the fit in the dataset directory `fitted`.

    `fitted`: a dataset with its fit; the files of its rows need not exist. `event_weights`: of the model, whose weights must
    not be negative. Raises ValueError: there is no fit, its features have histories, or the files lack the column of a
    feature or of `keep`; one line.
    """
    table = described_rows(fitted, [str(source) for source in sources])
    refuse_histories(fitted, table)
    state = load_fitted(fitted)
    spec = FeatureSpec.load_features(fitted).with_event_weights(event_weights or {})
    return TransformedRows(spec, replace(table, keep=list(keep)), state)


def refuse_histories(fitted: Path, table: TableConfig) -> None:
    for past in [*table.history, *table.sequence]:
        what = f"the history {shown(past.name)} of a row takes all rows before it"
        how = "mode=transform, and use that"
        if isinstance(past, EventLists) and not past.time:
            continue
        if isinstance(past, EventLists):
            what = f"the lists of {shown(past.name)} are written in slices"
        elif isinstance(past, EventLog):
            what = f"a row sees the events {shown(past.name)} of the days before, too"
            how = (
                f"mode=extend fitted={fitted}, and use its splits (data.path, predict.split; checkpoint.grow=true where it has "
                "new values)"
            )
        raise ValueError(f"{fitted}: {what}; make a dataset of the new rows with {how}")


class TransformedRows(AbstractContextManager["TransformedRows"]):
    """Iterator over the batches of rows, in the order of the files; close it, or use it in a `with` statement."""

    def __init__(self, spec: FeatureSpec, table: TableConfig, state: FittedState) -> None:
        # New rows need no scores of a teacher.
        table = replace(table, teacher=[])
        self.spec = spec  # features of the fitted dataset, without splits
        self._state = state
        self._directory = TemporaryDirectory(prefix="transformed-rows-")
        directory = Path(self._directory.name)
        # They check the description.
        options = PreprocConfig(
            mode=Mode.transform,
            fitted=str(spec.root),
            output=str(directory),
            layout=Layout.table,
            table=asdict(table),
            memory_limit=MEMORY_LIMIT,
        )
        self._engine = DuckDBEngine(options, directory, may_skip=False)
        try:
            sources = {}
            for name, source in table.sources.items():
                described, files = find_source(name, source)
                if described.columns == list(COLUMNS):  # of Criteo's logs, which may lack the label
                    described = replace(described, columns=columns_of(files[0]))
                sources[name] = read_columns(described, files)
            # A description of rows alone: nothing is divided, and no label is read.
            rows = replace(table, label=[], weight=None, split=SplitRule())
            self._staging = Staging(
                self._engine, rows, sources, may_lack_labels=True, fitted=state.text_columns
            )
            self._table = self._staging.table
            refuse_other_numbers(self._staging.five, state.five)
            self._staging.refuse_no_text()
            self._staging.refuse_other_rows()
            kept = [f"keep{i}_ AS {quoted(name)}" for i, name in enumerate(table.keep)]
            query = f"SELECT {', '.join(kept) or 'bad_'} FROM ({self._staging.query})"
            self.kept_schema = self._engine.schema(query) if kept else pa.schema([])
            self._cursor = self._engine.cursor()
            self._vocabularies = {
                feature.name: self._load_vocabulary(number, feature.name)
                for number, feature in enumerate(self._table.categorical)
                if not feature.is_hashed and feature.vocabulary_of is None
            }
        except BaseException:
            self.close()
            raise
        self._expressions = numerical_columns(self._table.numerical, state.statistics)
        self._expressions += length_columns(self._table, _num_items)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._engine.close()
        self._directory.cleanup()

    def __iter__(self) -> Iterator[RowBatch]:
        """Yield all rows, once; ValueError names a row that cannot be read or stored, or says that there are none."""
        query = self._staging.rows.with_text_items
        if self._table.query:
            query = f"SELECT * FROM ({query}) ORDER BY {nulls_first(self._staging.order_by)}"
            batches: Iterator[pa.RecordBatch] = self._engine.stream(query, CHUNK_ROWS)
        else:
            query = self._engine.in_source_order(query)
            batches = checked_order(self._engine.stream(query, CHUNK_ROWS))
        first = 0
        try:
            for batch in batches:
                if batch.num_rows:
                    yield self._transformed(batch, first)
                    first += batch.num_rows
        except QueryError as error:
            self._staging.refuse(error)
        if not first:
            raise ValueError("the sources have no rows; give files that have some")

    def _load_vocabulary(self, number: int, name: str) -> str:
        relation = f"vocabulary_{number}"
        path = self._state.directory / vocabulary_name(name)
        try:
            self._cursor.execute(
                f"CREATE TABLE {relation} AS SELECT value, id FROM read_parquet({text(glob.escape(str(path)))})"
                + (" WHERE NOT retired" if self._state.has_days(name) else "")
            )
        except duckdb.OutOfMemoryException:
            raise
        except duckdb.Error as error:
            if is_disk_error(error):
                raise
            raise self._state.unreadable(vocabulary_name(name), error) from None
        repeated = f"SELECT count(value) - count(DISTINCT value) FROM {relation}"
        if self._cursor.execute(repeated).fetchall() != [(0,)]:
            raise self._state.two_ids(name)
        return relation

    def _transformed(self, batch: pa.RecordBatch, first: int) -> RowBatch:
        """Return a batch of staged rows with its features; `first` is its first row among all."""
        number_of_rows = as_arrow(np.arange(batch.num_rows))
        rows = pa.Table.from_batches([batch]).append_column("row_", number_of_rows)
        bad = batch.column("bad_")
        if bad.null_count < len(bad):
            row = int(np.asarray(bad.is_valid()).argmax())
            where, reason = self._where(batch, first, row), bad[row].as_py()
            raise bad_row(where, reason, self._table, is_fit=False, may_skip=False)
        self._cursor.register(ROWS, rows)
        columns: dict[str, pa.Array] = {}
        if self.spec.keep_rate is not None and "keep_rate_" in self._table.row_numbers:
            columns[self.spec.keep_rate.name] = batch.column("keep_rate_")
        columns |= self._numericals(batch, first)
        categorical = zip(self._table.categorical, self.spec.categorical, strict=True)
        for number, (feature, stored) in enumerate(categorical):
            values = batch.column(f"c{number}")
            columns[stored.name] = self._ids(values, feature, stored, is_first=not first)
        self._cursor.unregister(ROWS)
        for number, group in enumerate(self._table.event_lists):
            lists = {name: columns[name] for name in group.lists}
            for j, name in enumerate(group.number_names):
                lists[name] = batch.column(f"numbers{number}_{j}_")
            columns |= {name: _last(values, group.length) for name, values in lists.items()}
        self._check_weights(columns, partial(self._where, batch, first))
        if self._table.logs:
            staged = filter(OF_LOG.fullmatch, batch.schema.names)
            # No feature has a slash in its name.
            columns |= {f"/{name}": batch.column(name) for name in staged}
        kept = [batch.column(f"keep{i}_") for i in range(len(self._table.keep))]
        return RowBatch(
            pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns)),
            pa.RecordBatch.from_arrays(kept, schema=self.kept_schema),
        )

    def _check_weights(self, columns: Mapping[str, pa.Array], where: Callable[[int], str]) -> None:
        """Raise ValueError for a negative weight, since here the file of its row is known."""
        for group in self.spec.sequences:
            for number in group.numbers:
                if number.name == group.weight:
                    lists = columns[number.name]
                    values, lengths = np.asarray(lists.flatten()), np.asarray(lists.value_lengths())
                    group.checked(number, values, lengths, None, where)

    def _numericals(self, batch: pa.RecordBatch, first: int) -> dict[str, pa.Array]:
        features = self._table.numerical
        if not self._expressions:
            return {}
        query = f"SELECT {', '.join(self._expressions)} FROM {ROWS} ORDER BY row_"
        single = [np.asarray(c) for c in self._cursor.execute(query).fetchnumpy().values()]
        dtype = self.spec.numerical_dtype.name
        stored = stored_numericals(single, dtype)
        if not np.isfinite(stored).all():
            row, number = np.argwhere(~np.isfinite(stored))[0].tolist()
            raw = batch.column(f"n{number}")[row].as_py()
            where = self._where(batch, first, row)
            raise overflow(where, features[number], raw, float(single[number][row]), dtype)
        return {
            name: as_arrow(np.ascontiguousarray(stored[:, number]))
            for number, name in enumerate(self.spec.numerical)
        }

    def _ids(
        self, values: pa.Array, feature: Categorical, stored: CategoricalFeature, *, is_first: bool
    ) -> pa.Array:
        """Return the ids of a feature, or lists of them; of the first rows, refuse values that are written in another way."""
        owners = {other.name: other for other in self._table.categorical}
        owner = owners[feature.vocabulary_of or feature.name]
        known = "" if owner.is_hashed else self._vocabularies[owner.name]
        coded = coded_texts(values)
        codes, lengths = flat_codes(coded.column(0))
        counts = np.bincount(codes[codes != NO_CODE], minlength=len(coded.texts))
        texts = {"code": as_arrow(np.arange(len(counts))), "value": coded.texts}
        self._cursor.register(TEXTS, pa.table(texts | {"count": as_arrow(counts)}))
        query = f"SELECT id FROM ({ids_of_codes(TEXTS, known, owner)}) ORDER BY row_"
        of_codes = self._cursor.execute(query).fetchnumpy()["id"]
        if is_first and known and not of_codes.any():
            note_of_new_values(
                lambda query: self._cursor.execute(query).fetchall(),
                f"(SELECT value, count FROM {TEXTS} WHERE count > 0)",
                known,
                feature.name,
            )
        self._cursor.unregister(TEXTS)
        found = np.append(of_codes, NO_VALUE).astype(stored.dtype.newbyteorder("<")).take(codes)
        drops_empty = self._table.drops_empty(feature.name)
        ids, lengths = stored_ids(found, lengths, stored, feature, drops_empty=drops_empty)
        if stored.hotness == 1:
            return as_arrow(ids.reshape(-1))
        if stored.hotness is not None:
            lengths = np.full(len(ids), stored.hotness)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        return pa.ListArray.from_arrays(as_arrow(offsets), as_arrow(ids.reshape(-1)))

    def _where(self, batch: pa.RecordBatch, first: int, row: int) -> str:
        """Return the file of a row of a batch and its number in the file, from 1."""
        if self._table.query:
            return f"row {first + row + 1} in the order of table.order_by"
        (source,) = self._staging.sources.values()
        file = source.files[batch.column("file_")[row].as_py()]
        # Rows of Parquet are counted from 0, those of text from 1.
        return f"{file.path}, row {batch.column('order_')[row].as_py() + file.is_parquet}"


def _last(lists: pa.ListArray, most: int) -> pa.ListArray:
    values, ends = lists.values, np.asarray(lists.offsets)
    starts = np.maximum(ends[:-1], ends[1:] - most)
    # Items in front of a row's are those of no list.
    is_kept = np.zeros(len(values) + 1, np.int32)
    np.add.at(is_kept, starts, 1)
    np.add.at(is_kept, ends[1:], -1)
    kept = values.take(as_arrow(np.flatnonzero(np.cumsum(is_kept[:-1]))))
    offsets = np.concatenate([[0], np.cumsum(ends[1:] - starts)]).astype(np.int32)
    return pa.ListArray.from_arrays(as_arrow(offsets), kept)


def _num_items(column: str, *, whole: bool) -> str:
    if whole:
        column = f"list_filter({column}, lambda item_: CAST(item_ AS STRING) <> '')"
    return f"coalesce(len({column}), 0)"
