"""Yambda's published Parquet files (huggingface.co/datasets/yandex/yambda, arXiv:2505.22238)."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from configs.preproc_schema import PreprocConfig
from preproc.listens.events import CHUNK_EVENTS, DAY, ItemMaps, Listens, joined
from preproc.work_directory import connect, memory_bytes

END = 26_000_000 - DAY - 1800
"""Second at which Yambda's training events end: its last one, less the day of its test and the gap before."""


def read_maps(source: Path, num_items: int) -> ItemMaps:
    """Return the artist and the album of each item, the last one that the file has; 0 without one."""
    maps = []
    for name in ("artist", "album"):
        columns = pq.read_table(source / f"{name}_item_mapping.parquet")
        items, of = (columns[column].to_numpy() for column in ("item_id", f"{name}_id"))
        found = np.zeros(num_items, np.int64)
        found[items[items < num_items]] = of[items < num_items]
        maps.append(found)
    return ItemMaps(*maps)


def read_listens(config: PreprocConfig, work: Path) -> Iterator[Listens]:
    """Yield the events of Yambda's multi_event.parquet up to `END`, sorted by user, time and place in the file."""
    path = str(Path(config.source) / config.yambda.events).replace("'", "''")
    connection = connect(config, work, memory_bytes(config))
    query = (
        "SELECT uid::BIGINT, timestamp::BIGINT, item_id::BIGINT, "
        "CASE event_type::VARCHAR WHEN 'like' THEN 2 WHEN 'listen' THEN "
        "CASE WHEN coalesce(played_ratio_pct, 0) >= 50 THEN 1 ELSE 4 END ELSE 0 END, "
        "event_type::VARCHAR = 'listen', is_organic::BOOLEAN "
        f"FROM read_parquet('{path}', file_row_number=true) WHERE timestamp < {END} "
        "ORDER BY uid, timestamp, file_row_number"
    )
    held: list[Listens] = []
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
