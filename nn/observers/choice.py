"""The observers of a run: those of the project, and those of a user that `log.observers` or the library's `Training` names."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from configs.user_objects import described, load_user_object
from nn.distributed.errors import EndOfRunError, RankError
from nn.observers.observer import Observer


def make_observer(name: str) -> Observer:
    """Return an observer that `log.observers` names; ValueError: `package.module:NAME` is none."""
    option = f"log.observers={name}"
    make = load_user_object(name, "log.observers")
    try:
        made = make() if callable(make) else make
    except (Exception, SystemExit) as error:  # one of the user may raise anything
        raise ValueError(f"{option} cannot be made ({described(error)}); correct it") from error
    check_events(name, made)
    return made


def check_events(name: str, observer: Observer) -> None:
    """Raise ValueError unless `observer` is one, all whose methods `on_...` an event calls."""
    if not isinstance(observer, Observer):
        raise ValueError(
            f"{name} is no observer; want an object of a class derived from Observer of nn/observers/observer.py"
        )
    events = [method for method in dir(Observer) if method.startswith("on_")]
    for method in sorted({*dir(observer)} - {*events}):
        # Other attributes may have such a name too, as on_gpu; a property is not asked for its value.
        found = inspect.getattr_static(observer, method, None)
        if method.startswith("on_") and (callable(found) or isinstance(found, classmethod)):
            raise ValueError(
                f"the observer {name} has {method}, which is no event; want {', '.join(events)}"
            )


class Observers:
    """All observers of a run, called in one order: the project's, then the user's by name."""

    def __init__(
        self, own: Sequence[Observer] = (), users: Mapping[str, Observer] | None = None
    ) -> None:
        self._own = tuple(own)
        self._users = dict(users or {})

    def tell(self, event: str, *arguments: Any, **named: Any) -> None:
        """Call a method of all observers; RankError: an observer of the user has failed."""
        for observer in self._own:
            getattr(observer, event)(*arguments, **named)
        for name, observer in self._users.items():
            try:
                getattr(observer, event)(*arguments, **named)
            except EndOfRunError:
                raise
            except (Exception, SystemExit) as error:  # the user's may raise anything
                text = f"the observer {name} has failed in {event} ({described(error)})"
                raise RankError(f"{text}; correct it, or leave it out of log.observers") from error
