"""The training loop: steps, records, evaluations, checkpoints. `nn.training.train_step` is the step itself."""

import math
import signal
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from configs.schema import Config
from dataloading.batch import Batch
from dataloading.loader import Loader
from nn.checkpoint.directory import step_of
from nn.checkpoint.manager import CheckpointManager, Pause
from nn.deltas.writer import DeltaWriter
from nn.distributed.errors import DivergedError, StoppedError
from nn.distributed.preemption import PreemptionSync, StopRequest
from nn.distributed.process_group import Ranks
from nn.hypertune import HypertuneReport
from nn.metrics.ranking import TRAIN_AUC_ROWS
from nn.metrics.task_metrics import StartedMetrics, TaskMetrics
from nn.models.metric import AUC, GAUC
from nn.models.tasks import auc_key, best_metric, metrics_of
from nn.observability.annotations import annotate
from nn.observability.mlperf_log import MlperfLog
from nn.observability.profiler import Profiler
from nn.observability.progress import (
    Progress,
)
from nn.observability.records import PROBLEM
from nn.observability.run_directory import (
    ALL_STEPS_DONE,
    ENDED_BY_CALLER,
    FIRST_AUC,
    LAST_AUC,
    RESTORED_AUC,
    RESULT_STEP,
    UNTRAINED_AUC,
    RunDirectory,
)
from nn.observability.throughput import ThroughputMeter
from nn.observability.trace_breakdown import STEP
from nn.training.evaluator import Evaluator, described_predictions
from nn.training.limits import PREVIOUS, EvalSteps, Stage, early_stop
from nn.training.prefetch import Prefetcher
from nn.training.train_step import StepResult, TrainStep

KEY_COUNTS = "key_counts"
OTHER_DAYS = "other_days"
"""Key of a checkpoint's metrics of other days than the stage's."""

ENDS_STAGE = "ends_stage"
"""Key of a checkpoint that tells whether all steps of its stage are behind it."""


@dataclass(frozen=True, slots=True)
class RunOutput:
    """The destinations of a run's records.

    Attributes:
        recorder: the run directory.
        progress: the terminal.
        profiler: records a profile of some steps, or None.
        mlperf: the benchmark's log, or None; None on ranks other than 0.
        hypertune: reports evaluations to a tuning service, or None; None on ranks other than 0.
    """

    recorder: RunDirectory
    progress: Progress
    profiler: Profiler | None = None
    mlperf: MlperfLog | None = None
    hypertune: HypertuneReport | None = None


@dataclass(frozen=True, slots=True)
class Saving:
    """The objects that save a run's state.

    Attributes:
        manager: of the checkpoints.
        stop: the signals received, and the heartbeat.
        deltas: of the deltas; None without.
    """

    manager: CheckpointManager
    stop: StopRequest
    deltas: DeltaWriter | None = None

    def wait(self) -> None:
        """Wait for the files that are being written."""
        if self.deltas is not None:
            self.deltas.wait(self.stop.heartbeat.beat)
        self.manager.wait()


