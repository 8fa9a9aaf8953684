"""Mapping of the keys of batches in the order of the steps, ahead of them."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Read = TypeVar("Read")
Described = TypeVar("Described")


class KeyPipeline:
    """Two threads: one reads batches and describes their keys, which is Python's work; the other maps them, which is not."""

    def __init__(self, name: str, enter: Callable[[], None]) -> None:
        self._describing, self._mapping = (
            ThreadPoolExecutor(1, thread_name_prefix=name, initializer=enter) for _ in range(2)
        )

    def submit(
        self,
        read: Callable[[], tuple[Read, Described]],
        map_keys: Callable[[Callable[[], Described]], None],
    ) -> Future[Read]:
        """Return a batch once it has its rows."""
        described = self._describing.submit(read)

        def mapped() -> Read:
            map_keys(lambda: described.result()[1])
            return described.result()[0]

        return self._mapping.submit(mapped)

    def close(self) -> None:
        """End the threads; batches that were not read yet are left out."""
        for thread in (self._describing, self._mapping):
            thread.shutdown(wait=True, cancel_futures=True)
