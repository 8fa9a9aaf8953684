"""What all ranks do after the same step because one of them was told to, or because it is time."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from nn.distributed.process_group import HostChannel, Ranks

ASK_EVERY_S = 0.25
"""How often the ranks ask each other: a few dozen microseconds each time."""
MOST_STEPS = 1000


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now.

    Attributes:
        signum: of the signal that asks a rank to stop, or 0.
        is_time_to_save: rank 0's clock says so.
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
        """Start the clock anew."""
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
