"""Harness of the fuzzers: try mutated artifacts, and accept success or one line with exit code 2.

A fuzzer has one valid artifact, made once, and a strategy of mutations of it. `fuzz` applies mutations to fresh copies and
calls what a command calls. Accepted are success, and a refusal: exit code 2 with one short line that a `raise` of this
project has written. Everything else is a failure: another exception, time, memory, or a file touched outside the copy.
"""

import dis
import io
import os
import re
import resource
import shutil
import signal
import stat
import sys
import threading
import time
import traceback
import unicodedata
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, ClassVar
from unittest.mock import patch

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

from configs.exit_codes import USER_ERROR_EXIT_CODE
from nn.library_warnings import quiet_libraries
from tests.helpers.forks import COMPOSED_VARIABLE

ROOT = Path(__file__).resolve().parents[2]
TIME_LIMIT_S = 30.0
MEMORY_LIMIT_BYTES = 768 << 20
"""Peak of resident memory that an example may add."""
ADDRESS_SPACE_BYTES = 6 << 30
"""Address space that an example may add; threads and allocators reserve much more than they use."""
LONGEST_LINE = 1000
# Categories of Unicode: control, format (as those that reverse the direction), surrogate, line and paragraph separator.
CONTROL = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
SECRET = "secret.bin"


@dataclass(frozen=True, slots=True)
class Fuzzer:
    """A valid artifact, mutations of it, and the function that reads them.

    Attributes:
        name: `area: artifact`.
        prepare: makes the artifact in a new directory and returns it.
        mutations: artifact -> strategy.
        attempt: (artifact, mutation, empty directory) -> None; writes the mutated copy and reads it as a command does.
        examples: of the short form, which CI runs.
        other_exit_codes: accepted beside that of a user error, such as 1 of `mode=verify`.
    """

    name: str
    prepare: Callable[[Path], Any]
    mutations: Callable[[Any], SearchStrategy[Any]]
    attempt: Callable[[Any, Any, Path], None]
    examples: int = 2
    other_exit_codes: tuple[int, ...] = ()


@dataclass(slots=True)
class Failure:
    """One kind of failure: where it was raised, how often, and its shortest example."""

    count: int = 0
    example: str = ""
    details: str = ""

    def add(self, example: str, details: str) -> None:
        """Count one more; keep the shorter example."""
        self.count += 1
        if not self.example or len(example) < len(self.example):
            self.example, self.details = example, details


@dataclass(slots=True)
class Report:
    """Outcome of a fuzzer."""

    name: str
    seed: int
    examples: int = 0
    succeeded: int = 0
    refused: int = 0
    slowest_s: float = 0.0
    total_s: float = 0.0
    cpu_s: float = 0.0
    failures: dict[str, Failure] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        counts = f"{self.succeeded:6,} succeeded {self.refused:6,} refused"
        text = f"{self.name:28} seed {self.seed} {self.examples:6,} examples {counts}"
        times = (
            f"{self.total_s:7.1f} s ({self.cpu_s:.1f} s of a CPU), slowest {self.slowest_s:5.2f} s"
        )
        return f"{text}, {times}, {len(self.failures)} distinct failures"

    def explained(self) -> str:
        """Return the failures, the most frequent first, each with its shortest example."""
        parts = []
        for kind, failure in sorted(self.failures.items(), key=lambda item: -item[1].count):
            parts += [f"  {failure.count:5} x {kind}", f"          {failure.example[:600]}"]
            parts += [f"          | {line}" for line in failure.details[:1500].splitlines()]
        return "\n".join(parts)


class _TooSlowError(BaseException):
    """An example takes longer than `TIME_LIMIT_S`; no `except Exception` stops it."""


def prepared(fuzzer: Fuzzer, directory: Path) -> Any:
    """Make the valid artifact of a fuzzer in a new directory."""
    with redirect_stdout(io.StringIO()):
        return fuzzer.prepare(directory)


def fuzz(
    fuzzer: Fuzzer, artifact: Any, directory: Path, *, examples: int, with_seed: int
) -> Report:
    """Try `examples` mutations; the same seed gives the same ones.

    Args:
        fuzzer: to run.
        artifact: what `prepared` has returned; it may serve several fuzzers with the same `prepare`.
        directory: empty directory for the mutated copies.
        examples: number of mutations.
        with_seed: seed of Hypothesis.
    """
    report = Report(fuzzer.name, with_seed)
    place = _Place(directory)

    @seed(with_seed)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(fuzzer.mutations(artifact))
    def attempt(mutation: Any) -> None:
        _try(fuzzer, artifact, mutation, place, report)

    with place.entered():
        attempt()
    return report


