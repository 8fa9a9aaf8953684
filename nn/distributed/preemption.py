"""Ends on request: signals that ask a run to stop, and the step after which all ranks do.

SIGTERM comes from a scheduler, and from torchrun when another rank has ended; SIGUSR1 is SLURM's warning
(`sbatch --signal`). Both set a flag that the training loop reads; the run then leaves a checkpoint and an exit code that
says to rerun the same command. A loop that waits in a collective for a rank that has ended will never read it: a thread
then ends the process.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Thread
from types import FrameType
from typing import Any, Self

from configs.exit_codes import RESUME_EXIT_CODE
from nn.distributed.process_group import HostChannel, Ranks

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
STUCK_AFTER_S = 10.0
"""A loop that has not moved so long after a signal waits for a rank that is gone."""
ASK_EVERY_S = 0.25
"""How often the ranks ask each other: a few dozen microseconds each time."""
MOST_STEPS = 1000


class Heartbeat:
    """The moment at which the loop last showed that it is not stuck."""

    def __init__(self) -> None:
        self.last = time.monotonic()

    def beat(self) -> None:
        """Record the moment; costs next to nothing."""
        self.last = time.monotonic()


class StopRequest:
    """Catches the signals while it is entered.

    Args:
        may_get_stuck: whether there are other ranks to wait for.
        lost_rank_message: returns what to print about a loop that is stuck, or nothing.

    Attributes:
        signum: of the signal that arrived, or 0.
        heartbeat: of the loop.
    """

    def __init__(self, may_get_stuck: bool, lost_rank_message: Callable[[], str]) -> None:
        self.signum = 0
        self._may_get_stuck = may_get_stuck
        self._lost_rank_message = lost_rank_message
        self.heartbeat = Heartbeat()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self.heartbeat.beat()
        self._before = {signum: signal.signal(signum, self._note) for signum in SIGNALS}
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
            self.heartbeat.last = float("inf")
            os.close(self._pipe[1])
            self._watcher.join()
            os.close(self._pipe[0])

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum

    def _watch(self) -> None:
        """Python runs a handler when the main thread is back from a collective; the interpreter writes here at once."""
        while signums := os.read(self._pipe[0], 16):
            if not set(signums) & set(SIGNALS):
                continue
            since = time.monotonic()
            while (left := max(since, self.heartbeat.last) + STUCK_AFTER_S - time.monotonic()) > 0:
                if self.heartbeat.last == float("inf"):
                    return
                time.sleep(min(left, 0.1))
            print(self._lost_rank_message(), end="", file=sys.stderr, flush=True)
            os._exit(RESUME_EXIT_CODE)


@dataclass(frozen=True, slots=True)
class Decision:
    """Agreement of all ranks after a step.

    Attributes:
        signum: number of a signal that asks a rank to stop, or 0.
        is_time_to_save: whether the interval of checkpoints has passed on rank 0.
    """

    signum: int
    is_time_to_save: bool


class PreemptionSync:
    """Asks every fraction of a second; every rank must call `after_step` alike.

    The number of steps to the next question is rank 0's, from its speed, so that all ranks ask at the same step.

    Args:
        ranks: this process.
        signum: returns the signal that this rank has got, or 0.
        save_every_minutes: None never saves by the clock.
    """

    def __init__(
        self, ranks: Ranks, signum: Callable[[], int], save_every_minutes: float | None
    ) -> None:
        self._channel = HostChannel() if ranks.world_size > 1 else None
        self._is_rank0 = ranks.is_rank0
        self._signum = signum
        self._save_every_s = (save_every_minutes or 0) * 60
        self._saved_at = self._asked_at = time.monotonic()
        self._steps_to_go = self._steps = 1

    def saved(self) -> None:
        """Restart the clock."""
        self._saved_at = time.monotonic()

    def after_step(self) -> Decision:
        """Return what to do after this step."""
        self._steps_to_go -= 1
        if self._steps_to_go:
            return Decision(0, False)
        now = time.monotonic()
        is_time = bool(self._save_every_s) and now - self._saved_at >= self._save_every_s
        wishes = [float(self._signum()), float(is_time and self._is_rank0), 1.0]
        if self._channel is not None:
            seconds_a_step = max(now - self._asked_at, 1e-6) / self._steps
            if self._is_rank0:
                wishes[2] = float(min(max(1, int(ASK_EVERY_S / seconds_a_step)), MOST_STEPS))
            wishes = self._channel.maximum(wishes)
        self._asked_at = now
        self._steps_to_go = self._steps = int(wishes[2])
        return Decision(int(wishes[0]), bool(wishes[1]))
