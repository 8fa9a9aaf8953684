"""The maps of all tables for raw keys, one batch after another, ahead of the step.

Batches are mapped while earlier ones train. A mapped batch is pending until its step begins; lookups and states leave the changes
of pending batches out.
"""

import os
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

import numpy as np

from configs.schema import DynamicConfig
from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.keys.key_map import KeyMap, MapChange
from dataloading.keys.new_rows import KEYS, NewRows

KeysOf = Callable[[int], np.ndarray]
"""Returns the int64 keys of a feature, by its index among the categorical ones."""


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
        self._pool = ThreadPoolExecutor(max(1, min(cores, len(rows))), thread_name_prefix="keys")
        self._batch = 0
        self._pending: deque[dict[str, MapChange]] = deque()
        self._lock = Lock()

    @property
    def tables(self) -> list[str]:
        """Names of the tables."""
        return list(self._maps)

    def map(self, keys_of: KeysOf) -> dict[int, np.ndarray]:
        """Return the rows of the next training batch by feature, int32; they are pending until `take_new_rows`.

        Raises:
            TableFullError: more keys need rows than a table has.
        """
        with self._lock:
            batch = self._batch + 1

            def mapped(table: str) -> tuple[list[np.ndarray], MapChange]:
                columns = [keys_of(feature) for feature in self._features[table]]
                return self._maps[table].map(columns, batch)

            done = dict(zip(self._maps, self._pool.map(mapped, self._maps), strict=True))
            self._batch = batch
            self._pending.append({table: change for table, (_, change) in done.items()})
        return {
            feature: ids
            for table, (columns, _) in done.items()
            for feature, ids in zip(self._features[table], columns, strict=True)
        }

    def look_up(self, keys_of: KeysOf) -> dict[int, np.ndarray]:
        """Return the rows of keys by feature, int32, in the state of the step; nothing is counted or admitted."""
        with self._lock:
            pending = list(self._pending)
            return {
                feature: self._maps[table].look_up(
                    keys_of(feature), [changes[table] for changes in pending]
                )
                for table, features in self._features.items()
                for feature in features
            }

    def take_new_rows(self) -> dict[str, NewRows]:
        """Return the rows that got other keys in the oldest pending batch, which trains next, by table."""
        changes = self._pending.popleft()
        found = {}
        for table, change in changes.items():
            if len(change.rows.slots):
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
            pending = list(self._pending)
            return {
                f"{table}.{name}": values
                for table, own in self._maps.items()
                for name, values in own.state(
                    self._batch - len(pending), [changes[table] for changes in pending]
                ).items()
            }

    def keys_of_rows(self) -> dict[str, np.ndarray]:
        """Return the keys of the rows of each table, int64 [rows]; 0 of rows without a key."""
        state = self.state()
        return {table: state[f"{table}.{KEYS}"] for table in self._maps}

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Load a state; one with the keys of rows alone is enough for scores."""
        with self._lock:
            self._pending.clear()
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
        self._pool.shutdown(wait=False, cancel_futures=True)
