"""The bound on a step: ranks that wait longer than the steps before explain end the run, each with its stacks in a file.

A collective waits without end for a rank that never joins it, and NCCL itself gives up after ten minutes. A thread of each rank
measures the steps instead. One that has lasted too long asks the threads of the other ranks through the launcher's store
whether they are in a step too: a rank that saves or evaluates is only late.
"""

import faulthandler
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread, Timer
from typing import Self

from configs.exit_codes import FAULT_EXIT_CODE
from nn.distributed.process_group import Ranks, store_of_start

LEAST_S = 60.0
"""The bound on a step, at least."""
FACTOR = 20.0
"""The bound over the longest of the latest steps."""
MEASURED = 64
"""Waits that must have been measured before one is bounded: the first ones compile, capture, connect and fetch."""
POLL_S = 2.0
ANSWER_S = 20.0
"""A rank whose thread gives no answer for so long is stopped or gone."""
FROZEN = 5.0
"""Polls that pass between two of them where the process was frozen."""
WRITE_S = 20.0
"""Time for the stacks, whose disk may be what hangs."""
STACKS = "stacks"
"""Directory of the stacks in the run directory."""
IN_STEP, ELSEWHERE = "in a step", "elsewhere"


class StepWatch:
    """Context manager of what waits for other ranks; `watching` ends the process after too long a wait."""

    def __init__(self, ranks: Ranks, directory: Path) -> None:
        self._ranks = ranks
        self._directory = directory
        self._store = store_of_start("step_watch")
        self._durations: deque[float] = deque(maxlen=MEASURED)
        self._since: float | None = None
        # After a freeze of this process (paging, a virtual machine that moves) the clock of a step starts again.
        self._awake_since = time.monotonic()
        self._answered = 0
        self._end = Event()

    def __enter__(self) -> Self:
        self._since = time.monotonic()
        return self

    def __exit__(self, *exception: object) -> None:
        since, self._since = self._since, None
        assert since is not None, "the step was entered"
        self._durations.append(time.monotonic() - since)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Leave the wait for this rank's loader out of the step: its disk is slow, and no rank hangs."""
        since, self._since = self._since, None
        start = time.monotonic()
        try:
            yield
        finally:
            self._since = None if since is None else since + time.monotonic() - start

    @property
    def bound_s(self) -> float:
        """The bound on a step in seconds; infinite until enough steps were measured."""
        if len(self._durations) < MEASURED:
            return float("inf")
        return max(LEAST_S, FACTOR * max(self._durations))

    @contextmanager
    def watching(self) -> Iterator[None]:
        thread = Thread(target=self._watch, name="step_watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._end.set()
            thread.join()

    def _waited_s(self) -> float:
        """Return how long the step lasts so far; 0 outside of one."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - max(since, self._awake_since)

    def _watch(self) -> None:
        asked_since = None
        polled = time.monotonic()
        while not self._end.wait(POLL_S):
            now = time.monotonic()
            if now - polled > FROZEN * POLL_S:
                self._awake_since = now
            polled, since = now, self._since
            try:
                self._answer()
                if since == asked_since or self._waited_s() <= self.bound_s:
                    continue
                # Once per step: if a rank is elsewhere, it asks itself when it waits too.
                asked_since = since
                silent = self._ask()
            except RuntimeError:
                return  # the launcher has ended, and ends this process
            polled = time.monotonic()
            if silent is not None and self._since == since:
                self._finish(silent)

    def _answer(self) -> None:
        """Answer the questions since the last call, and end if a rank has found that all wait."""
        asked = self._store.add("questions", 0)
        for question in range(self._answered + 1, asked + 1):
            # Half of the bound: the ranks measure the same steps, but not to the millisecond.
            waits = self._waited_s() > self.bound_s / 2
            self._store.set(f"{question}/{self._ranks.rank}", IN_STEP if waits else ELSEWHERE)
        self._answered = asked
        if self._store.check(["found"]):
            self._finish([])

    def _ask(self) -> list[int] | None:
        """Ask all ranks where they are; return those that gave no answer, or None if a rank is not in a step."""
        question = self._store.add("questions", 1)
        keys = [f"{question}/{rank}" for rank in range(self._ranks.world_size)]
        end = time.monotonic() + ANSWER_S
        while True:
            self._answer()  # several ranks may ask at once
            if self._store.check(keys) or time.monotonic() > end:
                break
            if self._end.wait(min(POLL_S, 0.5)):
                return None
        answers = [self._store.get(key) if self._store.check([key]) else None for key in keys]
        if ELSEWHERE.encode() in answers:
            return None
        return [rank for rank, answer in enumerate(answers) if answer is None]

    def _finish(self, silent: list[int]) -> None:
        """Write the stacks of this process, say once what has happened, and end the process."""
        # The disk or the store may be what hangs.
        deadline = Timer(WRITE_S, os._exit, [FAULT_EXIT_CODE])
        deadline.daemon = True
        deadline.start()
        is_first = not self._store.check(["found"]) and self._store.add("found", 1) == 1
        waited_s, bound_s = self._waited_s(), self.bound_s
        self._directory.mkdir(parents=True, exist_ok=True)
        with open(self._directory / f"rank_{self._ranks.rank}.txt", "w") as file:
            file.write(f"in a step for {waited_s:.0f} s, pid {os.getpid()}\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        if is_first:
            gone = f"; no answer from ranks {silent}, which are stopped or gone" if silent else ""
            print(
                f"error: a step lasts {waited_s:.0f} s, and {bound_s:.0f} s is the bound ({FACTOR:g} times the longest of the "
                f"{MEASURED} before, at least {LEAST_S:g} s){gone}. The stacks of the ranks are in "
                f"{self._directory}. The same command with the same run_dir resumes from the latest checkpoint",
                file=sys.stderr,
                flush=True,
            )
            # The launcher ends the other ranks when this one has ended.
            self._end.wait(2 * POLL_S + 1)
        os._exit(FAULT_EXIT_CODE)
