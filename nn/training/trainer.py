"""The training loop: steps, records, evaluations, checkpoints. `nn.training.train_step` is the step itself."""

import logging
import signal
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from configs.schema import Config
from dataloading.batch import Batch
from dataloading.loader import Loader
from nn.checkpoint.directory import step_of
from nn.checkpoint.manager import CheckpointManager, Pause
from nn.distributed.errors import DivergedError, RankError, StoppedError
from nn.distributed.preemption import PreemptionSync, StopRequest
from nn.distributed.process_group import Ranks
from nn.models.metric import AUC, best_of
from nn.models.tasks import auc_key, metrics_of
from nn.observability.annotations import annotate
from nn.observability.progress import Progress
from nn.observability.records import PROBLEM, TEST, TRAIN
from nn.observability.run_directory import (
    ALL_STEPS_DONE,
    ENDED_BY_CALLER,
    NO_NEW_ROWS,
    RESTORED_AUC,
    UNTRAINED_AUC,
    RunDirectory,
)
from nn.observability.throughput import ThroughputMeter
from nn.observability.trace_breakdown import STEP
from nn.observers.choice import Observers
from nn.observers.observer import PendingCheckpoint
from nn.training.evaluator import Evaluator, described_predictions
from nn.training.limits import EvalSteps, early_stop
from nn.training.loop_state import LoopState, Origin, plain_numbers
from nn.training.prefetch import Prefetcher
from nn.training.stream_rows import StreamRows
from nn.training.train_records import TrainRecords
from nn.training.train_step import StepResult, TrainStep


@dataclass(frozen=True, slots=True)
class Saving:
    """The objects that save a run's state: the writer of checkpoints, and the signals received, with the heartbeat."""

    manager: CheckpointManager
    stop: StopRequest


@dataclass(frozen=True, slots=True)
class RunOutput:
    """The destinations of a run's records and state: run directory, terminal, checkpoints, and all that observes the loop."""

    recorder: RunDirectory
    progress: Progress
    saving: Saving | None
    observers: Observers
    stream_rows: StreamRows | None  # of training rows that grow


