"""Preemption: signals that request the end of a run, and the step after which all ranks stop.

SIGTERM comes from a scheduler, and from torchrun when another rank has ended; SIGUSR1 is SLURM's warning
(`sbatch --signal`). Both set a flag that the training loop reads. The run then saves a checkpoint and exits with the code for
"resumable". A loop that waits in a collective for a rank that has exited never reads the flag; a thread then ends the process.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Thread, current_thread, main_thread
from types import FrameType
from typing import Any, Self

from configs.exit_codes import RESUME_EXIT_CODE
from nn.distributed.process_group import HostChannel, Ranks

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
STUCK_AFTER_S = 10.0
"""Seconds without a heartbeat after a signal; the loop then waits for a rank that has exited."""
SYNC_EVERY_S = 0.25
"""Seconds between exchanges of the ranks; one takes a few dozen microseconds."""
MAX_STEPS = 1000
"""Maximum number of steps between exchanges."""


class Heartbeat:
    """Time of the loop's last sign of progress."""

    def __init__(self) -> None:
        self.last = time.monotonic()

    def beat(self) -> None:
        self.last = time.monotonic()


class StopRequest:
    """Context manager that catches the signals; `signum` is the one that arrived, or 0.

    After a signal the run ends, and its end takes a moment. Further signals are then ignored, also after this context: a
    parent of several threads that dies sends its request once per thread, and a scheduler may repeat its own.
    """

    def __init__(self, may_get_stuck: bool, lost_rank_message: Callable[[], str]) -> None:
        self.signum = 0
        # Python lets no other thread catch signals.
        self._catches = current_thread() is main_thread()
        self._may_get_stuck = may_get_stuck and self._catches
        self._lost_rank_message = lost_rank_message
        self.heartbeat = Heartbeat()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self.heartbeat.beat()
        if self._catches:
            self._before = {signum: signal.signal(signum, self._record) for signum in SIGNALS}
        if self._may_get_stuck:
            self._pipe = os.pipe()
            os.set_blocking(self._pipe[1], False)
            self._wakeup_before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            self._watcher = Thread(target=self._watch, daemon=True)
            self._watcher.start()
        return self

    def __exit__(self, *exception: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, signal.SIG_IGN if self.signum else handler)
        if self._may_get_stuck:
            signal.set_wakeup_fd(self._wakeup_before)
            self.heartbeat.last = float("inf")
            os.close(self._pipe[1])
            self._watcher.join()
            os.close(self._pipe[0])

    def _record(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum

    def _watch(self) -> None:
        """End the process if the loop is stuck, where Python runs no handler; in a thread that the pipe wakes."""
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
    signum: int  # number of a signal that asks a rank to stop, or 0
    is_time_to_save: bool  # whether the interval of checkpoints has passed on rank 0


class PreemptionSync:
    """Exchange between all ranks every `SYNC_EVERY_S`; every rank must call `after_step` after every step.

    Rank 0 chooses the number of steps to the next exchange from its speed, so that all ranks exchange after the same step.
    """

    def __init__(
        self, ranks: Ranks, signum: Callable[[], int], save_every_minutes: float | None
    ) -> None:
        self._channel = HostChannel() if ranks.world_size > 1 else None
        self._is_rank0 = ranks.is_rank0
        self._signum = signum
        self._save_every_s = (save_every_minutes or 0) * 60
        self._saved_at = self._synced_at = time.monotonic()
        self._steps_left = self._steps = 1

    def saved(self) -> None:
        self._saved_at = time.monotonic()

    def after_step(self, *, is_waiting: bool = False) -> Decision:
        """Return the decision after this step; exchange with the other ranks if it is due, or if all are waiting for rows."""
        self._steps_left = 0 if is_waiting else self._steps_left - 1
        if self._steps_left:
            return Decision(0, False)
        now = time.monotonic()
        is_time = bool(self._save_every_s) and now - self._saved_at >= self._save_every_s
        requests = [float(self._signum()), float(is_time and self._is_rank0), 1.0]
        if self._channel is not None:
            seconds_per_step = max(now - self._synced_at, 1e-6) / self._steps
            if self._is_rank0:
                requests[2] = float(min(max(1, int(SYNC_EVERY_S / seconds_per_step)), MAX_STEPS))
            requests = self._channel.maximum(requests)
        self._synced_at = now
        self._steps_left = self._steps = int(requests[2])
        return Decision(int(requests[0]), bool(requests[1]))
