"""Keys of a batch that have no row: a job for each table, and memory for what jobs write."""

from dataclasses import dataclass

import numpy as np

from dataloading.keys.kernels.layouts import Job, Kind
from dataloading.keys.key_table import Leaving, TableChange

Arrays = tuple[np.ndarray, ...]


@dataclass(frozen=True, slots=True)
class NewKeys:
    """Memory for keys without rows, job after job."""

    keys: np.ndarray  # to insert, int64 [n]
    times: np.ndarray  # their sightings, int64 [n]
    key_slots: np.ndarray  # their slots, int64 [n]
    candidates_seen: np.ndarray  # as `seen` of `BatchChange`
    # slots that get keys, these keys and those before, int64 [n], and the facts before, int32 [n, 2]: of candidates that are
    # new, and of rows
    candidates: Arrays
    rows: Arrays

    @classmethod
    def empty(cls, count: int) -> "NewKeys":
        def numbers() -> Arrays:
            return tuple(np.empty(count, np.int64) for _ in range(3))

        facts = (np.empty((count, 2), np.int32) for _ in Kind)
        candidates, rows = ((*numbers(), before) for before in facts)
        keys, times, key_slots = numbers()
        seen = np.empty((count, 3), np.int32)
        return cls(keys, times, key_slots, seen, candidates, rows)

    def arrays(self) -> Arrays:
        """Return the arrays in the order of `do_jobs`."""
        changed = *self.candidates, *self.rows
        return self.keys, self.times, self.key_slots, self.candidates_seen, *changed


def change_of(changed: Arrays, first: int, count: int, used: int, leaving: Leaving) -> TableChange:
    slots, keys, old_keys, old_facts = (array[first : first + count] for array in changed)
    return TableChange(slots, keys, old_keys, old_facts, used, leaving)


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
