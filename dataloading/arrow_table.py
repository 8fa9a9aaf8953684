"""Rows of an Arrow table in memory as a source, such as new rows that a trained model scores."""

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from configs.messages import shortened, shown
from dataloading.dataset.binary import BinarySource
from dataloading.dataset.feature_spec import FeatureSpec, parquet_columns
from dataloading.dataset.parquet import joined
from dataloading.dataset.parquet_files import check_columns
from dataloading.dataset.row_groups import Where, decode
from dataloading.dataset.split_files import SplitFiles

SPLIT = "rows"
"""Name of the only split of such a source."""


def features_source(table: pa.Table, spec: FeatureSpec, name: str) -> BinarySource:
    """Return a source of the features of a table, and of its keep rates if the dataset has them.

    Labels and weights are not read: the labels of the source are 0, and it has no weights. Columns that the spec does
    not name are ignored. `table`: a column per feature, as in a Parquet dataset; at least one row. The times of a group
    without a column of moments are ages in seconds. Raises ValueError: a column is missing or of another type, or a value
    is missing, not finite or outside its table.
    """
    moments = {group.name for group in spec.sequences} - {*table.column_names}
    absent = moments.union(label.name for label in spec.labels)
    files = SplitFiles(table.num_rows, absent=frozenset(absent))
    spec = replace(spec, weight=None, teachers=(), splits={SPLIT: files})
    kinds = parquet_columns(spec, files)
    present = table.select([column for column in table.column_names if column in kinds])
    for index, field in enumerate(present.schema):
        # Of lists that are all empty, pandas does not know of what they are.
        kinds_of_list = pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list
        is_list = any(is_kind(field.type) for is_kind in kinds_of_list)
        if is_list and not len(pc.list_flatten(present[index])):
            column = present[index].cast(pa.list_(pa.int64()))
            present = present.set_column(index, field.name, column)
    check_columns(name, present.schema, kinds)
    rows = decode(present, spec, Where(name), absent)
    return BinarySource(spec, {SPLIT: joined(spec, [rows], files)})


def arrow_table(table: Any) -> tuple[pa.Table, Any]:
    """Return rows as an Arrow table, and the function that converts a result to the kind of table that was given."""
    if isinstance(table, pa.Table):
        return table, lambda result: result
    if type(table).__module__.partition(".")[0] != "pandas" or not hasattr(table, "columns"):
        raise ValueError(
            f"got rows of type {type(table).__name__}; want a pandas DataFrame or a pyarrow.Table"
        )
    try:
        rows = pa.Table.from_pandas(table, preserve_index=False)
    except (pa.ArrowException, ArithmeticError, ValueError, TypeError) as error:
        for name, column in table.items():
            if problem := _problem(column):
                raise ValueError(f"the table: column {shown(str(name))} {problem}") from None
        raise ValueError(f"the table: {shortened(' '.join(str(error).split()))}") from None
    return rows, lambda result: result.to_pandas().set_index(table.index)


def _problem(column: Any) -> str | None:
    """Return why Arrow cannot hold a pandas column, and what to do; None if it can."""
    values = column[column.notna()] if column.dtype == object else ()
    kinds = {type(value).__name__ for value in values} or {str(column.dtype)}
    if len(kinds) > 1:
        return f"has values of several types, {', '.join(sorted(kinds))}; want one: convert it, for example by astype(str)"
    if any(kind.startswith("complex") for kind in kinds):
        return "has complex numbers; want real ones, such as .real and .imag of them"
    try:
        pa.array(column, from_pandas=True)
    except (pa.ArrowException, ArithmeticError, ValueError, TypeError) as error:
        reason = shortened(" ".join(str(error).split()))
        return (
            f"of {column.dtype} cannot be read ({reason}); convert it, for example by astype(str)"
        )
    return None
