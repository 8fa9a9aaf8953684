"""Triton for modules that machines without it import too."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

tl: Any = None
"""`triton.language`; Triton's interpreter looks for the name in each module that has a kernel."""

with suppress(ImportError):  # torch without CUDA
    import triton
    import triton.language

    tl = triton.language


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return Triton's kernel of a function; without Triton the function, which nothing can launch."""
    return function if tl is None else triton.jit(function)
