"""Processes that read batches into memory which they share with the process that trains.

Threads would do, were it not for Python's lock: a thread that reads takes and leaves it at every column, and the step, which
leaves it at every kernel it launches, waits for it each time. On four H200 the readers' threads cost a DLRM step 0.9 of
2.4 ms (benchmarks/README.md).
"""

import ctypes
import mmap
import os
import signal
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import NoReturn

# <sys/prctl.h>
PR_SET_PDEATHSIG = 1
# What a terminal or a batch system sends to all processes of a run: the one that trains answers, and needs its readers.
SIGNALS_OF_THE_RUN = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


class ReaderProcesses:
    """Reads into slots of shared memory; what is started first is finished first.

    The processes are forked when this is made, so that they have all that is open here and import nothing. That wants to be
    early: before CUDA, NCCL and threads, whose locks a child would inherit as they happen to be.

    Args:
        read: run in the processes: fills the slot of this number with what this other number stands for.
        num_slots: how many there are, in memory that came from `shared_memory`.
        num_processes: how many.
    """

    def __init__(
        self, read: Callable[[int, int], None], num_slots: int, num_processes: int
    ) -> None:
        self._num_slots = num_slots
        self._num_started = self._num_finished = 0
        self._readers = [_Reader(read) for _ in range(num_processes)]

    @property
    def pids(self) -> list[int]:
        """The processes."""
        return [each.pid for each in self._readers]

    @property
    def num_pending(self) -> int:
        """What was started and not yet finished."""
        return self._num_started - self._num_finished

    @property
    def next_slot(self) -> int:
        """The slot that `start` will fill."""
        return self._num_started % self._num_slots

    def start(self, number: int) -> None:
        """Let a process fill the next slot, which nobody may be using any more."""
        assert self.num_pending < self._num_slots
        reader = self._readers[self._num_started % len(self._readers)]
        slot = self.next_slot
        self._num_started += 1
        reader.ask(slot, number)

    def finish(self) -> int:
        """Wait for what was started first, and return its slot.

        Raises:
            ValueError: what `read` raised.
            RuntimeError: it raised something else, or its process has ended.
        """
        reader = self._readers[self._num_finished % len(self._readers)]
        slot = self._num_finished % self._num_slots
        self._num_finished += 1
        reader.wait()
        return slot

    def close(self) -> None:
        """End the processes, whatever they are at."""
        for each in self._readers:
            each.close()
        self._readers = []


def shared_memory(num_bytes: int) -> mmap.mmap:
    """Return memory that processes forked from now on write into for this one; it needs no room in /dev/shm."""
    return mmap.mmap(-1, num_bytes)


class _Reader:
    """One process, as its parent sees it."""

    def __init__(self, read: Callable[[int, int], None]) -> None:
        self._connection, its = Pipe()
        parent = os.getpid()
        self.pid = os.fork()
        if not self.pid:
            _serve(read, its, parent)
        its.close()
        self._has_ended = False

    def ask(self, slot: int, number: int) -> None:
        # One that has ended says so where its answer is waited for.
        with suppress(ConnectionError):
            self._connection.send((slot, number))

    def wait(self) -> None:
        try:
            problem = self._connection.recv()
        except (EOFError, ConnectionError):
            raise RuntimeError(self._how_it_ended()) from None
        if problem is not None:
            raise problem

    def close(self) -> None:
        if not self._has_ended:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        self._has_ended = True
        self._connection.close()

    def _how_it_ended(self) -> str:
        told = "a process that reads batches has ended"
        if self._has_ended:
            return told
        self._has_ended = True
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if code == -signal.SIGBUS:
            return f"{told}: a file of the dataset became shorter while it was read"
        by = f" by {signal.Signals(-code).name}" if code < 0 else f" with exit code {code}"
        return f"{told}{by}; was it killed for want of memory?"


def _serve(read: Callable[[int, int], None], connection: Connection, parent: int) -> NoReturn:
    """Fill slots until the parent is gone."""
    try:
        for each in SIGNALS_OF_THE_RUN:
            signal.signal(each, signal.SIG_IGN)
        # A parent that is killed closes nothing.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        while os.getppid() == parent:
            slot, number = connection.recv()
            connection.send(_problem_of(read, slot, number))
    finally:
        # Nothing of the parent's is to be flushed, closed or freed here.
        os._exit(0)


def _problem_of(read: Callable[[int, int], None], slot: int, number: int) -> Exception | None:
    try:
        read(slot, number)
    except ValueError as error:
        return ValueError(str(error))
    except Exception:
        # Not every exception can be sent to another process.
        return RuntimeError(f"in a process that reads batches:\n{traceback.format_exc()}")
    return None
