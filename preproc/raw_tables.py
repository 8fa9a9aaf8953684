"""Raw rows of an Arrow table in memory, transformed by the fit of a dataset as a file of such rows is."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from configs.messages import shortened, shown
from configs.table_schema import EventLog, Source, TableConfig
from dataloading.dataset.feature_spec import CategoricalFeature, FeatureSpec
from dataloading.dataset.sequences import seen_events
from preproc.fitted_state import load_fitted
from preproc.transformed_rows import TransformedRows, refuse_histories


@contextmanager
def table_file(rows: pa.Table) -> Iterator[str]:
    """Write a table as Parquet for a moment; an error in the block names no file, but `the table`."""
    for field in rows.schema:
        if pa.types.is_duration(field.type) or "period" in str(field.type):
            raise ValueError(
                f"the table: column {shown(field.name)} is {field.type}, a number whose unit a file does not keep; want "
                "numbers or text, as of .dt.total_seconds() or astype(str)"
            )
    with TemporaryDirectory(prefix="table-") as directory:
        path = str(Path(directory) / "table.parquet")
        try:
            pq.write_table(rows, path)
        except pa.ArrowException as error:
            reason = shortened(" ".join(str(error).split()))
            raise ValueError(f"the table: {reason}; convert its columns") from None
        try:
            yield path
        except ValueError as error:
            raise ValueError(str(error).replace(path, "the table")) from None


ROWS = "rows"
"""Name of the only source."""


class RawTables:
    """The fit of a dataset, whose rows need not exist, applied to tables; ValueError without one, or with histories.

    The events of a log `seen` are columns `seen_<column>` of lists, with the columns that its SQL and its features read.
    """

    def __init__(self, fitted: Path) -> None:
        state = load_fitted(fitted)
        table = state.table
        self._logs = [log for log in table.logs if not log.source]
        self._lists = [group for group in table.event_lists if not group.time]
        others = [group for group in table.sequence if group not in (*self._logs, *self._lists)]
        refuse_histories(fitted, replace(table, sequence=others))
        # The given rows take the place of what the sources, or the query over them, gave.
        self._description = replace(table, query="", order_by=[], keep=[])
        self._state = replace(state, text_columns=state.text_columns.of_rows(ROWS))
        self.spec = FeatureSpec.load_features(fitted)

    def transformed(self, rows: pa.Table) -> pa.Table:
        """Return the features of rows in their order: a column per feature as in a Parquet dataset, and keep rates if given.

        `rows`: a column per column that the fit reads: those of the raw files, or of the query's result. At least one
        row. Raises ValueError: a column is missing or of a type that Parquet lacks, or a row is bad; one line.
        """
        # Of a log, rows themselves have a moment alone.
        described = replace(
            self._description,
            sequence=[
                *(replace(log, by="1", filter="", numbers=[]) for log in self._logs),
                *self._lists,
            ],
        )
        of_events = {name for log in self._logs for name in log.features}
        own = [feature for feature in self.spec.categorical if feature.name not in of_events]
        lists = [_lists(rows, log) for log in self._logs]
        names = [name for of_log in lists for name in of_log]
        found = self._features(described, own, rows.drop_columns(names))
        for number, (log, of_log) in enumerate(zip(self._logs, lists, strict=True)):
            moments = found[f"/time{number}_"].combine_chunks()
            for name, column in self._events(log, of_log, moments).items():
                found = found.append_column(name, column)
        return found

    def _features(
        self, described: TableConfig, features: Sequence[CategoricalFeature], rows: pa.Table
    ) -> pa.Table:
        spec = replace(self.spec, categorical=tuple(features), sequences=())
        with table_file(rows) as path:
            source = Source(files=[path], format="parquet")
            described = replace(described, sources={ROWS: source})
            with TransformedRows(spec, described, self._state) as found:
                return pa.Table.from_batches([batch.features for batch in found])

    def _events(
        self, log: EventLog, lists: dict[str, pa.ListArray], moments: pa.Array
    ) -> dict[str, pa.Array]:
        """Return the columns of the group of a log: of the events in `lists`, those that rows see."""
        lengths = [np.asarray(pc.fill_null(column.value_lengths(), 0)) for column in lists.values()]
        for name, own in zip(lists, lengths, strict=True):
            if (own != lengths[0]).any():
                row = int((own != lengths[0]).argmax())
                raise ValueError(
                    f"column {shown(name)}: {own[row]} events at row {row} of the table, and {shown(next(iter(lists)))} has "
                    f"{lengths[0][row]}; want equally many in all columns of {shown(log.name)}"
                )
        row_of = np.repeat(np.arange(len(moments)), lengths[0])
        flat = {n.removeprefix(f"{log.name}_"): column.flatten() for n, column in lists.items()}
        if not len(row_of):  # the engine wants a row: an event without a time is none
            row_of, flat = np.zeros(1, int), {n: pa.nulls(1, v.type) for n, v in flat.items()}
        by_name = {feature.name: feature for feature in self._description.categorical}
        features = [by_name[name] for name in log.of]
        owners = {feature.vocabulary_of or feature.name for feature in features} - {*log.of}
        features += [
            replace(by_name[name], expression="CAST(NULL AS STRING)", cross=[]) for name in owners
        ]
        described = replace(
            self._description,
            numerical=[],
            keep_rate=None,
            categorical=features,
            sequence=[replace(log, by="1")],
        )
        stored = {feature.name: feature for feature in self.spec.categorical}
        try:
            made = self._features(described, [stored[f.name] for f in features], pa.table(flat))
        except ValueError as error:
            raise ValueError(
                f"events of {shown(log.name)}, counted over all rows: {error}"
            ) from None
        is_event = pc.and_(made["/time0_"].is_valid(), made["/c0"].is_valid())
        if log.filter:
            is_event = pc.and_(is_event, pc.fill_null(made["/past0_"], False))
        made, row_of = made.filter(is_event), row_of[np.asarray(is_event)]
        ends = np.where(moments.is_valid(), moments.fill_null(0), np.iinfo(np.int64).min)
        seen, counts = seen_events(row_of, np.asarray(made["/time0_"]), ends, log.length)
        offsets = pa.array(np.concatenate([[0], np.cumsum(counts)]), pa.int32())
        columns = [*log.of, *(f"/event0_{j}_" for j in range(len(log.numbers))), "/time0_"]
        return {log.name: moments.fill_null(0)} | {
            name: pa.ListArray.from_arrays(offsets, made[column].combine_chunks().take(seen))
            for name, column in zip([*log.features, *log.number_names], columns, strict=True)
        }


def _lists(rows: pa.Table, log: EventLog) -> dict[str, pa.ListArray]:
    """Return the columns of the events of a log; ValueError if there are none."""
    found = {
        name: column.combine_chunks()
        for name, column in zip(rows.column_names, rows.columns, strict=True)
        if name.startswith(f"{log.name}_") and pa.types.is_list(column.type)
    }
    if not found:
        raise ValueError(
            f"the table has no events of {shown(log.name)}; want columns of lists such as {log.name}_{log.of[0]}, with "
            "those that events have in the log"
        )
    return found
