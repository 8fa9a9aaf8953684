"""The maps of all tables for raw keys, ahead of the step.

Batches are mapped while earlier ones train, several at a time: a table maps them one after another on the same thread, and waits
for no table of another thread. A batch is pending until its step begins; lookups and states leave the changes of pending
batches out.
"""

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

import numpy as np

from configs.schema import DynamicConfig
from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.keys.batch_keys import BatchKeys
from dataloading.keys.key_map import SHARED_ROWS, FullMapError, KeyMap, MapChange
from dataloading.keys.new_rows import KEYS, NewRows

KeysOf = Callable[[int], BatchKeys]
"""Returns the keys of a feature, by its index among the categorical ones, and the memory for their rows."""
LARGE_COST = 3.0
"""Time of a key of a large table, whose index is in no core's own cache, in times of one of a small table."""


class MapTask:
    """A batch whose keys are being mapped.

    Args:
        tables: done when a table is mapped.
        changes: of the tables that are mapped.
    """

    def __init__(
        self, tables: Mapping[str, Future[None]], changes: Mapping[str, MapChange]
    ) -> None:
        self._tables, self._changes = tables, changes

    def wait(self) -> None:
        """Wait for all tables.

        Raises:
            TableFullError: more keys need rows than a table has.
            ValueError: the keys are invalid.
        """
        for table in self._tables.values():
            table.result()

    def change(self, table: str) -> MapChange | None:
        """Wait for a table, and return what changed, also if that failed; None if nothing did."""
        self._tables[table].exception()
        return self._changes.get(table)


