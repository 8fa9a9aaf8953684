"""Yambda's published Parquet files (huggingface.co/datasets/yandex/yambda, arXiv:2505.22238)."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from configs.messages import first_line
from configs.preproc_schema import PreprocConfig
from preproc.listens.events import CHUNK_EVENTS, DAY, ItemMaps, Listens, Sizes, joined
from preproc.work_directory import connect, memory_bytes, small_database

END = 26_000_000 - DAY - 1800
"""Second at which Yambda's training events end: its last one, less the day of its test and the gap before."""


@contextmanager
def _errors_explained(path: Path) -> Iterator[None]:
    try:
        yield
    # Arrow passes on what DuckDB raises as its own errors.
    except (duckdb.Error, pa.ArrowException, OSError) as error:
        raise ValueError(
            f"{path} cannot be read ({first_line(error)}); want Yambda's file: correct source or yambda.events; if DuckDB lacks "
            "memory or disk, raise memory_limit or move temp_directory"
        ) from None


def _check(
    connection: duckdb.DuckDBPyConnection, path: Path, columns: dict[str, int | None]
) -> None:
    """Refuse a file that lacks a column or a value in one, or has an id that is not below the rows of its table; ValueError."""
    bad = (
        f"count(*) FILTER ({name} IS NULL"
        + ("" if rows is None else f" OR {name} NOT BETWEEN 0 AND {rows - 1}")
        + ")"
        for name, rows in columns.items()
    )
    with _errors_explained(path):
        (counts,) = connection.read_parquet(str(path)).aggregate(", ".join(bad)).fetchall()
    for (name, rows), count in zip(columns.items(), counts, strict=True):
        if count:
            within = "" if rows is None else f" from 0 to {rows - 1} (table_rows)"
            raise ValueError(
                f"{path}: {count:,} rows have no {name}{within}; correct the file"
                + " or table_rows" * (rows is not None)
            )


def read_maps(source: Path, sizes: Sizes) -> ItemMaps:
    """Return the artist and the album of each item, the last one that the file has; 0 without one."""
    maps = []
    for name, rows in (("artist", sizes.artists), ("album", sizes.albums)):
        path = source / f"{name}_item_mapping.parquet"
        _check(small_database(), path, {"item_id": None, f"{name}_id": rows})
        columns = pq.read_table(path)
        items, of = (columns[column].to_numpy() for column in ("item_id", f"{name}_id"))
        found = np.zeros(sizes.items, np.int64)
        # `read_listens` refuses logs with other items.
        is_known = (items >= 0) & (items < sizes.items)
        found[items[is_known]] = of[is_known]
        maps.append(found)
    return ItemMaps(*maps)


def read_listens(config: PreprocConfig, sizes: Sizes, work: Path) -> Iterator[Listens]:
    """Yield the events of Yambda's multi_event.parquet up to `END`, sorted by user, time and place in the file."""
    file = Path(config.source) / config.yambda.events
    path = str(file).replace("'", "''")
    connection = connect(config, work, memory_bytes(config))
    ids = {"uid": sizes.users, "item_id": sizes.items}
    _check(connection, file, ids | dict.fromkeys(("timestamp", "event_type", "is_organic")))
    query = (
        "SELECT uid::BIGINT, timestamp::BIGINT, item_id::BIGINT, "
        "CASE event_type::VARCHAR WHEN 'like' THEN 2 WHEN 'listen' THEN "
        "CASE WHEN coalesce(played_ratio_pct, 0) >= 50 THEN 1 ELSE 4 END ELSE 0 END, "
        "event_type::VARCHAR = 'listen', is_organic::BOOLEAN "
        f"FROM read_parquet('{path}', file_row_number=true) WHERE timestamp < {END} "
        "ORDER BY uid, timestamp, file_row_number"
    )
    held: list[Listens] = []
    with _errors_explained(file):
        for batch in connection.sql(query).to_arrow_reader(CHUNK_EVENTS):
            read = Listens(*(column.to_numpy(zero_copy_only=False) for column in batch.columns))
            # The last user goes on in the next batch.
            begun = int(np.searchsorted(read.uid, read.uid[-1]))
            if begun or (held and held[-1].uid[-1] != read.uid[0]):
                yield joined([*held, Listens(*(column[:begun] for column in read))])
                held = []
            held.append(Listens(*(column[begun:] for column in read)))
    if held:
        yield joined(held)
