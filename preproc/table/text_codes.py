"""Codes in place of the texts of staged rows, so that nothing after the first pass reads a text per row.

A batch of rows numbers its distinct texts. A code stands for one value, and a value has one code per batch that holds it. So
memory does not grow with the values, and there are no more codes than rows. Relation `texts_<column>` (code, value) lists them.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dataloading.dataset.parquet_writer import abandon_writer, as_arrow
from preproc.ordered_map import ordered_map
from preproc.table.expressions import NO_CODE, RELATION_FILE

# Rows that differ in few texts are coded in 4 bytes.
MOST_CODES = 2**31 - 1
BATCH_TEXTS = 1 << 17
TEXTS_SCHEMA = pa.schema({"code": pa.int32(), "value": pa.string()})

TextBatch = tuple[pa.RecordBatch, Mapping[str, list[pa.DictionaryArray]]]


@dataclass(frozen=True, slots=True)
class Coded:
    codes: pa.Array  # indices into `texts`, null for a missing text
    texts: pa.Array  # distinct texts, those of the empty text included
    offsets: pa.Array | None = None  # of the lists, if a row holds several texts
    missing: pa.Array | None = None  # which rows have no list

    def column(self, first: int) -> pa.Array:
        codes = pc.add(self.codes, pa.scalar(first, pa.int32()))
        if self.offsets is None:
            return codes
        return pa.ListArray.from_arrays(self.offsets, codes, mask=self.missing)


def coded_texts(texts: pa.Array) -> Coded:
    if pa.types.is_list(texts.type):
        items = coded_texts(texts.values)
        return Coded(items.codes, items.texts, texts.offsets, texts.is_null())
    if pa.types.is_dictionary(texts.type) and len(texts.dictionary) > len(texts):
        # Of a row group of many batches: each would list all texts.
        texts = texts.cast(texts.type.value_type)
    encoded = texts if pa.types.is_dictionary(texts.type) else texts.dictionary_encode()
    codes, empty = encoded.indices, pc.index(encoded.dictionary, "").as_py()
    if empty >= 0:
        codes = pc.if_else(pc.equal(codes, empty), None, codes)
    return Coded(codes, encoded.dictionary.cast(pa.string()))


def _joined(parts: list[Coded]) -> Coded:
    """Return the codes of consecutive rows as those of one column."""
    if len(parts) == 1:
        return parts[0]
    firsts = np.cumsum([0, *(len(part.texts) for part in parts)])
    codes = [part.column(int(first)) for part, first in zip(parts, firsts, strict=False)]
    return Coded(pa.concat_arrays(codes), pa.concat_arrays([part.texts for part in parts]))


def crossed_codes(parts: Sequence[Coded]) -> Coded:
    """Return the codes of the values that `crossed` makes of several columns: a text per pair, not per row."""
    first, *others = parts
    for other in others:
        before, after = (part.codes.cast(pa.int64()) for part in (first, other))
        pairs = pc.add(pc.multiply(before, len(other.texts)), after).dictionary_encode()
        of_both = np.divmod(np.asarray(pairs.dictionary), len(other.texts))
        texts = [p.texts.take(as_arrow(of)) for p, of in zip((first, other), of_both, strict=True)]
        first = Coded(pairs.indices, pc.binary_join_element_wise(*texts, "\x1f"))
    return first


def write_coded(
    batches: Iterator[TextBatch],
    schema: pa.Schema,
    columns: Collection[str],
    path: Path,
    threads: int,
    crosses: Mapping[str, Sequence[str]],
) -> None:
    """Write the rows, with `row_` from 0, to a file in `path`, and the texts of every column in `path/texts_<column>`.

    `batches`: rows in their order, and texts of theirs that are dictionaries already. `threads`: that number the texts;
    another one reads the batches, and this one writes. `crosses`: columns that the rows lack, and the other ones that each is
    made of. Raises ValueError: a column has more texts than codes.
    """

    def coded(batch: TextBatch) -> tuple[pa.RecordBatch, dict[str, Coded]]:
        rows, dictionaries = batch
        found = {
            name: _joined(
                [coded_texts(texts) for texts in dictionaries.get(name) or [rows.column(name)]]
            )
            for name in {*columns} - {*crosses}
        }
        for name, parts in crosses.items():
            found[name] = crossed_codes([found[of] for of in parts])
        return rows, found

    with _Writer(path, schema, columns) as writer:
        for batch, found in ordered_map(coded, batches, threads, threads + 1):
            writer.append(batch, found)


class _Writer:
    """Appends batches to the files of rows and texts."""

    def __init__(self, path: Path, schema: pa.Schema, columns: Collection[str]) -> None:
        fields = [pa.field("row_", pa.int64())]
        for field in schema:
            if field.name in columns and pa.types.is_list(field.type):
                field = field.with_type(pa.list_(pa.int32()))
            elif field.name in columns:
                # A column that cannot have nulls is written and read in half the time.
                field = pa.field(field.name, pa.int32(), nullable=False)
            fields.append(field)
        self._schema = pa.schema(fields)
        # Labels, splits and messages repeat; numbers and codes rarely do, or are narrow.
        texts = [field.name for field in fields if pa.types.is_string(field.type)]
        self._num_codes = dict.fromkeys(columns, 0)
        self._num_rows = 0
        self._texts: dict[str, pq.ParquetWriter] = {}
        self._rows = pq.ParquetWriter(
            path / RELATION_FILE,
            self._schema,
            use_dictionary=texts,
            compression="none",
            # By these DuckDB finds the rows of a split.
            write_statistics=["row_"],
        )
        try:
            for name in columns:
                (path / f"texts_{name}").mkdir()
                self._texts[name] = pq.ParquetWriter(
                    path / f"texts_{name}" / RELATION_FILE,
                    TEXTS_SCHEMA,
                    use_dictionary=False,
                    compression="none",
                    write_statistics=False,
                )
        except BaseException:
            self._abandon()
            raise

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        try:
            if error is None:
                for writer in self._writers:
                    writer.close()
        finally:
            self._abandon()

    @property
    def _writers(self) -> list[pq.ParquetWriter]:
        return [self._rows, *self._texts.values()]

    def _abandon(self) -> None:
        """Close what is still open; on a full disk, most likely, it cannot be written."""
        for writer in self._writers:
            abandon_writer(writer)

    def append(self, batch: pa.RecordBatch, coded: dict[str, Coded]) -> None:
        rows = np.arange(self._num_rows, self._num_rows + len(batch))
        self._num_rows += len(batch)
        columns = [as_arrow(rows)]
        for name in self._schema.names[1:]:
            if (found := coded.get(name)) is None:
                columns.append(batch.column(name))
                continue
            column = found.column(self._append_texts(name, found))
            columns.append(column.fill_null(NO_CODE) if found.offsets is None else column)
        self._rows.write_batch(pa.RecordBatch.from_arrays(columns, schema=self._schema))

    def _append_texts(self, name: str, coded: Coded) -> int:
        """Write the texts of a column; return their first code."""
        first = self._num_codes[name]
        last = first + len(coded.texts)
        if last > MOST_CODES:
            raise ValueError(
                f"categorical feature number {int(name[1:]) + 1} has over {MOST_CODES:,} different texts; set engine=spark"
            )
        self._num_codes[name] = last
        codes = as_arrow(np.arange(first, last, dtype=np.int32))
        texts = pa.RecordBatch.from_arrays([codes, coded.texts], schema=TEXTS_SCHEMA)
        self._texts[name].write_batch(texts)
        return first


def flat_codes(column: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Return the codes of rows, flat, `NO_CODE` for a missing text, and the lengths of their lists; none without lists."""
    lengths = np.zeros(0, np.int32)
    if pa.types.is_list(column.type):
        lengths = np.asarray(column.value_lengths().fill_null(0))
        column = column.flatten()
    return np.asarray(column.fill_null(NO_CODE)), lengths


