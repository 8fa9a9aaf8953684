"""Observers of the training loop: what hangs on its events, such as the profiler, or an observer of a user's own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from nn.models.metric import Metric


class Loop(Protocol):
    """The part of the training loop that observers use."""

    best_metric: Metric
    last_step: int  # of the complete run, or of its day
    rank: int  # this process among all ranks
    run_dir: Path
    first_step: int  # updates behind the model that the run began with

    @property
    def num_steps(self) -> int:
        """Updates made so far, those of earlier starts too."""

    @property
    def ends_day(self) -> bool:
        """Return whether training ends after the latest step."""

    def epoch(self) -> float:
        """Return the epochs so far."""

    def auc_of(self, record: Mapping[str, Any]) -> float:
        """Return the AUC that stands for the run in an evaluation; nan where it is undefined."""

    def facts(self) -> dict[str, Any]:
        """Return the state of the loop as a checkpoint holds it."""

    def save(self) -> None:
        """Start to save a checkpoint; all ranks must call it after the same step."""

    def wait_for_files(self) -> None:
        """Wait until no checkpoint is written of tables on disk, whose files are about to change."""

    def pause_speed(self) -> None:
        """Leave the coming time and steps out of the throughput."""

    def resume_speed(self) -> None:
        """Count time and steps again."""


class Trained(Protocol):
    """A step that was trained: `loss` is the mean over the global batch, `logits` are this rank's, [B] or [B, T]."""

    @property
    def loss(self) -> float:
        """Before the update."""

    @property
    def logits(self) -> Tensor:
        """On the device; the next step overwrites them."""


@dataclass(slots=True)
class PendingCheckpoint:
    """A checkpoint that begins to be written; deltas set the last two fields."""

    directory: Path  # exists once the checkpoint is complete
    facts: dict[str, Any]
    chain: Callable[[], dict[str, Any]] | None = None
    deltas_paused_s: float | None = None


class Observer:
    """Observer of the training loop; a subclass overrides the events that it wants.

    Every rank has one and calls it at the same steps, in the thread that trains: training waits for it. So a collective may
    be called in any event, and then by all ranks. Tensors of a step must not be read in `on_step` without need, since that
    waits for the device.
    """

    def on_start(self, loop: Loop) -> None:
        """The first event of this start, before `eval.at_start` too: the model is loaded."""

    def on_step_begin(self, loop: Loop) -> None:
        """Before a step."""

    def on_step(self, loop: Loop, trained: Trained) -> None:
        """After a step, before its record; `loop.num_steps` counts it."""

    def on_record(self, loop: Loop, record: Mapping[str, Any]) -> None:
        """A training record is complete: up to a few steps after its own, `record["step"]`. Its metrics are those of rank 0."""

    def on_evaluation_begin(self, loop: Loop) -> None:
        """Before an evaluation; not before the final one."""

    def on_evaluation(self, loop: Loop, record: Mapping[str, Any], *, is_final: bool) -> None:
        """After an evaluation of the model after `record["step"]` steps; the record is the same on all ranks.

        `is_final`: it is the one that follows training, by `eval.final_max_steps` or of the best model.
        """

    def on_checkpoint(self, loop: Loop, checkpoint: PendingCheckpoint) -> None:
        """A checkpoint of this step begins to be written."""

    def on_between_steps(self, loop: Loop) -> None:
        """Between two steps, after evaluation and checkpoint of the first one; not after the last step."""

    def on_end(self, loop: Loop) -> None:
        """After the last step, when its checkpoint is complete; a final evaluation, if there is one, follows."""

    def on_error(self, loop: Loop) -> None:
        """All ranks have met the same error, which ends the run: complete files that are being written."""
