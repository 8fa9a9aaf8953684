"""The loggers that `log.loggers` names: those of the project and those of other packages."""

from collections.abc import Sequence
from logging import Logger

from configs.built_in import LOGGERS
from configs.messages import DEPENDENCIES, EXTRAS, require_package
from configs.user_objects import load_user_object
from nn.loggers.background import Loggers
from nn.loggers.run_logger import METHODS, RunLogger


def check_loggers(names: Sequence[str]) -> None:
    """Refuse loggers whose library is not installed, without importing it.

    Raises ValueError: the message names it and how to install it.
    """
    for name in names:
        # The name of a logger is that of its library, if it needs one.
        if name in (*DEPENDENCIES.split(), *EXTRAS["loggers"]):
            require_package(name, f"log.loggers={name}")


def make_loggers(names: Sequence[str], logger: Logger) -> Loggers:
    """Return the loggers of a run, not started yet; only rank 0 may call it. `logger` prints their errors.

    Raises ValueError: `package.module:NAME` is no logger.
    """
    return Loggers({name: _made(name) for name in names}, logger)


def _made(name: str) -> RunLogger:
    make = load_user_object(LOGGERS.get(name, name), "log.loggers")
    try:
        made = make() if callable(make) else make
    except (Exception, SystemExit) as error:  # one of the user may raise anything
        if name in LOGGERS or isinstance(error, OSError):
            raise
        problem = (str(error).splitlines() or [""])[0]
        raise ValueError(
            f"log.loggers={name} cannot be made ({type(error).__name__}: {problem}); correct it, or leave it out"
        ) from error
    missing = [method for method in METHODS if not callable(getattr(made, method, None))]
    if missing:
        raise ValueError(
            f"log.loggers={name} is no logger: it has no method {missing[0]}; nn/loggers/run_logger.py describes the four"
        )
    return made