def _try(fuzzer: Fuzzer, artifact: Any, mutation: Any, place: "_Place", report: Report) -> None:
    room = place.new_room()
    began, cpu = time.perf_counter(), time.process_time()
    ending, limits = _Ending(), _Limits(room)
    with ending, limits:
        fuzzer.attempt(artifact, mutation, room)
    seconds = time.perf_counter() - began
    report.cpu_s += time.process_time() - cpu
    exit_codes = (USER_ERROR_EXIT_CODE, *fuzzer.other_exit_codes)
    problem = ending.problem(exit_codes) or limits.problem() or place.problem()
    report.examples += 1
    report.total_s += seconds
    report.slowest_s = max(report.slowest_s, seconds)
    if problem is None:
        report.succeeded += ending.exit_code == 0
        report.refused += ending.exit_code != 0
        line = _generic(ending.err or ending.out if ending.exit_code else "", room)
        report.lines[line] = report.lines.get(line, 0) + 1
    else:
        key, details = problem
        report.failures.setdefault(key, Failure()).add(_without_runs(repr(mutation)), details)


def _without_runs(text: str) -> str:
    """Return the text with 40 or more equal characters in a row written as their number."""
    return re.sub(r"(.)\1{39,}", lambda run: f"{run[1]}<{len(run[0])} times>", text)


def _generic(text: str, room: Path) -> str:
    """Return the start of a message without the directory, to count kinds of messages."""
    return text.replace(str(room), "ROOM").strip()[:300]


