"""Check of a vocabulary that was written earlier: `vocabulary/FEATURE.parquet` with `value`, `id` and `count`."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from configs.messages import first_line, shown

if TYPE_CHECKING:  # 25 MB of memory that only transforms and verification need
    import pyarrow as pa

BATCH_ROWS = 1 << 17
DAYS_COLUMN = "retired"
"""Column that the vocabularies of later days have (`preproc/table/extension.py`)."""


def has_days(path: Path) -> bool:
    """Tell whether a vocabulary is of a later day than the fit; it must have been checked."""
    from dataloading.dataset.parquet_files import open_file

    with open_file(path) as file:
        return DAYS_COLUMN in file.schema_arrow.names


def check_vocabulary(path: Path, remedy: str) -> int:
    """Read a vocabulary once, in constant memory, and return its rows.

    Raises ValueError: it is truncated, or its rows are not those of ids 1, 2, ... by descending count and, for equal
    counts, ascending value; in a vocabulary of a later day, within the ids that each day gave.
    """
    import pyarrow as pa

    from dataloading.dataset.parquet_files import open_file

    num_rows = 0
    last: pa.RecordBatch | None = None
    with open_file(path) as file:
        _check_columns(path, file.schema_arrow, remedy)
        columns = ["value", "id", "count"]
        if DAYS_COLUMN in file.schema_arrow.names:
            columns = ["value", "id", "first_count", "day"]
        try:
            for batch in file.iter_batches(BATCH_ROWS, columns=columns):
                wrong = _mistake(batch, last, num_rows)
                if wrong:
                    raise ValueError(f"{path}: {wrong}; {remedy}")
                num_rows += len(batch)
                last = batch.slice(len(batch) - 1) if len(batch) else last
        except (pa.ArrowException, OSError) as error:
            reason = shown(first_line(error))
            raise ValueError(f"{path}: not a complete Parquet file ({reason}); {remedy}") from None
    return num_rows


def _check_columns(path: Path, schema: "pa.Schema", remedy: str) -> None:
    import pyarrow as pa

    integer = pa.types.is_integer
    kinds = {"value": pa.types.is_string, "id": integer, "count": integer}
    if DAYS_COLUMN in schema.names:
        later = dict.fromkeys(("day", "first_count", "today", "last_day"), integer)
        kinds |= {**later, DAYS_COLUMN: pa.types.is_boolean}
    for name, is_kind in kinds.items():
        if schema.names.count(name) != 1 or not is_kind(schema.field(name).type):
            raise ValueError(
                f"{path}: columns {shown(dict(zip(schema.names, map(str, schema.types), strict=True)))}, want value, id "
                f"and count; {remedy}"
            )


def _mistake(batch: "pa.RecordBatch", last: "pa.RecordBatch | None", first_row: int) -> str | None:
    """Return the first mistake in a batch whose rows begin at `first_row`, after the row `last`."""
    import pyarrow as pa
    import pyarrow.compute as pc

    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        # An id whose value was forgotten has none any more.
        if column.null_count and name != "value":
            return f"row {first_row + int(np.asarray(column.is_null()).argmax()):,} has no value"
    if last is not None:
        batch = pa.concat_batches([last, batch])
        first_row -= 1
    ids = np.asarray(batch.column("id")).astype(np.int64)
    wanted = np.arange(first_row + 1, first_row + len(ids) + 1)
    if (ids != wanted).any():
        at = int((ids != wanted).argmax())
        return f"id {ids[at]} in row {first_row + at:,}, want {wanted[at]}"
    counts, values = np.asarray(batch.column(2)).astype(np.int64), batch.column("value")
    rises = np.asarray(pc.fill_null(pc.greater(values[1:], values[:-1]), True))
    follows = (counts[1:] < counts[:-1]) | ((counts[1:] == counts[:-1]) & rises)
    if batch.num_columns > 3:
        days = np.asarray(batch.column("day")).astype(np.int64)
        follows = (days[1:] > days[:-1]) | ((days[1:] == days[:-1]) & follows)
    if not follows.all():
        at = int((~follows).argmax())
        return (
            f"id {ids[at]} is {shown(values[at].as_py())} with count {counts[at]:,}, and id {ids[at + 1]} is "
            f"{shown(values[at + 1].as_py())} with count {counts[at + 1]:,}; want ids by descending count and ascending "
            "value, so ids were exchanged"
        )
    return None
