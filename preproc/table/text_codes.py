"""Codes in place of the texts of staged rows, so that nothing after the first pass reads a text per row.

A batch of rows numbers its distinct texts. A code stands for one value, and a value has one code per batch that holds it. So
memory does not grow with the values, and there are no more codes than rows. Relation `texts_<column>` (code, value) lists them.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow.fs import LocalFileSystem

from dataloading.dataset.parquet_writer import as_arrow, as_scalar
from preproc.dataset_writer import RecordedFile
from preproc.ordered_map import ordered_map
from preproc.table.expressions import CODED_FILE, NO_CODE, RELATION_FILE

if TYPE_CHECKING:  # imports pandas
    from pyarrow import dataset

# Rows that differ in few texts are coded in 4 bytes.
MOST_CODES = 2**31 - 1
# Columns of staged rows with long runs of equal values, of which a run is stored once.
IN_RUNS = ("file_", "bad_")
TEXTS_SCHEMA = pa.schema({"code": pa.int32(), "value": pa.string()})
BLANK_AND_SEPARATOR = pa.StringArray.from_buffers(
    2, pa.py_buffer(np.array([0, 0, 1], np.int32)), pa.py_buffer(b"\x1f")
)
"""The empty text and that between the values of a cross, which Arrow would take from Python by importing pandas."""

TextBatch = tuple[pa.RecordBatch, Mapping[str, list[pa.DictionaryArray]]]


@dataclass(frozen=True, slots=True)
class Coded:
    codes: pa.Array  # indices into `texts`, null for a missing text
    texts: pa.Array  # distinct texts, those of the empty text included
    offsets: pa.Array | None = None  # of the lists, if a row holds several texts
    missing: pa.Array | None = None  # which rows have no list

    def column(self, first: int) -> pa.Array:
        codes = pc.add(self.codes, as_scalar(np.int32(first)))
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
    codes, found = encoded.indices, encoded.dictionary.cast(pa.string())
    empty = pc.index(found, BLANK_AND_SEPARATOR[0])
    if empty.as_py() >= 0:
        codes = pc.if_else(pc.equal(codes, empty), pa.nulls(1, codes.type)[0], codes)
    return Coded(codes, found)


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
        size = np.int64(len(other.texts))
        pairs = pc.add(pc.multiply(before, as_scalar(size)), after).dictionary_encode()
        of_both = np.divmod(np.from_dlpack(pairs.dictionary), size)
        texts = [p.texts.take(as_arrow(of)) for p, of in zip((first, other), of_both, strict=True)]
        first = Coded(pairs.indices, pc.binary_join_element_wise(*texts, BLANK_AND_SEPARATOR[1]))
    return first


def write_coded(
    batches: Iterator[TextBatch],
    schema: pa.Schema,
    columns: Collection[str],
    path: Path,
    threads: int,
    crosses: Mapping[str, Sequence[str]],
) -> dict[str, dict[str, Any]]:
    """Write the rows, with `row_` from 0, to a file in `path`, and the texts of every column in `path/texts_<column>`.

    Returns bytes and CRC-32 of every file, by its path in `path`.

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

    with ExitStack() as files:
        writer = _Writer(files, path, schema, columns)
        for batch, found in ordered_map(coded, batches, threads, threads + 1):
            writer.append(batch, found)
        return writer.finish()


class _Writer:
    """Appends batches to the files of rows and texts, which `files` closes; `finish` makes them complete."""

    def __init__(
        self, files: ExitStack, path: Path, schema: pa.Schema, columns: Collection[str]
    ) -> None:
        kinds = {"row_": pa.int64()} | dict(zip(schema.names, schema.types, strict=True))
        for name in columns:
            is_list = pa.types.is_list(kinds[name])
            kinds[name] = pa.list_(pa.int32()) if is_list else pa.int32()
        for name in kinds.keys() & IN_RUNS:
            kinds[name] = pa.run_end_encoded(pa.int32(), kinds[name])
        self._schema = pa.schema(kinds)
        self._num_codes = dict.fromkeys(columns, 0)
        self._num_rows = 0
        self._files: list[RecordedFile] = []

        def new_file(name: str, schema: pa.Schema) -> pa.RecordBatchFileWriter:
            file = RecordedFile(path, name, sync=lambda _: None)  # later, beside other work
            self._files.append(files.enter_context(file))
            return pa.ipc.new_file(file, schema)

        self._rows = new_file(CODED_FILE, self._schema)
        self._texts = {n: new_file(f"texts_{n}/{CODED_FILE}", TEXTS_SCHEMA) for n in columns}

    def finish(self) -> dict[str, dict[str, Any]]:
        for writer in (self._rows, *self._texts.values()):
            writer.close()
        return {name: record for file in self._files for name, record in file.record.items()}

    def append(self, batch: pa.RecordBatch, coded: dict[str, Coded]) -> None:
        rows = np.arange(self._num_rows, self._num_rows + len(batch))
        self._num_rows += len(batch)
        columns = [as_arrow(rows)]
        for name in self._schema.names[1:]:
            found = coded.get(name)
            first = 0 if found is None else self._append_texts(name, found)
            column = batch.column(name) if found is None else found.column(first)
            columns.append(pc.run_end_encode(column) if name in IN_RUNS else column)
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


