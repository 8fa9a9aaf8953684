"""The time to the end of a training: its steps, the evaluations to come, and the last checkpoint."""

import time
from collections.abc import Callable

WINDOW, PART_OF_RUN = 20, 10
"""The rate is smoothed over so many steps, or this part of a longer run."""


class TimeLeft:
    """Estimate of the seconds to the end, from the times at which steps end.

    `evaluations_from`: evaluations after a step and all later ones. `steps_per_evaluation`: how many steps one is expected
    to take, until one was seen. `checkpoint_s`: the seconds that the last checkpoint is expected to take.
    """

    def __init__(
        self,
        last_step: int,
        evaluations_from: Callable[[int], float] = lambda _: 0.0,
        steps_per_evaluation: float = 0.0,
        checkpoint_s: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.last_step = last_step
        self._evaluations_from = evaluations_from
        self._steps_per_evaluation = steps_per_evaluation
        self._checkpoint_s = checkpoint_s
        self._clock = clock
        self._step, self._at = last_step, 0.0
        self._counted, self._step_s = -1, 0.0  # the first step of a start compiles and allocates
        self._evaluation_s: float | None = None
        self._began: float | None = None

    def count(self, step: int) -> None:
        now = self._clock()
        if self._began is not None:
            # What followed it counts too, such as a checkpoint of the best model.
            self._evaluation_s = max(now - self._began - self._step_s, 0.0)
        else:
            self._counted += 1
            if self._counted:
                # Until the window is full the n-th step has the weight n, so that those of cold caches are soon outweighed.
                window = max(WINDOW, self.last_step / PART_OF_RUN)
                seconds = (now - self._at) / max(step - self._step, 1)
                self._step_s += (seconds - self._step_s) * max(2 / (self._counted + 1), 1 / window)
        self._step, self._at, self._began = step, now, None

    def begin_evaluation(self) -> None:
        """Leave the time to the end of the next step out of the rate."""
        self._began = self._clock()

    def seconds(self) -> float | None:
        """Return the seconds that are left after the latest step; None before there is a rate."""
        if self._counted < 1:
            return None
        evaluation_s = self._evaluation_s
        if evaluation_s is None:
            evaluation_s = self._steps_per_evaluation * self._step_s
        left = (self.last_step - self._step) * self._step_s
        return left + self._evaluations_from(self._step) * evaluation_s + self._checkpoint_s()
