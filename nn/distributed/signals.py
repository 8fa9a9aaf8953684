"""Signals that ask a run to end: it then leaves a checkpoint and an exit code that says to start it again.

SIGTERM comes from a scheduler, and from torchrun when another rank has ended; SIGUSR1 is SLURM's warning
(`sbatch --signal`). Both set a flag that the training loop sees. A loop that waits in a collective for a rank that is
gone will never see it: a thread then ends the process.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from threading import Thread
from types import FrameType
from typing import Any, Self

from configs.exit_codes import RESUME_EXIT_CODE

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
STUCK_AFTER_S = 10.0
"""A loop that has not moved so long after a signal waits for a rank that is gone."""


class StopRequest:
    """Catches the signals while it is entered.

    Args:
        may_get_stuck: whether there are other ranks to wait for.
        lost_rank_message: returns what to say of a loop that is stuck, or nothing.
    """

    def __init__(self, may_get_stuck: bool, lost_rank_message: Callable[[], str]) -> None:
        self.signum = 0
        self._may_get_stuck = may_get_stuck
        self._lost_rank_message = lost_rank_message
        self._moved_at = time.monotonic()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._moved_at = time.monotonic()
        self._before = {each: signal.signal(each, self._note) for each in SIGNALS}
        if self._may_get_stuck:
            self._pipe = os.pipe()
            os.set_blocking(self._pipe[1], False)
            self._wakeup_before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            self._watcher = Thread(target=self._watch, daemon=True)
            self._watcher.start()
        return self

    def __exit__(self, *exception: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        if self._may_get_stuck:
            signal.set_wakeup_fd(self._wakeup_before)
            self._moved_at = float("inf")
            os.close(self._pipe[1])
            self._watcher.join()
            os.close(self._pipe[0])

    def moved(self) -> None:
        """Say that the loop is not stuck; costs next to nothing."""
        self._moved_at = time.monotonic()

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum

    def _watch(self) -> None:
        """Python runs a handler when the main thread is back from a collective; the interpreter writes here at once."""
        while signums := os.read(self._pipe[0], 16):
            if not set(signums) & set(SIGNALS):
                continue
            since = time.monotonic()
            while (left := max(since, self._moved_at) + STUCK_AFTER_S - time.monotonic()) > 0:
                if self._moved_at == float("inf"):
                    return
                time.sleep(min(left, 0.1))
            print(self._lost_rank_message(), end="", file=sys.stderr, flush=True)
            os._exit(RESUME_EXIT_CODE)
