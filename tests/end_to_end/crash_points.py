"""Every crash point of the commands: kill, or fail a file's change, at the n-th one for every n, and start again.

    python -m tests.end_to_end.crash_points --all
    python -m tests.end_to_end.crash_points training export_npy --faults kill EIO --stride 5
    python -m tests.end_to_end.crash_points training --faults ENOSPC --at 17

A start of a small command is disturbed at its n-th change of a file (`tests.helpers.file_system_faults`). The same command is
then started again, undisturbed, and its result is compared with that of a command that was never disturbed: weights and
optimizer states, records, summary, datasets and exports byte by byte, and nothing else may be left. A start that was not
killed must end with exit code 0, or with 2 or 75 and one line that names the path and what to do.
"""

import argparse
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL

from tests.helpers.crash_scenarios import SCENARIOS, Scenario, warm_up
from tests.helpers.file_system_faults import FAULTS, Ended, Fault, run_with_fault
from tests.helpers.forks import fork_context

JOBS = 2
STARTS = 3
"""Undisturbed starts that a disturbed command may take: the first may end with exit code 75."""
REMEDY = "rerun|restart|copy it again|set another|choose another|name a new"
RESUMABLE, USER_ERROR, LOST_RANK = 75, 2, 1


@dataclass(frozen=True, slots=True)
class Point:
    """One disturbed start.

    Attributes:
        scenario: its name.
        fault: its name.
        at: number of the change that met the fault.
        what: call and role of the file, as `rename run/checkpoints/step_N`; None if the start made fewer changes.
        codes: exit codes of the disturbed start; none if it was killed.
        problems: what differs from the undisturbed command or from what a start promises.
        output: of all starts, if there are problems.
    """

    scenario: str
    fault: str
    at: int
    what: str | None = None
    codes: tuple[int, ...] = ()
    problems: tuple[str, ...] = ()
    output: str = ""


@dataclass(slots=True)
class Tally:
    """Points of one scenario and fault."""

    points: list[Point] = field(default_factory=list)

    @property
    def kinds(self) -> set[str | None]:
        """Distinct calls and roles that met the fault."""
        return {point.what for point in self.points}

    @property
    def failed(self) -> list[Point]:
        """Points with problems."""
        return [point for point in self.points if point.problems]


def role_of(path: Path) -> str:
    """Return a path with its numbers and random names replaced."""
    text = re.sub(r"\.(partial|replaced)-[0-9a-f]+", r".\1-*", str(path))
    return re.sub(r"events\.out\.tfevents\.[^/]+", "events", re.sub(r"\d+", "N", text))


def prepare(name: str, root: str, with_reads: bool = True) -> dict[str, list[str]]:
    """Make the input of a scenario and its undisturbed result; return per fault what it meets at each point."""
    scenario, directory = SCENARIOS[name], Path(root) / name
    directory.mkdir(parents=True)
    scenario.prepare(directory)
    met = {}
    for reads, case_name in ((False, "undisturbed"), (True, "counted"))[: 1 + with_reads]:
        case = _new_case(scenario, directory, case_name)
        ended = _start(scenario, case, FAULTS["unreadable" if reads else "kill"])
        assert ended.codes == [0] * scenario.num_ranks, ended.output
        calls = [(call.name, f"{call.name} {_role_in(case, call.path)}") for call in ended.calls]
        met |= {
            fault.name: [what for call, what in calls if call in fault.calls]
            for fault in FAULTS.values()
            if fault.reads == reads and (scenario.num_ranks > 1 or not fault.one_rank)
        }
    return met


def check(name: str, root: str, fault_name: str, at: int) -> Point:
    """Disturb one start of a scenario, start again until it is complete, and compare."""
    scenario, fault, directory = SCENARIOS[name], FAULTS[fault_name], Path(root) / name
    case = _new_case(scenario, directory, f"{fault_name}-{at}")
    try:
        first = _start(scenario, case, fault, at)
        if first.hit is None:
            return Point(name, fault_name, at)
        what = f"{first.hit.name} {_role_in(case, first.hit.path)}"
        problems, outputs = _problems_of(first, fault, case), [first.output]
        is_complete = first.codes == [0] * scenario.num_ranks
        differences = _compare(scenario, directory, case, first) if is_complete else ["not ended"]
        for _ in range(STARTS if differences else 0):
            again = _start(scenario, case)
            outputs.append(again.output)
            if set(again.codes) == {RESUMABLE}:
                continue
            if not (set(again.codes) == {0} or _refuses_complete(again)) or again.is_late:
                problems.append(f"the start after it ended with {again.codes}")
            problems += _compare(scenario, directory, case, first)
            break
        output = "\n--- started again ---\n".join(outputs) if problems else ""
        return Point(name, fault_name, at, what, tuple(first.codes), tuple(problems), output)
    finally:
        shutil.rmtree(case, ignore_errors=True)


def _refuses_complete(again: Ended) -> bool:
    """Return whether a start refuses to write what the disturbed one had completed before it was killed."""
    return again.codes == [USER_ERROR] and bool(re.search(r"holds a|work/out exists", again.output))


def _compare(scenario: Scenario, directory: Path, case: Path, disturbed: Ended) -> list[str]:
    wanted = directory / "undisturbed" / "work"
    try:
        return scenario.differences(wanted, case / "work", disturbed.output)
    except (OSError, ValueError, KeyError, IndexError) as error:
        return [f"cannot be compared: {error!r}"]


