"""Columns of Criteo's logs as MLPerf's procedure for DLRM-DCNv2 makes them: logarithms per day, ids by first appearance.

Its programs (`npy_preproc_criteo`, `contiguous_preproc_criteo`, `shuffle_preproc_criteo` and
`materialize_synthetic_multihot_dataset`) define every step below, also those that a design of today would not have.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from dataloading.dataset.durable_files import sync_directory, sync_stream
from preproc.column_store import StoredColumn, bytes_of
from preproc.criteo.hash_table import FirstSeen
from preproc.criteo.tokenizer import MISSING
from preproc.vocabulary_sql import CATEGORICAL
from preproc.work_directory import connected

FIRST_ID = 2
"""Id of the first value of a column; 0 and 1 are no value's."""
MOST_CODE = (1 << 32) - 1
CHUNK_ROWS = 1 << 20


def log_days(integers: StoredColumn, output: StoredColumn, days: list[range]) -> None:
    """Write ln(x - least + 2) of int32 `integers` as float32, where `least` is the least integer of the day.

    `integers`: [rows, 13], missing ones as 0. `output`: [rows, 13], written and synced. `days`: rows of each day, in
    order.
    """
    with output.path.open("wb", buffering=0) as stream:
        for rows in days:
            least = min(int(values.min()) for _, values in integers.chunks(rows, CHUNK_ROWS))
            for _, values in integers.chunks(rows, CHUNK_ROWS):
                values -= np.int32(least - 2)
                stream.write(bytes_of(np.log(values, dtype=np.float32)))
        sync_stream(stream)
    sync_directory(output.path.parent)


def number_column(
    codes: StoredColumn,
    output: StoredColumn,
    table_rows: int,
    num_train: int,
    num_rows: int,
    texts: Mapping[int, int],
) -> int:
    """Write the ids of a column, int32: values are numbered as they first appear, over all days, modulo the table's rows.

    A missing value is the code 0. The procedure shuffles training rows as float32, which rounds their ids above 2**24.
    `codes`: uint32 [rows]. `output`: [rows], written and synced. Returns the number of distinct values.
    """
    first_seen = FirstSeen(FIRST_ID)
    text_rows = np.fromiter(texts, np.int64, len(texts))
    text_codes = np.fromiter(texts.values(), np.uint32, len(texts))
    with output.path.open("wb", buffering=0) as stream:
        for rows in (range(num_train), range(num_train, num_rows)):
            for start, values in codes.chunks(rows, CHUNK_ROWS):
                values[values == MISSING] = 0
                first, last = np.searchsorted(text_rows, [start, start + len(values)])
                values[text_rows[first:last] - start] = text_codes[first:last]
                ids = first_seen(values)
                if rows.start == 0:
                    ids = ids.astype(np.float32).astype(np.int32)
                stream.write(bytes_of(ids % np.int32(table_rows)))
        sync_stream(stream)
    sync_directory(output.path.parent)
    return first_seen.num_codes


def codes_of_texts(files: Path, number: int) -> dict[int, int]:
    """Return the codes of the texts of column `number` that are not eight lower-case digits, by ascending row.

    `files`: directory of the Parquet files (column, row, value) of such texts; it may be empty. Raises ValueError: a
    text is no hexadecimal number of 32 bits.
    """
    paths = [str(path) for path in files.glob("*.parquet")]
    if not paths:
        return {}
    with connected({}) as connection:
        found = connection.execute(
            'SELECT "row", value FROM read_parquet($files) WHERE "column" = $number ORDER BY "row"',
            {"files": paths, "number": number},
        ).fetchall()
    codes = {}
    for row, text in found:
        try:
            codes[row] = int(text, 16)
        except ValueError:
            codes[row] = -1
        if not 0 <= codes[row] <= MOST_CODE:
            raise ValueError(
                f"row {row:,} has {text[:40]!r} in {CATEGORICAL[number]}; MLPerf's procedure reads categories as "
                "hexadecimal numbers of at most 32 bits. dataset=criteo_1tb takes any text"
            )
    return codes
