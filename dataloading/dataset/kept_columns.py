"""Raw columns that preprocessing keeps beside the rows of a dataset, such as the number of an order.

They are no features: no batch has them. `kept/SPLIT.parquet` holds them in the order of the split's rows, with the types
of the raw data, in a dataset directory of either format.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import pyarrow as pa

from configs.messages import printable, shortened, shown
from dataloading.dataset.parquet_files import read_schema
from dataloading.dataset.parquet_writer import PartWriter
from dataloading.dataset.row_groups import SplitGroups
from dataloading.dataset.split_files import find_file

FOLDER = "kept"
ROW_GROUP_ROWS = 65_536


def kept_file_name(split: str) -> str:
    return f"{FOLDER}/{split}.parquet"


class KeptColumns:
    """Kept columns of one split, read by ranges of rows; safe to call from several threads.

    The row group that was read last stays in memory, so consecutive ranges decode each row group once. Raises
    ValueError: the file is damaged, or holds another number of rows.
    """

    def __init__(self, root: Path, split: str, num_rows: int | None = None) -> None:
        self.names: list[str] = []  # of the columns; empty if the dataset keeps none
        self._root = root
        self._split = split
        self._lock = Lock()
        self._latest: tuple[tuple[int, ...], pa.Table] | None = None
        if not (root / kept_file_name(split)).exists():
            return
        path = find_file(root, kept_file_name(split))
        self._schema = read_schema(path)
        self._groups = SplitGroups((path,))
        self.names = self._schema.names
        twice = [name for name, times in Counter(self.names).items() if times > 1]
        if twice:
            raise ValueError(f"{path}: two columns are called {shown(twice[0])}; write it again")
        got = self._groups.num_rows
        if num_rows is not None and got != num_rows:
            raise ValueError(
                f"{path} holds {got:,} rows, want the {num_rows:,} of split '{split}'; copy or write the dataset again"
            )

    def read(self, start: int, stop: int, names: Sequence[str]) -> pa.Table:
        """Return the columns `names` of the rows [start, stop), in the order of `names`.

        Raises ValueError: the dataset does not keep one of them, or its data is damaged.
        """
        unknown = [name for name in names if name not in self.names]
        if unknown:
            kept = shortened(", ".join(map(printable, self.names)), 300) or "none"
            raise ValueError(
                f"{self._root}: no kept column {shown(unknown[0])} of split '{self._split}'; it keeps {kept}: name the "
                "column in table.keep when the dataset is written"
            )
        assert names, "a table without columns has no rows"
        empty = pa.schema([self._schema.field(name) for name in names]).empty_table()
        pieces = [
            self._group(group, names).slice(rows.start, rows.stop - rows.start)
            for group, rows in self._groups.cut(start, stop)
        ]
        assert sum(len(piece) for piece in pieces) == stop - start, "rows beyond the split"
        return pa.concat_tables([empty, *pieces])

    def _group(self, group: int, names: Sequence[str]) -> pa.Table:
        key = (group, *(self.names.index(name) for name in names))
        with self._lock:
            if self._latest is None or self._latest[0] != key:
                # Parquet returns columns in the order of the file.
                self._latest = (key, self._groups.table(group, names).select(list(names)))
            return self._latest[1]


class KeptWriter(PartWriter):
    def __init__(self, root: Path, split: str, schema: pa.Schema) -> None:
        self._name = kept_file_name(split)
        path = root / self._name
        path.parent.mkdir(exist_ok=True)
        # A run that resumes writes the file again.
        path.unlink(missing_ok=True)
        super().__init__(path, schema, compression="zstd")

    def append(self, rows: pa.Table) -> None:
        """Append rows; of several chunks, all but the last hold a multiple of `ROW_GROUP_ROWS` rows."""
        self.writer.write_table(rows, row_group_size=ROW_GROUP_ROWS)

    @property
    def record(self) -> dict[str, dict[str, Any]]:
        """Bytes and CRC-32 of the file by its path below the dataset."""
        return {self._name: self.stream.record}
