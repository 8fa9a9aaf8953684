"""Parquet files of a split: their footers, and a check of their columns against the spec."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from configs.messages import first_line, shortened
from dataloading.dataset.documents import check_regular
from dataloading.dataset.split_files import expect


class ColumnKind(Enum):
    """Kinds of columns of a Parquet file; the value describes the types accepted."""

    number = "bool, integers or floats"
    id = "integers"
    ids = "a list of integers"
    numbers = "a list of integers or floats"

    def accepts(self, kind: pa.DataType) -> bool:
        """Return whether a column of Arrow type `kind` can be read as this."""
        if self in (ColumnKind.ids, ColumnKind.numbers):
            if not isinstance(kind, pa.ListType | pa.LargeListType | pa.FixedSizeListType):
                return False
            is_float = self is ColumnKind.numbers and pa.types.is_floating(kind.value_type)
            return is_float or pa.types.is_integer(kind.value_type)
        if self is ColumnKind.id:
            return pa.types.is_integer(kind)
        # Booleans are 0 and 1, as labels and as numericals.
        is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
        return is_number or pa.types.is_boolean(kind)


def open_file(path: Path, metadata: pq.FileMetaData | None = None) -> pq.ParquetFile:
    """Open a Parquet file through a memory map; ValueError unless it is one."""
    with _complete(path):
        check_regular(path)
        # Reading ahead gains nothing with a memory map, and it would start Arrow's threads in reader processes.
        return pq.ParquetFile(path, metadata=metadata, memory_map=True, pre_buffer=False)


@contextmanager
def _complete(path: Path) -> Iterator[None]:
    """Convert what Arrow raises for a damaged footer, such as one whose names are no text."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError, MemoryError, OverflowError) as error:
        raise ValueError(
            f"{path}: not a complete Parquet file ({shortened(first_line(error))}); copy or write it again"
        ) from None


def read_footer(path: Path) -> pq.FileMetaData:
    """Return the footer of a Parquet file; ValueError if it contradicts itself."""
    with open_file(path) as file, _complete(path):
        metadata = file.metadata
        sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    if min(sizes, default=0) < 0 or sum(sizes) != metadata.num_rows:
        raise ValueError(
            f"{path}: its footer has {metadata.num_rows} rows, and its row groups have {sum(sizes)}; copy or write it again"
        )
    return metadata


def read_schema(path: Path) -> pa.Schema:
    """Return the columns of a Parquet file; ValueError unless it is one."""
    with open_file(path) as file, _complete(path):
        return file.schema_arrow


def count_rows(paths: Sequence[Path], columns: Mapping[str, ColumnKind]) -> int:
    """Return the rows of all files.

    Raises ValueError: a file is truncated, lacks a column or has one of another type, or there are no rows.
    """
    num_rows = 0
    for path in paths:
        num_rows += read_footer(path).num_rows
        check_columns(path, read_schema(path), columns)
    expect(num_rows > 0, f"{paths[0].parent}", "no rows", "at least one row per split")
    return num_rows


def check_columns(path: Path | str, schema: pa.Schema, columns: Mapping[str, ColumnKind]) -> None:
    """Raise `ValueError` unless `schema` of the file or table `path` has all of `columns` with the right types."""
    present = Counter(schema.names)
    missing = [name for name in columns if name not in present]
    expect(not missing, str(path), f"no column {', '.join(missing)}", "every feature of the spec")
    twice = [name for name in columns if present[name] > 1]
    expect(not twice, str(path), f"several columns {', '.join(twice)}", "every feature once")
    for name, kind in columns.items():
        got = schema.field(name).type
        expect(kind.accepts(got), f"{path}: column '{name}'", str(got), kind.value)


def mean_hotness(paths: Sequence[Path], name: str) -> float:
    """Return the mean ids per row of a list column, from the footers, outliers included; an empty list counts as one id."""
    num_ids = num_rows = 0
    for path in paths:
        metadata = read_footer(path)
        num_rows += metadata.num_rows
        for group in range(metadata.num_row_groups):
            row_group = metadata.row_group(group)
            num_ids += sum(
                row_group.column(i).num_values
                for i in range(row_group.num_columns)
                if row_group.column(i).path_in_schema.startswith(f"{name}.list.")
            )
    return num_ids / num_rows
