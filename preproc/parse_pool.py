"""Parses pieces of text in several processes and gives them back in their order.

Processes, not threads: parsing is many short NumPy calls, and threads that run them spend more time
handing Python's lock to each other than they gain (docs/preprocessing.md has the numbers).
"""

import atexit
import os
import signal
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from threading import Thread

from preproc.parse_piece import Parsed, PieceParser

# A process with its libraries, a piece and its columns, and its pieces in flight.
WORKER_BYTES = 128 << 20
# Text for which another process is worth its start of half a second.
WORTHWHILE_BYTES = 32 << 20


def num_workers(threads: int, memory: int, text_bytes: float) -> int:
    """Return how many processes to parse `text_bytes` with: within `threads` and `memory`, at least 1."""
    return max(1, min(threads, memory // WORKER_BYTES, int(text_bytes // WORTHWHILE_BYTES)))


class ParsePool:
    """`workers` processes, or with one worker this process."""

    def __init__(self, workers: int, numerical_dtype: str) -> None:
        self.workers = workers
        self._reader = ThreadPoolExecutor(1)
        if workers == 1:
            self._parser = PieceParser(numerical_dtype)
            self._pool = None
            return
        # Not forked: the process that would be copied holds threads of DuckDB's.
        self._pool = ProcessPoolExecutor(
            workers, get_context("spawn"), initializer=_start, initargs=(numerical_dtype,)
        )

    def __enter__(self) -> "ParsePool":
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.shutdown(cancel_futures=True)
        if self._pool:
            self._pool.shutdown(cancel_futures=True)

    def in_order(self, texts: Iterator[bytes]) -> Iterator[Parsed]:
        """Yield the parsed texts in their order; a few are read and parsed ahead.

        Raises:
            ValueError: a process ended.
        """
        if self._pool is None:
            yield from map(self._parser, texts)
            return
        parsing: deque[Future[Parsed]] = deque()
        try:
            for text in self._read_ahead(texts):
                parsing.append(self._pool.submit(_parse, text))
                if len(parsing) >= 2 * self.workers:
                    yield parsing.popleft().result()
            while parsing:
                yield parsing.popleft().result()
        except BrokenProcessPool:
            raise ValueError(
                "a parsing process was ended from outside, as the system does when memory is short; "
                "lower memory_limit or threads, and start again to go on"
            ) from None

    def _read_ahead(self, texts: Iterator[bytes]) -> Iterator[bytes]:
        """Read, and unpack, one piece in a thread while the one before it is dealt with."""
        following = self._reader.submit(next, texts, b"")
        while text := following.result():
            following = self._reader.submit(next, texts, b"")
            yield text


_parser: PieceParser


def _start(numerical_dtype: str) -> None:
    """Make the parser of a process."""
    global _parser
    # Ctrl-C reaches all processes of a terminal: the first one answers for them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_end_with_parent, daemon=True).start()
    _parser = PieceParser(numerical_dtype)
    # Python does not clean up globals beside a daemon thread, and DuckDB complains about that.
    atexit.register(globals().pop, "_parser")


def _end_with_parent() -> None:
    """End when the first process does, which may be killed without a chance to tell."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _parse(text: bytes) -> Parsed:
    return _parser(text)
