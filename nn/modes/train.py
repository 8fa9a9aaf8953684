"""`mode=train`: the trainer and all that hangs on it, from the session to the summary."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from configs.messages import on_one_line
from configs.schema import Config
from dataloading.lineage import FORGOTTEN, FORGOTTEN_BEFORE
from dataloading.loader import Loader
from dataloading.stream_source import StreamSource
from nn.build import TRAIN_SPLIT, model_spec
from nn.checkpoint.directory import CHECKPOINTS, DELTAS
from nn.checkpoint.forgetting import all_forgotten
from nn.checkpoint.manager import CheckpointManager, SavedRun
from nn.checkpoint.mirror import CheckpointMirror
from nn.checkpoint.run_facts import DAY_FACTS
from nn.checkpoint.state import facts_of, trainer_rows
from nn.checkpoint.tensor_index import read_index
from nn.deltas.delta import chain_of
from nn.deltas.observer import DeltaSaving
from nn.deltas.writer import DeltaRun, DeltaWriter
from nn.distributed.failures import lost_rank_message
from nn.distributed.preemption import Heartbeat, StopRequest
from nn.distributed.step_watch import STACKS, StepWatch
from nn.hypertune import hypertune_report
from nn.models.numerical_features import named_numbers
from nn.modes.day_scores import DayScores
from nn.modes.finish import finish_training, finishes_writing
from nn.next_day import retired_rows
from nn.observability.mlperf_log import MLPERF_LOG, RESUMED, MlperfLog, now_ms, settings_of
from nn.observability.numerical_ranges import range_note
from nn.observability.progress import Progress
from nn.observability.time_left import TimeLeft
from nn.observers.choice import Observers, make_observer
from nn.observers.observer import Observer
from nn.resume import ResumePoint, tidy
from nn.session import Session, open_session
from nn.training.evaluator import Evaluator
from nn.training.limits import EvalSteps
from nn.training.loop_state import LoopState, Origin
from nn.training.stream_rows import StreamRows
from nn.training.trainer import RunOutput, Saving, Trainer

EVALUATED_ROW = 1 / 3
"""Time of a row that is evaluated, as part of that of one that is trained: the forward pass alone."""


def train(config: Config, config_yaml: str) -> None:
    started_ms = now_ms()
    with open_session(config, config_yaml) as session:
        if session is None:
            return
        with open_training(session, started_ms) as trainer:
            # Called here, so that few frames lie between the command and a step.
            with finishes_writing(trainer, session.ranks):
                trainer.train()
            summary, problem = finish_training(session, trainer)
        session.conclude(summary, problem)


@contextmanager
def open_training(
    session: Session, started_ms: int, observers: Mapping[str, Observer] | None = None
) -> Iterator[Trainer]:
    """Build the trainer, at the point that the run starts from, and the objects that save its state.

    `started_ms`: when it started, in milliseconds since the epoch.
    """
    config, ranks, start = session.config, session.ranks, session.start
    loader = session.loaders.train
    assert loader is not None
    last_step = start.day.last_step(config, loader.steps_per_epoch)
    users = {name: make_observer(name) for name in config.log.observers} | dict(observers or {})
    with ExitStack() as stack:
        # Before any row is read, since its clock starts there.
        mlperf = stack.enter_context(_mlperf_log(session, started_ms))
        _report_ranges(session, loader)
        for task in session.step.tasks:
            if task.note is not None:
                session.logger.info(f"note: {task.note}")
        saving = heartbeat = deltas = None
        stack.enter_context(_bounded_steps(session))
        if config.checkpoint.save:
            # Its last upload may take longer than a stopped run may be silent: it ends after `StopRequest`.
            mirror = stack.enter_context(_mirror(session))

            def lost() -> str:
                text = lost_rank_message(ranks)
                return f"error: {on_one_line(text)}\n" if text else ""

            stop = stack.enter_context(StopRequest(ranks.world_size > 1, lost))
            heartbeat = stop.heartbeat
            saving = Saving(_checkpoint_manager(session, heartbeat, mirror), stop)
            deltas = _delta_saving(session, heartbeat, mirror)
            saving.manager.check_room()
        evaluator = session.evaluator(heartbeat)
        left = _time_left(session, evaluator, last_step, saving)
        progress = Progress(
            session.console, session.metrics, last_step, start_step=start.num_steps, time_left=left
        )
        stack.enter_context(progress)
        state = _loop_state(start)
        own: list[Observer | None] = [
            DayScores(session, state, progress, heartbeat),
            deltas,
            session.profiler(),
            mlperf,
            hypertune_report(session.logger) if ranks.is_rank0 else None,
        ]
        if config.log.prometheus is not None and ranks.is_rank0:
            # Imported where it is used: it brings an HTTP server.
            from nn.observers.prometheus_file import PrometheusFile

            path = Path(config.log.prometheus)
            own.append(PrometheusFile(path, str(session.recorder.run_dir), session.logger))
        observers_of_run = Observers([one for one in own if one is not None], users)
        output = RunOutput(session.recorder, progress, saving, observers_of_run, _stream(session))
        trainer = Trainer(session.step, loader, evaluator, config, ranks, output, state)
        if trainer.note is not None:
            session.logger.info(f"note: {trainer.note}")
        if start.is_continuation and not start.day.is_new:
            rows = trainer_rows(start.checkpoint) if ranks.is_rank0 else {}
            trainer.records.rows.restore(rows)
        # Also after an error, whose traceback keeps the batches.
        stack.callback(trainer.stop_reading)
        yield trainer


def _stream(session: Session) -> StreamRows | None:
    if not isinstance(session.source, StreamSource):
        return None
    return StreamRows(session.source, session.config, session.ranks, session.logger.warning)


def _time_left(
    session: Session, evaluator: Evaluator, last_step: int, saving: Saving | None
) -> TimeLeft:
    config, loader = session.config, session.loaders.train
    assert loader is not None
    if isinstance(loader.source, StreamSource):
        return TimeLeft(last_step)  # to the end of the rows so far
    steps, day = EvalSteps.of(config, loader.steps_per_epoch), session.start.day
    return TimeLeft(
        last_step,
        lambda step: steps.remaining(day.position(step)) + evaluator.final_part,
        evaluator.scored["rows"] / config.train.batch_size * EVALUATED_ROW,
        lambda: 0.0 if saving is None else saving.manager.write_s,
    )


def _loop_state(start: ResumePoint) -> LoopState:
    """Return what the loop begins with: the state in a checkpoint of its own, or a new one."""
    if start.is_continuation:
        return LoopState.of_facts(start.loop, start.num_steps, start.day)
    origin = Origin.NEW if start.path is None else Origin.RESTORED
    steps = start.num_steps
    return LoopState(num_steps=steps, first_step=steps, day=start.day, origin=origin)


@contextmanager
def _bounded_steps(session: Session) -> Iterator[None]:
    if session.ranks.world_size == 1:
        yield
        return
    watch = StepWatch(session.ranks, session.recorder.run_dir / STACKS)
    session.step.watch, session.step.loading = watch, watch.loading
    with watch.watching():
        yield


@contextmanager
def _mlperf_log(session: Session, started_ms: int) -> Iterator[MlperfLog | None]:
    """Open the benchmark's log on rank 0 and start its clock; None without log.mlperf and on other ranks."""
    config, ranks, start = session.config, session.ranks, session.start
    loader, target = session.loaders.train, config.eval.auc_threshold
    if not config.log.mlperf:
        yield None
        return
    assert loader is not None
    assert target is not None
    path = session.recorder.run_dir / MLPERF_LOG
    is_restored = start.path is not None
    if is_restored:
        session.logger.warning(RESUMED.format(path=path))
    with ExitStack() as stack:

        def open_log() -> None:
            log = MlperfLog(
                path,
                _mlperf_settings(session),
                steps_per_epoch=loader.steps_per_epoch,
                target=target,
                restored_step=start.num_steps if is_restored else None,
            )
            opened.append(stack.enter_context(log))
            log.start(started_ms, is_cache_cleared=config.log.mlperf_cache_cleared)

        opened: list[MlperfLog] = []
        # All ranks raise an error of the file.
        ranks.run_on_rank0(open_log)
        yield opened[0] if opened else None