class Trainer:
    """The training loop.

    `last_step`: updates of the complete run, up to the end of its day.
    `note`: why the best evaluation so far cannot be compared with the coming ones, or None.
    """

    def __init__(
        self,
        step: TrainStep,
        train_loader: Loader,
        evaluator: Evaluator,
        config: Config,
        ranks: Ranks,
        output: RunOutput,
        state: LoopState,
    ) -> None:
        self._step = step
        self._train_loader = train_loader
        self.evaluator = evaluator
        self._config = config
        self._ranks, self.rank = ranks, ranks.rank
        self._recorder, self.run_dir = output.recorder, output.recorder.run_dir
        self.progress = output.progress
        self.observers = output.observers
        self.saving = saving = output.saving
        self._stream_rows = output.stream_rows
        self.state, self.first_step = state, state.first_step
        self.last_step = state.day.last_step(config, train_loader.steps_per_epoch)
        self.best_metric = best_of(metrics_of(step.tasks), config.eval.best_metric)
        self.note = state.compare_by(self.best_metric, evaluator.scored)
        if step.key_maps is not None:
            step.key_maps.counts.update(state.key_counts or {})
            state.key_counts = step.key_maps.counts
        if state.row_capacity is not None:
            step.runner.request_capacity.take(state.row_capacity)
        step.runner.measure(train_loader)
        has_weights = train_loader.source.spec.weight is not None
        self.records = TrainRecords(step, state, ranks, has_weights=has_weights)
        self._preemption: PreemptionSync | None = None
        if saving is not None:
            minutes = config.checkpoint.save_every_minutes
            self._preemption = PreemptionSync(ranks, lambda: saving.stop.signum, minutes)
        # Until a step or an evaluation follows the checkpoint that the run resumed from.
        self._is_as_resumed = state.origin is Origin.RESUMED
        self._saved_step = state.num_steps if self._is_as_resumed else None
        self._batches: Generator[Batch, None, None] | None = None
        self._has_told_start = False

    @property
    def num_steps(self) -> int:
        return self.state.num_steps

    @property
    def _position(self) -> int:
        """Updates of the day."""
        return self.state.day.position(self.num_steps)

    @property
    def ends_day(self) -> bool:
        return self.num_steps >= self.last_step or self._early_stop() is not None

    def facts(self) -> dict[str, Any]:
        capacity = self._step.runner.request_capacity.facts()
        self.state.row_capacity = capacity if capacity["shards"] else None
        stream = self._stream_rows
        self.state.parts = None if stream is None else stream.begun(self._position)
        return self.state.facts(ends_day=self.ends_day)

    @property
    def is_saved(self) -> bool:
        """Return whether the checkpoint that the run resumed from is what it ends with, and says whether it ends there."""
        return self._is_as_resumed and self.state.ends_day in (None, self.ends_day)

    def save(self, *, is_last: bool = False) -> None:
        """Start saving a checkpoint, and what observers add to it."""
        saving = self.saving
        if saving is None:
            raise ValueError("checkpoint.save=false saves nothing; set checkpoint.save=true")
        stopped_at = time.perf_counter()
        self._write_record()
        self._recorder.sync()
        rows = self.records.rows.rows()
        directory = saving.manager.directory / f"step_{self.num_steps}"
        pending = PendingCheckpoint(directory, self.facts())
        self.wait_for_files()
        self.observers.tell("on_checkpoint", self, pending)
        self._saved_step = self.num_steps
        saving.manager.save(
            self.num_steps,
            pending.facts,
            rows,
            is_last=is_last,
            chain=pending.chain,
            pause=Pause(stopped_at, pending.deltas_paused_s),
        )

    def wait_for_files(self) -> None:
        """Wait until no checkpoint is written of tables on disk, whose files are about to change."""
        if self.saving is not None and self._step.tables.has_disk_tables:
            self.saving.manager.wait()

    def finish_files(self) -> None:
        """Wait for the files that are being written, after an error that all ranks have met."""
        try:
            self.observers.tell("on_error", self)
        except RankError as failure:  # the error that ends the run is the one to report
            logging.getLogger(__name__).warning(str(failure))
        finally:
            if self.saving is not None:
                self.saving.manager.wait()

    def train(self) -> None:
        """Train to the end.

        Raises StoppedError: a signal stopped the run, after a checkpoint unless that could not be written.
        """
        start_step, last_step = self.num_steps, self.last_step
        eval_at = EvalSteps.of(self._config, self._train_loader.steps_per_epoch)
        is_continuation = self.state.origin is Origin.RESUMED
        if self._config.eval.at_start and not is_continuation:
            first = self.evaluate()
            is_restored = self.state.origin is Origin.RESTORED
            name = RESTORED_AUC if is_restored else UNTRAINED_AUC
            self.state.first_auc[name] = plain_numbers(first).get(self.auc_key(first))
        was_stopped = is_continuation and self._early_stop() is not None
        is_done = start_step >= last_step or was_stopped
        prefetcher = self.start()
        with self.writing_late_record():
            while not is_done:
                if self.num_steps == self._known_step:
                    if not self._wait_for_rows():
                        break
                    waited_ms = prefetcher.data_wait.ms
                    prefetcher = self._read()
                    prefetcher.data_wait.ms += waited_ms
                self.begin_step()
                with annotate(STEP):
                    trained = self._step.train(self.num_steps, prefetcher)
                self.finish_step(trained, prefetcher)
                if self._position in eval_at:
                    self.evaluate_between_steps()
                is_done = self.num_steps == last_step or self._early_stop() is not None
                if not is_done:
                    self.between_steps()
        self.end(prefetcher)
        has_trained_nothing = is_continuation and self.num_steps == start_step and not was_stopped
        is_evaluated = self.state.test.get("step") == self.num_steps
        if (has_trained_nothing or not is_done) and not is_evaluated:
            self.evaluate()

    def start(self) -> Prefetcher:
        """Start to read the batches of the remaining steps, and to measure speed; return them."""
        self._tell_start()
        prefetcher = self._read()
        self._step.set_training(True)
        self.records.speed = ThroughputMeter()
        return prefetcher

    def _tell_start(self) -> None:
        if not self._has_told_start:
            self._has_told_start = True
            self.observers.tell("on_start", self)

    @property
    def _known_step(self) -> int:
        """The step up to which rows can be read: the last one, or that of the rows of a stream so far."""
        if self._stream_rows is None:
            return self.last_step
        return min(self.state.day.first_step + self._stream_rows.steps, self.last_step)

    def _read(self) -> Prefetcher:
        """Start to read the batches of all known rows that are left."""
        self.stop_reading()
        self.progress.move_end(self._known_step)
        num_steps = max(self._known_step - self.num_steps, 0)
        self._batches = self._train_loader.batches(self._position, num_steps)
        return Prefetcher(self._batches, self._step.runner, self._ranks.device, self._step.loading)

    def _wait_for_rows(self) -> bool:
        """Wait for further rows of a stream; False if it has ended. Raises StoppedError after a signal."""
        assert self._stream_rows is not None, "the rows of a dataset are all known"
        self._write_record()
        self.pause_speed()
        has_come = self._stream_rows.wait(self._position, self._between_looks)
        self.resume_speed()
        return has_come

    def _between_looks(self) -> None:
        if self._preemption is not None:
            self._save_or_stop(self._preemption, is_waiting=True)

    @contextmanager
    def writing_late_record(self) -> Iterator[None]:
        """Write the record that is still computed, if a loss in the context is not finite on any rank."""
        try:
            yield
        except DivergedError:
            self._write_record()
            raise

    def begin_step(self) -> None:
        self.observers.tell("on_step_begin", self)

    def finish_step(self, trained: StepResult, prefetcher: Prefetcher) -> None:
        """Count a step that was trained, and write a record where one is due."""
        with self._step.watch:
            self.state.num_steps += 1
            self._is_as_resumed = False
            self.records.speed.count(trained.batch.global_valid)
            self.progress.advance(self.num_steps)
            self._write_record(waits=False)
            every, left = self._config.log.every, self.last_step - self.num_steps
            steps_to_record = min(-self.num_steps % every, left)
            self.records.count(trained, steps_to_record * self._config.train.batch_size)
        # Not watched: an observer may take as long as it likes.
        self.observers.tell("on_step", self, trained)
        with self._step.watch:
            if not steps_to_record:
                self._start_record(prefetcher)

    def evaluate_between_steps(self) -> dict[str, Any]:
        """Evaluate as `evaluate` does; speed leaves that time out."""
        self.pause_speed()
        try:
            record = self.evaluate()
            # Ranks end an evaluation at different times, and the next step waits for the last one.
            with self._step.watch:
                self._ranks.barrier()
            return record
        finally:
            self.resume_speed()

    def pause_speed(self) -> None:
        self.records.speed.pause()

    def resume_speed(self) -> None:
        self.records.speed.resume()

    def end(self, prefetcher: Prefetcher) -> None:
        """Stop reading, and write the record of the steps since the last one."""
        self.stop_reading()
        if self.state.loss_steps:
            self._start_record(prefetcher)
        self._write_record()

    def stop_reading(self) -> None:
        if self._batches is not None:
            self._batches.close()

    def auc_of(self, record: Mapping[str, Any]) -> float:
        return record[self.auc_key(record)]

    def auc_key(self, test: Mapping[str, Any]) -> str:
        """Return the key of the AUC that stands for the run; that of a single label where there is none."""
        return auc_key(test, self._config.eval.best_metric) or AUC.test_key

    def _early_stop(self) -> str | None:
        return early_stop(
            self._config, self.state.test, self.num_steps, self.state.evals_since_best
        )

    @property
    def stopped(self) -> str:
        is_complete = self.num_steps >= self.last_step
        early_end = ENDED_BY_CALLER if self._stream_rows is None else NO_NEW_ROWS
        return self._early_stop() or (ALL_STEPS_DONE if is_complete else early_end)

    def head_of_record(self, step: int) -> dict[str, Any]:
        return {"step": step, "epoch": self.epoch(step), **self.state.day.label}

    def evaluate(self) -> dict[str, Any]:
        """Evaluate on the test split; record and return the result, the same on all ranks."""
        self._tell_start()
        self._write_record()
        self.observers.tell("on_evaluation_begin", self)
        record = self.head_of_record(self.num_steps) | self.evaluator.run(self.progress)
        self._is_as_resumed = False
        is_first = self.state.best_step is None
        self.state.take_evaluation(record, self.best_metric)
        self.observers.tell("on_evaluation", self, dict(record), is_final=False)
        problem = self.evaluator.problem
        self._recorder.write(TEST, record | ({} if problem is None else {PROBLEM: problem}))
        described = described_predictions(self._config, self.evaluator, self.num_steps)
        self._recorder.write_predictions(described)
        self.state.last_record = self.num_steps
        best = "" if is_first else self.state.best_so_far(self.best_metric)
        model = self.state.first_model
        self.progress.show_test(record, model=model, problem=problem, best=best)
        return record

    def between_steps(self) -> None:
        """Save if a checkpoint is due, and stop after a signal; all ranks decide the same.

        Raises StoppedError: a signal stopped the run, after a checkpoint unless that could not be written.
        """
        if self._preemption is not None:
            self._save_or_stop(self._preemption)
        self.observers.tell("on_between_steps", self)

    def _save_or_stop(self, preemption: PreemptionSync, *, is_waiting: bool = False) -> None:
        assert self.saving is not None
        self.saving.stop.heartbeat.beat()
        with self._step.watch:
            decision = preemption.after_step(is_waiting=is_waiting)
        if decision.signum:
            self.save(is_last=True)
            manager = self.saving.manager
            is_saved = manager.wait() is None
            latest = manager.latest
            start = "restarts" if latest is None else f"resumes from step {step_of(latest)}"
            saved = "a checkpoint was saved" if is_saved else "no checkpoint could be written"
            raise StoppedError(
                f"stopped by {signal.Signals(decision.signum).name} after step {self.num_steps}; {saved}; "
                f"the same command with run_dir={self._recorder.run_dir} {start}"
            )
        every = self._config.checkpoint.save_every
        is_due = every is not None and self.num_steps % every == 0
        if is_waiting and self._saved_step == self.num_steps:
            return
        if is_due or decision.is_time_to_save or self.state.best_step == self.num_steps:
            self.save()
            preemption.saved()

    def _start_record(self, prefetcher: Prefetcher) -> None:
        behind = {} if self._stream_rows is None else self._stream_rows.behind(self._position)
        self._write_record()
        self.records.start(self.head_of_record(self.num_steps), prefetcher, behind)
        self._write_record(waits=False)

    def _write_record(self, *, waits: bool = True) -> None:
        """Write the latest record if it is not written yet; unless it `waits`, only if its metrics are there."""
        record = self.records.take(waits=waits)
        if record is None:
            return
        self._recorder.write(TRAIN, record)
        self.progress.show_train(record)
        self.observers.tell("on_record", self, record)

    def epoch(self, step: int | None = None) -> float:
        """Return the epochs of the day after `step`, by default those so far."""
        if self._stream_rows is not None:
            return 0.0  # the first epoch has no end
        position = self.state.day.position(self.num_steps if step is None else step)
        return position / self._train_loader.steps_per_epoch
