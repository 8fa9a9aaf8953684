"""Supervision of a process's system calls that change files, by Linux seccomp user notification.

A process installs a filter for itself, its threads and its children. The kernel then stops each of these calls, whatever
library makes it (Python, torch, DuckDB, Arrow), until the holder of the filter's listener answers: execute it, or return
this error. Neither a compiler nor ptrace is needed. Writes to mapped memory are no calls and are not seen.
"""

import array
import ctypes
import errno
import fcntl
import os
import platform
import select
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

# <linux/audit.h>, <linux/filter.h>, <linux/seccomp.h>, <sys/prctl.h>
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
SECCOMP = {"x86_64": 317, "aarch64": 277}
LOAD, EQUALS, ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06
NOTIFY, ALLOW = 0x7FC00000, 0x7FFF0000
NUMBER, ARCHITECTURE = 0, 4
SET_MODE_FILTER, NEW_LISTENER = 1, 1 << 3
RECEIVE, SEND = 0xC0502100, 0xC0182101
CONTINUE = 1
PR_SET_NO_NEW_PRIVS, PR_SET_PTRACER, ANY_PROCESS = 38, 0x59616D61, -1
AT_FDCWD = -100
MAX_PATH = 4096

# Name: (number on x86-64, number on AArch64 or None). The directory functions without "at" exist on x86-64 only.
CALLS: dict[str, tuple[int, int | None]] = {
    "write": (1, 64),
    "pwrite64": (18, 68),
    "writev": (20, 66),
    "pwritev": (296, 70),
    "pwritev2": (328, 287),
    "sendfile": (40, 71),
    "copy_file_range": (326, 285),
    "fallocate": (285, 47),
    "ftruncate": (77, 46),
    "truncate": (76, 45),
    "fsync": (74, 82),
    "fdatasync": (75, 83),
    "open": (2, None),
    "openat": (257, 56),
    "creat": (85, None),
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "unlink": (87, None),
    "unlinkat": (263, 35),
    "rmdir": (84, None),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "link": (86, None),
    "linkat": (265, 37),
    "symlink": (88, None),
    "symlinkat": (266, 36),
}
# Position of the argument with the descriptor, or of (directory's descriptor or None, path).
DESCRIPTOR = dict.fromkeys(
    ["write", "pwrite64", "writev", "pwritev", "pwritev2", "fallocate", "ftruncate"], 0
) | {"sendfile": 0, "copy_file_range": 2, "fsync": 0, "fdatasync": 0}
PATH: dict[str, tuple[int | None, int]] = {
    **dict.fromkeys(["truncate", "open", "creat", "unlink", "rmdir", "mkdir"], (None, 0)),
    **dict.fromkeys(["openat", "unlinkat", "mkdirat"], (0, 1)),
    # The new name. A rename within the directories under test has both there.
    **dict.fromkeys(["rename", "link", "symlink"], (None, 1)),
    **dict.fromkeys(["renameat", "renameat2", "linkat"], (2, 3)),
    "symlinkat": (1, 2),
}
OPEN_FLAGS = {"open": 1, "openat": 2}
FOR_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Unsupported(Exception):
    """Supervision is not permitted on this machine; the text says why."""


@dataclass(frozen=True, slots=True)
class Call:
    """A system call that waits for an answer.

    Attributes:
        id: of the notification.
        thread: its thread.
        name: a key of `CALLS`.
        arguments: six integers.
        path: the file or directory; of a rename the new name.
    """

    id: int
    thread: int
    name: str
    arguments: tuple[int, ...]
    path: Path

    @property
    def is_read(self) -> bool:
        """Return whether the call opens a file for reading, and so changes nothing."""
        flags = OPEN_FLAGS.get(self.name)
        return flags is not None and not self.arguments[flags] & FOR_WRITING


def install(opens_for_reading: bool = False) -> int:
    """Install the filter in this process, which has one thread, and return the listener's descriptor.

    Args:
        opens_for_reading: stop calls that open a file for reading too.

    Raises:
        Unsupported: the kernel or the sandbox does not permit it.
    """
    machine = platform.machine()
    if machine not in MACHINES or not hasattr(select, "poll"):
        raise Unsupported(f"no table of system calls for {machine}")
    libc = ctypes.CDLL(None, use_errno=True)
    program = _program(machine, opens_for_reading)
    filters = ctypes.create_string_buffer(b"".join(program))
    pointer = struct.pack("HxxxxxxP", len(program), ctypes.addressof(filters))
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    # The supervisor is no ancestor of this process; where Yama restricts ptrace, it could not read its memory.
    libc.prctl(PR_SET_PTRACER, ANY_PROCESS, 0, 0, 0)
    listener = libc.syscall(SECCOMP[machine], SET_MODE_FILTER, NEW_LISTENER, pointer)
    if listener < 0:
        code = ctypes.get_errno()
        raise Unsupported(f"seccomp user notification is not permitted ({os.strerror(code)})")
    return listener