def _mlperf_settings(session: Session) -> dict[str, Any]:
    config, ranks = session.config, session.ranks
    rows = session.source.num_rows(config.eval.split)
    if config.eval.max_steps is not None:
        rows = min(rows, config.eval.max_steps * config.eval.batch_size)
    on_gpu = ranks.device.type == "cuda"
    gpu = torch.cuda.get_device_name(ranks.device) if on_gpu else "CPU"
    num_hosts = ranks.world_size // ranks.local_world_size
    return settings_of(
        config,
        machine=f"{num_hosts}x{ranks.world_size // num_hosts}x{gpu}",
        train_rows=session.source.num_rows(TRAIN_SPLIT),
        eval_rows=rows,
        on_gpu=on_gpu,
        num_ranks=ranks.world_size,
    )


def _report_ranges(session: Session, loader: Loader) -> None:
    """Print a warning if rank 0's first batch has numerical features that nobody scaled, and that no option names."""
    spec = session.source.spec
    named = named_numbers(session.config.model, spec)
    columns = {name: column for column, name in enumerate(spec.numerical) if name not in named}
    # The next batch of a stream may not have come.
    if session.ranks.is_rank0 and columns and not loader.source.grows(loader.split):
        batch = loader.batch(session.start.day.position(session.start.num_steps))
        values = batch.numerical[: batch.num_valid, list(columns.values())]
        note = range_note(list(columns), values.numpy())
        if note is not None:
            session.logger.warning(note)


