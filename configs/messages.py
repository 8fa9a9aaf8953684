"""Values, texts and errors of the system as a message may show them: on one line, short, without control characters."""

import errno
import re
import reprlib
import sys
import unicodedata
from collections.abc import Mapping, Sequence, Set
from enum import Enum
from importlib.util import find_spec
from types import TracebackType
from typing import Any

from configs.exit_codes import USER_ERROR_EXIT_CODE

MAX_SHOWN_CHARS = 160
MAX_PATH_CHARS = 400
MAX_LINE_CHARS = 4000
# Categories of Unicode: control, format (as those that reverse the direction), surrogate, line and paragraph separator.
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


class _Short(reprlib.Repr):
    """Representations whose cost and length do not grow with the value."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxstring = self.maxother = self.maxlong = MAX_SHOWN_CHARS

    def repr1(self, x: Any, level: int) -> str:
        """Represent a value by what it is, not by the name of its class: a subclass may hold as much."""
        if isinstance(x, Enum):
            return repr(x)
        if isinstance(x, int):
            return self.repr_int(x, level)
        if isinstance(x, str):
            return self.repr_str(x, level)
        if isinstance(x, bytes | bytearray):
            return repr(bytes(x[:MAX_SHOWN_CHARS]))
        if isinstance(x, Mapping):
            return self.repr_dict(x, level)  # type: ignore[arg-type]
        if isinstance(x, tuple):
            return self.repr_tuple(x, level)
        if isinstance(x, Set):
            return self.repr_set(x, level)  # type: ignore[arg-type]
        if isinstance(x, Sequence):
            return self.repr_list(x, level)  # type: ignore[arg-type]
        return self.repr_instance(x, level)

    def repr_int(self, x: int, level: int) -> str:
        """Show an integer whose digits Python refuses to write (over 4,300) by its size."""
        bits = x.bit_length()
        return repr(x) if bits <= 256 else f"<an integer of {bits:,} bits>"


_SHORT = _Short()


def shown(value: Any) -> str:
    """Return a value as a message shows it: like `repr`, on one line, with at most `MAX_SHOWN_CHARS` characters.

    Values come from files: a yaml of 2 kB may hold, by nested aliases, a value whose `repr` fills the memory.
    """
    return shortened(printable(_SHORT.repr(value)))


def first_of(texts: Sequence[str], most: int = 4) -> str:
    """Return the first texts of a list, and how many more there are."""
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return f"{', '.join(texts[:most])}{more}"


def shortened(text: str, max_chars: int = MAX_SHOWN_CHARS) -> str:
    """Return `text`, or its first and last part around `...` if it has more than `max_chars` characters."""
    if len(text) <= max_chars:
        return text
    tail = max_chars // 4
    return f"{text[: max_chars - tail - 3]}...{text[-tail:]}"


def printable(text: str) -> str:
    r"""Return `text` with control characters as escapes, as `\n` or `\x1b`; a name may hold any character."""
    if text.isprintable():
        return text
    return "".join(
        repr(char)[1:-1] if unicodedata.category(char) in _HIDDEN else char for char in text
    )


def on_one_line(text: str) -> str:
    """Return a message as it leaves the process: one line of at most `MAX_LINE_CHARS` characters that hides nothing."""
    return shortened(printable(shortened(text, MAX_LINE_CHARS)), MAX_LINE_CHARS)


_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EFBIG), "free some space"),
    errno.EDQUOT: "free some of your quota",
    **dict.fromkeys((errno.EEXIST, errno.ENOTDIR), "move it or choose another path"),
    errno.EROFS: "choose a directory that can be written",
    **dict.fromkeys((errno.EACCES, errno.EPERM), "change its permissions or choose another path"),
    **dict.fromkeys(
        (errno.EIO, errno.ESTALE, errno.ENODEV, errno.ENXIO, errno.EREMOTEIO, errno.ETIMEDOUT),
        "check the disk or the network file system",
    ),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise the limit of open files (ulimit -n)"),
}


UNKNOWN_FILE = "while a file of the run was read or written"


def os_error_text(error: OSError, where: str = UNKNOWN_FILE, more: str = "") -> str:
    """Describe an error of the system in one line: reason, path (`where` if it names none) and remedy.

    `more` continues the remedy for a full disk.
    """
    # A name that a damaged file holds may have any length.
    files = [
        shortened(printable(str(file)), MAX_PATH_CHARS)
        for file in (error.filename, error.filename2)
        if file is not None
    ]
    remedy = _REMEDIES.get(error.errno or 0)
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    then = f"; {remedy} and rerun the same command{more if is_full else ''}" if remedy else ""
    what = error.strerror or str(error) or type(error).__name__
    return f"{what}: {' -> '.join(files) or where}{then}"


OURS = "main configs dataloading preproc nn compare serving status sweep hybrid_parallel_recsys benchmarks"
DEPENDENCIES = (
    "torch torchrec fbgemm_gpu hydra omegaconf numpy yaml duckdb pyarrow numba isal rich tensorboard matplotlib "
    "antlr4 llvmlite pyre_extensions tensordict torchmetrics tqdm triton uvicorn httptools prometheus_client google"
)
"""Modules that pyproject.toml installs without an extra, and those that TorchRec and others of them import."""
EXTRAS = {
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "spark": ("pyspark",),
    "sweep": ("optuna", "sklearn"),
    "loggers": ("wandb", "mlflow", "sqlalchemy", "alembic"),
    "mlperf": ("mlperf_logging",),
    "bench": ("polars",),
    "kafka": ("confluent_kafka",),
}
"""Modules that an extra of pyproject.toml installs."""


def require_package(name: str, purpose: str) -> None:
    """Raise `ValueError` unless a package is installed, without importing it; `purpose`, as an option, needs it."""
    if find_spec(name) is None:
        raise ValueError(
            f"{purpose} needs the package {name}, which is not installed: {_how_to_install(name)}"
        )


def first_line(error: Exception | str) -> str:
    """Return the first line of a library's error that has text; other characters that end lines may be of a value in it."""
    return next((line.strip() for line in str(error).split("\n") if line.strip()), repr(error))


