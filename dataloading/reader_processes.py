"""Processes that read batches into memory shared with the training process.

Reader threads compete with the training step for the GIL. They acquire and release it at every column. The
step releases it at every kernel launch, and waits to get it back. On four H200 the reader threads cost a DLRM
step 0.8 of 2.4 ms (benchmarks/history.md).
"""

import ctypes
import gc
import mmap
import os
import signal
import struct
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import NoReturn

# <sys/prctl.h>
PR_SET_PDEATHSIG = 1
# <malloc.h>
M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4
# Signals that a terminal or a batch system sends to all processes of a run. The training process handles
# them, and needs its readers.
SIGNALS_OF_THE_RUN = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


# A task is a slot and a number, its answer one byte: nothing is pickled unless a read fails.
TASK = struct.Struct("=qq")
READ, FAILED = b"\0", b"\1"


class ReaderProcesses:
    """Reads into slots of shared memory, finished in the order in which they are started.

    The constructor forks the processes, so they inherit open files and modules. Call it early: a forked process also inherits the
    state of all locks, and there are fewer of them before a CUDA context, NCCL and most threads exist.

    `read`: function of a slot and a number, called in a process: fill the slot with the batch of that number. It may use numpy,
    but neither CUDA nor libraries that start threads. Raises ValueError: the system cannot start that many processes.
    """

    def __init__(
        self, read: Callable[[int, int], None], num_slots: int, num_processes: int
    ) -> None:
        self._num_slots = num_slots
        self._num_started = self._num_finished = 0
        self._readers: list[_Reader] = []
        try:
            for _ in range(num_processes):
                self._readers.append(_Reader(read))
        except OSError as error:
            num_forked = len(self._readers)
            self.close()
            raise ValueError(
                f"process {num_forked + 1} of {num_processes} that read batches cannot be started ({error.strerror}); lower "
                "data.workers, or raise the limits of processes (ulimit -u), open files (ulimit -n) and memory"
            ) from None

    @property
    def pids(self) -> list[int]:
        return [reader.pid for reader in self._readers]

    @property
    def num_pending(self) -> int:
        return self._num_started - self._num_finished

    @property
    def next_slot(self) -> int:
        return self._num_started % self._num_slots

    def start(self, number: int) -> None:
        """Let a process fill the next slot, which must be free."""
        assert self.num_pending < self._num_slots
        reader = self._readers[self._num_started % len(self._readers)]
        slot = self.next_slot
        self._num_started += 1
        reader.ask(slot, number)

    def finish(self) -> int:
        """Wait for the oldest pending read, and return its slot.

        Raises ValueError, OSError, MemoryError: those of `read`; RuntimeError: it raised another one, or its process has ended.
        """
        reader = self._readers[self._num_finished % len(self._readers)]
        slot = self._num_finished % self._num_slots
        self._num_finished += 1
        reader.wait()
        return slot

    def close(self) -> None:
        """Kill the processes; no read is pending afterwards."""
        for reader in self._readers:
            reader.close()
        self._readers = []
        self._num_finished = self._num_started


def shared_memory(num_bytes: int) -> mmap.mmap:
    """Return memory shared with processes that are forked later; it needs no space in /dev/shm."""
    return mmap.mmap(-1, num_bytes)


class _Reader:
    """One reader process, from the side of its parent."""

    def __init__(self, read: Callable[[int, int], None]) -> None:
        self._connection, its = Pipe()
        parent = os.getpid()
        # Blocked until the child ignores them, since it inherits the handlers of its parent.
        signals = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS_OF_THE_RUN)
        try:
            self.pid = os.fork()
            if not self.pid:
                self._connection.close()
                _serve(read, its, parent)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, signals)
            its.close()
        self._has_ended = False

    def ask(self, slot: int, number: int) -> None:
        # `wait` reports a process that has ended.
        with suppress(ConnectionError):
            os.write(self._connection.fileno(), TASK.pack(slot, number))

    def wait(self) -> None:
        try:
            answer = os.read(self._connection.fileno(), len(READ))
            if answer == READ:
                return
            if not answer:
                raise EOFError
            problem = self._connection.recv()
        except (EOFError, ConnectionError):
            raise RuntimeError(self._how_it_ended()) from None
        raise problem

    def close(self) -> None:
        if not self._has_ended:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        self._has_ended = True
        self._connection.close()

    def _how_it_ended(self) -> str:
        message = "a process that reads batches has ended"
        if self._has_ended:
            return message
        self._has_ended = True
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if code == -signal.SIGBUS:
            return f"{message} by SIGBUS: a file of the dataset became shorter while it was read, or its disk failed"
        by = f" by {signal.Signals(-code).name}" if code < 0 else f" with exit code {code}"
        return f"{message}{by}; was it killed because memory ran out?"


def _serve(read: Callable[[int, int], None], connection: Connection, parent: int) -> NoReturn:
    """Fill slots until the parent has ended."""
    exit_code = 1
    # Garbage of the parent must not be collected here: who owned threads there would join them, and they are not in a fork.
    gc.freeze()
    try:
        for signum in SIGNALS_OF_THE_RUN:
            signal.signal(signum, signal.SIG_IGN)
        libc = ctypes.CDLL(None)
        # A closed pipe is not enough: readers forked later inherit the parent's end of it.
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        # Freed arrays stay with the process for the next batch, about what its largest one took (1.1 times). Given back,
        # their memory is mapped again page by page, for a third of the time of a batch of sequences, and processes that map
        # at once wait for each other.
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, -1)
        while os.getppid() == parent:
            task = os.read(connection.fileno(), TASK.size)
            if not task:
                break
            problem = _problem_of(read, *TASK.unpack(task))
            os.write(connection.fileno(), READ if problem is None else FAILED)
            if problem is not None:
                connection.send(problem)
        exit_code = 0
    except (EOFError, ConnectionError):
        exit_code = 0
    except Exception:
        os.write(2, traceback.format_exc().encode())
    finally:
        # Skips handlers that would flush, close or free resources of the parent.
        os._exit(exit_code)


def _problem_of(read: Callable[[int, int], None], slot: int, number: int) -> Exception | None:
    try:
        read(slot, number)
    except ValueError as error:
        return ValueError(str(error))
    except MemoryError as error:
        return MemoryError(str(error))
    except OSError as error:
        arguments = (str(error),) if error.errno is None else (error.errno, error.strerror)
        return OSError(*arguments, *([error.filename] if error.filename else []))
    except Exception:
        # Not every exception can be pickled.
        return RuntimeError(f"in a process that reads batches:\n{traceback.format_exc()}")
    return None