@contextmanager
def _mirror(session: Session) -> Iterator[CheckpointMirror | None]:
    """Yield the mirror of the run directory on rank 0, if there is one; upload the rest at the end."""
    address, ranks = session.config.checkpoint.mirror, session.ranks
    if address is None:
        yield None
        return
    mirror = CheckpointMirror(session.recorder.run_dir, address, session.logger)
    ranks.run_on_rank0(mirror.check)
    try:
        yield mirror if ranks.is_rank0 else None
    finally:
        if ranks.is_rank0:
            mirror.start()
            mirror.wait()


def _checkpoint_manager(
    session: Session, heartbeat: Heartbeat, mirror: CheckpointMirror | None
) -> CheckpointManager:
    """Remove what the previous start left, and return the writer of checkpoints."""
    config, ranks, start = session.config, session.ranks, session.start
    directory = session.recorder.run_dir / CHECKPOINTS

    ranks.run_on_rank0(partial(tidy, directory, start, config.checkpoint.keep))
    run = SavedRun(_run_facts(session), session.source.spec, mirror)
    return CheckpointManager(
        directory, session.step, run, config.checkpoint, ranks, session.logger, heartbeat
    )


def _run_facts(session: Session) -> dict[str, Any]:
    config, start = session.config, session.start
    facts = facts_of(config, model_spec(config, session.source), session.ranks)
    return facts | {DAY_FACTS: start.day.facts(), FORGOTTEN_BEFORE: all_forgotten(start.facts)}


def _delta_saving(
    session: Session, heartbeat: Heartbeat, mirror: CheckpointMirror | None
) -> DeltaSaving | None:
    """Remove the deltas after the state that the run starts from, and return what saves further ones; None without."""
    config, ranks, start = session.config, session.ranks, session.start
    if config.checkpoint.delta_every is None:
        return None
    run = DeltaRun(_run_facts(session), None)
    link = chain_of(start.facts) if start.is_continuation else None
    if mirror is not None:
        run = replace(run, written=mirror.start)
    if link is not None:
        tensors = read_index(start.checkpoint).tensors
        rows = {name: tensors[f"tables.{name}.weight"].size[0] for name in session.step.table_names}
        forgotten = start.facts.get(FORGOTTEN, {})
        run = replace(run, start=link, start_rows=rows, forgotten=forgotten)
    directory, step, logger = session.recorder.run_dir / DELTAS, session.step, session.logger
    writer = DeltaWriter(
        directory, step.tables, step.dense_weights, run, config.checkpoint, ranks, logger
    )
    day = start.day
    # Also if the run was killed before the first delta of the day.
    if day.number and start.num_steps == day.first_step:
        for table, retired in retired_rows(config, session.source.spec).items():
            writer.retire(table, retired)
    return DeltaSaving(writer, config.checkpoint.delta_every, heartbeat)
