"""Rows for raw keys, against a plain dictionary: admission, eviction, taking back, and states in between."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from configs.schema import DynamicConfig, Evict
from dataloading.dataset.source import Keys
from dataloading.keys import key_map
from dataloading.keys.batch_keys import BatchKeys
from dataloading.keys.hash_index import (
    DRAWN,
    cell_of,
    cells_for,
    fill,
    last_batches,
    look_up,
    place_of,
    remove,
)
from dataloading.keys.key_map import KeyMap
from tests.dataloading.keys.reference import ReferenceMap

POLICIES = [
    (1, Evict.age, 64),
    (1, Evict.count, 64),
    (3, Evict.age, 20),
    (2, Evict.count, 100),
    (2, Evict.never, 4000),
]


def drifting(rng, batch: int, size: int) -> np.ndarray:
    """Skewed keys whose frequent ones change over time; some are missing (0)."""
    ranks = (rng.pareto(0.8, size) * 4).astype(np.int64) % 300
    keys = (ranks + batch // 4) * 0x9E3779B97F4A7C1 - 2**60
    keys[rng.random(size) < 0.05] = 0
    return keys


@pytest.mark.parametrize("num_helpers", [0, 1])
@pytest.mark.parametrize(("admit_after", "evict", "capacity"), POLICIES)
def test_it_equals_a_dictionary_over_many_batches(
    admit_after, evict, capacity, num_helpers, monkeypatch
):
    monkeypatch.setattr(key_map, "SHARED_ROWS", 0)
    monkeypatch.setattr(key_map, "LEAST_HALF", 1)
    helpers = ThreadPoolExecutor(num_helpers) if num_helpers else None
    policy = DynamicConfig(admit_after=admit_after, evict=evict)
    rng = np.random.default_rng(0)
    own = KeyMap("t", capacity, policy, helpers)
    reference = ReferenceMap(capacity, policy)
    num_evicted = 0
    for batch in range(1, 301):
        keys = drifting(rng, batch, int(rng.integers(1, 33)))
        # Two features share the table.
        cut = len(keys) // 2
        # The first feature's keys are parts of a column, and the second one's first key is another rank's.
        apart = np.insert(keys[:cut], cut // 2, [7, 7, 7])
        runs = np.array([[0, cut // 2], [cut // 2 + 3, cut + 3]])
        first = BatchKeys(Keys(apart, runs, None), np.empty(cut, np.int32))
        second = BatchKeys(Keys.of(keys[cut:]), np.empty(len(keys) - cut - 1, np.int32), 1)
        change = own.map([first, second], batch)
        wanted = reference.map(keys.tolist(), batch)
        assert first.rows.tolist() == wanted[:cut]
        assert second.rows.tolist() == wanted[cut + 1 :]
        num_evicted += np.count_nonzero(change.rows.old_keys)
        if batch % 50 == 0:
            # A state is enough to continue.
            state = own.state(batch)
            own = KeyMap("t", capacity, policy, helpers)
            assert own.load(state) == batch
    assert (own._helpers is not None) == (num_helpers > 0 and evict is not Evict.count)
    assert (num_evicted > 60) == (evict is not Evict.never)
    assert max(reference.rows.slots.values()) < capacity


@pytest.mark.parametrize(("admit_after", "evict", "capacity"), POLICIES[:4])
def test_states_and_rows_before_pending_batches_are_those_of_then(admit_after, evict, capacity):
    policy = DynamicConfig(admit_after=admit_after, evict=evict)
    rng = np.random.default_rng(1)
    own = KeyMap("t", capacity, policy)
    for batch in range(1, 120):
        own.map([BatchKeys.alone(drifting(rng, batch, 24))], batch)
    then = own.state(119)
    asked = np.concatenate([drifting(rng, batch, 200) for batch in (100, 119, 125)])
    rows = own.look_up(asked)
    pending = [
        own.map([BatchKeys.alone(drifting(rng, batch, 24))], batch) for batch in range(120, 126)
    ]
    assert any(np.count_nonzero(change.rows.old_keys) for change in pending)
    assert (own.look_up(asked) != rows).any()
    assert (own.look_up(asked, pending) == rows).all()
    before = own.state(119, pending)
    assert before.keys() == then.keys()
    assert all((before[name] == then[name]).all() for name in then)


def test_a_full_table_names_its_policy():
    few = np.arange(1, 8, dtype=np.int64)
    kept = KeyMap("user", 8, DynamicConfig(evict=Evict.never))
    kept.map([BatchKeys.alone(few)], 1)
    with pytest.raises(ValueError, match=r"table 'user' of 8 rows is full: .*evict=never"):
        kept.map([BatchKeys.alone(few + 100)], 2)
    aged = KeyMap("user", 8, DynamicConfig())
    with pytest.raises(ValueError, match=r"evict=age has evicted all keys that batch 1 does not"):
        aged.map([BatchKeys.alone(np.arange(1, 10, dtype=np.int64))], 1)


def test_removed_keys_leave_no_hole_in_the_index():
    rng = np.random.default_rng(2)
    keys = np.concatenate([[0], rng.integers(-(2**63), 2**63, 20, dtype=np.int64)])
    for left in range(1, 21):
        cells, entries = cells_for(1)  # As few cells as there are, so that probes are long.
        last = np.arange(15, dtype=np.int32)
        fill(cells, entries, keys[:15], last, DRAWN)
        gone = keys[1:15][rng.permutation(14)[: min(left, 14)]]
        for key in gone:
            remove(cells, entries, cell_of(cells, entries, key, place_of(key, 15, DRAWN)), DRAWN)
        slots = np.empty(15, np.int32)
        look_up(cells, entries, keys[:15], slots, DRAWN)
        expected = np.where(np.isin(keys[:15], gone), 0, np.arange(15))
        assert slots[1:].tolist() == expected[1:].tolist()
        kept = np.full(15, -1, np.int32)
        last_batches(entries, kept)
        assert kept.tolist() == np.where(expected > 0, expected, -1).tolist()


def test_keys_of_a_run_that_counted_no_sightings_begin_with_those_of_their_admission():
    aged = KeyMap("t", 8, DynamicConfig(admit_after=2))
    for batch in (1, 2, 3):
        aged.map([BatchKeys.alone(np.arange(1, 6, dtype=np.int64))], batch)
    counted = KeyMap("t", 8, DynamicConfig(admit_after=2, evict=Evict.count))
    counted.load(aged.state(3))
    assert counted.state(3)["facts"].tolist() == [[0, 0], *[[2, 3]] * 5, [0, 0], [0, 0]]
