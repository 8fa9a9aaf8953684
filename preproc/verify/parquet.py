"""Check of the values of a Parquet file, one row group at a time."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from configs.messages import first_line
from dataloading.dataset.feature_spec import CategoricalFeature, FeatureSpec, parquet_columns
from dataloading.dataset.parquet_files import check_columns, open_file
from preproc.report.console import LabelSum
from preproc.verify.binary import mistakes, wrong_ids


def check_values(
    path: Path, spec: FeatureSpec, split: str
) -> tuple[int, dict[str, LabelSum], list[tuple[str, int]]]:
    """Return rows, sums of the labels, and per kind of mistake its description and number."""
    counts: dict[str, int] = {}
    firsts: dict[str, str] = {}
    num_rows = 0
    labels: dict[str, LabelSum] = {}
    try:
        with open_file(path) as file:
            kinds = parquet_columns(spec, spec.splits[split])
            check_columns(path, file.schema_arrow, kinds)
            for group in range(file.num_row_groups):
                table = file.read_row_group(group, columns=list(kinds), use_threads=False)
                for kind, rows, first in _mistakes(table, spec):
                    counts[kind] = counts.get(kind, 0) + len(rows)
                    firsts.setdefault(kind, f"{first} at row {num_rows + int(rows[0]):,}")
                num_rows += len(table)
                for label in spec.labels:
                    if label.name in kinds:
                        found = labels.setdefault(label.name, LabelSum(0, label.is_binary))
                        # In NumPy, since Arrow sums no float16.
                        found.add(table.column(label.name).drop_null().to_numpy())
    except (ValueError, pa.ArrowException, OSError) as error:
        return num_rows, labels, [(first_line(error).removeprefix(f"{path}: "), 1)]
    mistakes = [(f"{n:,} {kind}, the first {firsts[kind]}", n) for kind, n in counts.items()]
    return num_rows, labels, mistakes


def _mistakes(table: pa.Table, spec: FeatureSpec) -> Iterator[tuple[str, np.ndarray, object]]:
    """Yield (kind of mistake, its rows in `table`, the first such value)."""
    single = {c.name: c for c in spec.row_columns if c.name in table.column_names}
    for name in (*single, *spec.numerical):
        column = table.column(name)
        missing = np.flatnonzero(np.asarray(column.is_null()))
        if len(missing):
            yield f"missing values of '{name}'", missing, None
        values = np.asarray(pc.fill_null(column, False if pa.types.is_boolean(column.type) else 0))
        if name in single:
            wrong, kind = single[name].wrong(values), mistakes(spec, single[name])
        else:
            wrong, kind = ~np.isfinite(values), f"numericals of '{name}' that are not finite"
        if wrong.any():
            yield kind, np.flatnonzero(wrong), values[wrong.argmax()]
    for feature in spec.categorical:
        yield from _wrong_ids(table.column(feature.name).combine_chunks(), feature)


def _wrong_ids(
    column: pa.Array, feature: CategoricalFeature
) -> Iterator[tuple[str, np.ndarray, object]]:
    missing = np.flatnonzero(np.asarray(column.is_null()))
    if len(missing):
        yield f"missing values of '{feature.name}'", missing, None
    values, rows = column, np.arange(len(column))
    if feature.hotness != 1:
        lengths = np.asarray(pc.fill_null(pc.list_value_length(column), feature.hotness or 0))
        if feature.hotness is not None and (lengths != feature.hotness).any():
            wrong = np.flatnonzero(lengths != feature.hotness)
            kind = f"rows of '{feature.name}' that have not {feature.hotness} ids"
            yield kind, wrong, lengths[wrong[0]]
        values, rows = pc.list_flatten(column), np.asarray(pc.list_parent_indices(column))
        holes = np.asarray(values.is_null())
        if holes.any():
            yield f"missing ids of '{feature.name}'", rows[holes], None
    ids = np.asarray(pc.fill_null(values, 0))
    outside = feature.wrong(ids)
    if outside.any():
        yield wrong_ids(feature), rows[outside], ids[outside.argmax()]
