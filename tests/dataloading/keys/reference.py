"""The same map in plain Python, without an index, marks in arrays, or a way back."""

import numpy as np

from configs.schema import DynamicConfig, Evict
from dataloading.dataset.source import Keys
from dataloading.keys.batch_keys import BatchKeys


def keys_of_a_rank(keys: np.ndarray) -> BatchKeys:
    """Return int64 keys [K] of a single rank, with memory for rows of their own."""
    return BatchKeys(Keys.of(keys), np.empty(len(keys), np.int32))


class ReferenceTable:
    """Slots of keys in a dictionary."""

    def __init__(self, capacity: int, evict: Evict) -> None:
        self.capacity, self.evict = capacity, evict
        self.slots: dict[int, int] = {}
        self.keys: dict[int, int] = {}  # of the slots
        self.facts: dict[int, list[int]] = {}  # slot -> [sightings, last batch]
        self.marks: list[int] = []
        self.marked_in = 0
        self.used = 1

    def see(self, key: int, batch: int) -> bool:
        if key not in self.slots:
            return False
        facts = self.facts[self.slots[key]]
        facts[0] += 1
        facts[1] = batch
        return True

    def insert(self, key: int, count: int, batch: int) -> bool:
        if key in self.slots:
            self.facts[self.slots[key]][0] += count
            return True
        slot = self.used
        if slot >= self.capacity:
            victim = self._next_victim(batch)
            if victim is None:
                return False
            slot = victim
            self.slots.pop(self.keys[slot], None)
        self.used = max(self.used, slot + 1)
        self.slots[key], self.keys[slot] = slot, key
        self.facts[slot] = [count, batch]
        return True

    def remove(self, key: int) -> None:
        """Take a key out; its slot is used again before that of any key."""
        slot = self.slots.pop(key)
        self.keys[slot], self.facts[slot] = 0, [0, 0]

    def _next_victim(self, batch: int) -> int | None:
        while True:
            while self.marks:
                slot = self.marks.pop(0)
                if self.keys[slot] == 0 or self.facts[slot][1] < self.marked_in:
                    return slot
            limit = 1 if self.evict is Evict.never else batch
            old = [slot for slot in self.keys if self.facts[slot][1] < limit]
            if not old:
                return None
            count, age = 0, 1
            order = [age] if self.evict is Evict.age else [count, age]
            old.sort(key=lambda slot: [*(self.facts[slot][fact] for fact in order), slot])
            self.marks, self.marked_in = old[: max(1, self.capacity // 16)], batch


class ReferenceMap:
    """Rows of keys: one list of keys per batch."""

    def __init__(self, capacity: int, policy: DynamicConfig) -> None:
        self.policy = policy
        self.rows = ReferenceTable(capacity, policy.evict)
        self.candidates = ReferenceTable(capacity, Evict.age)

    def map(self, keys: list[int], batch: int) -> list[int] | None:
        """Return the rows of the keys; None if the table is exhausted."""
        missing = [key for key in keys if key and not self.rows.see(key, batch)]
        for key, count in self._admitted(missing, batch):
            if not self.rows.insert(key, count, batch):
                return None
        return self.look_up(keys)

    def look_up(self, keys: list[int]) -> list[int]:
        return [self.rows.slots.get(key, 0) for key in keys]

    def _admitted(self, missing: list[int], batch: int) -> list[tuple[int, int]]:
        if self.policy.admit_after == 1:
            return [(key, 1) for key in missing]
        new = [key for key in missing if not self.candidates.see(key, batch)]
        for key in new:
            if not self.candidates.insert(key, 1, batch):
                break
        due = []
        for key in dict.fromkeys(missing):
            if key in self.candidates.slots:
                facts = self.candidates.facts[self.candidates.slots[key]]
                if facts[0] >= self.policy.admit_after:
                    due.append((key, facts[0]))
                    facts[0] = 0
        return due