def read_codes(
    directory: Path, column: str, rows: range
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the codes of some rows, and the lengths of lists, as `flat_codes`."""
    with pq.ParquetFile(directory / RELATION_FILE) as file:
        first = 0
        for group in range(file.num_row_groups):
            stop = first + file.metadata.row_group(group).num_rows
            start, end = max(first, rows.start), min(stop, rows.stop)
            if start < end:
                table = file.read_row_group(group, [column], use_threads=False)
                for chunk in table.column(0).slice(start - first, end - start).chunks:
                    yield flat_codes(chunk)
            first = stop


def count_codes(directory: Path, column: str, rows: range, num_codes: int) -> np.ndarray:
    """Return how often every code occurs in some rows, int64 [num_codes]; arguments as of `read_codes`."""
    counts = np.zeros(num_codes, np.int64)
    for codes, _ in read_codes(directory, column, rows):
        if len(codes) and codes.min() < 0:
            codes = codes[codes >= 0]
        if len(codes):
            # A batch has codes of its own, so their range is short.
            first = int(codes.min())
            found = np.bincount(codes - first)
            counts[first : first + len(found)] += found
    return counts


def counted_texts(directory: Path, counts: np.ndarray) -> pa.RecordBatchReader:
    """Return the texts (value, count) of the relation in `directory` whose code was counted; they are read once."""
    schema = pa.schema({"value": pa.string(), "count": pa.int64()})

    def batches() -> Iterator[pa.RecordBatch]:
        first = 0
        with pq.ParquetFile(directory / RELATION_FILE) as file:
            for texts in file.iter_batches(BATCH_TEXTS, columns=["value"], use_threads=False):
                found = as_arrow(counts[first : first + len(texts)])
                first += len(texts)
                batch = pa.RecordBatch.from_arrays([texts.column(0), found], schema=schema)
                yield batch.filter(pc.greater(found, 0))

    return pa.RecordBatchReader.from_batches(schema, batches())