class KeyMaps:
    """Maps of the tables of a dataset; every rank has the same ones, since it maps the keys of all ranks' rows.

    Args:
        spec: of the dataset.
        policy: admission and eviction.
        ranks_of_node: ranks that share the cores of this machine.
    """

    def __init__(self, spec: FeatureSpec, policy: DynamicConfig, ranks_of_node: int = 1) -> None:
        self._features = spec.dynamic_tables
        rows = {
            table: spec.categorical[first].cardinality
            for table, (first, *_) in self._features.items()
        }
        cores = len(os.sched_getaffinity(0)) // ranks_of_node
        large = [table for table, count in rows.items() if count >= SHARED_ROWS]
        self._helpers = None
        if num_helpers := min(cores // 4, len(large)):
            self._helpers = ThreadPoolExecutor(num_helpers, thread_name_prefix="keys-helper")
        self._maps = {
            table: KeyMap(table, count, policy, self._helpers) for table, count in rows.items()
        }
        # Few threads with several tables each: every task and every array operation takes Python's lock, for which more
        # threads would queue.
        costs = {
            table: number * (LARGE_COST if table in large else 1.0)
            for table, number in _keys_per_row(spec).items()
        }
        self._threads = [
            (ThreadPoolExecutor(1, thread_name_prefix="keys"), tables)
            for tables in _shares(costs, max(1, min(cores // 2, len(rows))))
        ]
        self._batch = 0
        # Their maps lack a batch, so they map no later one.
        self._failed: dict[str, Exception] = {}
        self._pending: deque[MapTask] = deque()
        self._lock = Lock()

    @property
    def tables(self) -> list[str]:
        """Names of the tables."""
        return list(self._maps)

    def start(self, keys_of: KeysOf) -> MapTask:
        """Start to map the next training batch, which is pending until `take_new_rows`.

        Args:
            keys_of: called on the threads of the tables.
        """
        changes: dict[str, MapChange] = {}
        with self._lock:
            self._batch += 1
            tasks: dict[str, Future[None]] = {}
            for thread, tables in self._threads:
                done = thread.submit(self._map, tables, self._batch, keys_of, changes)
                tasks |= dict.fromkeys(tables, done)
            task = MapTask(tasks, changes)
            self._pending.append(task)
        return task

    def _map(
        self, tables: Sequence[str], batch: int, keys_of: KeysOf, changes: dict[str, MapChange]
    ) -> None:
        """Map tables, and note what changed, also of a table that is full; raise the first error at the end."""
        errors: list[Exception] = []
        for table in tables:
            if table in self._failed:
                later = RuntimeError(f"an earlier batch of table {table} has failed")
                later.__cause__ = self._failed[table]
                errors.append(later)
                continue
            try:
                columns = [keys_of(feature) for feature in self._features[table]]
                changes[table] = self._maps[table].map(columns, batch)
            except Exception as error:
                self._failed[table] = error
                if isinstance(error, FullMapError):
                    changes[table] = error.change
                errors.append(error)
        if errors:
            raise errors[0]

    def look_up(self, keys_of: KeysOf) -> None:
        """Write the rows of keys in the state of the step; nothing is counted or admitted."""
        with self._lock:
            for table, features in self._features.items():
                pending = self._changes(table)
                for column in map(keys_of, features):
                    own = column.keys.values()[column.first :][: len(column.rows)]
                    column.rows[:] = self._maps[table].look_up(own, pending)

    def wait(self) -> None:
        """Wait for all batches that were started; nothing is raised."""
        with self._lock:
            for table in self._maps:
                self._changes(table)

    def _changes(self, table: str) -> list[MapChange]:
        """Wait for the pending batches, and return their changes of a table."""
        changes = (task.change(table) for task in self._pending)
        return [change for change in changes if change is not None]

    def take_new_rows(self) -> dict[str, NewRows]:
        """Return the rows that got other keys in the oldest pending batch, which trains next, by table."""
        task = self._pending.popleft()
        task.wait()
        found = {}
        for table in self._maps:
            change = task.change(table)
            if change is not None and len(change.rows.slots):
                order = np.argsort(change.rows.slots)
                found[table] = NewRows(change.rows.slots[order], change.rows.keys[order])
        return found

    def rewind(self) -> None:
        """Take pending batches back: they are mapped again."""
        if self._pending:
            self.load(self.state())

    def state(self) -> dict[str, np.ndarray]:
        """Return a copy of the state of the step, in arrays of constant shapes by `<table>.<name>`."""
        with self._lock:
            batch = self._batch - len(self._pending)
            return {
                f"{table}.{name}": values
                for table, own in self._maps.items()
                for name, values in own.state(batch, self._changes(table)).items()
            }

    def keys_of_rows(self) -> dict[str, np.ndarray]:
        """Return the keys of the rows of each table, int64 [rows]; 0 of rows without a key."""
        state = self.state()
        return {table: state[f"{table}.{KEYS}"] for table in self._maps}

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Load a state; one with the keys of rows alone is enough for scores."""
        with self._lock:
            for table in self._maps:
                self._changes(table)
            self._pending.clear()
            self._failed.clear()
            for table, own in self._maps.items():
                prefix = f"{table}."
                mine = {
                    name.removeprefix(prefix): values
                    for name, values in state.items()
                    if name.startswith(prefix) and "." not in name.removeprefix(prefix)
                }
                if len(mine) == 1:
                    own.load_keys(mine[KEYS])
                else:
                    self._batch = own.load(mine)

    def close(self) -> None:
        """End the threads."""
        for thread, _ in self._threads:
            thread.shutdown(wait=True, cancel_futures=True)
        if self._helpers is not None:
            self._helpers.shutdown(wait=True)


def _keys_per_row(spec: FeatureSpec) -> dict[str, float]:
    """Return the mean number of keys that a row has for each table."""
    return {
        table: sum(spec.categorical[feature].mean_hotness for feature in features)
        for table, features in spec.dynamic_tables.items()
    }


def _shares(costs: Mapping[str, float], most: int) -> list[list[str]]:
    """Return at most so many lists of tables of about equal cost: the most expensive tables first, each to the least list."""
    shares: list[list[str]] = [[] for _ in range(most)]
    loads = [0.0] * most
    for table in sorted(costs, key=lambda table: -costs[table]):
        least = loads.index(min(loads))
        loads[least] += costs[table]
        shares[least].append(table)
    return shares
