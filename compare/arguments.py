"""Directories among the arguments of a command, beside options that are written key=value."""

from collections.abc import Sequence
from pathlib import Path

from configs.arguments import quoted
from configs.many_runs_schema import CompareConfig
from configs.options import describe


def with_runs(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with all directories as one option, `runs`.

    An argument is a directory if it names no option: no `=`, or one in the name of a path, such as `many/00-lr=0.1`.
    """
    names = {name for name, _ in describe(CompareConfig)}
    directories: list[str] = []
    others: list[str] = []
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        is_path = not equals or "/" in name or Path(argument).exists()
        is_option = argument.startswith(("-", "hydra.")) or (equals and name.lstrip("+~") in names)
        (directories if is_path and not is_option and argument else others).append(argument)
    if not directories:
        return others
    return [*others, f"runs=[{','.join(map(quoted, directories))}]"]