def _new_case(scenario: Scenario, directory: Path, name: str) -> Path:
    case = directory / name
    case.mkdir()
    (case / "input").symlink_to(directory / "input")
    if (directory / "start").exists():
        shutil.copytree(directory / "start", case / "work", symlinks=True)
    else:
        (case / "work").mkdir()
    return case


def _start(
    scenario: Scenario, case: Path, fault: Fault = FAULTS["kill"], at: int | None = None
) -> Ended:
    ranks = scenario.ranks(case)
    return run_with_fault(
        ranks, case / "work", case / "log", fault, at, num_ranks=scenario.num_ranks
    )


def _role_in(case: Path, path: Path) -> str:
    below = case / "work"
    return role_of(path.relative_to(below if path.is_relative_to(below) else case))


def _problems_of(ended: Ended, fault: Fault, case: Path) -> list[str]:
    """Return what a start that was not killed does wrong: its exit codes, its message."""
    problems = []
    if ended.is_late:
        problems.append("did not end in time")
    for word in ("Traceback", "Exception ignored", "terminate called"):
        if word in ended.output:
            problems.append(f"printed {word!r}")
    errors = [line for line in ended.output.splitlines() if line.startswith("error: ")]
    if fault.one_rank:
        others = set(ended.codes) - {-SIGKILL}
        if not others <= {LOST_RANK, RESUMABLE} or len(errors) != (LOST_RANK in others):
            problems.append(f"ended with {ended.codes} and {len(errors)} errors")
    if fault.code is None:
        return problems
    allowed = {0, USER_ERROR, RESUMABLE}
    if len(ended.codes) > 1 and USER_ERROR in ended.codes:
        allowed.add(LOST_RANK)
    if not set(ended.codes) <= allowed:
        problems.append(f"ended with {ended.codes}")
    if USER_ERROR in ended.codes:
        own = [line for line in errors if "another rank has exited" not in line]
        if len(own) != 1:
            problems.append(f"printed {len(own)} lines that begin with 'error:'")
        problems += [f"names no path: {line}" for line in own if not re.search("work|input", line)]
        problems += [f"names no remedy: {line}" for line in own if not re.search(REMEDY, line)]
    return problems


def spread(num_changes: int, count: int) -> list[int]:
    """Return `count` numbers from 1 to `num_changes`, evenly spread; a single one lies in the middle."""
    if count == 1:
        return [(num_changes + 1) // 2]
    return [1 + round(at * (num_changes - 1) / (count - 1)) for at in range(count)]


@contextmanager
def directory_of_cases() -> Iterator[str]:
    """Yield a directory in memory if there is one: no test here depends on a disk."""
    memory = Path("/dev/shm")
    parent = memory if os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="crash-points-", dir=parent) as name:
        yield str(Path(name).resolve())


def workers(jobs: int) -> ProcessPoolExecutor:
    """Return processes of one thread that fork the starts."""
    return ProcessPoolExecutor(jobs, mp_context=fork_context(), initializer=warm_up)


def run_points(
    pool: ProcessPoolExecutor, root: str, points: Iterable[tuple[str, str, int]]
) -> Iterator[Point]:
    """Check points (scenario, fault, number) and yield them as they end; scenarios must be prepared."""
    waiting = [pool.submit(check, name, root, fault, at) for name, fault, at in points]
    for done in as_completed(waiting):
        yield done.result()


def report(tally: Tally, title: str, verbose: bool) -> None:
    """Print the counts of a scenario and fault, and each failure."""
    hit = [point for point in tally.points if point.what is not None]
    codes = Counter(str(list(point.codes)) if point.codes else "killed" for point in hit)
    ended = ", ".join(f"{count} x {code}" for code, count in sorted(codes.items()))
    print(
        f"{title}: {len(hit)} points, {len(tally.kinds - {None})} distinct, {len(tally.failed)} failed; {ended}",
        flush=True,
    )
    for point in sorted(tally.failed, key=lambda point: point.at):
        print(f"  {point.at}: {point.what} {list(point.codes)}: {'; '.join(point.problems)}")
        if verbose:
            print("    | " + point.output.replace("\n", "\n    | "))
    sys.stdout.flush()


def main() -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("scenarios", nargs="*", help=f"some of {', '.join(SCENARIOS)}")
    parser.add_argument("--all", action="store_true", help="all scenarios")
    parser.add_argument("--faults", nargs="*", default=list(FAULTS), choices=list(FAULTS))
    parser.add_argument("--stride", type=int, default=1, help="every n-th change only")
    parser.add_argument("--first", type=int, default=1, help="number of the first change")
    parser.add_argument("--at", type=int, nargs="*", help="these changes only")
    parser.add_argument("--jobs", type=int, default=JOBS)
    parser.add_argument("--verbose", action="store_true", help="print the output of failures")
    options = parser.parse_args()
    names = list(SCENARIOS) if options.all else options.scenarios
    if not names or set(names) - set(SCENARIOS):
        parser.error(f"name scenarios, or --all: {', '.join(SCENARIOS)}")
    num_points = num_failed = 0
    with directory_of_cases() as root, workers(options.jobs) as pool:
        changes = dict(zip(names, pool.map(prepare, names, [root] * len(names)), strict=True))
        for name in names:
            for fault in options.faults:
                if fault not in changes[name]:
                    continue
                count = len(changes[name][fault])
                numbers = options.at or range(options.first, count + 1, options.stride)
                points = [(name, fault, at) for at in numbers]
                tally = Tally(list(run_points(pool, root, points)))
                report(tally, f"{name}, {fault} ({count} changes)", options.verbose)
                num_points += len(tally.points)
                num_failed += len(tally.failed)
    print(f"{num_points} crash points, {num_failed} failed")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