class Trainer:
    """The training loop.

    Args:
        step: tables and dense component with their optimizers.
        train_loader: the training split.
        evaluator: the split to evaluate on.
        config: the complete run.
        ranks: this process.
        output: where records go.
        saving: saves the state, or None.

    Attributes:
        num_steps: updates made so far.
        stage: day that is trained.
        last_step: updates of the complete run, up to the end of its stage.
        best_metric: tells which evaluation is the best.
        best_value: of that metric over all evaluations of the stage so far; nan before the first.
    """

    def __init__(
        self,
        step: TrainStep,
        train_loader: Loader,
        evaluator: Evaluator,
        config: Config,
        ranks: Ranks,
        output: RunOutput,
        saving: Saving | None = None,
    ) -> None:
        self._step = step
        self._train_loader = train_loader
        self._evaluator = evaluator
        self._recorder = output.recorder
        self._progress = output.progress
        self._profiler = output.profiler
        self._hypertune = output.hypertune
        self._mlperf = output.mlperf
        self._config = config
        self._ranks = ranks
        self.stage = Stage()
        self.last_step = self.stage.last_step(config, train_loader.steps_per_epoch)
        self._metrics = metrics_of(step.tasks)
        self.best_metric = best_metric(step.tasks, config.eval.best_metric)
        self._train_metrics = TaskMetrics(
            step.tasks,
            ranks.device,
            ranks,
            has_weights=train_loader.source.spec.weight is not None,
            while_training=True,
        )
        self._loss_sum = 0.0
        self._loss_steps = 0
        self._saving = saving
        self._preemption: PreemptionSync | None = None
        if saving is not None:
            minutes = config.checkpoint.save_every_minutes
            self._preemption = PreemptionSync(ranks, lambda: saving.stop.signum, minutes)
        self.num_steps = self._first_step = 0
        self._deltas_paused_s = 0.0  # since the latest checkpoint
        self._is_continuation = False
        # Whether neither a step nor an evaluation followed the checkpoint that the run resumed from, and whether that ends it.
        self._is_as_resumed = False
        self._saved_end: bool | None = None
        self._test: dict[str, Any] = {}
        self._first_auc: dict[str, float | None] = dict.fromkeys(FIRST_AUC)
        self._is_restored = False
        self._best_step: int | None = None
        self._evals_since_best = 0
        self._speed = ThroughputMeter()
        self._batches: Generator[Batch, None, None] | None = None
        self._last_record: int | None = None
        self._late_record: tuple[dict[str, Any], StartedMetrics] | None = None
        self._other_days: dict[str, Any] = {}
        self.best_value = math.nan

    def start_at(self, num_steps: int, *, is_restored: bool, stage: Stage | None = None) -> None:
        """Start a new run from a model after `num_steps` updates; a restored model may start at step 0 too.

        Args:
            num_steps: updates made so far.
            is_restored: whether the model is one of a checkpoint.
            stage: day that is trained; None: the first.
        """
        self.stage = stage or Stage()
        self.last_step = self.stage.last_step(self._config, self._train_loader.steps_per_epoch)
        self.num_steps = self._first_step = num_steps
        self._is_restored = is_restored

    def resume_from(
        self,
        num_steps: int,
        state: Mapping[str, Any],
        rows: Mapping[str, Tensor],
        stage: Stage | None = None,
    ) -> str | None:
        """Resume the run that saved `state` after `num_steps`.

        A new stage starts without a best evaluation, since metrics of different days cannot be compared.

        Args:
            num_steps: updates made so far.
            state: from the checkpoint.
            rows: logits, labels and weights of all ranks since the last record, on one rank; empty on the others.
            stage: day that is trained; None: the first.

        Returns:
            A note that the best evaluation so far cannot be compared with the coming ones, or None.
        """
        # Earlier versions called the AUC of a restored model untrained too.
        is_restored = self._config.checkpoint.restore is not None
        self.start_at(num_steps, is_restored=is_restored, stage=stage)
        self._first_step = state.get("first_step", 0)
        self._is_continuation = self._is_as_resumed = True
        first = {name: state.get(name) for name in FIRST_AUC}
        if is_restored and RESTORED_AUC not in state:
            first = {UNTRAINED_AUC: None, RESTORED_AUC: first[UNTRAINED_AUC]}
        self._first_auc = first
        self._last_record = state.get("last_record")
        if self.stage.is_new:
            return None
        self._test = state["test"]
        self._other_days = dict(state.get(OTHER_DAYS, {}))
        self._saved_end = state.get(ENDS_STAGE)
        self._loss_sum, self._loss_steps = state["loss_sum"], state["loss_steps"]
        if self._step.key_maps is not None:
            self._step.key_maps.counts.update(state.get(KEY_COUNTS, {}))
        # Checkpoints of earlier versions have the best AUC only. The best by another metric, or of other rows, is not known.
        scored, metric = self._evaluator.scored, state.get("best_metric", AUC.name)
        before = scored | state.get("best_rows", {})
        if before != scored:
            self._test = {}
        is_comparable = metric == self.best_metric.key and self._is_comparable(before)
        if is_comparable:
            self._best_step = state["best_step"]
            self.best_value = math.nan if state["best_auc"] is None else state["best_auc"]
            self._evals_since_best = state.get("evals_since_best", 0)
        if rows:
            self._train_metrics.restore(rows)
        if is_comparable or state["best_step"] is None:
            return None
        group = before["group"]
        groups = "" if group in (None, scored["group"]) else f" in groups by {group}"
        return (
            f"evaluations score {scored['rows']:,} rows of split '{scored['split']}' by {self.best_metric.key}, those before "
            f"were by {metric} of {before['rows']} rows of split '{before['split']}'{groups}: the best one is chosen among the "
            "coming ones"
        )

    def _is_comparable(self, rows: Mapping[str, Any]) -> bool:
        """Return whether earlier evaluations were of the same rows, and groups if these matter to the best one."""
        scored = self._evaluator.scored
        names = scored if self.best_metric.name == GAUC.name else scored.keys() - {"group"}
        return all(rows[name] == scored[name] for name in names)

    @property
    def is_saved(self) -> bool:
        """Return whether the checkpoint that the run resumed from is what it ends with, and says whether it ends there."""
        return self._is_as_resumed and self._saved_end in (None, self._ends_stage)

    @property
    def _ends_stage(self) -> bool:
        """Return whether the stage ends at this step."""
        return self.num_steps >= self.last_step or self._early_stop() is not None

    def save(self, *, is_last: bool = False) -> None:
        """Start saving a checkpoint, and the delta that leads to it."""
        saving = self._saving
        assert saving is not None
        stopped_at = time.perf_counter()
        self._write_late_record()
        self._recorder.sync()
        rows = self._train_metrics.rows()
        chain, state = None, self._state()
        self._wait_for_files()
        if saving.deltas is not None:
            chain = saving.deltas.save(self.num_steps, state, saving.stop.heartbeat.beat)
        pause = Pause(stopped_at, None if saving.deltas is None else self._deltas_paused_s)
        self._deltas_paused_s = 0.0
        saving.manager.save(self.num_steps, state, rows, is_last=is_last, chain=chain, pause=pause)

    def _wait_for_files(self) -> None:
        """Wait until no checkpoint is written of tables on disk, whose files are about to change."""
        if self._saving is not None and self._step.tables.has_disk_tables:
            self._saving.manager.wait()

    def _state(self) -> dict[str, Any]:
        """Return the state of the training loop for run.json."""
        key_maps = self._step.key_maps
        return {
            "loss_sum": self._loss_sum,
            "loss_steps": self._loss_steps,
            **({} if key_maps is None else {KEY_COUNTS: dict(key_maps.counts)}),
            "test": plain_numbers(self._test),
            **self._first_auc,
            "best_metric": self.best_metric.key,
            "best_rows": self._evaluator.scored,
            "best_auc": None if math.isnan(self.best_value) else self.best_value,
            "best_step": self._best_step,
            "evals_since_best": self._evals_since_best,
            "last_record": self._last_record,
            "first_step": self._first_step,
            OTHER_DAYS: self._other_days,
            ENDS_STAGE: self._ends_stage,
        }

    def train(self) -> None:
        """Train to the end.

        Raises:
            StoppedError: a signal stopped the run, after a checkpoint unless that could not be written.
        """
        start_step, last_step = self.num_steps, self.last_step
        eval_at = EvalSteps.of(self._config, self._train_loader.steps_per_epoch)
        if self._config.eval.at_start and not self._is_continuation:
            first = self.evaluate()
            name = RESTORED_AUC if self._is_restored else UNTRAINED_AUC
            self._first_auc[name] = plain_numbers(first).get(self._auc_key(first))
        was_stopped = self._is_continuation and self._early_stop() is not None
        is_done = start_step >= last_step or was_stopped
        prefetcher = self.start()
        with self.writing_late_record():
            while not is_done:
                self._begin_profile(self._speed)
                with annotate(STEP):
                    trained = self._step.train(self.num_steps, prefetcher)
                self.finish_step(trained, prefetcher)
                if self.stage.place(self.num_steps) in eval_at:
                    self.evaluate_between_steps()
                is_done = self.num_steps == last_step or self._early_stop() is not None
                if not is_done:
                    self.save_or_stop()
        self.end(prefetcher)
        if self._is_continuation and self.num_steps == start_step and not was_stopped:
            self._evaluate_last()

    def _evaluate_last(self) -> None:
        """Evaluate the model that a resumed run ends with, unless it was evaluated: a longer run may have saved it."""
        if self._test.get("step") != self.num_steps:
            self.evaluate()

    def start(self) -> Prefetcher:
        """Start to read the batches of the remaining steps, and to measure speed; return them.

        A chain of deltas begins at a checkpoint, which is saved first if there is none.
        """
        saving = self._saving
        if saving is not None and saving.deltas is not None and saving.deltas.needs_base:
            self.save()
        num_steps = max(self.last_step - self.num_steps, 0)
        self._batches = self._train_loader.batches(self.stage.place(self.num_steps), num_steps)
        prefetcher = Prefetcher(
            self._batches, self._step.path, self._ranks.device, self._step.loading
        )
        self._step.set_training(True)
        self._speed = ThroughputMeter()
        return prefetcher

    @contextmanager
    def writing_late_record(self) -> Iterator[None]:
        """Write the record that is still computed, if a loss in the context is not finite on any rank."""
        try:
            yield
        except DivergedError:
            self._write_late_record()
            raise

    def finish_step(self, trained: StepResult, prefetcher: Prefetcher) -> None:
        """Count a step that was trained, and write a record where one is due."""
        with self._step.watch:
            self.num_steps += 1
            self._is_as_resumed = False
            self._speed.count(trained.batch.global_valid)
            self._end_profile(self._speed)
            self._progress.advance(self.num_steps)
            if self._late_record is not None and self._late_record[1].are_there():
                self._write_late_record()
            self._count(trained)
            if self._due(self._config.log.every) or self.num_steps == self.last_step:
                self._record(self._speed, prefetcher)

    def evaluate_between_steps(self) -> dict[str, Any]:
        """Evaluate as `evaluate` does; speed leaves that time out."""
        self._speed.pause()
        try:
            return self.evaluate()
        finally:
            self._speed.resume()

    def end(self, prefetcher: Prefetcher) -> None:
        """Stop reading, and write the record of the steps since the last one."""
        self.stop_reading()
        if self._loss_steps:
            self._record(self._speed, prefetcher)
        self._write_late_record()

    def stop_reading(self) -> None:
        """End the threads that read batches."""
        if self._batches is not None:
            self._batches.close()

    def conclude(self) -> dict[str, Any]:
        """Make the final evaluation, of the best model under `eval.patience`, and return the run's summary.

        The last checkpoint must have been written: the state that was trained last may be gone afterwards.

        Raises:
            SharedError: the best checkpoint cannot be read.
        """
        model_step, best_step = self.num_steps, self._best_step
        if self._config.eval.patience is not None and best_step not in (None, model_step):
            assert self._saving is not None
            assert best_step is not None
            if self._saving.manager.load_best(best_step):
                model_step = best_step
        if model_step == self.num_steps and not self._evaluator.has_final:
            summary = self._summary(self._test)
            # A loop of the caller's own may end without an evaluation.
            if self._test.get("step", model_step) != model_step:
                summary[RESULT_STEP] = self._test["step"]
            return summary
        record = {
            "step": model_step,
            "epoch": self._epoch(model_step),
            **self.stage.label,
            **self._evaluator.run(self._progress, is_final=True),
        }
        problem = self._evaluator.problem
        self._recorder.write_final(record | ({} if problem is None else {PROBLEM: problem}))
        self._recorder.write_predictions(self._described(model_step))
        name = "final" if model_step == self.num_steps else "final, best model"
        self._progress.show_test(record, model=name, problem=problem)
        self._report_to_service(record, model_step)
        last_auc = self._test.get(self._auc_key(self._test))
        return self._summary(record) | {RESULT_STEP: model_step, LAST_AUC: last_auc}

    def _auc_key(self, test: Mapping[str, Any]) -> str:
        """Return the key of the AUC that stands for the run; that of a single label where there is none."""
        return auc_key(test, self._config.eval.best_metric) or AUC.test_key

    def _early_stop(self) -> str | None:
        return early_stop(self._config, self._test, self.num_steps, self._evals_since_best)

    def _summary(self, test: Mapping[str, Any]) -> dict[str, Any]:
        """Return the summary of a run whose result is the evaluation `test`."""
        return {
            "recipe": self._config.recipe,
            "steps": self.num_steps,
            "epochs": self._epoch(),
            "stopped": self._early_stop()
            or (ALL_STEPS_DONE if self.num_steps >= self.last_step else ENDED_BY_CALLER),
            **{metric.test_key: test.get(metric.test_key) for metric in self._metrics},
            "test_rows": test.get("test_rows"),
            self.best_metric.best_key: self.best_value,
            "best_step": self._best_step,
            "first_step": self._first_step,
            **self._first_auc,
            **self.stage.label,
            **self._other_days,
            **({} if self._evaluator.problem is None else {PROBLEM: self._evaluator.problem}),
            **self._speed.run(),
            "peak_hbm_bytes": self._peak_hbm_bytes(),
        }

    def evaluate(self) -> dict[str, Any]:
        """Evaluate on the test split; record and return the result, the same on all ranks."""
        self._write_late_record()
        if self._mlperf is not None:
            self._mlperf.start_evaluation(self.num_steps)
        record = {
            "step": self.num_steps,
            "epoch": self._epoch(),
            **self.stage.label,
            **self._evaluator.run(self._progress),
        }
        self._is_as_resumed = False
        value = record[self.best_metric.test_key]
        self._evals_since_best += 1
        if self.best_metric.improves(value, self.best_value):
            self.best_value, self._best_step, self._evals_since_best = value, self.num_steps, 0
        self._test = record
        if self._mlperf is not None:
            ends_run = self.num_steps >= self.last_step or self._early_stop() is not None
            self._mlperf.stop_evaluation(record[self._auc_key(record)], ends_run=ends_run)
        problem = self._evaluator.problem
        self._recorder.write_test(record | ({} if problem is None else {PROBLEM: problem}))
        self._recorder.write_predictions(self._described(self.num_steps))
        self._last_record = self.num_steps
        self._progress.show_test(record, model=self._first_model(), problem=problem)
        self._report_to_service(record, self.num_steps)
        return record

    def evaluate_other_day(self, evaluator: Evaluator, which: str, model: str) -> None:
        """Evaluate the model on rows of another day; record the result, which decides nothing.

        Args:
            evaluator: of those rows.
            which: beginning of the keys, NEXT or PREVIOUS.
            model: the model and the rows, for the terminal.
        """
        measured = evaluator.run(self._progress)
        place = {"step": self.num_steps, "epoch": self._epoch(), **self.stage.label}
        numbers = {f"{which}_{key.removeprefix('test_')}": v for key, v in measured.items()}
        del numbers[f"{which}_eval_s"]
        self._other_days |= plain_numbers(numbers)
        record = place | numbers | {"eval_s": measured["eval_s"]}
        self._recorder.write_other_day(record, is_last=which == PREVIOUS)
        self._progress.show_test(place | measured, model=model, problem=evaluator.problem)

    def _report_to_service(self, record: Mapping[str, Any], step: int) -> None:
        """Report an evaluation to the service that tunes hyperparameters, if one has started this run."""
        if self._hypertune is not None and step > self._first_step:
            self._hypertune.write(self.best_metric, record[self.best_metric.test_key], step)

    def _described(self, step: int) -> dict[str, Any]:
        """Return the predictions of the latest evaluation, of the model after `step`."""
        return described_predictions(self._config, self._evaluator, step)

    def _first_model(self) -> str:
        """Return what the model is before the first step of a run; empty after it."""
        if self._is_continuation or self.num_steps > self._first_step:
            return ""
        return "restored model" if self._is_restored else "untrained model"

    def save_or_stop(self) -> None:
        """Save if a checkpoint is due, and stop after a signal; all ranks decide the same.

        Raises:
            StoppedError: a signal stopped the run, after a checkpoint unless that could not be written.
        """
        preemption = self._preemption
        if preemption is None:
            return
        assert self._saving is not None
        self._saving.stop.heartbeat.beat()
        with self._step.watch:
            decision = preemption.after_step()
        if decision.signum:
            self.save(is_last=True)
            manager = self._saving.manager
            is_saved = manager.wait() is None
            latest = manager.latest
            start = "restarts" if latest is None else f"resumes from step {step_of(latest)}"
            saved = "a checkpoint was saved" if is_saved else "no checkpoint could be written"
            raise StoppedError(
                f"stopped by {signal.Signals(decision.signum).name} after step {self.num_steps}; {saved}; "
                f"the same command with run_dir={self._recorder.run_dir} {start}"
            )
        every = self._config.checkpoint.save_every
        is_due = every is not None and self._due(every)
        if is_due or decision.is_time_to_save or self._best_step == self.num_steps:
            self.save()
            preemption.saved()
        elif self._saving.deltas is not None and self._due(
            self._config.checkpoint.delta_every or 1
        ):
            stopped_at = time.perf_counter()
            beat = self._saving.stop.heartbeat.beat
            self._wait_for_files()
            self._saving.deltas.save(self.num_steps, self._state(), beat)
            self._deltas_paused_s += time.perf_counter() - stopped_at

    def _count(self, trained: StepResult) -> None:
        self._loss_sum += trained.loss
        self._loss_steps += 1
        every = self._config.log.every
        steps_to_record = min(-self.num_steps % every, self.last_step - self.num_steps)
        if steps_to_record * self._config.train.batch_size < TRAIN_AUC_ROWS:
            batch = trained.batch
            self._train_metrics.update(trained.logits, batch)

    def _record(self, speed: ThroughputMeter, prefetcher: Prefetcher) -> None:
        self._write_late_record()
        measured = self._train_metrics.start()
        self._train_metrics.reset()
        key_maps = self._step.key_maps
        record = {
            "step": self.num_steps,
            "epoch": self._epoch(),
            **self.stage.label,
            "loss": self._loss_sum / self._loss_steps,
            # In the place of the metrics, which are written when they are there.
            **{metric.train_key: math.nan for metric in self._metrics if metric.while_training},
            "lr": self._step.learning_rate,
            **speed.window(),
            "data_wait_ms": prefetcher.data_wait_ms / self._loss_steps,
            "hbm_bytes": self._peak_hbm_bytes(),
            **self._step.tables.host_traffic(self._loss_steps),
            **({} if key_maps is None else key_maps.take_counts(self._loss_steps)),
        }
        self._loss_sum, self._loss_steps, prefetcher.data_wait_ms = 0.0, 0, 0.0
        self._late_record = record, measured
        self._last_record = self.num_steps
        if measured.are_there():
            self._write_late_record()

    def _write_late_record(self) -> None:
        """Write the latest training record if it is not written yet; wait for its metrics."""
        if self._late_record is None:
            return
        (record, measured), self._late_record = self._late_record, None
        values = measured.values()
        trained = [metric for metric in self._metrics if metric.while_training]
        record |= {metric.train_key: values[metric.key] for metric in trained}
        self._recorder.write_train(record)
        self._progress.show_train(record)

    def _begin_profile(self, speed: ThroughputMeter) -> None:
        """Start the profiler before its first step; throughput leaves its steps out."""
        if self._profiler is not None and self.num_steps == self._profiler.steps.start:
            speed.pause()
            self._profiler.start()

    def _end_profile(self, speed: ThroughputMeter) -> None:
        """Report a step to the profiler; after its last one, measure throughput again."""
        if self._profiler is not None and self.num_steps - 1 in self._profiler.steps:
            self._profiler.step()
            if self.num_steps == self._profiler.steps.stop:
                speed.resume()

    def _due(self, every: int) -> bool:
        return self.num_steps % every == 0

    def _epoch(self, step: int | None = None) -> float:
        """Return the epochs of the stage after `step`, by default those so far."""
        place = self.stage.place(self.num_steps if step is None else step)
        return place / self._train_loader.steps_per_epoch

    def _peak_hbm_bytes(self) -> int | None:
        """Return the peak memory of tensors on this rank's GPU so far."""
        if self._ranks.device.type != "cuda":
            return None
        return torch.cuda.max_memory_allocated(self._ranks.device)


def plain_numbers(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record with None instead of nan, which JSON does not have."""
    return {
        key: None if isinstance(value, float) and math.isnan(value) else value
        for key, value in record.items()
    }
