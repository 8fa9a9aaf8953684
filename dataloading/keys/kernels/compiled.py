"""Compilation of kernels by Numba, kept on disk if a directory for them can be written, and the threads that run them."""

import ast
import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from threading import Lock
from typing import Any

import numba
from numba import njit, types
from numba.core.cgutils import ir
from numba.extending import intrinsic

_locks = [Lock()]


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function at its first call, without the interpreter's lock; a cache that fails costs time only.

    Numba keeps compiled code beside the source, in the home directory or in NUMBA_CACHE_DIR, until the file of the kernel
    or one that it imports from its package changes. A container whose user owns none of these directories keeps none.
    """
    return _kept(njit(nogil=True)(function))


def parallel_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile as `kernel`, with loops over `prange` in `numba_threads`, which sleep and do not outlive a fork."""
    config: Any = numba.config
    if config.THREADING_LAYER == "default":
        config.THREADING_LAYER = "workqueue"
    return _kept(njit(nogil=True, parallel=True)(function))


@intrinsic
def tab_bits(_: Any, text: Any, at: Any) -> Any:
    """Return a bit per byte of text[at : at + 64], the first in the lowest bit: whether it is a tab."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_helper(builder, signature.args[0], arguments[0])
        bytes_64 = ir.VectorType(ir.IntType(8), 64)
        start = builder.bitcast(builder.gep(array.data, [arguments[1]]), bytes_64.as_pointer())
        are_tabs = builder.icmp_unsigned("==", builder.load(start, align=1), bytes_64([9] * 64))
        return builder.bitcast(are_tabs, ir.IntType(64))

    return types.uint64(text, types.int64), generate


@intrinsic
def lowest_bit(_: Any, bits: Any) -> Any:
    """Return the number of the lowest bit that is set, 64 if none is."""
    may_be_none = ir.IntType(1)(0)
    return types.int64(types.uint64), lambda _, builder, __, of: builder.cttz(of[0], may_be_none)


def _kept(compiled: Any) -> Callable[..., Any]:
    """Let Numba keep the code on disk."""
    try:
        digest = _digest(compiled.py_func.__module__)
        compiled.enable_caching()
    except (RuntimeError, OSError):
        _warn()
        return compiled
    kept = compiled._cache  # Numba has no public name for it
    # Numba compares the file of the kernel alone, but compiled code has the kernels and constants of other files inside.
    file = kept._cache_file
    file._source_stamp = file._source_stamp, digest

    def tolerant(access: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return access(*arguments)
        except Exception:  # a full disk, or a damaged file, whose pickle may raise anything
            _warn()
            return None

    for name in ("load_overload", "save_overload"):
        setattr(kept, name, partial(tolerant, getattr(kept, name)))
    return compiled


@cache
def _digest(module: str) -> str:
    """Return what changes with the source of a module, or of one that it imports from its package."""
    sources: dict[str, bytes] = {}
    waiting = [module, __name__]
    while waiting:
        name = waiting.pop()
        path = getattr(sys.modules.get(name), "__file__", None)
        if name in sources or path is None:
            continue
        sources[name] = Path(path).read_bytes()
        package = name.partition(".")[0]
        waiting += [
            node.module
            for node in ast.walk(ast.parse(sources[name]))
            if isinstance(node, ast.ImportFrom)
            and node.module is not None
            and node.module.partition(".")[0] == package
        ]
    return hashlib.sha256(repr(sorted(sources.items())).encode()).hexdigest()


@cache
def _warn() -> None:
    """Print one line per process."""
    print(
        "warning: compiled kernels cannot be kept on disk, so every start compiles them; set NUMBA_CACHE_DIR to a directory "
        "that only you can write",
        file=sys.stderr,
        flush=True,
    )


def num_threads(wanted: int) -> int:
    """Return how many threads there can be; Numba starts as many as there are cores."""
    return min(wanted, numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]


@contextmanager
def numba_threads(number: int) -> Iterator[None]:
    """Have so many of Numba's threads for a call, one call at a time; the thread's own number comes back afterwards."""
    with _locks[0]:
        before = numba.get_num_threads()
        numba.set_num_threads(number)
        try:
            yield
        finally:
            numba.set_num_threads(before)


# A call of the parent does not end in the child.
os.register_at_fork(after_in_child=lambda: _locks.__setitem__(0, Lock()))
