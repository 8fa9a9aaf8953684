"""Mapping of the keys of batches, started in the order of the steps; several batches are at work at a time."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Read = TypeVar("Read")
Wait = Callable[[], None]
"""Waits for the rows of a batch's keys."""


class KeyPipeline:
    """Two threads: one starts the mapping of batches, the other waits for its end.

    Args:
        name: prefix of the names of the threads.
        enter: called once in each.
    """

    def __init__(self, name: str, enter: Callable[[], None]) -> None:
        self._starting, self._waiting = (
            ThreadPoolExecutor(1, thread_name_prefix=name, initializer=enter) for _ in range(2)
        )

    def submit(self, read: Callable[[], Read], start: Callable[[Read], Wait]) -> Future[Read]:
        """Return a batch once it has its rows.

        Args:
            read: returns the batch.
            start: starts to map its keys.
        """

        def started() -> tuple[Read, Wait]:
            batch = read()
            return batch, start(batch)

        def ended(beginning: Future[tuple[Read, Wait]]) -> Read:
            batch, wait = beginning.result()
            wait()
            return batch

        return self._waiting.submit(ended, self._starting.submit(started))

    def close(self) -> None:
        """End the threads; batches that were not read yet are left out."""
        for thread in (self._starting, self._waiting):
            thread.shutdown(wait=True, cancel_futures=True)
