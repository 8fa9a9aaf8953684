"""Annotations of parts of a step, shown by a profiler above their kernels; no-ops without a profiler.

The active profiler is a global of the process, so that the training step does not need a reference to it.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

_NULL_CONTEXT = nullcontext()
_open: Callable[[str], AbstractContextManager] | None = None


def annotate(name: str) -> AbstractContextManager:
    """Return a context that appears as `name` in the active profile; a null context without a profile."""
    return _NULL_CONTEXT if _open is None else _open(name)


@contextmanager
def use_annotations(open_range: Callable[[str], AbstractContextManager]) -> Iterator[None]:
    """Open a range of this kind for every `annotate` of this process until the context ends."""
    global _open
    _open = open_range
    try:
        yield
    finally:
        _open = None
