"""Deltas as an observer of the training loop: one with every checkpoint, and one every so many steps between them."""

import time

from nn.deltas.writer import DeltaWriter
from nn.distributed.preemption import Heartbeat
from nn.observers.observer import Loop, Observer, PendingCheckpoint


class DeltaSaving(Observer):
    def __init__(self, writer: DeltaWriter, every: int, heartbeat: Heartbeat) -> None:
        self._writer = writer
        self._every = every
        self._heartbeat = heartbeat
        self._saved_step = -1
        self._paused_s = 0.0  # since the latest checkpoint

    def on_step_begin(self, loop: Loop) -> None:
        """Save a checkpoint at which the chain begins, if there is none: it has the evaluation of `eval.at_start`."""
        if self._writer.needs_base and self._saved_step < 0:
            loop.pause_speed()
            loop.save()
            loop.resume_speed()

    def on_checkpoint(self, loop: Loop, checkpoint: PendingCheckpoint) -> None:
        """Start the delta that leads to the checkpoint."""
        beat = self._heartbeat.beat
        checkpoint.chain = self._writer.save(loop.num_steps, checkpoint.facts, beat)
        checkpoint.deltas_paused_s, self._paused_s = self._paused_s, 0.0
        self._saved_step = loop.num_steps

    def on_between_steps(self, loop: Loop) -> None:
        """Start a delta where one is due and no checkpoint was saved."""
        if loop.num_steps % self._every or loop.num_steps == self._saved_step:
            return
        stopped_at = time.perf_counter()
        loop.wait_for_files()
        self._writer.save(loop.num_steps, loop.facts(), self._heartbeat.beat)
        self._saved_step = loop.num_steps
        self._paused_s += time.perf_counter() - stopped_at

    def on_error(self, loop: Loop) -> None:
        """Wait for the files of a delta that is being written."""
        self._writer.wait(self._heartbeat.beat)
