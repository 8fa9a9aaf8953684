"""Import of objects that an option names as `package.module:NAME`; they may lie outside the project."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from traceback import extract_tb
from typing import Any


def load_user_object(path: str, option: str) -> Any:
    """Import an object, `package.module:NAME`, that an option names.

    Raises ValueError: the module cannot be imported, or has no such name. The project's own modules raise their own errors.
    """
    module, _, name = path.partition(":")
    try:
        content = import_module(module)
    except (Exception, SystemExit) as error:  # the module is not ours, and may raise anything
        is_missing = (
            isinstance(error, ModuleNotFoundError)
            and f"{module}.".startswith(f"{error.name}.")
            and module not in sys.modules
        )
        if module.split(".")[0] in ("configs", "nn") and not is_missing:
            raise  # a fault of the project or of its installation
        raise ValueError(
            f"{option}={path}: {module} cannot be imported ({described(error)}); correct the name, install its package, or add "
            "its directory to PYTHONPATH"
        ) from error
    if not hasattr(content, name):
        raise ValueError(f"{option}={path}: {module} has no {name}; correct the name")
    return getattr(content, name)


def has_raised(module: str, error: BaseException) -> bool:
    """Return whether an error came from the code of a module, or from what that code called."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return any(frame.filename == file for frame in extract_tb(error.__traceback__))


@contextmanager
def one_line_if_it_fails(option: str) -> Iterator[None]:
    """Raise ValueError for any error of a user's object that is called within, with the option that names it."""
    try:
        yield
    except (Exception, SystemExit) as error:  # the user's may raise anything
        raise ValueError(f"{option} has failed ({described(error)}); correct it") from error


def described(error: BaseException) -> str:
    """Return an error of a user's object in one line, with where it was raised: the last line outside of installed packages."""
    first_line = (str(error).splitlines() or [""])[0]
    frames = [
        frame
        for frame in extract_tb(error.__traceback__)
        if frame.filename != __file__ and "importlib" not in frame.filename
    ]
    own = [frame for frame in frames if "site-packages" not in frame.filename] or frames
    at = f", at {own[-1].filename}:{own[-1].lineno}" if own else ""
    return f"{type(error).__name__}: {first_line}{at}"
