"""Mapping of the keys of a batch in all tables at once, by compiled calls that share them among threads.

Python's lock is taken a few times per batch, however many tables there are: beside a training step, a thread or a call for each
table waits for it longer than it computes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from configs.schema import DynamicConfig
from dataloading.keys.described_keys import DescribedKeys
from dataloading.keys.kernels.batch_kernels import do_jobs, see_parts, share_jobs
from dataloading.keys.kernels.compiled import num_threads, numba_threads
from dataloading.keys.kernels.hash_index import DRAWN
from dataloading.keys.kernels.layouts import NO_BATCH, Column, Field, Job, Kind, Part
from dataloading.keys.key_map import KeyMap, MapChange
from dataloading.keys.key_table import Leaving, TableChange
from dataloading.keys.new_keys import NewKeys, change_of, jobs_of
from dataloading.keys.rekeyed import TableFullError
from dataloading.keys.shares import Shares, TableSize, shares_of

SHARED_KEYS = 2048
"""Keys without rows from which threads share them; fewer take less time than to wake the threads."""

CHECKS = 8
"""Times that keys are looked at for their age within the steps after which they leave."""

BATCH, ERROR = "batch", "error"
"""Names in the message of a change; others are numbers of tables."""


@dataclass(frozen=True, slots=True)
class BatchChange:
    seen: np.ndarray  # memory of the slots that the parts of columns have seen, int32 [keys, 3]
    tables: np.ndarray  # of the parts, int64 [P]
    spans: np.ndarray  # half-open parts of `seen` that are used, int64 [P, 2]
    changed: dict[int, MapChange] = field(default_factory=dict)  # keys that tables got, by table
    # keys that find no row in a table that is full, by table, int64 [n]
    left_out: dict[int, np.ndarray] = field(default_factory=dict)
    batch: int = 0  # its number, if another rank has mapped it
    error: Exception | None = None  # that this rank raised

    def message(self, batch: int, error: Exception | None) -> dict[str, np.ndarray]:
        """Return what other ranks need of a batch: its number, the text of an error, and the rows that got other keys."""
        found = {str(table): of.rows for table, of in self.changed.items() if of.rows is not None}
        keys = {name: np.stack([of.slots, of.keys, of.old_keys]) for name, of in found.items()}
        return {BATCH: np.array(batch), ERROR: np.array(str(error or "")), **keys}

    @classmethod
    def of_message(cls, message: Mapping[str, np.ndarray]) -> "BatchChange":
        nothing = np.zeros((0, 2), np.int32), 0, Leaving(np.zeros(0, np.int64), 0, 0)
        changed = {
            int(name): MapChange([], TableChange(rows[0], rows[1], rows[2], *nothing))
            for name, rows in message.items()
            if name not in (BATCH, ERROR)
        }
        text = str(message[ERROR])
        error = TableFullError(text) if text else None
        no_tables, no_spans = np.zeros(0, np.int64), np.zeros((0, 2), np.int64)
        no_seen = np.zeros((0, 3), np.int32)
        return cls(no_seen, no_tables, no_spans, changed, {}, int(message[BATCH]), error)

    def of(self, table: int) -> MapChange:
        spans = self.spans[self.tables == table].tolist()
        changed = self.changed.get(table, MapChange([]))
        return replace(changed, seen=[self.seen[first:last] for first, last in spans])


class BatchMapper:
    def __init__(self, maps: Sequence[KeyMap], policy: DynamicConfig, workers: int) -> None:
        self._maps = maps
        self._policy = policy
        self.drawn = DRAWN  # of the process whose indexes are looked up
        self._workers = num_threads(workers)
        self._sizes = [TableSize(own.capacity, own.rows.counts_sightings) for own in maps]
        self._fields = np.zeros((len(maps), len(Kind), len(Field)), np.int64)
        for own, fields in zip(maps, self._fields, strict=True):
            own.rows.describe(fields[Kind.ROWS])
            own.candidates.describe(fields[Kind.CANDIDATES])
        self._shares: tuple[tuple[list[int], list[int]], Shares] | None = None
        self._missing = np.zeros((0, 2), np.int64)
        self._free: list[np.ndarray] = []

    def map(self, keys: DescribedKeys, batch: int) -> BatchChange:
        """Write the rows of the keys of a batch, whose numbers ascend from 1, and return what changed; see `KeyMap`."""
        seen = self._memory(keys.count)
        parts = self._see(keys, batch, seen)
        of_parts = keys.columns[parts[:, Part.COLUMN]]
        tables = of_parts[:, Column.TABLE]
        first = of_parts[:, Column.OFFSET] + parts[:, Part.BEGIN]
        change = BatchChange(seen, tables, np.stack([first, first + parts[:, Part.SEEN]], 1))
        jobs = jobs_of(tables, parts[:, Part.MISSING])
        if len(jobs):
            self._admit(keys, parts, jobs, batch, change)
        age = self._policy.expire_after
        if age is not None and batch % -(-age // CHECKS) == 0:
            # Keys that no batch since has had.
            for table, own in enumerate(self._maps):
                now = change.changed.get(table, MapChange([]))
                rows = own.rows.remove_unseen(batch - age + 1, now.rows)
                candidates = own.candidates.remove_unseen(batch - age + 1, now.candidates)
                change.changed[table] = replace(now, rows=rows, candidates=candidates)
        return change

    def look_up(self, keys: DescribedKeys) -> None:
        """Write the rows of keys, and note nothing."""
        self._see(keys, NO_BATCH, np.zeros((0, 3), np.int32))

    def release(self, change: BatchChange) -> None:
        """Use the memory of a change again, which is not needed any more."""
        if len(change.seen):
            self._free.append(change.seen)

    def _shares_of(self, keys: DescribedKeys) -> Shares:
        """Return the threads' shares in keys; those of a batch of the same shape are known."""
        shape = keys.columns[:, Column.TABLE].tolist(), keys.counts
        if self._shares is None or self._shares[0] != shape:
            self._shares = shape, shares_of(*shape, self._sizes, self._workers)
        return self._shares[1].copy()

    def _memory(self, count: int) -> np.ndarray:
        """Return memory for the slots that so many keys have, int32 [at least `count`, 3]; pages that are used stay."""
        while self._free:
            memory = self._free.pop()
            if len(memory) >= count:
                return memory
        return np.empty((count + count // 8, 3), np.int32)

    def _see(self, keys: DescribedKeys, batch: int, seen: np.ndarray) -> np.ndarray:
        """Write the rows of keys, and what a batch has seen and misses; return the parts of the columns, int64 [P, Part]."""
        if batch != NO_BATCH and len(self._missing) < keys.count:
            self._missing = np.empty((keys.count + keys.count // 8, 2), np.int64)
        shares = self._shares_of(keys)
        parts, threads = shares.parts, (shares.order, shares.starts)
        with numba_threads(self._workers):
            see_parts(
                keys.columns, parts, *threads, self._fields, batch, seen, self._missing, self.drawn
            )
        return parts

    def _admit(
        self,
        keys: DescribedKeys,
        parts: np.ndarray,
        jobs: np.ndarray,
        batch: int,
        change: BatchChange,
    ) -> None:
        """Give rows to keys that have none, if the policy admits them, and note what changed."""
        counts_candidates = self._policy.admit_after > 1
        maps = [self._maps[table] for table in jobs[:, Job.TABLE]]
        tables = [(own.rows, own.candidates) if counts_candidates else (own.rows,) for own in maps]
        for of_job, num_keys in zip(tables, jobs[:, Job.KEYS].tolist(), strict=True):
            for key_table in of_job:
                key_table.prepare(num_keys)
        before = [[(table.used, table.leaving) for table in of_job] for of_job in tables]
        count = int(jobs[:, Job.KEYS].sum())
        new = NewKeys.empty(count)
        memory = (self._missing, np.empty(count, np.int64), *new.arrays())
        inputs = (jobs, keys.columns, parts, self._fields, (batch, self._policy.admit_after))
        if count < SHARED_KEYS:
            do_jobs((0, 1), *inputs, memory, DRAWN)
        else:
            with numba_threads(self._workers):
                share_jobs(self._workers, *inputs, memory, DRAWN)
        for own, job, was in zip(maps, jobs.tolist(), before, strict=True):
            table, first = job[Job.TABLE], job[Job.OFFSET]
            rows = change_of(new.rows, first, job[Job.ROWS_CHANGED], *was[Kind.ROWS])
            changed = MapChange([], rows)
            if counts_candidates:
                count = job[Job.CANDIDATES_CHANGED]
                changed = replace(
                    changed,
                    candidates_seen=[new.candidates_seen[first:][: job[Job.CANDIDATES_SEEN]]],
                    candidates=change_of(new.candidates, first, count, *was[Kind.CANDIDATES]),
                )
            change.changed[table] = changed
            if job[Job.DONE] < job[Job.DUE]:
                # The batch may have keys again that found a row.
                left = new.keys[first + job[Job.DONE] : first + job[Job.DUE]]
                change.left_out[table] = left[own.rows.look_up(left) == 0]
