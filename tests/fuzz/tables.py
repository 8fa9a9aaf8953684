"""Mutations of Arrow tables, written as Parquet: columns of other types, missing, twice, with nulls, NaN and extremes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

from tests.fuzz.mutations import HOSTILE_TEXTS

TYPES: dict[str, pa.DataType] = {
    "null": pa.null(),
    "bool": pa.bool_(),
    "int8": pa.int8(),
    "int64": pa.int64(),
    "uint64": pa.uint64(),
    "float16": pa.float16(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "decimal": pa.decimal128(30, 5),
    "string": pa.string(),
    "large_string": pa.large_string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "time": pa.time64("us"),
    "timestamp": pa.timestamp("us", "UTC"),
    "duration": pa.duration("s"),
    "list": pa.list_(pa.int64()),
    "large_list": pa.large_list(pa.int32()),
    "fixed_list": pa.list_(pa.int32(), 2),
    "list of lists": pa.list_(pa.list_(pa.int64())),
    "list of text": pa.list_(pa.string()),
    "list of floats": pa.list_(pa.float32()),
    "struct": pa.struct([("a", pa.int64())]),
    "map": pa.map_(pa.string(), pa.int64()),
    "dictionary": pa.dictionary(pa.int8(), pa.string()),
}
ACTIONS = (
    "drop",
    "rename",
    "repeat",
    "retype",
    "null",
    "value",
    "move",
    "empty",
    "no rows",
    "many",
)
VALUES: tuple[Any, ...] = (
    *(0, 1, -1, 2, 2**31, 2**63 - 1, -(2**63), 10**18, 1.5, 1e300, -1e-320),
    *(
        float("nan"),
        float("inf"),
        float("-inf"),
        "",
        "x" * 70_000,
        "\x1b[31m\n",
        "1",
        "NaN",
        b"\xff",
    ),
    *(True, [], [None], [1, -5], [2**40], [float("nan")], {"a": 1}),
)


@dataclass(frozen=True, slots=True)
class TableEdit:
    """One change of a column."""

    column: str
    action: str
    kind: str
    value: Any
    at: float


def table_edits(columns: Sequence[str]) -> st.SearchStrategy[list[TableEdit]]:
    """Return a strategy of changes of a table with these columns."""
    edit = st.builds(
        TableEdit,
        st.sampled_from(list(columns)),
        st.sampled_from(ACTIONS),
        st.sampled_from(sorted(TYPES)),
        st.one_of(st.sampled_from(VALUES), st.sampled_from(HOSTILE_TEXTS)),
        st.floats(0, 1),
    )
    return st.lists(edit, min_size=1, max_size=3)


def apply_table(table: pa.Table, edits: Sequence[TableEdit], path: Path) -> None:
    """Write the changed table to `path`; a change that Arrow cannot express is left out."""
    names, columns = list(table.column_names), list(table.columns)
    num_rows, row_group = table.num_rows, None
    for edit in edits:
        if edit.column not in names:
            continue
        index = names.index(edit.column)
        if edit.action == "drop":
            del names[index], columns[index]
        elif edit.action == "rename":
            names[index] = str(edit.value)[:40].encode("utf-8", "replace").decode()
        elif edit.action == "repeat":
            names.append(names[index])
            columns.append(columns[index])
        elif edit.action == "move":
            names.append(names.pop(index))
            columns.append(columns.pop(index))
        elif edit.action == "no rows":
            num_rows = 0
        elif edit.action == "many":
            row_group = 1 + int(edit.at * 5)
        else:
            columns[index] = _changed(columns[index], edit)
    arrays = [column.slice(0, num_rows) for column in columns]
    try:
        pq.write_table(pa.table(arrays, names=names), path, row_group_size=row_group)
    except (pa.ArrowException, ValueError):
        pq.write_table(table, path)


def _changed(column: pa.ChunkedArray, edit: TableEdit) -> pa.ChunkedArray:
    """Return the column in another type, or with other values; itself if that is impossible."""
    kind = TYPES[edit.kind]
    values = column.to_pylist()
    at = int(edit.at * (len(values) - 1))
    if edit.action == "null":
        values[at] = None
        kind = column.type
    elif edit.action == "value":
        values[at] = edit.value
        kind = column.type
    elif edit.action == "empty":
        values = [None] * len(values)
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
        values = [str(value) for value in values]
    elif "list" in edit.kind and values and not isinstance(values[0], list):
        values = [[value] for value in values]
    for attempt in (
        lambda: pa.array(values, kind),
        lambda: column.cast(kind),
        lambda: pa.array(values),
        lambda: pa.array([edit.value] * len(values)),
        lambda: pa.nulls(len(values), kind),
    ):
        try:
            return pa.chunked_array([attempt()])
        # SystemError: Arrow's own, of a list in which a list is null.
        except (pa.ArrowException, ValueError, TypeError, OverflowError, SystemError):
            continue
    return column
