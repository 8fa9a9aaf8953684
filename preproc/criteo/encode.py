"""Encoding of categorical columns: count the values, rank them, write the ids; several columns at a time.

A `Counter` counts the values. Each time it is full, and at the end, its counts go to DuckDB. DuckDB merges and ranks them with
the SQL of `preproc/vocabulary_sql.py`, and spills when memory runs out. A `Lookup` of the vocabulary then maps values to ids. A
vocabulary that does not fit in memory is split into parts, with one pass over the column per part.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import duckdb
import numpy as np

from dataloading.dataset.durable_files import sync_directory, sync_file
from dataloading.dataset.feature_spec import CategoricalFeature
from preproc.column_store import StoredColumn
from preproc.criteo.hash_table import ENTRY_BYTES, GROWING_ENTRY_BYTES, Counter, Lookup
from preproc.criteo.tokenizer import NON_HEX
from preproc.dataset_writer import RecordedFile, checksum
from preproc.report.console import COVERAGE_LIMITS
from preproc.vocabulary_sql import coverage, merge_counts, vocabulary

# Few enough rows that codes and ids stay in the cache between reading, looking up and writing.
CHUNK_ROWS = 1 << 17
# Entries of a vocabulary that are added to a hash table at a time.
PART_ENTRIES = 1 << 18
# Arrays of a chunk: codes, ids, and ids from earlier parts of the vocabulary.
CHUNK_BYTES = CHUNK_ROWS * 12
# Partial counts are merged once a column has more than this many, and four times those of the last merge.
MERGE_ROWS = 1 << 25


@dataclass(frozen=True, slots=True)
class EncodedColumn:
    seen: int  # counted rows that have a value
    distinct: int  # values among them
    kept: int  # values with an id
    # per frequency limit of `COVERAGE_LIMITS`, the values seen at least that often and their rows
    coverage: list[list[int]]
    zeros: dict[str, int]  # number of ids that are 0, per split


@dataclass(frozen=True, slots=True)
class ColumnEncoder:
    """Encodes columns into the partial dataset; several threads may call it."""

    connection: duckdb.DuckDBPyConnection
    dataset: Path
    splits: dict[str, range]
    counted: range
    frequency_limit: int
    table_bytes: int

    def __call__(
        self, number: int, name: str, column: StoredColumn
    ) -> tuple[dict[str, Any], dict[str, dict]]:
        """Count and encode a column; return the fields of its `EncodedColumn`, and bytes and CRC-32 per written file."""
        with self.connection.cursor() as cursor:
            seen, distinct, kept, covered, has_non_hex = self._build_vocabulary(
                cursor, number, name, column
            )
            feature = CategoricalFeature.of(name, kept + 1)
            files, zeros = self._encode(
                cursor, number, name, column, feature.dtype, has_non_hex, kept
            )
            cursor.execute(f"DROP TABLE IF EXISTS vocabulary_{name}")
        written = f"vocabulary/{name}.parquet"
        files[written] = checksum(self.dataset / written)
        return asdict(EncodedColumn(seen, distinct, kept, covered, zeros)), files

    def _build_vocabulary(
        self, cursor: duckdb.DuckDBPyConnection, number: int, name: str, column: StoredColumn
    ) -> tuple[int, int, int, list[list[int]], bool]:
        counter = Counter(max(1, self.table_bytes // GROWING_ENTRY_BYTES))
        cursor.execute(
            f"CREATE OR REPLACE TEMP TABLE partial_{name} (value UINTEGER, count BIGINT)"
        )
        held = merged = 0

        def keep(parts: Iterator[tuple[np.ndarray, np.ndarray]]) -> None:
            nonlocal held, merged
            for values, counts in parts:
                partial = {"value": values, "count": counts}  # noqa: F841, the query reads it
                cursor.execute(f"INSERT INTO partial_{name} FROM partial")
                held += len(values)
            if held > max(MERGE_ROWS, 4 * merged):
                # Merging leaves one row per value, instead of one per partial count.
                query = merge_counts(f"partial_{name}")
                cursor.execute(f"CREATE TEMP TABLE merged_{name} AS {query}")
                cursor.execute(f"DROP TABLE partial_{name}")
                cursor.execute(f"ALTER TABLE merged_{name} RENAME TO partial_{name}")
                ((held,),) = cursor.execute(f"SELECT count(*) FROM partial_{name}").fetchall()
                merged = held

        for _, codes in column.chunks(self.counted, CHUNK_ROWS):
            keep(counter.add(codes))
        keep(counter.take())
        has_non_hex = counter.has_non_hex
        # Of an empty column the sums are 0; counting it takes as long as the rest.
        counts = f"partial_{name}"
        sums = (0,) * (2 + 2 * len(COVERAGE_LIMITS))
        if held or has_non_hex:
            counts, counts_of = f"counts_{name}", merge_counts(counts)
            if has_non_hex:
                first, last = self.counted.start, self.counted.stop
                counts_of = merge_counts(
                    f"(SELECT printf('%08x', value) AS value, count FROM partial_{name} UNION ALL "
                    f'SELECT value, 1 AS count FROM non_hex WHERE "column" = {number} '
                    f'AND "row" >= {first} AND "row" < {last})'
                )
            cursor.execute(f"CREATE OR REPLACE TEMP TABLE {counts} AS {counts_of}")
            cursor.execute(f"DROP TABLE partial_{name}")
            (sums,) = cursor.execute(coverage(counts, COVERAGE_LIMITS)).fetchall()
        distinct, seen, *covered = [int(number or 0) for number in sums]
        cursor.execute(
            f"CREATE OR REPLACE TEMP TABLE vocabulary_{name} AS {vocabulary(counts, self.frequency_limit)}"
        )
        cursor.execute(f"DROP TABLE {counts}")
        path = self.dataset / "vocabulary" / f"{name}.parquet"
        quoted = str(path).replace("'", "''")
        text = "value" if has_non_hex else "printf('%08x', value)"
        ((kept,),) = cursor.execute(
            f"COPY (SELECT {text} AS value, id, count FROM vocabulary_{name} ORDER BY id) "
            f"TO '{quoted}' (FORMAT parquet, COMPRESSION zstd, ROW_GROUP_SIZE 122880)"
        ).fetchall()
        sync_file(path)
        sync_directory(path.parent)
        pairs = [list(pair) for pair in zip(covered[::2], covered[1::2], strict=True)]
        return seen, distinct, kept, pairs, has_non_hex

    def _encode(
        self,
        cursor: duckdb.DuckDBPyConnection,
        number: int,
        name: str,
        column: StoredColumn,
        dtype: np.dtype,
        has_non_hex: bool,
        last: int,
    ) -> tuple[dict[str, dict], dict[str, int]]:
        """Write the ids of every split, up to `last`; return the files and how many ids are 0."""
        # Only values with a code; the others are patched in.
        values = f"(SELECT value, id FROM vocabulary_{name})"
        if has_non_hex:
            values = (
                f"(SELECT CAST('0x' || value AS UINTEGER) AS value, id FROM vocabulary_{name} "
                f"WHERE regexp_full_match(value, '[0-9a-f]{{8}}') AND value < '{NON_HEX:08x}')"
            )
            ((last,),) = cursor.execute(f"SELECT coalesce(max(id), 0) FROM {values}").fetchall()
        size = max(1, self.table_bytes // ENTRY_BYTES)
        pieces = [range(first, min(first + size, last)) for first in range(0, max(last, 1), size)]
        # Ids of earlier parts of the vocabulary.
        partial_ids = {split: column.path.with_name(f"{name}.{split}.ids") for split in self.splits}
        lookup: Lookup | None = None

        def looked_up(split: str, piece: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
            rows = self.splits[split]
            for start, codes in column.chunks(rows, CHUNK_ROWS):
                ids, first = np.zeros(len(codes), "<i4"), start - rows.start
                if piece:
                    ids = StoredColumn(partial_ids[split], "<i4").read(first, first + len(codes))
                assert lookup is not None
                lookup(codes, ids)
                yield start, codes, ids

        files: dict[str, dict[str, Any]] = {}
        zeros: dict[str, int] = {}
        for piece, of_piece in enumerate(pieces):
            lookup = None  # free its memory before the next one takes as much
            lookup = _lookup(cursor, values, of_piece)
            for split in self.splits:
                if of_piece.stop < last:
                    with partial_ids[split].open("r+b" if piece else "wb") as stream:
                        for _, _, ids in looked_up(split, piece):
                            stream.write(ids.data)
                    continue
                zeros[split] = 0
                with RecordedFile(self.dataset, f"{split}/{name}.bin") as file:
                    for start, codes, ids in looked_up(split, piece):
                        if has_non_hex and (codes == NON_HEX).any():
                            # The ids of texts without a code.
                            patches = cursor.execute(
                                f'SELECT o."row" - {start} AS at, v.id AS id FROM non_hex AS o '
                                f"JOIN vocabulary_{name} AS v ON o.value = v.value WHERE "
                                f'o."column" = {number} AND o."row" >= {start} AND o."row" < {start + len(ids)}'
                            ).fetchnumpy()
                            ids[patches["at"]] = patches["id"]
                        zeros[split] += len(ids) - int(np.count_nonzero(ids))
                        file.append(ids.astype(dtype.newbyteorder("<"), copy=False))
                files |= file.record
                partial_ids[split].unlink(missing_ok=True)
        return files, zeros


def _lookup(cursor: duckdb.DuckDBPyConnection, values: str, ids: range) -> Lookup:
    """Return a lookup of query `values` for the values with an id behind each of `ids`."""
    lookup = Lookup(len(ids))
    for start in range(ids.start, ids.stop, PART_ENTRIES):
        # DuckDB keeps the smallest and the largest id of each block of the table, and skips other blocks.
        part = cursor.execute(
            f"SELECT value, CAST(id AS INTEGER) AS id FROM {values} "
            f"WHERE id > {start} AND id <= {min(start + PART_ENTRIES, ids.stop)}"
        ).fetchnumpy()
        lookup.add(np.ascontiguousarray(part["value"]), np.ascontiguousarray(part["id"]))
    return lookup
