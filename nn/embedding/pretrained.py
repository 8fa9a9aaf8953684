"""Vectors of a file as the rows of a table that is not trained (`model.pretrained`)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from configs.messages import shown
from configs.schema import OptimizerConfig
from nn.embedding.declared_tables import Tables
from nn.embedding.optimizer import table_rule

if TYPE_CHECKING:
    import pyarrow as pa

ROWS_AT_ONCE = 2**16


@dataclass(frozen=True, slots=True)
class FileRows:
    """A .npy file [rows, columns] of floats, or Parquet with a vector per id; the `init_fn` of its table.

    Both are read in parts: the .npy file by a memory map, Parquet batch by batch.
    """

    feature: str
    path: str

    @property
    def key(self) -> str:
        """The option that names the file, for messages."""
        return f"model.pretrained.{self.feature}={self.path}"

    def check(self, num_rows: int, columns: int, table: str) -> None:
        """Raise ValueError unless the file has a vector of so many columns for every row of `table`."""
        is_parquet = self.path.endswith(".parquet")
        found = self._checked_ids(num_rows) if is_parquet else self.opened().shape
        if found != (num_rows, columns):
            raise ValueError(
                f"{self.key} holds {found[0]} vectors of {found[1]} columns, and table {shown(table)} has {num_rows} of "
                f"{columns}; make a file of these, or set model.embedding_dims"
            )

    def opened(self) -> np.ndarray:
        """Return the file's rows. Raises ValueError: it cannot be read, or is no matrix of floats."""
        key = self.key
        try:
            rows = np.lib.format.open_memmap(self.path, mode="r")  # reads no archive and no pickle
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{key} cannot be read ({error}); want a .npy file of floats, or Parquet"
            ) from None
        if rows.ndim != 2 or rows.dtype not in ("float16", "float32", "float64"):
            raise ValueError(
                f"{key} holds {list(rows.shape)} {rows.dtype}; want a .npy file [rows, columns] of floats"
            )
        return rows

    def __call__(self, weight: Tensor, first_row: int = 0, first_column: int = 0) -> None:
        """Fill a shard of the table [rows, columns]. Raises ValueError: a number is not finite in the table's type."""
        for rows, values in self.parts(weight.shape, weight.dtype, first_row, first_column):
            weight.index_copy_(0, rows.to(weight.device), values.to(weight.device))

    def parts(
        self, shape: torch.Size, dtype: torch.dtype, first_row: int, first_column: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield rows of a shard, ascending, int64 [n], and their weights [n, columns], until it has all; see `__call__`."""
        num_rows, num_columns = shape
        columns = slice(first_column, first_column + num_columns)
        for ids, vectors in self._of_rows(first_row, first_row + num_rows):
            mine = np.flatnonzero((ids >= first_row) & (ids < first_row + num_rows))
            mine = mine[np.argsort(ids[mine])]
            values = torch.from_numpy(vectors[mine, columns]).to(dtype)
            finite = values.isfinite().all(1)
            if not finite.all():
                raise ValueError(
                    f"{self.key}: row {ids[mine][int(finite.int().argmin())]} is not finite in the table's {values.dtype}; "
                    "correct the file"
                )
            yield torch.from_numpy(ids[mine] - first_row), values

    def _of_rows(self, first: int, end: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield ids, int64 [n], of some rows at least, and their vectors, floats [n, columns]."""
        if self.path.endswith(".parquet"):
            yield from self._vectors(first, end)
            return
        of_file = self.opened()
        for begin in range(first, end, ROWS_AT_ONCE):
            ids = np.arange(begin, min(begin + ROWS_AT_ONCE, end))
            yield ids, of_file[begin : begin + len(ids)]

    def _batches(
        self, wanted: Sequence[str], first: int = 0, end: int | None = None
    ) -> Iterator[list["pa.Array"]]:
        """Yield parts of the columns of ids and of vectors, but row groups that say that they have no id from `first` to `end`.

        Raises ValueError: the file has no such columns.
        """
        import pyarrow as pa

        from dataloading.dataset.parquet_files import open_file

        try:
            file = open_file(Path(self.path))
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.key} cannot be read ({error})") from None
        with file:
            names: dict[str, list[str]] = {"ids": [], "vectors": []}
            for column in file.schema_arrow:
                item = getattr(column.type, "value_type", None)
                if pa.types.is_integer(column.type):
                    names["ids"].append(column.name)
                elif item is not None and pa.types.is_floating(item):
                    names["vectors"].append(column.name)
            if [len(found) for found in names.values()] != [1, 1]:
                got = ", ".join(f"{column.name} {column.type}" for column in file.schema_arrow)
                raise ValueError(
                    f"{self.key} has columns {got}; want one of integers, the ids, and one of lists of floats, the vectors"
                )
            chosen = [names[kind][0] for kind in wanted]
            paths = [file.schema.column(leaf).path for leaf in range(len(file.schema))]
            at, groups = paths.index(names["ids"][0]), []
            for group in range(file.num_row_groups):
                known = file.metadata.row_group(group).column(at).statistics
                if (
                    end is None
                    or known is None
                    or not known.has_min_max
                    or (known.min < end and known.max >= first)
                ):
                    groups.append(group)
            for batch in file.iter_batches(ROWS_AT_ONCE, row_groups=groups, columns=chosen):
                columns = [batch.column(name) for name in chosen]
                for name, column in zip(chosen, columns, strict=True):
                    if column.null_count:
                        raise ValueError(f"{self.key}: {shown(name)} is missing in a row; fill it")
                yield columns

    def _checked_ids(self, num_rows: int) -> tuple[int, int]:
        """Return `num_rows`, if each has a vector, and the columns of the first one."""
        seen = np.zeros(num_rows, bool)
        for (column,) in self._batches(["ids"]):
            ids = column.to_numpy().astype(np.int64)
            outside = ids[(ids < 0) | (ids >= num_rows)]
            if len(outside):
                raise ValueError(
                    f"{self.key} has id {outside[0]}, and the table ids 0 to {num_rows - 1}; leave it out"
                )
            twice = seen[ids]
            values, counts = np.unique(ids, return_counts=True)
            repeated = [*ids[twice], *values[counts > 1]]
            if repeated:
                raise ValueError(f"{self.key} has id {repeated[0]} twice; want a vector per id")
            seen[ids] = True
        if not seen.all():
            raise ValueError(
                f"{self.key} lacks {np.count_nonzero(~seen):,} of {num_rows:,} ids, the first {int(seen.argmin())}; want a "
                "vector for each, also for 0 of unknown values"
            )
        return num_rows, next(vectors.shape[1] for _, vectors in self._vectors())

    def _vectors(
        self, first: int = 0, end: int | None = None
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield ids, int64 [n], and their vectors, floats [n, columns]. Raises ValueError: vectors have different widths."""
        width = None
        for ids, lists in self._batches(["ids", "vectors"], first, end):
            sizes = lists.value_lengths().to_numpy()
            width = int(sizes[0]) if width is None else width
            if (sizes != width).any():
                at = int((sizes != width).argmax())
                raise ValueError(
                    f"{self.key}: the vector of id {ids[at]} has {sizes[at]} columns, and the first one {width}; want "
                    "equally many"
                )
            flat = lists.flatten()
            if flat.null_count:
                raise ValueError(f"{self.key}: a vector lacks a number; fill it")
            yield ids.to_numpy().astype(np.int64), flat.to_numpy().reshape(-1, width)


def check_pretrained(tables: Tables, optimizer: OptimizerConfig) -> None:
    """Refuse files of other sizes than their tables, and optimizers that may move rows whose gradient is zero; ValueError."""
    for table in tables:
        if not isinstance(table.init_fn, FileRows):
            continue
        table.init_fn.check(table.num_embeddings, table.embedding_dim, table.name)
        if optimizer.embedding_l2 or not table_rule(optimizer.table_name).leaves_untouched_rows:
            raise ValueError(
                f"{table.init_fn.key}: optimizer.embedding_l2={optimizer.embedding_l2} or the tables' optimizer "
                f"{optimizer.table_name} may move weights without a gradient, and these are not trained; set "
                "optimizer.embedding_l2=0 and an embedding_name whose rule says leaves_untouched_rows, such as adam"
            )
