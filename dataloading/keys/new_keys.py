"""Keys of a batch that have no row: a job for each table, and memory for what jobs write."""

from dataclasses import dataclass

import numpy as np

from dataloading.keys.kernels.layouts import Job, Kind
from dataloading.keys.key_table import Leaving, TableChange


@dataclass(frozen=True, slots=True)
class Changed:
    """Memory for the slots that get keys, job after job."""

    slots: np.ndarray  # int64 [n]
    keys: np.ndarray  # of them, int64 [n]
    old_keys: np.ndarray  # before, int64 [n]
    old_facts: np.ndarray  # likewise, int32 [n, 2]

    @classmethod
    def empty(cls, count: int) -> "Changed":
        """Return memory for so many."""
        slots, keys, old_keys = (np.empty(count, np.int64) for _ in range(3))
        return cls(slots, keys, old_keys, np.empty((count, 2), np.int32))

    def arrays(self) -> tuple[np.ndarray, ...]:
        """Return the arrays in the order of `insert_keys`."""
        return self.slots, self.keys, self.old_keys, self.old_facts

    def change(self, first: int, count: int, used: int, leaving: Leaving) -> TableChange:
        """Return what a job has changed, in the same memory."""
        own = slice(first, first + count)
        slots, keys, old_keys, old_facts = (array[own] for array in self.arrays())
        return TableChange(slots, keys, old_keys, old_facts, used, leaving)


@dataclass(frozen=True, slots=True)
class NewKeys:
    """Memory for keys without rows, job after job."""

    keys: np.ndarray  # to insert, int64 [n]
    times: np.ndarray  # their sightings, int64 [n]
    key_slots: np.ndarray  # their slots, int64 [n]
    candidates_seen: np.ndarray  # as `seen` of `BatchChange`
    candidates: Changed  # those that are new
    rows: Changed  # those that change

    @classmethod
    def empty(cls, count: int) -> "NewKeys":
        """Return memory for so many."""
        keys, times, key_slots = (np.empty(count, np.int64) for _ in range(3))
        seen = np.empty((count, 3), np.int32)
        return cls(keys, times, key_slots, seen, *(Changed.empty(count) for _ in Kind))

    def arrays(self) -> tuple[np.ndarray, ...]:
        """Return the arrays in the order of `do_jobs`."""
        changed = *self.candidates.arrays(), *self.rows.arrays()
        return self.keys, self.times, self.key_slots, self.candidates_seen, *changed


def jobs_of(table_of: np.ndarray, missing: np.ndarray) -> np.ndarray:
    """Return the jobs of tables with keys without rows, int64 [jobs, Job]."""
    if not missing.any():
        return np.zeros((0, len(Job)), np.int64)
    tables, first = np.unique(table_of, return_index=True)
    counts = np.add.reduceat(missing, first)
    jobs = np.zeros((len(tables), len(Job)), np.int64)
    jobs[:, Job.TABLE], jobs[:, Job.FIRST_PART], jobs[:, Job.KEYS] = tables, first, counts
    jobs[:, Job.LAST_PART] = [*first[1:], len(table_of)]
    jobs[:, Job.OFFSET] = np.cumsum(counts) - counts
    return jobs[counts > 0]
