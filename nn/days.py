"""Days that a run trains one after another: a list of dataset directories, or patterns that further ones will match.

Each day is a process of its own, as a command with `data.path=DAY day=next` is, so that a kill at any moment leaves what that
command leaves, and the same command resumes.
"""

import glob
import signal
import sys
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from omegaconf import DictConfig

from configs.exit_codes import USER_ERROR_EXIT_CODE
from configs.messages import on_one_line
from configs.schema import DayToTrain
from dataloading.dataset.feature_spec import SPEC_NAME, FeatureSpec
from dataloading.lineage import Lineage
from dataloading.storage.local_copy import local_path
from nn.checkpoint.directory import CHECKPOINTS, list_checkpoints, read_facts
from nn.checkpoint.run_facts import DAY_FACTS
from nn.distributed.launcher import is_launched
from nn.multirun import JOBS, STOPPING, on_stop
from nn.observability.run_lock import RunLock
from nn.shared_imports import import_for_runs

KILLED = 128
"""Exit codes above are this and the number of a signal."""
OWN_OPTIONS = ("days", "watch_days", "day", "data.path")
"""Options that the command of a single day has with other values."""


class UnfinishedDaysError(Exception):
    """A day ended with an exit code, or a signal ended the waiting for one; without a message if the day has printed it."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class DayDataset:
    """A dataset directory, with its position among the days."""

    path: str
    lineage: Lineage


def train_days(composed: DictConfig, work: Callable[[DictConfig], None]) -> None:
    """Train the days that a run has not completed, in their order.

    Raises ValueError: a directory is no dataset, or the days do not follow one another; or a launcher has started this process.
    Raises UnfinishedDaysError: a day ended with an exit code, or a signal arrived while waiting.
    """
    if is_launched():
        raise ValueError(
            "days starts one process per day, and a launcher one per rank; start the days one by one under the launcher"
        )
    if composed.checkpoint.mirror is not None:
        # In a process of its own: the libraries of object stores have threads, and the days are forked.
        _run_process(partial(_fetch, Path(composed.run_dir), composed.checkpoint.mirror), [])
    latest = _latest(Path(composed.run_dir))
    has_begun, is_complete = latest is not None, False
    while True:
        chain = days_to_train(find_days(composed.days), latest, is_complete=is_complete)
        if composed.watch_days is None:
            if chain.unreached:
                raise ValueError(
                    f"days: {chain.unreached[0].path} follows neither the day that the run trained last nor another one of "
                    "days; add what is missing, or leave it out"
                )
            if not chain.ahead:
                raise ValueError(
                    f"days={','.join(composed.days)}: no dataset of a day there; correct the paths"
                )
        for day in chain.ahead:
            _train(composed, day, work, which=DayToTrain.next.value if has_begun else None)
            latest, has_begun, is_complete = day.lineage.identity, True, True
        if composed.watch_days is None:
            return
        _wait(composed.watch_days)


@dataclass(frozen=True, slots=True)
class Chain:
    """Days as a run sees them: those ahead of it in their order, and those that follow none of these or of its own."""

    ahead: list[DayDataset]
    unreached: list[DayDataset]


def find_days(patterns: Sequence[str]) -> list[DayDataset]:
    """Return the datasets that paths and patterns name; what else a pattern matches is left out.

    Raises ValueError: a path names no dataset, or one that does not tell its fit.
    """
    found: dict[str, DayDataset] = {}
    for pattern in patterns:
        matches = [pattern]
        if glob.has_magic(pattern) and not Path(pattern).exists():
            matches = [
                path for path in sorted(glob.glob(pattern)) if (Path(path) / SPEC_NAME).exists()
            ]
        for path in matches:
            lineage = Lineage.of(FeatureSpec.load(local_path(path), measure=False).metadata)
            if lineage.identity is None:
                raise ValueError(
                    f"days: {path} does not tell its fit, so that its position among the days is not known; train it alone with "
                    "data.path"
                )
            found[path] = DayDataset(path, lineage)
    return list(found.values())


def days_to_train(days: Sequence[DayDataset], latest: str | None, *, is_complete: bool) -> Chain:
    """Return the chain of days from the one that a run trains, or trained last.

    `latest`: identity of the fit of that day; None if the run has no checkpoint.

    Raises ValueError: two days follow the same one, or there are several first ones.
    """
    next_of: dict[str | None, DayDataset] = {}
    by_identity = {day.lineage.identity: day for day in days}
    for day in days:
        parent = day.lineage.parent if day.lineage.parent in by_identity or latest else None
        other = next_of.setdefault(parent, day)
        if other is not day and (parent is not None or latest is None):
            follow = "are both a first day" if parent is None else "follow the same day"
            raise ValueError(f"days: {other.path} and {day.path} {follow}; leave one of them out")
    ahead, at = [], latest
    if latest in by_identity and not is_complete:
        ahead.append(by_identity[latest])
    while (day_ahead := next_of.get(at)) is not None:
        ahead.append(day_ahead)
        at = day_ahead.lineage.identity
    seen = {day.path for day in ahead}
    behind = by_identity.get(latest)
    while behind is not None:
        seen.add(behind.path)
        behind = by_identity.get(behind.lineage.parent)
    return Chain(ahead, [day for day in days if day.path not in seen])


def _fetch(run_dir: Path, mirror: str) -> None:
    """Copy what a run directory lacks from its mirror: its checkpoints say which days are behind the run."""
    from nn.checkpoint.mirror import catch_up
    from nn.observability.console import make_console, make_logger

    logger = make_logger(make_console(0))
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        with RunLock(logger) as lock:
            lock.take(run_dir)
            catch_up(run_dir, mirror, logger)
    except (ValueError, OSError) as error:
        print(f"error: {on_one_line(str(error))}", file=sys.stderr)
        sys.exit(USER_ERROR_EXIT_CODE)


def _latest(run_dir: Path) -> str | None:
    """Return the identity of the fit that the latest checkpoint of a run was trained on; None without a checkpoint.

    Raises ValueError: that is not known.
    """
    for path in list_checkpoints(run_dir / CHECKPOINTS):
        try:
            facts = read_facts(path)
        except ValueError:
            continue  # the run itself says what is damaged, and starts from an earlier one
        identity = facts.get(DAY_FACTS, {}).get("identity")
        if identity is None:
            raise ValueError(
                f"run_dir={run_dir} was trained on a dataset that does not tell its fit, so that no day is known to follow it; "
                "name the next one with data.path"
            )
        return str(identity)
    return None


def _train(
    composed: DictConfig, day: DayDataset, work: Callable[[DictConfig], None], *, which: str | None
) -> None:
    """Train a day in a process of its own; `which` is the value of its option `day`."""
    own = deepcopy(composed)
    own.days, own.watch_days, own.day, own.data.path = [], None, which, day.path
    written = [text for text in sys.argv[1:] if text.lstrip("+").split("=")[0] not in OWN_OPTIONS]
    written += [f"data.path={day.path}", *([] if which is None else [f"day={which}"])]
    print(on_one_line(f"day {day.lineage.day}: {day.path}"), flush=True)
    import_for_runs()
    _run_process(partial(work, own), written, f"data.path={day.path}")


def _run_process(
    work: Callable[[], None], arguments: Sequence[str], name: str = "checkpoint.mirror"
) -> None:
    """Do some work in a process of its own; `name` is what a message calls it if a signal ended it."""
    exit_code = JOBS.fork(work, arguments)
    if exit_code > KILLED:
        text = f"{name} was ended by signal {exit_code - KILLED}; the same command resumes"
        raise UnfinishedDaysError(text, exit_code)
    if exit_code:
        raise UnfinishedDaysError("", exit_code)


def _wait(seconds: float) -> None:
    """Sleep, and end the command after a signal."""
    caught: list[int] = []
    with on_stop(lambda signum, _: caught.append(signum)):
        end = time.monotonic() + seconds
        while not caught and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, 0.2))
    if caught:
        signum = signal.Signals(caught[0])
        raise UnfinishedDaysError(
            f"stopped by {signum.name} while waiting for the next day; the same command resumes",
            STOPPING[signum],
        )
