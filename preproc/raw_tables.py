"""Raw rows of an Arrow table in memory, transformed by the fit of a dataset as a file of such rows is."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.parquet as pq

from configs.messages import shortened
from configs.table_schema import Source
from dataloading.dataset.feature_spec import FeatureSpec
from preproc.fitted_state import fitted_description, load_fitted
from preproc.transformed_rows import TransformedRows, refuse_histories


@contextmanager
def table_file(rows: pa.Table) -> Iterator[str]:
    """Write a table as Parquet for a moment; an error in the block names no file, but `the table`."""
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
    """The fit of a dataset, whose rows need not exist, applied to tables; ValueError without one, or with histories."""

    def __init__(self, fitted: Path) -> None:
        table = fitted_description(fitted)
        refuse_histories(fitted, table)
        # The given rows take the place of what the sources, or the query over them, gave.
        self._description = replace(table, query="", order_by=[], keep=[])
        state = load_fitted(fitted, table)
        self._state = replace(state, text_columns=state.text_columns.of_rows(ROWS))
        self.spec = FeatureSpec.load_features(fitted)

    def transformed(self, rows: pa.Table) -> pa.Table:
        """Return the features of rows in their order: a column per feature as in a Parquet dataset, and keep rates if given.

        `rows`: a column per column that the fit reads: those of the raw files, or of the query's result. At least one
        row. Raises ValueError: a column is missing or of a type that Parquet lacks, or a row is bad; one line.
        """
        with table_file(rows) as path:
            source = Source(files=[path], format="parquet")
            described = replace(self._description, sources={ROWS: source})
            with TransformedRows(self.spec, described, self._state) as found:
                return pa.Table.from_batches([batch.features for batch in found])
