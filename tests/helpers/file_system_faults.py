"""Starts of a command whose n-th change of a file meets a fault: the death of its processes, a full or a failing disk.

A change is a system call below a watched directory that opens a file for writing, writes, syncs, renames, removes, links or
makes a directory (`tests.helpers.seccomp`). Calls are counted over all threads and ranks, so the n-th one of two starts may
differ.
"""

import ctypes
import errno
import math
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.helpers import seccomp
from tests.helpers.seccomp import Call, Listener, Unsupported

WRITES = frozenset({"write", "pwrite64", "writev", "pwritev", "pwritev2"})
REMOVALS = frozenset({"unlink", "unlinkat", "rmdir"})
RENAMES = frozenset({"rename", "renameat", "renameat2"})
OPENS = frozenset(seccomp.OPEN_FLAGS)
SYNCS = frozenset({"fsync", "fdatasync"})
ALL = frozenset(seccomp.CALLS)
PR_SET_CHILD_SUBREAPER = 36
PIDFD_GETFD = 438
MAX_COPY = 1 << 26
LAUNCHER_WAIT_S = 8.0
"""Seconds from the death of a rank to the launcher's SIGTERM for the others."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Fault at the n-th call of some kinds.

    Attributes:
        name: for the command line and the report.
        calls: kinds of calls that are counted, and that fail.
        code: error that the call returns; without one processes are killed.
        lasts: whether later calls fail too.
        halves: whether the n-th call, if it writes, writes the first half of its bytes.
        reads: whether opens for reading are counted and fail instead, also of files beside the watched directory.
        one_rank: whether only the rank of the call is killed. The others get SIGTERM a while later, as from a launcher.
    """

    name: str
    calls: frozenset[str] = ALL
    code: int | None = None
    lasts: bool = False
    halves: bool = False
    reads: bool = False
    one_rank: bool = False


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("kill"),
        Fault("torn", calls=WRITES, halves=True),
        Fault("lost_rank", one_rank=True),
        Fault("ENOSPC", calls=ALL - REMOVALS, code=errno.ENOSPC),
        # Names can be removed, replaced and synced on a full disk.
        Fault(
            "full",
            calls=ALL - REMOVALS - RENAMES - SYNCS,
            code=errno.ENOSPC,
            lasts=True,
            halves=True,
        ),
        Fault("EIO", code=errno.EIO),
        Fault("broken", code=errno.EIO, lasts=True),
        Fault("unreadable", calls=OPENS, code=errno.EIO, reads=True),
    )
}


@dataclass(slots=True)
class Ended:
    """One start that has ended.

    Attributes:
        codes: exit code per rank; negative for a signal.
        output: stdout and stderr of all ranks.
        calls: the changes that the fault counts, in their order.
        hit: the call that met the fault, if there was one.
        is_late: whether ranks were still running at the time limit, and were killed.
    """

    codes: list[int] = field(default_factory=list)
    output: str = ""
    calls: list[Call] = field(default_factory=list)
    hit: Call | None = None
    is_late: bool = False


def run_with_fault(
    rank_main: Callable[[int], int],
    watched: Path,
    log: Path,
    fault: Fault = FAULTS["kill"],
    at: int | None = None,
    *,
    num_ranks: int = 1,
    limit_s: float = 120.0,
) -> Ended:
    """Fork ranks of this process, which must have one thread, and supervise them until they end.

    Args:
        rank_main: what a rank calls with its number; it returns the exit code.
        watched: directory whose changes are counted, resolved.
        log: file for the output of the ranks, not below `watched`.
        fault: what happens.
        at: number of the call, from 1, that meets the fault; None for none.
        num_ranks: number of processes.
        limit_s: time limit.

    Raises:
        Unsupported: this machine does not permit supervision.
    """
    _reap_orphans_of_ranks()
    ours, theirs = socket.socketpair()
    leader = os.fork()
    if leader == 0:
        ours.close()
        _lead(rank_main, num_ranks, log, theirs, opens_for_reading=fault.reads)
    theirs.close()
    try:
        with ours:
            ended = _Supervisor(leader, watched, fault, at).run(ours, limit_s)
    finally:
        _end_all(leader)
    ended.output = log.read_text(errors="replace")
    return ended


def unsupported() -> str | None:
    """Return why this machine does not permit supervision, or None; tried in a fork."""
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        reason = ""
        try:
            os.close(seccomp.install())
        except Unsupported as error:
            reason = str(error)
        theirs.sendall(b" " + reason.encode())
        os._exit(0)
    theirs.close()
    with ours:
        reason = ours.recv(1000).decode()
    os.waitpid(child, 0)
    return (reason.strip() or None) if reason else "a filter could not be tried"


