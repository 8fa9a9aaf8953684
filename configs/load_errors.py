"""A library that is missing, or that the system cannot load, as one line with the command that installs it."""

import os
import sys
from importlib.util import find_spec
from types import TracebackType

from configs.exit_codes import USER_ERROR_EXIT_CODE

OURS = "main configs dataloading preproc nn compare serving sweep benchmarks"
EXTRAS = {
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "spark": ("pyspark",),
    "sweep": ("optuna", "sklearn"),
    "loggers": ("wandb", "mlflow", "sqlalchemy", "alembic"),
    "mlperf": ("mlperf_logging",),
    "bench": ("polars", "pandas"),
}
"""Modules that an extra of pyproject.toml installs."""


def require_package(name: str, purpose: str) -> None:
    """Raise `ValueError` unless a package is installed, without importing it; `purpose`, as an option, needs it."""
    if find_spec(name) is None:
        raise ValueError(
            f"{purpose} needs the package {name}, which is not installed: {_how_to_install(name)}"
        )


def require_onnx() -> None:
    """Raise `ValueError` unless the packages that write an ONNX model, and prove it, are installed."""
    for name in EXTRAS["onnx"]:
        require_package(name, "onnx=true")


def load_error_text(error: ImportError | OSError) -> str | None:
    """Return the line for a library that is missing or cannot be loaded; None for any other error.

    A module of the project that is missing, or lacks a name, is an error of the program.
    """
    name = ((error.name if isinstance(error, ImportError) else None) or "").partition(".")[0]
    if name in OURS.split():
        return None
    if isinstance(error, ModuleNotFoundError) and name:
        return f"the package {name} is not installed for {sys.executable}: {_how_to_install(name)}"
    # The loader of shared libraries sets no number; torch and FBGEMM call it themselves.
    if isinstance(error, OSError) and (error.errno is not None or ".so" not in str(error)):
        return None
    reason = " ".join(str(error).split())
    return (
        f"a library of {sys.executable} cannot be loaded: {reason}; raise the limit of memory if there is one (ulimit -v), "
        f"or install again: {_how_to_install()}"
    )


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
    # Of the ranks of a node, one prints.
    if os.environ.get("LOCAL_RANK", "0") == "0":
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
