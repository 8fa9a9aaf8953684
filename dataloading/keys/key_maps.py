"""The maps of all tables for raw keys, ahead of the step.

Batches are mapped while earlier ones train. A batch is pending until its step begins; lookups and states leave its changes out.
"""

import os
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import CancelledError
from threading import Lock
from typing import Any

import numpy as np

from configs.schema import DynamicConfig
from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.keys.batch_keys import BatchKeys
from dataloading.keys.batch_mapper import BatchChange, BatchMapper
from dataloading.keys.described_keys import DescribedKeys, described
from dataloading.keys.kernels.layouts import Field
from dataloading.keys.key_link import KeyServer
from dataloading.keys.key_map import KeyMap
from dataloading.keys.rekeyed import KEYS, LEFT, Rekeyed, TableFullError

KeysOf = Callable[[int], BatchKeys]
"""Returns the keys of a feature, by its index among the categorical ones, and the memory for their rows."""
SHARE_OF_CORES = 0.8
"""Part of the cores that map keys; the training step and the readers have the others."""


LOADED = "loaded"
"""Name in a message of the latest batch, the rows in use, and whether the state is not that of the step."""


class KeyMaps:
    """Maps of the tables of a dataset on the rank of a node that maps the keys of all ranks' rows; see `SharedKeyMaps`."""

    maps_all = True  # whether `map` takes the keys of all ranks

    def __init__(self, spec: FeatureSpec, policy: DynamicConfig, ranks_of_node: int = 1) -> None:
        self._features = spec.dynamic_tables
        self._maps = [
            KeyMap(table, spec.categorical[first].cardinality, policy)
            for table, (first, *_) in self._features.items()
        ]
        self._num_peers = ranks_of_node - 1
        self._server = KeyServer(0)
        cores = len(os.sched_getaffinity(0)) // (1 if self.maps_all else ranks_of_node)
        self._mapper = BatchMapper(self._maps, policy, max(1, int(cores * SHARE_OF_CORES)))
        self._batch = 0
        # The maps lack a batch, so they map no later one.
        self._failed: Exception | None = None
        # Of the step, to which pending batches do not belong.
        self._num_used = 0
        self.counts = {"keys_new": 0, "keys_evicted": 0}
        self._pending: deque[BatchChange] = deque()
        # The maps have a part of a batch, which cannot be taken back.
        self._broken: BaseException | None = None
        self._lock = Lock()

    def listen(self) -> Any:
        """Return what the other ranks of the node `connect` with: where, and shapes and types of the state."""
        shapes = {name: (values.shape, values.dtype) for name, values in self.state().items()}
        # Of small pages, so that an index of millions of keys is a tenth slower than in a rank's own memory.
        self._server = KeyServer(sum(int(own.rows.fields[Field.NUM_CELLS]) for own in self._maps))
        self._place(self._server.cells)
        return self._server.listen(), shapes

    def connect(self, offer: Any) -> None:
        """Show the indexes, which are empty, to the other ranks of the node."""
        self._server.accept(self._num_peers)

    def _place(self, cells: np.ndarray) -> None:
        for own in self._maps:
            cells = own.rows.place(cells)

    def stop(self) -> None:
        """End waits for the rank that maps, which is this one: nobody reads the batches any more."""

    @property
    def tables(self) -> list[str]:
        return [*self._features]

    def describe(self, keys_of: KeysOf) -> DescribedKeys:
        return described(
            {
                table: [*map(keys_of, features)]
                for table, features in enumerate(self._features.values())
            }
        )

    def map(self, take: Callable[[], DescribedKeys]) -> None:
        """Write the rows of the keys of the next training batch, which is pending until `take_rekeyed`.

        `take`: returns the keys; a batch for which it fails, and every later one, is not mapped. Raises TableFullError:
        more keys need rows than a table has; RuntimeError: an earlier batch has failed; Exception: as `take` raises.
        """
        keys, error = None, None
        try:
            keys = take()
        except CancelledError:  # the loader ends
            raise
        except Exception as failed:
            error = failed
        with self._lock:
            self._check_whole()
            self._batch += 1
            no_tables, no_spans = np.zeros(0, np.int64), np.zeros((0, 2), np.int64)
            change = BatchChange(np.zeros((0, 3), np.int32), no_tables, no_spans)
            if self._failed is not None:
                error = RuntimeError("an earlier batch of keys has failed")
                error.__cause__ = self._failed
            elif keys is not None:
                try:
                    with self._server.changing(lambda: change.message(self._batch, error)):
                        change = self._mapper.map(keys, self._batch)
                        for table, left_out in change.left_out.items():
                            error = TableFullError(self._maps[table].is_full(left_out, self._batch))
                            break
                except BaseException as failed:
                    self._broken = failed
                    raise
            self._pending.append(change)
            self._failed = self._failed or error
        if error is not None:
            raise error

    def look_up(self, take: Callable[[], DescribedKeys]) -> None:
        """Write the rows of keys in the state of the step; nothing is counted or admitted."""
        keys = take()
        with self._lock:
            self._mapper.look_up(keys)
            self._check_whole()
            self._take_back(keys, self._pending)

    def _take_back(self, keys: DescribedKeys, pending: Collection[BatchChange]) -> None:
        """Replace the present rows of keys by those before the latest batches."""
        for table, own in keys.keys.items():
            changes = [change.changed[table] for change in pending if table in change.changed]
            # Nearly always no batch ahead of the step has changed any row.
            for column in own if changes else ():
                values = column.keys.values()[column.first :][: len(column.rows)]
                self._maps[table].before(values, column.rows, changes)

    def _check_whole(self) -> None:
        """Raise RuntimeError if mapping a batch has ended midway."""
        if self._broken is not None:
            raise RuntimeError("mapping a batch of keys ended midway") from self._broken

    def take_rekeyed(self) -> dict[str, Rekeyed]:
        """Return the rows that got other keys in the oldest pending batch, which trains next, by table."""
        oldest = self._pending.popleft()
        found = {}
        for table, change in oldest.changed.items():
            if change.rows is not None and len(change.rows.slots):
                order = np.argsort(change.rows.slots)
                keys = change.rows.keys[order]
                rows = Rekeyed(change.rows.slots[order], np.where(keys == 0, LEFT, keys))
                new, evicted = map(np.count_nonzero, (keys, change.rows.old_keys))
                self.counts["keys_new"] += int(new)
                self.counts["keys_evicted"] += int(evicted)
                self._num_used += int(new) - int(evicted)
                found[self._maps[table].name] = rows
        self._mapper.release(oldest)
        return found

    def take_counts(self, steps: int) -> dict[str, float]:
        """Return keys that got a row and that lost theirs, per step since the last call, and the share of rows in use."""
        rows = sum(own.capacity - 1 for own in self._maps)
        taken = {name: count / steps for name, count in self.counts.items()}
        self.counts.update(dict.fromkeys(self.counts, 0))
        return taken | {"key_rows_used": self._num_used / rows}

    def rewind(self) -> None:
        """Take pending batches back: they are mapped again."""
        self.load(self.state() if self._pending else {}, is_loaded=False)

    def state(self) -> dict[str, np.ndarray]:
        """Return a copy of the state of the step, in arrays of constant shapes by `<table>.<name>`."""
        with self._lock:
            self._check_whole()
            batch = self._batch - len(self._pending)
            state = {}
            for table, own in enumerate(self._maps):
                changes = [change.of(table) for change in self._pending]
                for name, values in own.state(batch, changes).items():
                    state[f"{own.name}.{name}"] = values
            return state

    def keys_of_rows(self) -> dict[str, np.ndarray]:
        """Return the keys of the rows of each table, int64 [rows]; 0 of rows without a key."""
        state = self.state()
        return {table: state[f"{table}.{KEYS}"] for table in self.tables}

    def _loaded(self, is_loaded: bool) -> dict[str, np.ndarray]:
        return {LOADED: np.array([self._batch, self._num_used, is_loaded])}

    def load(self, state: Mapping[str, np.ndarray], *, is_loaded: bool = True) -> None:
        """Load a state; one with the keys of rows alone is enough for scores. `is_loaded`: it is not that of the step."""
        with self._lock, self._server.changing(lambda: self._loaded(is_loaded)):
            if not state:
                return
            self._pending.clear()
            self._failed = None
            self._broken = None
            for own in self._maps:
                prefix = f"{own.name}."
                mine = {
                    name.removeprefix(prefix): values
                    for name, values in state.items()
                    if name.startswith(prefix) and "." not in name.removeprefix(prefix)
                }
                if len(mine) == 1:
                    own.load_keys(mine[KEYS])
                else:
                    self._batch = own.load(mine)
            self._num_used = sum(own.rows.num_keys for own in self._maps)
