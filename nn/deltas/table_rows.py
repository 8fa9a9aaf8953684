"""Rows of a table, and their raw keys, after a chain of deltas, block by block: memory depends on none of them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from nn.checkpoint.tensor_index import DTYPES, RowReader, StoredTensor, converted, rows_per_block
from nn.deltas.delta import Delta
from nn.deltas.row_ids import decode_ids


class ChangedRows:
    """The rows of a table, or the raw keys of rows, that a delta changes, read in ascending order."""

    def __init__(
        self,
        title: str,
        ids: StoredTensor | None,
        rows: StoredTensor | None,
        dtype: str,
        scales: StoredTensor | None = None,
        columns: int = 1,
    ) -> None:
        self._title, self._columns = title, columns
        self._count = 0 if rows is None else rows.size[0]
        self._pieces = iter(()) if ids is None else decode_ids(ids)
        self._ids = np.empty(0, np.int64)
        self._rows = None if rows is None else RowReader(rows)
        self.dtype = dtype if rows is None else rows.dtype
        self.integers = self._scales = None
        if scales is not None:
            self.integers = "int4" if self.dtype == "uint8" else self.dtype
            self._scales, self.dtype = RowReader(scales), "float32"
        self._done = 0

    @classmethod
    def of_table(cls, delta: Delta, table: str) -> "ChangedRows":
        ids = delta.ids_of(table)
        rows = None if ids is None else delta.rows_of(table)
        title, change = f"{delta.path}: table {table}", delta.tables[table]
        return cls(title, ids, rows, change.dtype, delta.scales_of(table), change.columns)

    @classmethod
    def of_keys(cls, delta: Delta, keys: str) -> "ChangedRows":
        title = f"{delta.path}: keys of {keys}"
        return cls(title, delta.rekeyed_rows_of(keys), delta.keys_of(keys), "int64")

    def before(self, end: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the numbers, int64 [n], and the values [n, columns] of the next rows below `end`; see `stored_before`."""
        for ids, rows, scales in self.stored_before(end):
            yield ids, rows if scales is None else dequantized(rows, scales, self._columns)

    def stored_before(self, end: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray | None]]:
        """Yield the numbers of the next rows below `end`, and the rows and scales as the delta has them; None without scales.

        Raises ValueError: there are other rows than the delta says.
        """
        while True:
            if not len(self._ids):
                self._ids = next(self._pieces, self._ids)
            count = int(np.searchsorted(self._ids, end))
            if not count:
                return
            ids, self._ids = self._ids[:count], self._ids[count:]
            if self._done + count > self._count:
                raise ValueError(f"{self._title} has more numbers of rows than rows")
            assert self._rows is not None, "there are numbers of rows"
            span = (self._done, self._done + count)
            scales = None if self._scales is None else self._scales.rows(*span)
            yield ids, self._rows.rows(*span), scales
            self._done += count

    def check_end(self) -> None:
        """Raise ValueError unless all rows were read, and belong to the table."""
        if self._done != self._count or len(self._ids) or next(self._pieces, None):
            raise ValueError(f"{self._title} has rows that do not exist, or lacks some")


@dataclass(frozen=True, slots=True)
class Replayed:
    """The rows of a table, or their raw keys, after deltas; an `ArraySource` of exports."""

    base: StoredTensor
    size: tuple[int, ...]
    dtype: str  # a key of `DTYPES`
    read: Callable[[], list[ChangedRows]]
    table: str | None = (
        None  # whose rows are all in a file; None of keys, which are 0 in rows of no file
    )

    def blocks(self) -> Iterator[np.ndarray]:
        """Yield all rows in order. Raises ValueError: a file is damaged, or a row does not exist, or is in no file."""
        reader, changes = RowReader(self.base), self.read()
        rows_at_once = rows_per_block(self.size, self.dtype)
        for first in range(0, self.size[0], rows_at_once):
            last = min(first + rows_at_once, self.size[0])
            in_base = max(0, min(last, self.base.size[0]) - first)
            block = np.zeros((last - first, *self.size[1:]), DTYPES[self.dtype])
            if in_base:
                rows = reader.rows(first, first + in_base)
                block[:in_base] = converted(rows, self.base.dtype, self.dtype)
            is_missing = np.arange(last - first) >= in_base
            for change in changes:
                for ids, rows in change.before(last):
                    block[ids - first] = converted(rows, change.dtype, self.dtype)
                    is_missing[ids - first] = False
            if self.table is not None and is_missing.any():
                missing = first + int(np.flatnonzero(is_missing)[0])
                raise ValueError(
                    f"deltas: table {self.table} has grown to {self.size[0]:,} rows, and row {missing:,} is in no delta; copy "
                    "the deltas again"
                )
            yield block
        for change in changes:
            change.check_end()


def replayed_table(table: str, base: StoredTensor, deltas: Sequence[Delta]) -> Replayed:
    """Return the weights of a table after deltas; ValueError unless all are of one table, which may grow."""
    rows, columns = base.size if len(base.size) == 2 else (0, -1)
    for delta in deltas:
        change = delta.tables[table]
        if change.columns != columns or change.rows < rows:
            raise ValueError(
                f"deltas: {delta.path}: table {table} has {change.rows:,} rows of {change.columns} columns, and before "
                f"it had {rows:,} of {columns}; name deltas of the same model"
            )
        rows = change.rows
    return Replayed(
        base,
        (rows, columns),
        deltas[-1].tables[table].dtype,
        lambda: [ChangedRows.of_table(delta, table) for delta in deltas],
        table,
    )


def replayed_keys(keys: str, base: StoredTensor, deltas: Sequence[Delta]) -> Replayed:
    """Return the raw keys of the rows of a map after deltas; ValueError unless all are of one map, which may grow."""
    check_key_rows(keys, base.size[0], deltas)
    size = (deltas[-1].keys[keys].rows,)
    return Replayed(
        base, size, "int64", lambda: [ChangedRows.of_keys(delta, keys) for delta in deltas]
    )


def check_key_rows(keys: str, rows: int, deltas: Sequence[Delta]) -> None:
    """Raise ValueError unless all deltas have the keys of a map of `rows` rows, which may grow."""
    for delta in deltas:
        change = delta.keys.get(keys)
        if change is None or change.rows < rows:
            got = "none" if change is None else f"those of {change.rows:,}"
            raise ValueError(
                f"deltas: {delta.path}: {keys} has raw keys of {rows:,} rows, and the delta {got}; name deltas of the same model"
            )
        rows = change.rows


def dequantized(rows: np.ndarray, scales: np.ndarray, columns: int) -> np.ndarray:
    """Return rows of integers times their scales, float32 [n, columns], with the bits of a served table."""
    if rows.dtype == np.uint8:
        both = np.stack([rows & 15, rows >> 4], axis=2).reshape(len(rows), -1)
        rows = both[:, :columns].astype(np.int8) - np.int8(8)
    return rows * scales[:, None]
