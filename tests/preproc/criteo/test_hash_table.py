"""Counts and look-ups in hash tables, compared with Python dictionaries."""

from collections import Counter as Counts

import numpy as np
import pytest

from preproc.criteo import hash_table as hashing
from preproc.criteo.hash_table import Counter, FirstSeen, Lookup
from preproc.criteo.tokenizer import MISSING, NON_HEX


def some_codes(kind: str) -> np.ndarray:
    """Return distinct codes in random order."""
    draw = np.random.default_rng(0)
    codes = {
        "random": np.unique(draw.integers(0, NON_HEX, 5000).astype(np.uint32)),
        "dense": np.arange(3000, dtype=np.uint32),
        "strided": np.arange(3000, dtype=np.uint32) * np.uint32(1 << 20),
        "ends": np.array([0, 1, NON_HEX - 1], np.uint32),
        "none": np.empty(0, np.uint32),
    }[kind]
    return draw.permutation(np.unique(codes))


@pytest.mark.parametrize("kind", ["random", "dense", "strided", "ends", "none"])
def test_a_lookup_is_a_dictionary(kind):
    codes = some_codes(kind)
    known = codes[: len(codes) // 2]
    wanted = dict(zip(known.tolist(), range(1, len(known) + 1), strict=True))
    lookup, ids = Lookup(len(known)), np.arange(1, len(known) + 1, dtype=np.int32)
    for start in range(0, len(known), 999):
        lookup.add(known[start : start + 999], ids[start : start + 999])
    asked = np.concatenate(
        [codes, codes, np.array([0, 1, NON_HEX - 1, NON_HEX, MISSING], np.uint32)]
    )
    ids = np.zeros(len(asked), np.int16)
    lookup(asked, ids)
    assert ids.tolist() == [wanted.get(code, 0) for code in asked.tolist()]


def test_a_lookup_leaves_ids_that_it_does_not_know():
    ids = np.array([7, 7, 7], np.int32)
    lookup = Lookup(1)
    lookup.add(np.array([5], np.uint32), np.array([1]))
    lookup(np.array([4, 5, MISSING], np.uint32), ids)
    assert ids.tolist() == [7, 1, 0]


@pytest.mark.parametrize("most_entries", [1, 3, 100, 2048, 1 << 20])
@pytest.mark.parametrize("kind", ["random", "strided", "none"])
def test_a_counter_counts_however_often_it_is_full(kind, most_entries, monkeypatch):
    monkeypatch.setattr(hashing, "FIRST_SLOTS", 16)
    monkeypatch.setattr(hashing, "PART_SLOTS", 7)
    codes = np.repeat(some_codes(kind), 2)[:5000]
    codes = np.concatenate([codes, codes[::3], np.array([MISSING, MISSING], np.uint32)])
    counter, parts = Counter(most_entries), []
    for start in range(0, len(codes), 999):
        parts += counter.add(codes[start : start + 999])
    parts += counter.take()
    assert not counter.has_non_hex
    counted = Counts()
    for values, counts in parts:
        assert len(values) <= most_entries
        counted.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
    assert counted == Counts(codes[codes < NON_HEX].tolist())


def test_a_count_that_would_overflow_restarts(monkeypatch):
    monkeypatch.setattr(hashing, "MOST_COUNTED", 10)
    counter = Counter(100)
    five = np.full(5, 3, np.uint32)
    assert [list(counter.add(five)) for _ in range(2)] == [[], []]
    [(values, counts)] = counter.add(five)
    assert (values.tolist(), counts.tolist()) == ([3], [10])
    [(values, counts)] = counter.take()
    assert (values.tolist(), counts.tolist()) == ([3], [5])


def test_codes_behind_a_full_table_are_counted_for_the_next_one(monkeypatch):
    monkeypatch.setattr(hashing, "MOST_COUNTED", 10)
    counter = Counter(1)
    [(values, counts)] = counter.add(np.array([1, 2, 2, 2, 2], np.uint32))
    assert (values.tolist(), counts.tolist()) == ([1], [1])
    [(values, counts)] = counter.add(np.full(7, 2, np.uint32))
    assert (values.tolist(), counts.tolist()) == ([2], [4])


def test_texts_without_a_code_are_noticed():
    counter = Counter(10)
    list(counter.add(np.array([1, NON_HEX, MISSING, NON_HEX], np.uint32)))
    [(values, counts)] = counter.take()
    assert counter.has_non_hex
    assert (values.tolist(), counts.tolist()) == ([1], [1])


@pytest.mark.parametrize("kind", ["random", "strided", "ends", "none"])
def test_first_seen_numbers_codes_in_their_order_however_often_it_grows(kind, monkeypatch):
    monkeypatch.setattr(hashing, "FIRST_SLOTS", 16)
    codes = some_codes(kind)
    codes = np.concatenate([codes, codes[::3], np.array([MISSING, NON_HEX, MISSING], np.uint32)])
    numbers: dict[int, int] = {}
    wanted = [numbers.setdefault(code, len(numbers) + 2) for code in codes.tolist()]
    first_seen = FirstSeen(2)
    found = [
        number
        for start in range(0, len(codes), 999)
        for number in first_seen(codes[start : start + 999]).tolist()
    ]
    assert found == wanted
    assert first_seen.num_codes == len(numbers)
