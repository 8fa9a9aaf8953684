"""Compilation of kernels by Numba, kept on disk if a directory for them can be written."""

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from numba import njit


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function at its first call, without the interpreter's lock; a cache that fails costs time only.

    Numba keeps compiled code beside the source, in the home directory or in NUMBA_CACHE_DIR. A container whose user owns
    none of them has no such directory.
    """
    compiled = njit(nogil=True)(function)
    try:
        compiled.enable_caching()
    except (RuntimeError, OSError):
        _warn()
        return compiled
    kept = compiled._cache  # type: ignore[attr-defined]  # Numba has no public name for it
    for name in ("load_overload", "save_overload"):
        setattr(kept, name, _tolerant(getattr(kept, name)))
    return compiled


def _tolerant(access: Callable[..., Any]) -> Callable[..., Any]:
    def accessed(*arguments: Any) -> Any:
        try:
            return access(*arguments)
        except Exception:  # a full disk, or a damaged file, whose pickle may raise anything
            _warn()
            return None

    return accessed


@cache
def _warn() -> None:
    """Print one line per process."""
    print(
        "warning: compiled kernels cannot be kept on disk, so every start compiles them; set NUMBA_CACHE_DIR to a directory "
        "that only you can write",
        file=sys.stderr,
        flush=True,
    )
