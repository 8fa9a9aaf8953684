"""Events of listeners, in memory."""

from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np

DAY = 86_400
CHUNK_EVENTS = 1 << 20
ITEMS = ("item_id", "artist_id", "album_id")
POOLS = {1: "listens of at least half", 2: "likes", 4: "other listens"}
"""Actions of events by their bits; other events have 0."""


class Sizes(NamedTuple):
    items: int
    artists: int
    albums: int
    users: int
    crosses: tuple[int, ...]

    @classmethod
    def of(cls, rows: Sequence[int]) -> Self:
        items, artists, albums, users, *crosses = rows
        return cls(items, artists, albums, users, tuple(crosses))


class Listens(NamedTuple):
    """Events of whole users, each user's oldest first."""

    uid: np.ndarray
    time: np.ndarray  # seconds
    item: np.ndarray
    action: np.ndarray  # of POOLS, or 0
    is_listen: np.ndarray
    is_organic: np.ndarray


def joined(parts: Sequence[Listens]) -> Listens:
    return Listens(*map(np.concatenate, zip(*parts, strict=True)))


class ItemMaps(NamedTuple):
    artists: np.ndarray
    albums: np.ndarray

    def of(self, items: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return items, self.artists[items], self.albums[items]
