"""Rows for raw keys, against a plain dictionary: admission, eviction, taking back, and states in between."""

from collections.abc import Sequence

import numpy as np
import pytest

from configs.schema import DynamicConfig, Evict
from dataloading.dataset.source import Keys
from dataloading.keys import batch_mapper, shares
from dataloading.keys.batch_keys import BatchKeys
from dataloading.keys.batch_mapper import BatchMapper
from dataloading.keys.described_keys import described
from dataloading.keys.kernels.hash_index import (
    DRAWN,
    cell_of,
    cells_for,
    fill,
    home_cell,
    last_batches,
    look_up,
    remove,
)
from dataloading.keys.kernels.layouts import Field
from dataloading.keys.kernels.mark_kernels import mark
from dataloading.keys.kernels.table_kernels import SMALL_CELLS
from dataloading.keys.key_map import KeyMap, MapChange
from dataloading.keys.key_table import LAST, KeyTable, Leaving, TableState
from tests.dataloading.keys.reference import ReferenceMap, keys_of_a_rank

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


class AloneMap(KeyMap):
    """A map whose keys alone are mapped."""

    def __init__(self, capacity: int, policy: DynamicConfig, workers: int = 1) -> None:
        super().__init__("user", capacity, policy)
        self._mapper = BatchMapper([self], policy, workers)

    def map(self, columns: list[BatchKeys], batch: int) -> MapChange:
        change = self._mapper.map(described({0: columns}), batch)
        self.left_out = change.left_out.get(0, np.zeros(0)).tolist()
        return change.of(0)

    def look_up(self, keys: np.ndarray, pending: Sequence[MapChange] = ()) -> np.ndarray:
        column = keys_of_a_rank(keys)
        self._mapper.look_up(described({0: [column]}))
        self.before(keys, column.rows, pending)
        return column.rows


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("admit_after", "evict", "capacity"), POLICIES)
def test_it_equals_a_dictionary_over_many_batches(
    admit_after, evict, capacity, workers, monkeypatch
):
    # Threads take parts of few keys.
    monkeypatch.setattr(shares, "MIN_KEYS", 3)
    monkeypatch.setattr(batch_mapper, "SHARED_KEYS", 8)
    policy = DynamicConfig(admit_after=admit_after, evict=evict)
    rng = np.random.default_rng(0)
    own = AloneMap(capacity, policy, workers)
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
        if change.rows is not None:
            num_evicted += np.count_nonzero(change.rows.old_keys)
        if batch % 50 == 0:
            # A state is enough to continue.
            state = own.state(batch)
            own = AloneMap(capacity, policy, workers)
            assert own.load(state) == batch
    assert (num_evicted > 60) == (evict is not Evict.never)
    assert max(reference.rows.slots.values()) < capacity


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("evict", Evict)
@pytest.mark.parametrize("age", [5, 24])
def test_keys_that_no_batch_had_leave_and_pending_batches_are_taken_back(age, evict, workers):
    policy = DynamicConfig(admit_after=2, evict=evict, expire_after=age)
    rng = np.random.default_rng(0)
    own, reference = AloneMap(100, policy, workers), ReferenceMap(100, policy)
    pending: list[MapChange] = []
    then, num_expired, asked = own.state(0), 0, drifting(rng, 150, 400)
    rows_then = own.look_up(asked)
    for batch in range(1, 201):
        keys = drifting(rng, batch, 16)
        if len(reference.rows.slots) > 80:  # no table is full for long
            keys = rng.choice([*reference.rows.slots], 16)
        column = keys_of_a_rank(keys)
        pending.append(own.map([column], batch))
        assert column.rows.tolist() == reference.map(keys.tolist(), batch)
        if batch % -(-age // 8) == 0:
            for table in (reference.rows, reference.candidates):
                old = [k for k, slot in table.slots.items() if table.facts[slot][1] <= batch - age]
                num_expired += len(old)
                for key in old:
                    table.remove(key)
        held = {key: slot for slot, key in enumerate(own.state(batch)["keys"].tolist()) if key}
        assert held == reference.rows.slots
        assert (own.look_up(asked, pending) == rows_then).all()
        if batch % 10 == 0:
            before = own.state(then["progress"][0], pending)
            assert all((before[name] == then[name]).all() for name in then)
            then, rows_then = own.state(batch), own.look_up(asked)
            pending = []
            own = AloneMap(100, policy, workers)
            own.load(then)
    assert num_expired > 50


@pytest.mark.parametrize("evict", Evict)
def test_rows_whose_key_was_removed_from_a_state_are_used_again(evict):
    policy = DynamicConfig(admit_after=2, evict=evict)
    rng = np.random.default_rng(0)
    own, reference = AloneMap(200, policy), ReferenceMap(200, policy)
    for batch in range(1, 201):
        keys = drifting(rng, batch, 24)
        if evict is Evict.never and len(reference.rows.slots) > 150:
            keys = rng.choice([*reference.rows.slots], 24)
        column = keys_of_a_rank(keys)
        own.map([column], batch)
        assert column.rows.tolist() == reference.map(keys.tolist(), batch)
        if batch % 20 == 0:
            state = own.state(batch)
            for prefix, table in (("", reference.rows), ("candidate_", reference.candidates)):
                held = state[f"{prefix}keys"]
                gone = np.flatnonzero(held)[rng.random(np.count_nonzero(held)) < 0.4]
                for key in held[gone].tolist():
                    table.remove(key)
                held[gone] = state[f"{prefix}facts"][gone] = 0
            own = AloneMap(200, policy)
            own.load(state)
    assert reference.rows.used == 200
    assert 0 in reference.rows.keys.values() or evict is not Evict.never


@pytest.mark.parametrize(
    ("admit_after", "evict"), [(1, Evict.age), (1, Evict.count), (2, Evict.age)]
)
def test_a_table_whose_index_is_large_equals_a_dictionary(admit_after, evict):
    policy = DynamicConfig(admit_after=admit_after, evict=evict)
    rng = np.random.default_rng(0)
    own, reference = AloneMap(6000, policy), ReferenceMap(6000, policy)
    assert own.rows.fields[Field.NUM_CELLS] > SMALL_CELLS
    num_evicted = 0
    for batch in range(1, 26):
        keys = (rng.pareto(0.3, 4000) * 50).astype(np.int64) % 20_000 + 100 * batch
        column = keys_of_a_rank(keys)
        change = own.map([column], batch)
        assert column.rows.tolist() == reference.map(keys.tolist(), batch)
        facts = own.rows.state().facts
        last = {slot: facts[1] for slot, facts in reference.rows.facts.items()}
        assert facts[[*last], LAST].tolist() == [*last.values()]
        if change.rows is not None:
            num_evicted += np.count_nonzero(change.rows.old_keys)
    assert num_evicted > 1000


@pytest.mark.parametrize(("admit_after", "evict", "capacity"), POLICIES[:4])
def test_states_and_rows_before_pending_batches_are_those_of_then(admit_after, evict, capacity):
    policy = DynamicConfig(admit_after=admit_after, evict=evict)
    rng = np.random.default_rng(1)
    own = AloneMap(capacity, policy)
    for batch in range(1, 120):
        own.map([keys_of_a_rank(drifting(rng, batch, 24))], batch)
    then = own.state(119)
    asked = np.concatenate([drifting(rng, batch, 200) for batch in (100, 119, 125)])
    rows = own.look_up(asked)
    pending = [
        own.map([keys_of_a_rank(drifting(rng, batch, 24))], batch) for batch in range(120, 126)
    ]
    assert any(np.count_nonzero(change.rows.old_keys) for change in pending if change.rows)
    assert (own.look_up(asked) != rows).any()
    assert (own.look_up(asked, pending) == rows).all()
    before = own.state(119, pending)
    assert before.keys() == then.keys()
    assert all((before[name] == then[name]).all() for name in then)


def test_a_full_table_names_its_policy():
    few = np.arange(1, 8, dtype=np.int64)
    kept = AloneMap(8, DynamicConfig(evict=Evict.never))
    kept.map([keys_of_a_rank(few)], 1)
    assert kept.left_out == []
    kept.map([keys_of_a_rank(few + 100)], 2)
    assert kept.left_out == (few + 100).tolist()
    message = kept.is_full(few, 2)
    assert message.startswith("table 'user' of 8 rows is full: data.dynamic.evict=never keeps")
    aged = AloneMap(8, DynamicConfig())
    repeated = keys_of_a_rank(np.array([*range(1, 10), 3], np.int64))
    aged.map([repeated], 1)
    assert aged.left_out == [8, 9]
    assert repeated.rows.tolist() == [1, 2, 3, 4, 5, 6, 7, 0, 0, 3]
    assert "evict=age has evicted all keys that batch 1 does" in aged.is_full(few, 1)


@pytest.mark.parametrize("evict", [Evict.age, Evict.count])
def test_marks_are_those_of_a_sort(evict):
    rng = np.random.default_rng(3)
    capacity, most = 3000, 2**31 - 1
    for batch in (
        2,
        40,
        most,
    ):  # The first slots of a tie, sums of several digits, and all slots but some.
        counts = np.minimum(rng.pareto(0.2, capacity) + 1, most).astype(np.int32)
        last = rng.integers(1, batch, capacity, endpoint=batch == 2, dtype=np.int32)
        last[: 2900 if batch == 40 else 0] = batch
        table = KeyTable(capacity, evict, counts_sightings=evict is Evict.count)
        keys, last[0] = np.arange(capacity), batch
        state = TableState(
            keys, np.stack([counts, last], 1), capacity, Leaving(np.zeros(0, np.int64), 0, 0)
        )
        table.load(state)
        table.prepare(1)
        assert mark(table.fields, table._entries, table._counts, batch)
        eligible = np.flatnonzero(last < batch)
        order = [last[eligible]] if evict is Evict.age else [last[eligible], counts[eligible]]
        wanted = eligible[np.lexsort(order)][: capacity // 16]
        assert table.leaving.slots.tolist() == wanted.tolist()


def test_removed_keys_leave_no_hole_in_the_index():
    rng = np.random.default_rng(2)
    keys = np.concatenate([[0], rng.integers(-(2**63), 2**63, 20, dtype=np.int64)])
    for left in range(1, 21):
        cells, entries = cells_for(1)  # As few cells as there are, so that probes are long.
        last = np.arange(15, dtype=np.int32)
        fill(cells, entries, keys[:15], last, DRAWN)
        gone = keys[1:15][rng.permutation(14)[: min(left, 14)]]
        for key in gone:
            remove(cells, entries, cell_of(cells, entries, key, home_cell(key, 15, DRAWN)), DRAWN)
        slots = np.empty(15, np.int32)
        look_up(cells, entries, keys[:15], slots, DRAWN)
        expected = np.where(np.isin(keys[:15], gone), 0, np.arange(15))
        assert slots[1:].tolist() == expected[1:].tolist()
        kept = np.full(15, -1, np.int32)
        last_batches(entries, kept)
        assert kept[1:].tolist() == np.where(expected > 0, expected, -1)[1:].tolist()


def test_keys_of_a_run_that_counted_no_sightings_begin_with_those_of_their_admission():
    aged = AloneMap(8, DynamicConfig(admit_after=2))
    for batch in (1, 2, 3):
        aged.map([keys_of_a_rank(np.arange(1, 6, dtype=np.int64))], batch)
    counted = AloneMap(8, DynamicConfig(admit_after=2, evict=Evict.count))
    counted.load(aged.state(3))
    assert counted.state(3)["facts"].tolist() == [[0, 0], *[[2, 3]] * 5, [0, 0], [0, 0]]


def test_admitted_candidates_are_counted_from_0_after_a_resume():
    policy = DynamicConfig(admit_after=2)
    whole = AloneMap(2, policy)
    for batch, key in enumerate([5, 5, 6, 6], 1):
        whole.map([keys_of_a_rank(np.array([key]))], batch)
    resumed = AloneMap(2, policy)
    resumed.load(whole.state(4))
    # Key 5 has left its row, and one sighting does not bring it back.
    np.testing.assert_equal(resumed.state(4), whole.state(4))


def test_a_state_with_places_outside_a_table_is_refused():
    policy = DynamicConfig(admit_after=2)
    own = AloneMap(40, policy)
    for batch in range(1, 74):
        own.map([keys_of_a_rank(np.arange(batch, batch + 9) // 2 + 1)], batch)
    state = own.state(73)
    assert state["leaving"].any()
    for name, at, value in (
        ("progress", 1, 41),
        ("progress", 1, 0),
        ("keys", 0, 5),
        ("facts", (3, 1), -1),
        ("candidate_facts", (3, 0), -7),
        ("leaving", 0, 40),
        ("leaving", 0, -1),
        ("progress", 3, 2),
    ):
        hostile = {key: values.copy() for key, values in state.items()}
        hostile[name][at] = value
        with pytest.raises(ValueError, match="the stored keys of table 'user' are invalid"):
            AloneMap(40, policy).load(hostile)
    assert AloneMap(40, policy).load(state) == 73


def test_one_thread_counts_the_sightings_of_a_table():
    policy = DynamicConfig(evict=Evict.count)
    mapper = BatchMapper([KeyMap(name, 40, policy) for name in "ab"], policy, 1)
    mapper._workers = 2
    for tables in (
        (0, 0, 1),
        (0, 1, 1),
    ):  # The features have as many keys as before, but other tables.
        columns = {
            table: [keys_of_a_rank(np.arange(4)) for _ in range(tables.count(table))]
            for table in (0, 1)
        }
        shares_of_batch = mapper._shares_of(described(columns))
        own = np.split(shares_of_batch.order, shares_of_batch.starts[1:-1])
        threads = [{tables[column] for column in share.tolist()} for share in own]
        assert sorted(map(sorted, threads)) == [[0], [1]]
