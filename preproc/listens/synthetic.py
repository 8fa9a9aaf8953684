"""A log of listens of any size in the form of Yambda's, with its lengths, pools and repeats, and a teacher of its labels.

A user's n-th event is an earlier item again, another item of an earlier artist, or one of an artist by popularity. A user likes
the artists that a hash of both chooses, and mostly plays their items for at least half.
"""

from collections.abc import Iterator

import numpy as np

from configs.preproc_schema import YambdaConfig
from dataloading.randomness import power_law, stream_key, uniform
from preproc.listens.events import CHUNK_EVENTS, DAY, ItemMaps, Listens, Sizes, joined

SIGMA = 1.067
"""Of the lognormal lengths, whose mean is 1.77 times the median, as Yambda's."""
LONGEST = 5.824
"""Longest log of a user, times the mean."""
REPEATED, SAME_ARTIST = 0.5, 0.44
SESSION_END = 0.03
EXPONENT = 0.9
"""Of the popularity of artists."""
LIKES, OTHERS = 0.019, 0.009
ORGANIC = 0.52
LIKED_ARTISTS = 0.63
PLAYED = {True: 0.85, False: 0.25}
"""Chance that an item of a liked artist, or another, is played for at least half."""
SCATTER = 1_000_003
"""A prime; popular ids lie apart."""


def synthetic_listens(config: YambdaConfig, sizes: Sizes, seed: int) -> Iterator[Listens]:
    held: list[Listens] = []
    for uid in range(1, config.users + 1):
        held.append(_listens_of(uid, config.mean_events, sizes, seed))
        if sum(len(of.uid) for of in held) >= CHUNK_EVENTS or uid == config.users:
            yield joined(held)
            held = []


def synthetic_maps(sizes: Sizes) -> ItemMaps:
    items = np.arange(sizes.items)
    return ItemMaps(items * sizes.artists // sizes.items, items * sizes.albums // sizes.items)


def _listens_of(uid: int, mean_events: float, sizes: Sizes, seed: int) -> Listens:
    draw = np.random.Generator(np.random.PCG64([seed, uid]))
    length = mean_events * np.exp(SIGMA * draw.standard_normal() - SIGMA**2 / 2)
    number = np.arange(max(int(min(length, LONGEST * mean_events)), 1))
    count = len(number)

    short = draw.integers(60, 300, count)
    pauses = draw.exponential(size=count) * (draw.random(count) < SESSION_END)
    room = max(300 * DAY - short.sum(), 0)
    time = np.cumsum(short + pauses * room / max(pauses.sum(), 1e-9)).astype(np.int64) // 5 * 5

    kind = draw.random(count)
    earlier = number - np.exp(draw.random(count) * np.log(np.maximum(number, 1))).astype(int)
    earlier = np.maximum(earlier, 0)
    of_item = _first(np.where(kind < REPEATED, earlier, number))
    of_artist = _first(np.where(kind < REPEATED + SAME_ARTIST, earlier, number))
    popular = power_law(draw.random(count), sizes.artists, EXPONENT).astype(np.int64)
    artist = (popular * SCATTER % sizes.artists)[of_artist]
    first, stop = (-(-of * sizes.items // sizes.artists) for of in (artist, artist + 1))
    item = (first + (draw.random(count) * (stop - first)).astype(np.int64))[of_item]

    likes = uniform(stream_key(seed, "taste"), (artist + (uid << 32)).astype(np.uint64))
    chance = np.where(likes < LIKED_ARTISTS, PLAYED[True], PLAYED[False])
    action = np.where(draw.random(count) < chance, 1, 4)
    kind = draw.random(count)
    is_listen = kind >= LIKES + OTHERS
    action = np.where(is_listen, action, np.where(kind < LIKES, 2, 0))
    is_organic = draw.random(count) < ORGANIC
    return Listens(np.full(count, uid), time, item, action, is_listen, is_organic)


def _first(earlier: np.ndarray) -> np.ndarray:
    """Follow each number to an earlier one, until one is its own."""
    while ((after := earlier[earlier]) != earlier).any():
        earlier = after
    return earlier