def mapped_rows(directory: Path) -> pa.Table:
    """Return the staged rows, or the texts of a column, in `directory`; they are read as they are used.

    Every batch of every column takes half a KB beside the file.
    """
    with pa.memory_map(str(directory / CODED_FILE)) as file:
        return pa.ipc.open_file(file).read_all()


def mapped_by_query(directory: Path) -> "dataset.Dataset":
    """Return the same for queries, each of which maps what it reads: slower, but nothing stays in memory."""
    from pyarrow import dataset

    files = LocalFileSystem(use_mmap=True)
    return dataset.dataset(str(directory / CODED_FILE), format="ipc", filesystem=files)


def flat_codes(column: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Return the codes of rows, flat, `NO_CODE` for a missing text, and the lengths of their lists; none without lists."""
    lengths: np.ndarray = np.zeros(0, np.int32)
    if pa.types.is_list(column.type):
        lengths = np.from_dlpack(column.value_lengths().fill_null(as_scalar(np.int32(0))))
        column = column.flatten()
    return np.from_dlpack(column.fill_null(as_scalar(np.int32(NO_CODE)))), lengths


def read_codes(
    directory: Path, column: str, rows: range
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the codes of some rows, and the lengths of lists, as `flat_codes`."""
    first = 0
    for batch in _batches(directory, column):
        part = batch.column(column)[max(rows.start - first, 0) : max(rows.stop - first, 0)]
        first += len(batch)
        if len(part):
            yield flat_codes(part)
        if first >= rows.stop:
            break


def _batches(directory: Path, column: str) -> Iterator[pa.RecordBatch]:
    """Yield the batches of the rows with a column, of which one is in memory or mapped at a time."""
    if (directory / CODED_FILE).exists():
        with pa.memory_map(str(directory / CODED_FILE)) as file:
            rows = pa.ipc.open_file(file.read_buffer())  # a mapped file reads all columns ahead
        yield from map(rows.get_batch, range(rows.num_record_batches))
        return
    with pq.ParquetFile(directory / RELATION_FILE) as file:
        yield from file.iter_batches(columns=[column], use_threads=False)


def count_codes(directory: Path, column: str, rows: range, counts: np.ndarray) -> None:
    """Add to `counts`, int64, how often every code occurs in some rows; arguments as of `read_codes`."""
    for codes, _ in read_codes(directory, column, rows):
        if len(codes) and codes.min() < 0:
            codes = codes[codes >= 0]
        if len(codes):
            # A batch has codes of its own, so their range is short.
            first = int(codes.min())
            found = np.bincount(codes - first)
            counts[first : first + len(found)] += found


def counted_texts(directory: Path, counts: np.ndarray) -> pa.RecordBatchReader:
    """Return the texts (value, count) of the relation in `directory` whose code was counted; they are read once."""
    schema = pa.schema({"value": pa.string(), "count": pa.int64()})

    def batches() -> Iterator[pa.RecordBatch]:
        first = 0
        # Not mapped: read texts would stay in memory beside the groups.
        with pa.OSFile(str(directory / CODED_FILE)) as file, pa.ipc.open_file(file) as texts:
            for number in range(texts.num_record_batches):
                values = texts.get_batch(number).column("value")
                found = counts[first : first + len(values)]
                first += len(values)
                batch = pa.RecordBatch.from_arrays([values, as_arrow(found)], schema=schema)
                # A filter copies the texts, also if it leaves none out.
                if not found.all():
                    is_counted = pc.greater(batch.column("count"), as_scalar(np.int64(0)))
                    batch = batch.filter(is_counted)
                yield batch

    return pa.RecordBatchReader.from_batches(schema, batches())
