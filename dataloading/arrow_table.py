"""Rows of an Arrow table in memory as a source, such as new rows that a trained model scores."""

from dataclasses import replace

import pyarrow as pa

from dataloading.dataset.binary import BinarySource
from dataloading.dataset.feature_spec import FeatureSpec, parquet_columns
from dataloading.dataset.parquet import joined
from dataloading.dataset.parquet_files import check_columns
from dataloading.dataset.row_groups import Place, decode
from dataloading.dataset.split_files import SplitFiles

SPLIT = "rows"
"""Name of the only split of such a source."""


def features_source(table: pa.Table, spec: FeatureSpec, name: str) -> BinarySource:
    """Return a source of the features of a table, and of its keep rates if the dataset has them.

    Labels and weights are not read: the labels of the source are 0, and it has no weights. Columns that the spec does
    not name are ignored. `table`: a column per feature, as in a Parquet dataset; at least one row. Raises ValueError: a
    column is missing or of another type, or a value is missing, not finite or outside its table.
    """
    labels = frozenset(label.name for label in spec.labels)
    files = SplitFiles(table.num_rows, absent=labels)
    spec = replace(spec, weight=None, splits={SPLIT: files})
    kinds = parquet_columns(spec, files)
    present = table.select([column for column in table.column_names if column in kinds])
    check_columns(name, present.schema, kinds)
    rows = decode(present, spec, Place(name), labels)
    return BinarySource(spec, {SPLIT: joined(spec, [rows], files)})
