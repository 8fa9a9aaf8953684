"""The maps of all tables for raw keys, ahead of the step.

Batches are mapped while earlier ones train, several at a time: a table maps them one after another on a thread of its own, and
waits for no other table. A batch is pending until its step begins; lookups and states leave the changes of pending batches out.
"""

import os
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

import numpy as np

from configs.schema import DynamicConfig
from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.keys.key_map import FullMapError, KeyMap, MapChange
from dataloading.keys.new_rows import KEYS, NewRows, TableFullError

KeysOf = Callable[[int], np.ndarray]
"""Returns the int64 keys of a feature, by its index among the categorical ones."""
Fill = Callable[[int, np.ndarray], None]
"""Takes the int32 rows of a feature's keys."""


class MapTask:
    """A batch whose keys are being mapped.

    Args:
        changes: of its tables, once they are mapped.
    """

    def __init__(self, changes: Mapping[str, Future[MapChange]]) -> None:
        self._changes = changes

    def wait(self) -> None:
        """Wait for all tables.

        Raises:
            TableFullError: more keys need rows than a table has.
        """
        for change in self._changes.values():
            change.result()

    def change(self, table: str) -> MapChange | None:
        """Wait for a table, and return what changed; None of a table that was full before."""
        try:
            return self._changes[table].result()
        except FullMapError as full:
            return full.change
        except TableFullError:
            return None


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
        self._maps = {table: KeyMap(table, count, policy) for table, count in rows.items()}
        cores = len(os.sched_getaffinity(0)) // ranks_of_node
        threads = [
            ThreadPoolExecutor(1, thread_name_prefix="keys")
            for _ in range(max(1, min(cores, len(rows))))
        ]
        # Small tables take less time, so the largest ones have a thread of their own first.
        ordered = sorted(rows, key=lambda table: -rows[table])
        self._threads = {table: threads[i % len(threads)] for i, table in enumerate(ordered)}
        self._batch = 0
        self._full: dict[str, TableFullError] = {}
        self._pending: deque[MapTask] = deque()
        self._lock = Lock()

    @property
    def tables(self) -> list[str]:
        """Names of the tables."""
        return list(self._maps)

    def start(self, keys_of: KeysOf, fill: Fill) -> MapTask:
        """Start to map the next training batch, which is pending until `take_new_rows`.

        Args:
            keys_of: called on the threads of the tables.
            fill: the same.
        """
        with self._lock:
            self._batch += 1
            task = MapTask(
                {
                    table: thread.submit(self._map, table, self._batch, keys_of, fill)
                    for table, thread in self._threads.items()
                }
            )
            self._pending.append(task)
        return task

    def _map(self, table: str, batch: int, keys_of: KeysOf, fill: Fill) -> MapChange:
        if table in self._full:
            raise TableFullError(str(self._full[table]))
        features = self._features[table]
        try:
            found, change = self._maps[table].map([keys_of(feature) for feature in features], batch)
        except TableFullError as full:
            self._full[table] = full
            raise
        for feature, ids in zip(features, found, strict=True):
            fill(feature, ids)
        return change

    def look_up(self, keys_of: KeysOf, fill: Fill) -> None:
        """Fill in the rows of keys in the state of the step; nothing is counted or admitted."""
        with self._lock:
            for table, features in self._features.items():
                pending = self._changes(table)
                for feature in features:
                    fill(feature, self._maps[table].look_up(keys_of(feature), pending))

    def wait(self) -> None:
        """Wait for all batches that were started."""
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
            self._full.clear()
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
        for thread in self._threads.values():
            thread.shutdown(wait=False, cancel_futures=True)
