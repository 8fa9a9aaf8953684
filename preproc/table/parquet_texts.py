"""Texts of Parquet files as their dictionaries and indices, which no engine has to decode and number again."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

# A column chunk with more than this per row lists texts outside its dictionary, which Arrow numbers slowly.
MOST_BYTES_PER_ROW = 6


def dictionary_columns(paths: list[Path], columns: Mapping[str, str]) -> dict[str, list[str]]:
    """Return which columns all files hold as dictionaries of text, each with its name in every file.

    `paths`: of the files, in order.
    """
    found: dict[str, list[str]] = {name: [] for name in columns}
    for path in paths:
        with pq.ParquetFile(path) as file:
            schema, metadata = file.schema_arrow, file.metadata
            names = {name.lower(): name for name in schema.names}
            for column, source in columns.items():
                name = names.get(source.lower())
                if column in found and not (name and _is_dictionary(schema, metadata, name)):
                    del found[column]
                elif column in found:
                    found[column].append(str(name))
    return found


def _is_dictionary(schema: pa.Schema, metadata: pq.FileMetaData, name: str) -> bool:
    kind = schema.field(name).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    leaves = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)) or (
        leaves.count(name) != 1  # a field of a struct may have the same path
    ):
        return False
    groups = (metadata.row_group(i) for i in range(metadata.num_row_groups))
    chunks = [group.column(leaves.index(name)) for group in groups]
    rows = sum(chunk.num_values for chunk in chunks)
    num_bytes = sum(chunk.total_uncompressed_size for chunk in chunks)
    return all(chunk.has_dictionary_page for chunk in chunks) and (
        num_bytes <= MOST_BYTES_PER_ROW * rows
    )


class ParquetTexts:
    def __init__(self, paths: list[Path], columns: Mapping[str, list[str]], rows: int) -> None:
        self._batches = self._read(paths, columns, rows)
        self._columns = columns
        self._rest: pa.RecordBatch | None = None

    def _read(
        self, paths: list[Path], columns: Mapping[str, list[str]], rows: int
    ) -> Iterator[pa.RecordBatch]:
        for number, path in enumerate(paths):
            names = [names_of[number] for names_of in columns.values()]
            with pq.ParquetFile(path, read_dictionary=names) as file:
                for batch in file.iter_batches(rows, columns=names, use_threads=False):
                    yield batch.select(names).rename_columns(list(columns))

    def take(self, num_rows: int) -> dict[str, list[pa.DictionaryArray]]:
        """Return the next rows of all columns, each in one array or more, without empty texts being missing.

        Raises pyarrow.ArrowInvalid: text that is not UTF-8.
        """
        taken: dict[str, list[pa.DictionaryArray]] = {name: [] for name in self._columns}
        while num_rows:
            batch = next(self._batches) if self._rest is None else self._rest
            part = batch.slice(0, num_rows)
            self._rest = batch.slice(num_rows) if len(batch) > num_rows else None
            num_rows -= len(part)
            for name, arrays in taken.items():
                array = part.column(name)
                array.dictionary.validate(full=True)
                arrays.append(array)
        return taken