def require_onnx() -> None:
    """Raise `ValueError` unless the packages that write an ONNX model, and prove it, are installed."""
    for name in EXTRAS["onnx"]:
        require_package(name, "onnx=true")


def load_error_text(error: ImportError | OSError) -> str | None:
    """Return the line for a library that is missing or cannot be loaded; None for any other error.

    A module of the project that is missing, or lacks a name, is an error of the program. The commands that install the
    project do not bring a module of the user.
    """
    name = ((error.name if isinstance(error, ImportError) else None) or "").partition(".")[0]
    if name in OURS.split():
        return None
    is_brought = not name or any(
        name in modules for modules in (DEPENDENCIES.split(), *EXTRAS.values())
    )
    if isinstance(error, ModuleNotFoundError) and name:
        remedy = _how_to_install(name) if is_brought else "install it there, or correct the import"
        return f"the package {name} is not installed for {sys.executable}: {remedy}"
    # The loader of shared libraries sets no number; torch and FBGEMM call it themselves.
    is_shared = re.search(r"\.so\b", str(error)) is not None
    if isinstance(error, OSError) and (error.errno is not None or not is_shared):
        return None
    reason = " ".join(str(error).split())
    limit = "raise the limit of memory if there is one (ulimit -v), or " if is_shared else ""
    again = (
        f"install again: {_how_to_install(name)}" if is_brought else f"correct or reinstall {name}"
    )
    return f"a library of {sys.executable} cannot be loaded: {reason}; {limit}{again}"


def report_load_errors() -> None:
    """Let such an error outside of all handlers, as in the first imports, end the process with one line and exit code 2."""
    sys.excepthook = _report


def _report(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    text = load_error_text(error) if isinstance(error, ImportError | OSError) else None
    if text is None:
        sys.__excepthook__(kind, error, traceback)
        return
    print(f"error: {text}", file=sys.stderr, flush=True)
    sys.exit(USER_ERROR_EXIT_CODE)


def _how_to_install(module: str = "") -> str:
    """Return the commands that install the project, with the extra that brings a module."""
    extras = [extra for extra, modules in EXTRAS.items() if module in modules]
    listed = ",".join(("cpu", *extras))
    further = "".join(f" --extra {extra}" for extra in extras)
    return (
        f"`uv sync --extra cpu{further}` or `pip install '.[{listed}]'` in the checkout (`cuda` instead of `cpu` on a GPU "
        "machine)"
    )
