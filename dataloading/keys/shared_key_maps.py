"""The maps of raw keys on the ranks of a node that do not map."""

from collections.abc import Callable, Mapping
from multiprocessing.connection import Client
from multiprocessing.reduction import recv_handle
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from dataloading.keys.batch_mapper import BATCH, BatchChange
from dataloading.keys.described_keys import DescribedKeys
from dataloading.keys.key_link import LOST, SharedCells, receive
from dataloading.keys.key_maps import LOADED, KeyMaps


class SharedKeyMaps(KeyMaps):
    """Looks keys up in the indexes of the rank that maps; the rest of its own maps stays without memory.

    A key has one row in all of a batch, its row after the batch. Ranks load and rewind in one order, if not at the same time.
    Raises RuntimeError: the rank that maps has ended.
    """

    maps_all = False
    _num_received = 0  # messages
    _mapped = 0  # the latest batch of the messages
    _num_owed = 0  # loads and rewinds of this rank that the other one has not told of
    _is_stopped = False

    def connect(self, offer: Any) -> None:
        (name, secret), self._shapes = offer
        try:
            self._link = Client(name, authkey=secret)
            self._shared = SharedCells(recv_handle(self._link))
        except (EOFError, ConnectionError):
            raise RuntimeError(LOST) from None
        self._mapper.drawn = np.uint64(self._shared.head[1])
        self._place(self._shared.cells)

    def stop(self) -> None:
        self._is_stopped = True

    def map(self, take: Callable[[], DescribedKeys]) -> None:
        """Write the rows of this rank's keys of the next training batch once it is mapped; raises as `KeyMaps.map`."""
        keys = take()
        self._batch += 1
        # Where the batch is not trained, its rows are of no account.
        self._wait(lambda: self._is_stopped or self._num_owed < 0 or self._mapped >= self._batch)
        for change in [*self._pending]:
            if change.batch == self._batch and change.error is not None:
                raise change.error
        self.look_up(lambda: keys, self._batch)

    def look_up(self, take: Callable[[], DescribedKeys], batch: int = 0) -> None:
        """Write the rows of keys in the state of the step, or in that after a batch."""
        keys = take()
        with self._lock:
            with self._shared.locked(shared=True):
                self._mapper.look_up(keys)
                num_changes, is_broken = divmod(int(self._shared.head[0]), 2)
            if is_broken:
                raise RuntimeError(LOST)
            while self._num_received < num_changes:
                self._receive()
            # The step takes batches off at any time.
            self._take_back(keys, [change for change in [*self._pending] if change.batch > batch])

    def _wait(self, is_there: Callable[[], bool]) -> None:
        while not is_there():
            if self._link.poll(0.1):
                with self._lock:
                    if self._link.poll():  # no other thread has received it
                        self._receive()

    def _receive(self) -> None:
        message = receive(self._link)
        self._num_received += 1
        if BATCH in message:
            self._pending.append(BatchChange.of_message(message))
            self._mapped = self._pending[-1].batch
            return
        self._num_owed -= 1
        self._mapped, num_used, is_loaded = message[LOADED].tolist()
        while self._pending and (is_loaded or self._pending[-1].batch > self._mapped):
            self._pending.pop()
        self._num_used = num_used if is_loaded else self._num_used

    def rewind(self) -> None:
        self.load({})
        self._is_stopped = False
        self._batch = self._pending[0].batch - 1 if self._pending else self._mapped

    def load(self, state: Mapping[str, Any], *, is_loaded: bool = True) -> None:
        """Wait until the rank that maps has done it."""
        self._num_owed += 1
        self._wait(lambda: self._num_owed <= 0)

    def state(self) -> dict[str, np.ndarray]:
        """Return the shapes of the state, as arrays without memory: the rank that maps has it."""
        return {
            name: as_strided(np.zeros(1, kind), shape, [0] * len(shape))
            for name, (shape, kind) in self._shapes.items()
        }
