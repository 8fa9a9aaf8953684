"""Names for parts of a step, which a profiler shows above the kernels they start; nothing at all when none looks.

The profiler in use is kept here, for the process, so that the step need not carry one about.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

_NOTHING = nullcontext()
_open: Callable[[str], AbstractContextManager] | None = None


def mark(name: str) -> AbstractContextManager:
    """Return a context that shows as `name` in the profile being taken, if one is."""
    return _NOTHING if _open is None else _open(name)


@contextmanager
def annotations_shown_by(open_range: Callable[[str], AbstractContextManager]) -> Iterator[None]:
    """Let every `mark` of this process open such a range until the context ends."""
    global _open
    _open = open_range
    try:
        yield
    finally:
        _open = None
