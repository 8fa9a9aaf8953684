"""Rows of MLPerf's dlrm_v4 among events: the listens with enough earlier events of their user, by windows in time.

Windows of a day begin with the first row. The rows of a window are user by user, in the order of the log.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from preproc.listens.events import DAY, ITEMS, ItemMaps, Listens, Sizes
from preproc.listens.xxh64 import xxh64

SCAN = 20_000
"""Latest events of its user in which a row sees some."""
CHUNK_ROWS = 1 << 18
CROSSES = {
    "user_x_artist": ("uid", "artist_id"),
    "user_x_album": ("uid", "album_id"),
    "item_x_hour": ("item_id", "hour"),
    "user_x_artist_x_hour": ("uid", "artist_id", "hour"),
    "artist_x_hour": ("artist_id", "hour"),
    "user_x_hour": ("uid", "hour"),
    "user_x_is_organic": ("uid", "is_organic"),
}
ROW = np.dtype(
    [
        ("slice", "<i8", 2),
        *((name, "<i8") for name in ("time", "query", "uid", "item_id")),
        *((name, "i1") for name in ("is_organic", "label")),
    ]
)


def rows_of(events: Listens, position: int, history: int) -> np.ndarray:
    """Return the rows among the events, the first of which is event `position` of the log."""
    number = np.arange(len(events.uid))
    first = np.maximum.accumulate(np.where(np.diff(events.uid, prepend=-1) != 0, number, 0))
    last_seen = np.maximum.accumulate(np.where(events.action > 0, number, -1))
    at = np.flatnonzero(events.is_listen & (number - first >= history))
    before = last_seen[at - 1]
    rows = np.empty(len(at), ROW)
    rows["slice"] = position + np.stack([np.maximum(first[at], at - SCAN), at], axis=1)
    rows["time"], rows["uid"], rows["item_id"] = events.time[at], events.uid[at], events.item[at]
    rows["query"] = np.where(before >= first[at], events.time[before], events.time[at])
    rows["is_organic"], rows["label"] = events.is_organic[at], events.action[at] == 1
    return rows


def parts_of(path: Path) -> Iterator[np.ndarray]:
    with path.open("rb") as stream:
        while len(part := np.fromfile(stream, ROW, CHUNK_ROWS)):
            yield part


def split_windows(path: Path, work: Path) -> list[Path]:
    """Return files of the rows of each window that has some, in time; rows keep their order.

    Raises ValueError: fewer than two windows have rows.
    """
    first = min((int(part["time"].min()) for part in parts_of(path)), default=0)
    windows = set()
    for part in parts_of(path):
        of_row = (part["time"] - first) // DAY
        for number in np.unique(of_row):
            with (work / f"window_{number}").open("ab") as stream:
                part[of_row == number].tofile(stream)
            windows.add(int(number))
    if len(windows) < 2:
        raise ValueError(
            f"listens with yambda.history earlier events of their user are of {len(windows)} windows of a day; want 2 or more, "
            "the last one to evaluate on: lower yambda.history, or take a longer log"
        )
    return [work / f"window_{number}" for number in sorted(windows)]


def columns_of(rows: np.ndarray, maps: ItemMaps, sizes: Sizes) -> dict[str, Any]:
    """Return the columns of rows as `SplitWriter.append` takes them."""
    ids = dict(zip(ITEMS, maps.of(rows["item_id"]), strict=True)) | {"uid": rows["uid"]}
    keys = {**ids, "is_organic": rows["is_organic"], "hour": rows["time"] // 3600 % 24}
    for (name, of), count in zip(CROSSES.items(), sizes.crosses, strict=True):
        ids[name] = (xxh64([keys[key] for key in of]) % np.uint64(count)).astype(np.int64)
    return {
        # The time of the query is that of the last event that the row sees, as in the reference.
        "numerical": rows["query"][:, None] / 3600,
        "labels": rows["label"],
        "ids": ids,
        "slices": {"history": rows["slice"]},
        # Its second ends then: events of the same second that stand before it in the log are seen.
        "moments": {"history": rows["time"] + 1},
    }