def _reap_orphans_of_ranks() -> None:
    """Become the parent of processes whose parent was killed, so that `_end_all` can wait for them."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _end_all(leader: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
    with suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def _lead(
    rank_main: Callable[[int], int],
    num_ranks: int,
    log: Path,
    channel: socket.socket,
    *,
    opens_for_reading: bool,
) -> None:
    """Install the filter, fork the ranks, and send their exit codes; never returns."""
    try:
        os.setpgid(0, 0)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
        try:
            listener = seccomp.install(opens_for_reading)
        except Unsupported as error:
            channel.sendall(str(error).encode())
            return
        seccomp.send_descriptor(channel, listener)
        os.close(listener)
        ranks = [_fork_rank(rank_main, rank) for rank in range(num_ranks)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
        channel.sendall(struct.pack(f"{num_ranks}i", *codes))
    finally:
        os._exit(0)


def _fork_rank(rank_main: Callable[[int], int], rank: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        code = rank_main(rank)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(code)


class _Supervisor:
    """Answers the calls of one start."""

    def __init__(self, leader: int, watched: Path, fault: Fault, at: int | None) -> None:
        self._leader = leader
        self._watched = watched
        self._fault = fault
        self._at = at
        self._ended = Ended()
        self._terminate_at = math.inf

    def run(self, channel: socket.socket, limit_s: float) -> Ended:
        """Answer calls until the ranks have ended or were killed."""
        descriptor = seccomp.receive_descriptor(channel)
        if descriptor is None:
            raise Unsupported(channel.recv(1000).decode() or "the process ended before its start")
        listener, end = Listener(descriptor), time.monotonic() + limit_s
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        poll.register(channel, select.POLLIN)
        try:
            while True:
                wait_s = min(end, self._terminate_at) - time.monotonic()
                ready = dict(poll.poll(max(0.0, wait_s) * 1000))
                if time.monotonic() > self._terminate_at:
                    self._terminate_at = math.inf
                    self._terminate()
                if time.monotonic() > end:
                    self._ended.is_late = True
                    break
                if ready.get(listener.fileno(), 0) & select.POLLIN:
                    call = listener.receive()
                    if call is not None and not self._answer(listener, call):
                        break
                elif channel.fileno() in ready:
                    codes = channel.recv(1000)
                    self._ended.codes = list(struct.unpack(f"{len(codes) // 4}i", codes))
                    break
        finally:
            # Killed before the listener closes: calls would then fail, and the ranks would continue.
            with suppress(ProcessLookupError):
                os.killpg(self._leader, signal.SIGKILL)
            listener.close()
        return self._ended

    def _answer(self, listener: Listener, call: Call) -> bool:
        """Answer a call; return whether the processes continue."""
        ended, fault = self._ended, self._fault
        if not self._counts(call):
            listener.execute(call)
            return True
        ended.calls.append(call)
        number = len(ended.calls)
        is_first = number == self._at
        if self._at is None or number < self._at or not (is_first or fault.lasts):
            listener.execute(call)
            return True
        if is_first:
            ended.hit = call
            written = _write_half(call) if fault.halves else 0
            if written and fault.code is not None:
                listener.succeed(call, written)
                return True
        if fault.one_rank:
            os.kill(_process_of(call), signal.SIGKILL)
            self._terminate_at = time.monotonic() + LAUNCHER_WAIT_S
            return True
        if fault.code is None:
            return False
        listener.fail(call, fault.code)
        return True

    def _counts(self, call: Call) -> bool:
        if call.name not in self._fault.calls or call.is_read != self._fault.reads:
            return False
        watched = self._watched.parent if self._fault.reads else self._watched
        return call.path.is_relative_to(watched)

    def _terminate(self) -> None:
        """Send SIGTERM to the ranks that are still running."""
        for path in Path(f"/proc/{self._leader}/task/{self._leader}").glob("children"):
            for rank in path.read_text().split():
                os.kill(int(rank), signal.SIGTERM)


def _write_half(call: Call) -> int:
    """Write the first half of the bytes of a writing call in its place; return how many, which is 0 for other calls."""
    if call.name not in WRITES:
        return 0
    data = _bytes_of(call)
    data = data[: len(data) // 2]
    if not data:
        return 0
    descriptor = _descriptor_of(call)
    try:
        if call.name in ("write", "writev"):
            return os.write(descriptor, data)
        return os.pwrite(descriptor, data, call.arguments[3])
    finally:
        os.close(descriptor)


def _bytes_of(call: Call) -> bytes:
    _, address, size, *_ = call.arguments
    if call.name in ("write", "pwrite64"):
        return seccomp.memory_of(call.thread, address, min(size, MAX_COPY))
    vectors = seccomp.memory_of(call.thread, address, 16 * size)
    return b"".join(
        seccomp.memory_of(call.thread, start, min(length, MAX_COPY))
        for start, length in struct.iter_unpack("QQ", vectors)
        if length
    )


def _process_of(call: Call) -> int:
    """Return the process of the thread that made a call."""
    status = Path(f"/proc/{call.thread}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("Tgid:")]
    return int(line.split()[1])


def _descriptor_of(call: Call) -> int:
    """Return a descriptor of this process that shares the file and its position with that of the call."""
    process = os.pidfd_open(_process_of(call))
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        descriptor = libc.syscall(PIDFD_GETFD, process, int(call.arguments[0]), 0)
    finally:
        os.close(process)
    if descriptor < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return descriptor
