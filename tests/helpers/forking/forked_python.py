"""`python` without its seconds of imports: commands are forks of a process that has imported torch, TorchRec and the project.

`PYTHON` is a program that takes the place of `sys.executable`: arguments, environment, directory, open standard streams, exit
code, and signals to and from it are as with Python. It asks the server for a fork and relays signals; if it is killed, so is the
fork. Limits of resources, mounts, inherited descriptors and the seed of hashes are the server's, and what a command imports is
not seen: such tests start `sys.executable`.
"""

import atexit
import faulthandler
import json
import locale
import os
import runpy
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

LENGTH = struct.Struct("Q")
STATUS = struct.Struct("i")
RELAYED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
# Read by the server's forks, so that commands which they start are forks too.
CLIENT = """#!{python} -ES
import json, os, signal, socket, struct, sys
server = socket.socket(socket.AF_UNIX)
signals = {signals}
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
server.connect("{address}")
request = [sys.argv[1:], os.getcwd(), dict(os.environ), [n for n in signals if signal.getsignal(n) == signal.SIG_IGN]]
request = json.dumps(request).encode("utf-8", "surrogateescape")
socket.send_fds(server, [struct.pack("Q", len(request))], [0, 1, 2])
server.sendall(request)
def relay(number, frame):
    try:
        server.send(bytes([number]))
    except OSError:
        pass
for number in signals:
    signal.signal(number, relay)
signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
status = server.recv(4)
code = struct.unpack("i", status)[0] if len(status) == 4 else 1
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code not in (9, 19) else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""


def serve(listener: socket.socket, alive: int, python: Path) -> NoReturn:
    """Fork a process per request, until no process is left that may ask; the caller has one thread."""
    python.write_text(
        CLIENT.format(
            python=sys.executable, address=listener.getsockname(), signals=list(map(int, RELAYED))
        )
    )
    python.chmod(0o755)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the clients
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    poll.register(alive, 0)
    while True:
        ready = dict(poll.poll(1000))
        while _ended_child():
            pass
        if alive in ready:
            os._exit(0)
        if listener.fileno() in ready:
            client, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                os.close(alive)
                _watch(client, python)
            client.close()


def _ended_child() -> bool:
    try:
        return os.waitpid(-1, os.WNOHANG)[0] > 0
    except ChildProcessError:
        return False


def _watch(client: socket.socket, python: Path) -> NoReturn:
    """Fork the command, hand on the client's signals and the command's end."""
    message, streams, *_ = socket.recv_fds(client, LENGTH.size, 3)
    (length,) = LENGTH.unpack(message)
    with client.makefile("rb") as stream:
        request = json.loads(stream.read(length))
    pid = os.fork()
    if pid == 0:
        client.close()
        _run(request, streams, python)
    for descriptor in (0, 1, 2, *streams):
        os.close(descriptor)
    command = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(client, select.POLLIN)
    poll.register(command, select.POLLIN)
    while True:
        ready = dict(poll.poll())
        if command in ready:
            break
        numbers = client.recv(64)
        for number in numbers or [signal.SIGKILL]:
            os.kill(pid, number)
        if not numbers:
            break
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        client.send(STATUS.pack(code))
    finally:
        os._exit(0)


def _run(request: list[Any], streams: list[int], python: Path) -> NoReturn:
    """Become `python <arguments>`."""
    arguments, directory, environment, ignored = request
    for number in RELAYED:
        signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
    if signal.SIGINT not in ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(directory)
    os.environ.clear()
    os.environ |= environment
    time.tzset()
    locale.setlocale(locale.LC_CTYPE, "")
    unbuffered = bool(arguments) and arguments[0] == "-u"
    arguments = arguments[unbuffered:]
    if not arguments or not (arguments[0] in ("-c", "-m") or Path(arguments[0]).is_file()):
        os.execv(sys.executable, [sys.executable, *request[0]])
    sys.executable = str(python)
    sys.stdin = os.fdopen(0)
    sys.stdout = os.fdopen(1, "w", buffering=1 if os.isatty(1) else -1)
    sys.stdout.reconfigure(write_through=unbuffered)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace")
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    faulthandler.disable()
    atexit._clear()
    code = _exit_code(arguments)
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = code or 120
    os._exit(code)


def _exit_code(arguments: list[str]) -> int:
    """Run the command and return the exit code as Python's."""
    try:
        _execute(arguments)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 255
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        if not isinstance(error, KeyboardInterrupt):
            sys.excepthook(type(error), error, error.__traceback__)
            return 1
        traceback.print_exc()
        sys.stderr.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return 0


def _execute(arguments: list[str]) -> None:
    first, *rest = arguments
    installed = [entry for entry in sys.path if Path(entry).is_relative_to(sys.base_prefix)]
    installed += [entry for entry in sys.path if "site-packages" in entry]
    own = [entry for entry in os.environ.get("PYTHONPATH", "").split(":") if entry]
    first_path = os.getcwd() if first in ("-c", "-m") else str(Path(first).resolve().parent)
    sys.path[:] = [first_path, *own, *dict.fromkeys(installed)]
    # It looks for the user's modules beside itself, and may be another directory's.
    sys.modules.pop("main", None)
    # It knows the process that started the one which imported it.
    sys.modules.pop("nn.distributed.launcher", None)
    if first == "-c":
        main = sys.modules["__main__"] = ModuleType("__main__")
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    elif first == "-m":
        for name in (rest[0], f"{rest[0]}.__main__"):
            if not hasattr(sys.modules.get(name), "__path__"):
                sys.modules.pop(name, None)
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *rest]
        runpy.run_path(first, run_name="__main__")
