"""Imports of torch and what needs it: thousands of modules, whose objects live as long as the process."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lasting_imports() -> Iterator[None]:
    """Import without looking for garbage: it would be looked for again and again, a sixth of the time, and there is none."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