class _Opened:
    """Paths that Python opens, lists, makes, moves or removes while it is active; libraries in C are not seen."""

    # Event -> index of its argument `dir_fd`: a name below an open directory is left out.
    CHANGES: ClassVar[dict[str, int]] = {
        "os.mkdir": 2,
        "os.rmdir": 1,
        "os.remove": 1,
        "os.rename": 2,
        "os.truncate": 2,
    }
    READS = frozenset(["os.listdir", "os.scandir"])

    def __init__(self) -> None:
        self.paths: set[tuple[str, bool]] = set()
        self.active = False
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.active:
            return
        if event == "open":
            writes = bool(arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        elif event in self.READS:
            writes = False
        elif event in self.CHANGES and arguments[self.CHANGES[event] :][:1] in ((), (-1,)):
            writes = True
        else:
            return
        for path in arguments[: 2 if event == "os.rename" else 1]:
            if isinstance(path, str | bytes | os.PathLike):
                self.paths.add((os.fsdecode(path), writes))


_OPENED = _Opened()


class _Place:
    """The directories around an example: `room`, and others that it must not touch."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory.resolve()
        self._room = self._directory / "room"
        self._elsewhere = [directory / name for name in ("outside", "cwd")]
        for path in self._elsewhere:
            path.mkdir()
        (directory / "outside" / SECRET).write_bytes(bytes(4096))

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Make `cwd` the working directory, so that relative paths of a mutation lie there."""
        before = Path.cwd()
        os.chdir(self._directory / "cwd")
        try:
            with patch.dict(os.environ, COLUMNS="200"):
                yield
        finally:
            os.chdir(before)

    def new_room(self) -> Path:
        """Empty the room; return its only folder."""
        shutil.rmtree(self._room, ignore_errors=True)
        room = self._room / "x"
        room.mkdir(parents=True)
        return room

    def _opened_outside(self) -> str | None:
        """Return a path that was opened outside: to read in `outside`, or to write anywhere but in the room."""
        for path, writes in sorted(_OPENED.paths):
            real = os.path.realpath(path)
            # Hydra makes its working directory, which is there.
            inside = real.startswith(f"{self._room}/") or real == f"{self._directory}/cwd"
            outside = real.startswith(f"{self._directory}/outside")
            # Numba's and matplotlib's caches.
            cached = "__pycache__" in real or "/matplotlib" in real
            # Configurations that the session's processes share.
            cached |= real.startswith(os.environ.get(COMPOSED_VARIABLE, "/dev/null"))
            allowed = inside or cached or real.startswith(("/dev/", "/proc/"))
            if outside or (writes and not allowed):
                return f"{'wrote' if writes else 'read'} {path.replace(str(self._room), 'ROOM')}"
        return None

    def problem(self) -> tuple[str, str] | None:
        """Return what was written outside the room, and remove it."""
        opened = self._opened_outside()
        if opened is not None:
            return opened[:100], ""
        allowed = {"room", "outside", "cwd", f"outside/{SECRET}"}
        found = {path.name for path in self._directory.iterdir()}
        for folder in self._elsewhere:
            found |= {f"{folder.name}/{path.name}" for path in folder.iterdir()}
        more = sorted(found - allowed)
        for name in more:
            path = self._directory / name
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        secret = self._directory / "outside" / SECRET
        if not secret.is_file() or secret.read_bytes() != bytes(4096):
            secret.write_bytes(bytes(4096))
            more.append("the file outside was changed")
        return (f"wrote outside: {', '.join(more)[:80]}", "") if more else None


class _Ending:
    """Capture how an example ends: exit code, output, error."""

    def __init__(self) -> None:
        self.exit_code: Any = 0
        self.out = self.err = ""
        self._error: BaseException | None = None
        self._in_threads: list[BaseException] = []

    def __enter__(self) -> None:
        self._out, self._err = io.StringIO(), io.StringIO()
        self._contexts = [redirect_stdout(self._out), redirect_stderr(self._err)]
        self._hook, threading.excepthook = threading.excepthook, self._note_thread
        self._warnings = warnings.catch_warnings(action="default")
        for context in (*self._contexts, self._warnings):
            context.__enter__()
        # Those that Python leaves out by default.
        for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", kind)
        quiet_libraries()

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> bool:
        for context in (self._warnings, *self._contexts):
            context.__exit__(None, None, None)
        threading.excepthook = self._hook
        self.out, self.err = self._out.getvalue(), self._err.getvalue()
        self._error = error
        if isinstance(error, KeyboardInterrupt):
            return False
        if isinstance(error, SystemExit):
            self.exit_code = error.code
        return True

    def _note_thread(self, arguments: threading.ExceptHookArgs) -> None:
        if arguments.exc_value is not None:
            self._in_threads.append(arguments.exc_value)

    def problem(self, exit_codes: tuple[int, ...]) -> tuple[str, str] | None:
        """Return (kind, details) of a failure, None if the example succeeded or was refused well."""
        for error in self._in_threads:
            return f"in a thread: {_kind(error)}", _text(error)
        if self._error is not None and not isinstance(self._error, SystemExit):
            return _kind(self._error), _text(self._error)
        if _has_control_characters(self.out):
            return "control characters on stdout", repr(self.out[:2000])
        if self.exit_code == 0:
            return (f"succeeded with stderr: {self.err[:60]!r}", self.err) if self.err else None
        if self.exit_code not in exit_codes:
            return f"exit code {self.exit_code}", self.err
        return None if self.exit_code != USER_ERROR_EXIT_CODE else self._problem_of_line()

    def _problem_of_line(self) -> tuple[str, str] | None:
        cause = None if self._error is None else self._error.__context__
        line = self.err.removesuffix("\n")
        place = "" if cause is None else f" at {_place_of(cause)}"
        if not line.startswith("error: ") or "\n" in line or _has_control_characters(line):
            return f"not one printable line{place}", repr(self.err[:2000])
        if len(line) > LONGEST_LINE:
            return f"a line of more than {LONGEST_LINE} characters{place}", line[:3000]
        if cause is not None and not _is_ours(cause):
            return f"refused by Python's {_kind(cause)}", f"{line}\n{_text(cause)}"
        return None


def _has_control_characters(text: str) -> bool:
    return not text.isprintable() and any(
        char != "\n" and unicodedata.category(char) in CONTROL for char in text
    )


def _kind(error: BaseException) -> str:
    return f"{type(error).__name__} at {_place_of(error)}"


def _place_of(error: BaseException) -> str:
    """Return file and function of the innermost frame of this project."""
    places = [
        f"{Path(frame.f_code.co_filename).relative_to(ROOT)}:{line} {frame.f_code.co_name}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if _is_project(frame)
    ]
    return places[-1] if places else "no frame of the project"


def _is_project(frame: FrameType) -> bool:
    path = Path(frame.f_code.co_filename)
    inside = path.is_relative_to(ROOT) and ".venv" not in path.parts
    return inside and not path.is_relative_to(ROOT / "tests" / "fuzz")


def _is_ours(error: BaseException) -> bool:
    """Return whether a `raise` of the project wrote the message; an OSError names its file itself."""
    if isinstance(error, OSError):
        return error.filename is not None
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or not _is_project(frame):
        return False
    return dis.opname[frame.f_code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"


def _text(error: BaseException) -> str:
    """Return the frames of the project and the message; the frames of the fuzzers are left out."""
    frames = [
        f"{Path(frame.f_code.co_filename).relative_to(ROOT)}:{line} {frame.f_code.co_name}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if _is_project(frame)
    ]
    return "\n".join([*frames[-6:], f"{type(error).__name__}: {error}"[:1000]])


class _Limits:
    """Limit time, address space and resident memory of an example."""

    def __init__(self, room: Path) -> None:
        self._room = room
        self.added_bytes = 0

    def __enter__(self) -> None:
        self._handler = signal.signal(signal.SIGALRM, self._stop)
        self._limit = resource.getrlimit(resource.RLIMIT_AS)
        limit = _status_bytes("VmSize") + ADDRESS_SPACE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, self._limit[1]))
        with suppress(OSError):
            # Makes VmHWM, the peak, that of now.
            Path("/proc/self/clear_refs").write_text("5")
        self._resident = _status_bytes("VmHWM")
        signal.setitimer(signal.ITIMER_REAL, TIME_LIMIT_S, 1.0)
        _OPENED.paths.clear()
        _OPENED.active = True

    def __exit__(self, *exception: object) -> None:
        _OPENED.active = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._handler)
        resource.setrlimit(resource.RLIMIT_AS, self._limit)
        self.added_bytes = _status_bytes("VmHWM") - self._resident

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        # A reader that waits for the writer of a FIFO is released by one.
        for path in self._room.rglob("*"):
            if stat.S_ISFIFO(path.lstat().st_mode):
                os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))
        raise _TooSlowError

    def problem(self) -> tuple[str, str] | None:
        """Return that the example took too much memory, if it did."""
        if self.added_bytes <= MEMORY_LIMIT_BYTES:
            return None
        return "too much memory", f"{self.added_bytes / 2**20:,.0f} MiB"


def _status_bytes(key: str) -> int:
    """Return a size of this process from /proc."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:"))
