"""Training records: what the steps since the latest one add up to; a record is written when its metrics are there."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from nn.distributed.process_group import Ranks
from nn.metrics.ranking import TRAIN_AUC_ROWS
from nn.metrics.task_metrics import StartedMetrics, TaskMetrics
from nn.models.tasks import metrics_of
from nn.observability.throughput import ThroughputMeter
from nn.training.loop_state import LoopState
from nn.training.prefetch import Prefetcher
from nn.training.train_step import StepResult, TrainStep

LATE_STEPS = 8
"""Steps from that of a record to its end on several GPUs, by which its metrics are there."""


class TrainRecords:
    """The training records of a run, of which the latest can be taken: on GPUs up to a few steps after its own.

    `rows`: metrics of the rows since the latest record.
    """

    def __init__(
        self, step: TrainStep, state: LoopState, ranks: Ranks, *, has_weights: bool
    ) -> None:
        self._step, self._state, self._ranks = step, state, ranks
        self._metrics = [metric for metric in metrics_of(step.tasks) if metric.while_training]
        self.rows = TaskMetrics(
            step.tasks, ranks.device, ranks, has_weights=has_weights, while_training=True
        )
        self.speed = ThroughputMeter()
        self._late: tuple[dict[str, Any], StartedMetrics] | None = None

    def count(self, trained: StepResult, rows_to_record: int) -> None:
        """Count a step, `rows_to_record` before the next record."""
        self._state.loss_sum += trained.loss
        self._state.loss_steps += 1
        if rows_to_record < TRAIN_AUC_ROWS:
            self.rows.update(trained.logits, trained.batch)

    def start(
        self, head: Mapping[str, Any], prefetcher: Prefetcher, last: Mapping[str, Any]
    ) -> None:
        """Make the record of the steps since the latest one, which was taken, between its first entries and its last ones."""
        measured = self.rows.start()
        self.rows.reset()
        state, step, key_maps = self._state, self._step, self._step.key_maps
        record = {
            **head,
            "loss": state.loss_sum / state.loss_steps,
            **step.extra_losses(),
            # In the place of the metrics, which are written when they are there.
            **{metric.train_key: math.nan for metric in self._metrics},
            "lr": step.learning_rate,
            **self.speed.window(),
            "data_wait_ms": prefetcher.data_wait.ms / state.loss_steps,
            "hbm_bytes": peak_hbm_bytes(self._ranks),
            **step.tables.host_traffic(state.loss_steps),
            **({} if key_maps is None else key_maps.take_counts(state.loss_steps)),
            **last,
        }
        state.loss_sum, state.loss_steps, prefetcher.data_wait.ms = 0.0, 0, 0.0
        self._late = record, measured
        state.last_record = state.num_steps

    def take(self, *, waits: bool) -> dict[str, Any] | None:
        """Return the latest record if it is not taken yet; unless it `waits`, only if it is due.

        It is due when its metrics are there; of several GPUs after `LATE_STEPS`, since all ranks take it at the same step.
        """
        if self._late is None:
            return None
        record, measured = self._late
        if self._ranks.world_size > 1 and self._ranks.device.type == "cuda":
            is_due = self._state.num_steps - record["step"] >= LATE_STEPS
        else:
            is_due = measured.are_there()
        if not (waits or is_due):
            return None
        self._late = None
        values = measured.values()
        return record | {metric.train_key: values[metric.key] for metric in self._metrics}


def peak_hbm_bytes(ranks: Ranks) -> int | None:
    """Return the peak memory of tensors on this rank's GPU so far."""
    return torch.cuda.max_memory_allocated(ranks.device) if ranks.device.type == "cuda" else None