def _program(machine: str, opens_for_reading: bool) -> list[bytes]:
    """Return the filter: notify for the calls of `CALLS`, but for opening only with a flag of `FOR_WRITING`."""

    def step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("HBBI", code, if_true, if_false, value)

    column = list(MACHINES).index(machine)
    numbers = {name: call[column] for name, call in CALLS.items()}
    program = [step(LOAD, ARCHITECTURE), step(EQUALS, MACHINES[machine], 1), step(RETURN, ALLOW)]
    program.append(step(LOAD, NUMBER))
    for name, number in numbers.items():
        if number is None:
            continue
        if name in OPEN_FLAGS and not opens_for_reading:
            flags = 16 + 8 * OPEN_FLAGS[name]
            program += [step(EQUALS, number, 0, 4), step(LOAD, flags)]
            program += [step(ANY_BIT, FOR_WRITING, 0, 1), step(RETURN, NOTIFY), step(RETURN, ALLOW)]
        else:
            program += [step(EQUALS, number, 0, 1), step(RETURN, NOTIFY)]
    return [*program, step(RETURN, ALLOW)]


class Listener:
    """Receives the calls of all processes under one filter, and answers them.

    Args:
        descriptor: from `install`, received by `receive_descriptor` in another process.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        column = list(MACHINES).index(platform.machine())
        self._names = {call[column]: name for name, call in CALLS.items()}

    def fileno(self) -> int:
        """Return the descriptor, for `select.poll`."""
        return self._descriptor

    def receive(self) -> Call | None:
        """Return a call that waits, or None if its process has ended; blocks if no call waits."""
        buffer = bytearray(80)
        try:
            fcntl.ioctl(self._descriptor, RECEIVE, buffer, True)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EINTR):
                return None
            raise
        number, thread, _, call, _, _, *arguments = struct.unpack("QIIiIQ6Q", buffer)
        name = self._names[call]
        try:
            path = _path_of(thread, name, arguments)
        except OSError:
            # The process has ended, or the call fails by itself, as one with a descriptor that is not open.
            path = Path()
        return Call(number, thread, name, tuple(arguments), path)

    def execute(self, call: Call) -> None:
        """Let the kernel execute the call."""
        self._answer(struct.pack("QqiI", call.id, 0, 0, CONTINUE))

    def fail(self, call: Call, code: int) -> None:
        """Make the call return an error, without executing it."""
        self._answer(struct.pack("QqiI", call.id, 0, -code, 0))

    def succeed(self, call: Call, result: int) -> None:
        """Make the call return a result, without executing it."""
        self._answer(struct.pack("QqiI", call.id, result, 0, 0))

    def close(self) -> None:
        """Close the descriptor; calls that wait then fail with ENOSYS."""
        os.close(self._descriptor)

    def _answer(self, answer: bytes) -> None:
        try:
            fcntl.ioctl(self._descriptor, SEND, answer)
        except OSError as error:
            if error.errno != errno.ENOENT:  # the process has ended
                raise


def memory_of(thread: int, address: int, num_bytes: int) -> bytes:
    """Return bytes of a process's memory; fewer where the mapping ends."""
    with open(f"/proc/{thread}/mem", "rb", buffering=0) as memory:
        return os.pread(memory.fileno(), num_bytes, address)


def send_descriptor(channel: socket.socket, descriptor: int) -> None:
    """Send an open descriptor to another process."""
    rights = array.array("i", [descriptor])
    channel.sendmsg([b"d"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])


def receive_descriptor(channel: socket.socket) -> int | None:
    """Return a descriptor that another process has sent, or None if it has sent none."""
    _, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
    return descriptors[0] if descriptors else None


def _path_of(thread: int, name: str, arguments: list[int]) -> Path:
    if name in DESCRIPTOR:
        return Path(os.readlink(f"/proc/{thread}/fd/{_signed(arguments[DESCRIPTOR[name]])}"))
    directory, position = PATH[name]
    path = _text_at(thread, arguments[position])
    if os.path.isabs(path):
        return Path(os.path.normpath(path))
    descriptor = AT_FDCWD if directory is None else _signed(arguments[directory])
    base = "cwd" if descriptor == AT_FDCWD else f"fd/{descriptor}"
    return Path(os.path.normpath(os.path.join(os.readlink(f"/proc/{thread}/{base}"), path)))


def _text_at(thread: int, address: int) -> str:
    # A path may end just before memory that is not mapped, where a longer read fails.
    text = b""
    while b"\0" not in text and len(text) < MAX_PATH:
        start = address + len(text)
        text += memory_of(thread, start, 256 - start % 256)
    return os.fsdecode(text.partition(b"\0")[0])


def _signed(value: int) -> int:
    return ctypes.c_int(value & 0xFFFFFFFF).value
