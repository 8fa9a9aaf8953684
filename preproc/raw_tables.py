"""Raw rows of an Arrow table in memory, transformed by the fit of a dataset as a file of such rows is."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.parquet as pq

from configs.messages import shortened
from configs.table_schema import Source, TableConfig
from dataloading.dataset.feature_spec import FeatureSpec
from preproc.fitted_state import fitted_description, load_fitted
from preproc.transformed_rows import TransformedRows, refuse_histories

ROWS = "rows"
"""Name of the only source."""
THE_TABLE = "the table"


class RawTables:
    """The fit of a dataset, applied to tables.

    `fitted`: a dataset with its fit; the files of its rows need not exist. Raises ValueError: there is no fit, or its
    features have histories.
    """

    def __init__(self, fitted: Path) -> None:
        table = fitted_description(fitted)
        refuse_histories(fitted, table)
        # The given rows take the place of what the sources, or the query over them, gave.
        self._description = replace(table, query="", order_by=[], keep=[])
        state = load_fitted(fitted, table, _ignore)
        columns = state.text_columns
        self._state = replace(state, text_columns=columns and columns.of_rows(ROWS))
        self.spec = FeatureSpec.load_features(fitted)

    def transformed(self, rows: pa.Table) -> pa.Table:
        """Return the features of rows in their order: a column per feature as in a Parquet dataset, and keep rates if given.

        `rows`: a column per column that the fit reads: those of the raw files, or of the query's result. At least one
        row. Raises ValueError: a column is missing or of a type that Parquet lacks, or a row is bad; one line.
        """
        with TemporaryDirectory(prefix="raw-table-") as directory:
            path = Path(directory) / f"{ROWS}.parquet"
            try:
                pq.write_table(rows, path)
            except pa.ArrowException as error:
                reason = shortened(" ".join(str(error).split()))
                raise ValueError(f"{THE_TABLE}: {reason}; convert its columns") from None
            try:
                with TransformedRows(self.spec, self._of(path), self._state) as found:
                    return pa.Table.from_batches([batch.features for batch in found])
            except ValueError as error:
                raise ValueError(str(error).replace(str(path), THE_TABLE)) from None

    def _of(self, path: Path) -> TableConfig:
        return replace(
            self._description, sources={ROWS: Source(files=[str(path)], format="parquet")}
        )


def _ignore(text: str) -> None:
    """A fit without checksums is used as it is."""
