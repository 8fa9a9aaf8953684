"""Objects that an option names as `package.module:NAME`: they may lie outside the project."""

from importlib import import_module
from typing import Any


def load_user_object(path: str, option: str) -> Any:
    """Import what `package.module:NAME` names.

    Args:
        path: module and name.
        option: that names it, for errors.

    Raises:
        ValueError: the module cannot be imported, or has no such name.
    """
    module, _, name = path.partition(":")
    try:
        found = import_module(module)
    except Exception as error:  # of code that is not ours
        first_line = (str(error).splitlines() or [""])[0]
        raise ValueError(
            f"{option}={path}: {module} cannot be imported ({type(error).__name__}: {first_line}); install its "
            "package, or put its directory on PYTHONPATH"
        ) from error
    if not hasattr(found, name):
        raise ValueError(f"{option}={path}: {module} has no {name}; correct the name")
    return getattr(found, name)
