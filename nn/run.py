"""A run from its typed configuration: check, plan, build, then train, evaluate or measure latency."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from logging import Logger
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from configs.messages import on_one_line
from configs.schema import Component, Config, Mode
from dataloading.dataset.file_states import data_identity
from dataloading.dataset.source import Source
from dataloading.loader import Loader, LoaderSettings
from dataloading.permuted_source import BLOCK_ROWS
from dataloading.synthetic import SyntheticSource
from nn.build import (
    TRAIN_SPLIT,
    Loaders,
    build_key_maps,
    build_loaders,
    build_step,
    build_test_loader,
    check_fp8,
    check_optimizers,
    check_raw_keys,
    checked_plan,
    device_type,
    hardware_of,
    id_share,
    model_spec,
    open_source,
    planned_hardware,
)
from nn.checkpoint.directory import (
    CHECKPOINTS,
    clear,
    list_checkpoints,
    prune,
    step_of,
)
from nn.checkpoint.manager import CheckpointManager, SavedRun
from nn.checkpoint.mirror import CheckpointMirror, catch_up
from nn.checkpoint.state import facts_of, trainer_rows
from nn.checkpoint.tensor_index import read_index
from nn.deltas.delta import FOLDER as DELTAS
from nn.deltas.delta import chain_of
from nn.deltas.writer import DeltaRun, DeltaWriter
from nn.distributed.errors import DivergedError, SharedError, StoppedError
from nn.distributed.failures import lost_rank_message, report_faults, report_lost_rank
from nn.distributed.preemption import Heartbeat, StopRequest
from nn.distributed.process_group import (
    Ranks,
    launcher_restarts,
    process_group,
    process_rank,
    ranks_from_environment,
)
from nn.distributed.step_watch import STACKS, StepWatch
from nn.hypertune import hypertune_report
from nn.importance import as_csv, measure_importance
from nn.loggers.choice import make_loggers
from nn.models.description import describe_model
from nn.models.metric import METRIC_FACTS, Metric, facts_of_metrics
from nn.models.registry import check_model
from nn.models.tasks import metrics_of, tasks_of_run
from nn.observability.console import (
    make_console,
    make_logger,
    print_header,
    print_importance,
    print_inference,
    print_summary,
)
from nn.observability.environment import (
    environment,
)
from nn.observability.mlperf_log import (
    MLPERF_LOG,
    RESUMED,
    MlperfLog,
    machine_name,
    now_ms,
    settings_of,
)
from nn.observability.model_summary import print_model, size_line
from nn.observability.numerical_ranges import range_note
from nn.observability.plan_table import BesidePlan, print_hardware, print_memory, print_plan
from nn.observability.profiler import Profiler, check_profile
from nn.observability.progress import (
    Progress,
)
from nn.observability.records import DATA_IDENTITY, ENDED, PLAN, PROBLEM, UNSAVED, KeptRecords
from nn.observability.run_directory import (
    RunDirectory,
    draw_missing_pictures,
    empty_summary,
    write_model,
    write_plan,
)
from nn.observability.run_lock import RunLock
from nn.planning.exchange import planned_exchange
from nn.planning.memory_estimate import RankMemory, plan_memory
from nn.planning.plan import TablePlan, replicated_tables
from nn.resume import (
    ResumePoint,
    finished_run,
    kept_records,
    load,
    named_resume_point,
    own_resume_point,
)
from nn.stages import (
    as_known,
    open_previous_day,
    retired_rows,
    score_next_day,
    score_previous_day,
)
from nn.step_floor import floor_of
from nn.training.dense_optimizer import dense_rule
from nn.training.evaluator import Evaluator, described_predictions
from nn.training.latency import measure
from nn.training.limits import EvalSteps, total_steps
from nn.training.train_step import TrainStep
from nn.training.trainer import RunOutput, Saving, Trainer

SYNTHETIC = "built-in synthetic clicks"


def run(config: Config, config_yaml: str) -> None:
    """Run `config.mode`.

    Args:
        config: the checked configuration.
        config_yaml: the same as text, for the run directory.

    Raises:
        ValueError: an invalid option or input; raised on all ranks.
        RankError: an error that one rank alone finds, such as a bad row.
        DivergedError: the loss is not finite; raised on all ranks.
        SharedError: an error that all ranks find while training, such as a checkpoint of another model.
        LostRankError: another rank has ended.
        StoppedError: a signal stopped the run; raised on all ranks.
    """
    started_ms = now_ms()
    console = make_console(process_rank())
    source = open_checked(config)
    if config.mode is Mode.plan:
        _show_plan(config, source, console)
        return
    with open_session(config, config_yaml, source, console) as session:
        problem = None
        if session is None:
            return
        if config.mode is Mode.train:
            with open_training(session, started_ms) as (trainer, saving):
                # Called here, so that few frames lie between the command and a step.
                with finishes_writing(saving, session.ranks):
                    trainer.train()
                summary, problem = finish_training(session, trainer, saving)
        elif config.mode is Mode.eval:
            summary = _evaluate(session)
        elif config.mode is Mode.importance:
            summary = _importance(session)
        else:
            summary = _inference(session)
        print_summary(console, summary, session.metrics, session.recorder.run_dir)
        if problem is not None:
            raise SharedError(problem)
        if summary.get(PROBLEM) is not None:
            raise DivergedError(f"the run is complete, but {summary[PROBLEM]}")


def open_checked(config: Config) -> Source:
    """Open the data of a run, and check model, optimizers and tasks against it; no process group is needed.

    Raises:
        ValueError: the data cannot be opened, or an option is not for it.
    """
    source = open_source(config)
    check_model(config.model, source.spec)
    check_optimizers(config)
    check_raw_keys(config, source.spec)
    check_fp8(config, source.spec)
    tasks_of_run(config, source.spec)
    return source


@dataclass(frozen=True, slots=True)
class Session:
    """The objects of a run that every mode works with.

    Attributes:
        config: the complete run.
        source: the rows.
        loaders: of the splits that the mode reads.
        ranks: this process.
        recorder: the run directory.
        console: of rank 0.
        logger: prints on that console.
        start: the point that the run starts from.
        step: tables and dense component, with the state of that point.
        teacher_auc: the best AUC that any model can reach, if known.
    """

    config: Config
    source: Source
    loaders: Loaders
    ranks: Ranks
    recorder: RunDirectory
    console: Console
    logger: Logger
    start: ResumePoint
    step: TrainStep
    teacher_auc: float | None

    @property
    def metrics(self) -> list[Metric]:
        """Metrics of all tasks, in the order of the records."""
        return metrics_of(self.step.tasks)

    def evaluator(self, heartbeat: Heartbeat | None = None) -> Evaluator:
        """Return the evaluator of the split to evaluate on."""
        assert self.loaders.test is not None
        return Evaluator(self.step, self.loaders.test, self.ranks, self.config.eval, heartbeat)

    def evaluator_of(
        self,
        source: Source,
        split: str,
        heartbeat: Heartbeat | None = None,
        stored: Source | None = None,
    ) -> Evaluator:
        """Return the evaluator of other rows, which threads read; `stored` has their ids where `source` changes them."""
        loader = build_test_loader(self.config, source, self.ranks, split, self.step.key_maps)
        return Evaluator(self.step, loader, self.ranks, self.config.eval, heartbeat, stored)

    def profiler(self) -> Profiler | None:
        """Return the profiler, if `profile.steps` is set; a run that resumes records no profile, and prints that."""
        if not self.config.profile.steps:
            return None
        if self.start.is_continuation:
            self.logger.info(
                "note: a run that resumes records no profile; set another run_dir, with checkpoint.restore, for profile.steps"
            )
            return None
        return Profiler(
            self.config.profile,
            self.start.num_steps,
            self.recorder.run_dir,
            self.console,
            self.ranks,
        )


def _show_plan(config: Config, source: Source, console: Console) -> None:
    hardware = planned_hardware(config)
    _, rows, disk_room = checked_plan(config, source, hardware)
    print_hardware(console, config, hardware)
    plan_json = None if config.run_dir is None else Path(config.run_dir) / PLAN
    listed = "run_dir=DIR writes them to DIR/plan.json" if plan_json is None else str(plan_json)
    floor_ms = None
    if hardware.device_type == "cuda" and any(row.has_arena for row in rows):
        spec, share_of = model_spec(config, source), partial(id_share, config, source)
        floor = floor_of(config, spec, hardware.world_size, share_of, replicated_tables(rows))
        floor_ms = floor.ms
    exchange = planned_exchange(config, source.spec, rows, hardware)
    has_gpus = hardware.device_type == "cuda"
    beside = BesidePlan(listed, exchange, floor_ms, disk_room, has_gpus=has_gpus)
    print_plan(console, rows, hardware.world_size, beside)
    memory = []
    description = _describe(config, source, make_logger(console))
    if description is not None:
        print_model(console, description)
    if hardware.device_type == "cuda":
        memory = plan_memory(config, source.spec, rows, hardware.world_size, _dense_states(config))
        print_memory(console, memory, hardware.hbm_bytes)
    if plan_json is not None and process_rank() == 0:
        plan_json.parent.mkdir(parents=True, exist_ok=True)
        write_plan(plan_json.parent, rows, memory)
        if description is not None:
            write_model(plan_json.parent, description)


@contextmanager
def open_session(
    config: Config, config_yaml: str, source: Source, console: Console
) -> Iterator[Session | None]:
    """Check, open the process group, plan and build; None if nothing is left to do."""
    logger = make_logger(console)
    ranks = ranks_from_environment(device_type(config))
    start = named_resume_point(config, source)
    key_maps = build_key_maps(config, source.spec, ranks)
    loaders = build_loaders(config, source, ranks, key_maps)
    _check(config, source, ranks, loaders, start)
    with ExitStack() as stack:
        stack.enter_context(loaders)
        stack.enter_context(process_group(ranks))
        stack.enter_context(report_lost_rank(ranks))
        lock = stack.enter_context(RunLock(logger))
        # Before anything in the run directory is read or renamed.
        ranks.run_on_rank0(partial(_take_run_directory, config, lock, logger))
        start = own_resume_point(config, source, ranks, logger) or start
        finished = finished_run(config, loaders.train, ranks, start)
        if finished is not None:
            ranks.run_on_rank0(lambda: _complete_results(config, start, logger))
            logger.info(finished)
            yield None
            return
        hardware = hardware_of(config, ranks.device.type, ranks.world_size, ranks.local_world_size)
        plan, rows, disk_room = ranks.run_on_rank0(partial(checked_plan, config, source, hardware))
        memory = _training_memory(config, source, rows, ranks)
        facts = _environment(config, source, ranks, start.num_steps)
        recorder = stack.enter_context(_recorder(config, config_yaml, facts, ranks, start, lock))
        ranks.run_on_rank0(lambda: recorder.write_plan(rows, memory))
        header = _header_facts(config, source, recorder.run_dir, start)
        size = ranks.run_on_rank0(lambda: _write_model(config, source, recorder, logger))
        print_header(console, facts, {"model": header["model"]} | size | header)
        if config.mode is Mode.train and ranks.is_rank0:
            listed = str(recorder.run_dir / PLAN)
            exchange = planned_exchange(config, source.spec, rows, hardware)
            has_gpus = ranks.device.type == "cuda"
            beside = BesidePlan(listed, exchange, disk_room=disk_room, has_gpus=has_gpus)
            print_plan(console, rows, ranks.world_size, beside)
        if memory:
            print_memory(console, memory, hardware.hbm_bytes)
        with report_faults(ranks):
            step = build_step(config, source, plan, ranks, key_maps)
            stack.callback(step.close)
            if ranks.device.type == "cuda":
                blocker = step.capture_blocker
                logger.info(f"step: {f'no CUDA graph, {blocker}' if blocker else 'a CUDA graph'}")
            load(config, start, step, logger)
            yield Session(
                config=config,
                source=source,
                loaders=loaders,
                ranks=ranks,
                recorder=recorder,
                console=console,
                logger=logger,
                start=start,
                step=step,
                teacher_auc=facts["teacher_auc"],
            )


def _describe(config: Config, source: Source, logger: Logger) -> dict[str, Any] | None:
    """Return the description of the model; None, with a warning, if its layers cannot be run on the CPU."""
    try:
        return describe_model(config.model, source.spec, model_spec(config, source))
    except Exception as error:  # of a model's own code, which may need a GPU
        logger.warning(f"no summary of the model and no model.json: {error}")
        return None


def _write_model(
    config: Config, source: Source, recorder: RunDirectory, logger: Logger
) -> dict[str, str]:
    """Write `model.json`; return the line of the header that tells the size of the model."""
    description = _describe(config, source, logger)
    if description is None:
        return {}
    recorder.write_model(description)
    return {"size": size_line(description)}


def _training_memory(
    config: Config, source: Source, rows: list[TablePlan], ranks: Ranks
) -> list[RankMemory]:
    """Return the peak memory of each GPU while training; empty on CPUs and in other modes."""
    if config.mode is not Mode.train or ranks.device.type != "cuda":
        return []
    return plan_memory(config, source.spec, rows, ranks.world_size, _dense_states(config))


def _complete_results(config: Config, start: ResumePoint, logger: Logger) -> None:
    """Do what the last start of a finished run could not: draw its curves, remove older checkpoints, link the best."""
    if config.run_dir is None:
        return
    # An error after the summary, such as of a last sync, does not make the run unfinished.
    (Path(config.run_dir) / ENDED).unlink(missing_ok=True)
    if config.mode is not Mode.train:
        return
    if config.log.pictures:
        draw_missing_pictures(Path(config.run_dir), logger)
    if start.is_continuation and config.checkpoint.save:
        directory = Path(config.run_dir) / CHECKPOINTS
        clear(directory, start.num_steps)
        prune(
            directory,
            start.num_steps,
            config.checkpoint.keep,
            start.facts["trainer"]["best_step"],
        )


def _environment(config: Config, source: Source, ranks: Ranks, start_step: int) -> dict[str, Any]:
    facts: dict[str, Any] = environment(
        config.recipe,
        ranks.device,
        world_size=ranks.world_size,
        num_hosts=ranks.world_size // ranks.local_world_size,
    )
    facts["teacher_auc"] = _teacher_auc(config, source) if ranks.is_rank0 else None
    # The title of the curves.
    facts["data"] = config.data.path or SYNTHETIC
    facts[DATA_IDENTITY] = data_identity(source.spec) if ranks.is_rank0 else None
    facts["batch_size"] = config.train.batch_size
    facts["seed"] = config.seed
    facts["split"] = config.eval.split
    # The point that the curves mark as the restored model.
    facts["restored"] = config.checkpoint.restore
    facts["start_step"] = start_step
    if metrics := facts_of_metrics(config.eval.metrics):
        facts[METRIC_FACTS] = metrics
    return facts


@contextmanager
def open_training(session: Session, started_ms: int) -> Iterator[tuple[Trainer, Saving | None]]:
    """Build the trainer, at the point that the run starts from, and the objects that save its state.

    Args:
        session: the run.
        started_ms: when it started, in milliseconds since the epoch.
    """
    config, ranks, start = session.config, session.ranks, session.start
    loader = session.loaders.train
    assert loader is not None
    last_step = start.stage.last_step(config, loader.steps_per_epoch)
    with ExitStack() as stack:
        # Before any row is read, since its clock starts there.
        mlperf = stack.enter_context(_mlperf_log(session, started_ms))
        _report_ranges(session, loader)
        saving = heartbeat = None
        stack.enter_context(_bounded_steps(session))
        if config.checkpoint.save:
            # Its last upload may take longer than a stopped run may be silent: it ends after `StopRequest`.
            mirror = stack.enter_context(_mirror(session))
            stop = stack.enter_context(
                StopRequest(ranks.world_size > 1, lambda: _as_error(lost_rank_message(ranks)))
            )
            heartbeat = stop.heartbeat
            manager = _checkpoint_manager(session, heartbeat, mirror)
            saving = Saving(manager, stop, _delta_writer(session))
            manager.check_room()
        progress = stack.enter_context(
            Progress(session.console, session.metrics, last_step, start_step=start.num_steps)
        )
        trainer = Trainer(
            session.step,
            loader,
            session.evaluator(heartbeat),
            config,
            ranks,
            RunOutput(
                session.recorder,
                progress,
                session.profiler(),
                mlperf,
                hypertune_report(session.logger) if ranks.is_rank0 else None,
            ),
            saving,
        )
        if start.is_continuation:
            rows = trainer_rows(start.checkpoint) if ranks.is_rank0 else {}
            state = start.facts["trainer"]
            note = trainer.resume_from(start.num_steps, state, rows, start.stage)
            if note is not None:
                session.logger.info(f"note: {note}")
        else:
            is_restored = start.path is not None
            trainer.start_at(start.num_steps, is_restored=is_restored, stage=start.stage)
        if start.stage.is_new:
            known = as_known(config, session.source, start.checkpoint)
            evaluator = session.evaluator_of(known, TRAIN_SPLIT, heartbeat, session.source)
            score_next_day(trainer, evaluator)
        yield trainer, saving


@contextmanager
def _bounded_steps(session: Session) -> Iterator[None]:
    """Bound the time for which a step waits for other ranks."""
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
    gpu = torch.cuda.get_device_name(ranks.device) if on_gpu else None
    return settings_of(
        config,
        machine=machine_name(ranks.world_size, ranks.world_size // ranks.local_world_size, gpu),
        train_rows=session.source.num_rows(TRAIN_SPLIT),
        eval_rows=rows,
        on_gpu=on_gpu,
    )


def _report_ranges(session: Session, loader: Loader) -> None:
    """Print a warning if rank 0's first batch has numerical features that nobody scaled."""
    names = session.source.spec.numerical
    if session.ranks.is_rank0 and names:
        batch = loader.batch(session.start.stage.place(session.start.num_steps))
        note = range_note(names, batch.numerical[: batch.num_valid].numpy())
        if note is not None:
            session.logger.warning(note)


def _take_run_directory(config: Config, lock: RunLock, logger: Logger) -> None:
    """Lock the run directory, and copy checkpoints and records into it if its mirror is ahead of it."""
    run_dir = None if config.run_dir is None else Path(config.run_dir)
    address = config.checkpoint.mirror if config.mode is Mode.train else None
    if run_dir is not None and address is not None:
        # Only a directory that exists is locked here.
        run_dir.mkdir(parents=True, exist_ok=True)
    lock.take(run_dir)
    if run_dir is not None and config.mode is Mode.train:
        catch_up(run_dir, address, logger)


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

    def tidy() -> None:
        clear(directory, start.num_steps if start.is_continuation else 0)
        if start.is_continuation:
            # Now, not after the next save: the user may have lowered checkpoint.keep because the disk is full.
            best = start.facts["trainer"]["best_step"]
            prune(directory, start.num_steps, config.checkpoint.keep, best)

    ranks.run_on_rank0(tidy)
    return CheckpointManager(
        directory,
        session.step,
        SavedRun(_run_facts(session), session.source.spec, mirror),
        config.checkpoint,
        ranks,
        session.logger,
        heartbeat,
    )


def _run_facts(session: Session) -> dict[str, Any]:
    """Return the facts of a run that its checkpoints and deltas record."""
    config, source = session.config, session.source
    facts = facts_of(config, model_spec(config, source), session.ranks)
    return facts | {"stage": session.start.stage.facts()}


def _delta_writer(session: Session) -> DeltaWriter | None:
    """Remove the deltas after the state that the run starts from, and return the writer of deltas; None without."""
    config, ranks, start = session.config, session.ranks, session.start
    if config.checkpoint.delta_every is None:
        return None
    run = DeltaRun(_run_facts(session), None)
    link = chain_of(start.facts) if start.is_continuation else None
    if link is not None:
        tensors = read_index(start.checkpoint).tensors
        rows = {name: tensors[f"tables.{name}.weight"].size[0] for name in session.step.table_names}
        run = replace(run, start=link, start_rows=rows)
    writer = DeltaWriter(
        session.recorder.run_dir / DELTAS,
        session.step.tables,
        session.step.dense_weights,
        run,
        config.checkpoint,
        ranks,
        session.logger,
    )
    stage = start.stage
    # Also if the run was killed before the first delta of the stage.
    if stage.number and start.num_steps == stage.first_step:
        for table, retired in retired_rows(config, session.source.spec).items():
            writer.retire(table, retired)
    return writer


@contextmanager
def finishes_writing(saving: Saving | None, ranks: Ranks) -> Iterator[None]:
    """After an error, wait for the checkpoint that is being written."""
    try:
        yield
    except BaseException as error:
        # If all ranks have this error, the checkpoint will be complete; if not, waiting for the others may never end.
        is_shared = isinstance(error, DivergedError | SharedError | StoppedError)
        if saving is not None and (is_shared or ranks.world_size == 1):
            saving.wait()
        raise


def finish_training(
    session: Session, trainer: Trainer, saving: Saving | None
) -> tuple[dict[str, Any], str | None]:
    """Save the last checkpoint, and record the result.

    Returns:
        The summary, and why that checkpoint could not be written, or None.
    """
    ranks, problem = session.ranks, None
    if saving is not None:
        if not trainer.is_saved:
            trainer.save(is_last=True)
        problem = saving.manager.wait()
    # After the checkpoint, so that a run of more steps resumes from the state that this one trained last.
    heartbeat = None if saving is None else saving.stop.heartbeat
    before = open_previous_day(session.config, trainer.stage, ranks, session.logger)
    if before is not None:
        evaluator = session.evaluator_of(before, session.config.eval.split, heartbeat)
        score_previous_day(trainer, evaluator)
    summary = trainer.conclude()
    summary["teacher_auc"] = session.teacher_auc
    summary[UNSAVED] = problem

    def finish() -> None:
        summary.update(_checkpoints(session.recorder.run_dir, summary["best_step"]))
        session.recorder.finish(summary, pictures=session.config.log.pictures)

    # The summary comes last: a run that is killed before it has not finished.
    ranks.run_on_rank0(finish)
    if problem is None:
        return summary, None
    latest = ranks.broadcast_object(summary.get("checkpoint"))
    return summary, (
        f"the checkpoint could not be written below {session.recorder.run_dir / CHECKPOINTS}: {problem}; the run's other "
        "results are there. Free some space and rerun the same command, which trains "
        f"{'from the start' if latest is None else f'from {latest}'} again, or set checkpoint.save=false"
    )


def _checkpoints(run_dir: Path, best_step: int | None) -> dict[str, str | None]:
    """Return the latest checkpoint and that of the best evaluation, relative to the run directory; None where there is none."""
    steps = [step_of(path) for path in list_checkpoints(run_dir / CHECKPOINTS)]
    return {
        "checkpoint": f"{CHECKPOINTS}/step_{steps[0]}" if steps else None,
        "best_checkpoint": f"{CHECKPOINTS}/step_{best_step}" if best_step in steps else None,
    }


def _as_error(text: str) -> str:
    return f"error: {on_one_line(text)}\n" if text else ""


def _evaluate(session: Session) -> dict[str, Any]:
    num_steps = session.start.num_steps
    evaluator = session.evaluator()
    with Progress(session.console, session.metrics, num_steps, has_training=False) as progress:
        record: dict[str, Any] = {"step": num_steps, **evaluator.run(progress)}
        progress.show_test(record, problem=evaluator.problem)
    if evaluator.problem is not None:
        record[PROBLEM] = evaluator.problem
    session.recorder.write_test(record)
    session.recorder.write_predictions(described_predictions(session.config, evaluator, num_steps))
    summary = empty_summary(session.metrics) | {"steps": num_steps} | record
    summary["teacher_auc"] = session.teacher_auc
    session.recorder.finish(summary, pictures=session.config.log.pictures)
    return summary


def _importance(session: Session) -> dict[str, Any]:
    """Measure the importance of every feature; print it, and write importance.json and importance.csv."""
    config = session.config
    split = config.eval.split
    rows = session.source.num_rows(split)
    if rows > BLOCK_ROWS:
        session.logger.info(
            f"note: split '{split}' has {rows:,} rows; features are permuted within blocks of {BLOCK_ROWS:,} rows"
        )

    def evaluate(source: Source) -> dict[str, Any]:
        evaluator = session.evaluator_of(source, split, stored=session.source)
        record = evaluator.run()
        if evaluator.problem is not None:
            raise DivergedError(evaluator.problem)
        return record

    importance = measure_importance(
        session.source,
        split,
        evaluate,
        session.metrics,
        seed=config.seed,
        repeats=config.eval.importance_repeats,
        report=lambda name, done, total: session.logger.info(f"feature {done + 1}/{total}: {name}"),
    )
    print_importance(session.console, importance)
    session.recorder.write_importance(importance, as_csv(importance))
    values = {metric.test_key: importance["unpermuted"][metric.key] for metric in session.metrics}
    summary = empty_summary(session.metrics) | {"steps": session.start.num_steps} | values
    summary["teacher_auc"] = session.teacher_auc
    session.recorder.finish(summary, pictures=session.config.log.pictures)
    return summary


def _inference(session: Session) -> dict[str, Any]:
    config, source, ranks = session.config, session.source, session.ranks
    session.step.set_training(False)
    sizes = _sizes_to_time(config, source, ranks)
    left_out = [f"{size:,}" for size in config.inference.batch_sizes if size not in sizes]
    if left_out:
        session.console.print(
            f"left out: batch sizes {', '.join(left_out)}, which split '{config.eval.split}' of "
            f"{source.num_rows(config.eval.split):,} rows or {_count(ranks.world_size, 'rank')} cannot fill"
        )
    results = []
    for batch_size in sizes:
        loader = Loader(
            source,
            config.eval.split,
            LoaderSettings(batch_size=batch_size),
            rank=ranks.rank,
            world_size=ranks.world_size,
            device=ranks.device,
            key_maps=session.step.key_maps,
        )
        batch = loader.batch(0).to(ranks.device)
        results.append(measure(session.step, batch, config.inference, ranks))
    print_inference(session.console, results)
    summary = empty_summary(session.metrics) | {"steps": session.start.num_steps}
    summary |= {"inference": results, "teacher_auc": session.teacher_auc}
    session.recorder.finish(summary, pictures=session.config.log.pictures)
    return summary


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _check(
    config: Config, source: Source, ranks: Ranks, loaders: Loaders, start: ResumePoint
) -> None:
    """Refuse invalid options before any process group or file exists."""
    if config.mode is Mode.inference:
        _sizes_to_time(config, source, ranks)
    if loaders.train is not None:
        if config.run_dir is None and launcher_restarts():
            raise ValueError(
                f"run_dir must be named under --max-restarts={launcher_restarts()}: a restarted run looks there for "
                "its checkpoints"
            )
        steps_per_epoch = loaders.train.steps_per_epoch
        place, last_place = start.stage.place(start.num_steps), total_steps(config, steps_per_epoch)
        if place >= last_place:
            last_step = start.stage.last_step(config, steps_per_epoch)
            raise ValueError(
                f"checkpoint.restore={config.checkpoint.restore} has {start.num_steps} steps behind it, and "
                f"this run ends after {last_step}; raise train.epochs or train.max_steps, or set mode=eval"
            )
        evaluations = EvalSteps.of(config, steps_per_epoch)
        check_profile(config.profile, place, last_place, evaluations, ranks)


def _sizes_to_time(config: Config, source: Source, ranks: Ranks) -> list[int]:
    """Return the batch sizes of `mode=inference` that divide over the ranks and that the split can fill."""
    num_rows = source.num_rows(config.eval.split)
    requested = config.inference.batch_sizes
    sizes = [size for size in requested if size % ranks.world_size == 0 and size <= num_rows]
    if not sizes:
        raise ValueError(
            f"inference.batch_sizes={requested}: none can be timed with the {num_rows} rows of split "
            f"'{config.eval.split}' on {_count(ranks.world_size, 'rank')}; name a size that is no larger "
            "and divides over the ranks"
        )
    return sizes


def _teacher_auc(config: Config, source: Source) -> float | None:
    """Return the best AUC that any model can reach, known for synthetic clicks only."""
    return source.teacher_auc(config.eval.split) if isinstance(source, SyntheticSource) else None


def _recorder(
    config: Config,
    config_yaml: str,
    facts: dict[str, Any],
    ranks: Ranks,
    start: ResumePoint,
    lock: RunLock,
) -> RunDirectory:
    """Create the run directory and its files on rank 0; if that fails, all ranks raise the error."""

    def make(run_dir: Path, kept: KeptRecords | None = None) -> RunDirectory:
        return RunDirectory(
            run_dir,
            rank=ranks.rank,
            config_yaml=config_yaml,
            environment=facts,
            logger=lock.logger,
            loggers=make_loggers(config.log.loggers, lock.logger) if ranks.is_rank0 else None,
            kept=kept,
        )

    made: list[RunDirectory] = []

    def make_on_rank0() -> Path:
        if config.run_dir is None:
            run_dir = lock.create_new(config.recipe)
        else:
            run_dir = Path(config.run_dir)
            lock.create(run_dir)
        made.append(make(run_dir, kept_records(config, run_dir, start, lock.logger)))
        return run_dir

    run_dir = ranks.run_on_rank0(make_on_rank0)
    return made[0] if made else make(run_dir)


def _header_facts(
    config: Config, source: Source, run_dir: Path, start: ResumePoint
) -> dict[str, str]:
    """Return the facts that the first lines of a run print."""
    spec, data, optimizer = source.spec, config.data, config.optimizer
    facts = {
        "model": f"{config.model.name}, {len(spec.numerical)} numerical and "
        f"{len(spec.categorical)} categorical features, dim {config.model.embedding_dim}",
        "data": f"{data.path or SYNTHETIC}, "
        f"{source.num_rows(TRAIN_SPLIT):,} training rows, "
        f"{source.num_rows(config.eval.split):,} {config.eval.split} rows",
        "seed": str(config.seed),
        "run_dir": str(run_dir),
    }
    if start.path is not None:
        how = "resumes" if start.is_continuation else "restored"
        facts[how] = f"{start.path}"
        starts_at_zero = config.mode is Mode.train and not config.checkpoint.takes_optimizer
        if start.is_continuation or not starts_at_zero:
            facts[how] += f", {start.num_steps:,} steps"
        if not start.is_continuation:
            facts[how] += ", " + ", ".join(part.name for part in config.checkpoint.parts)
            facts[how] += "; training starts at step 0" if starts_at_zero else ""
    if config.train.ema_decay is not None:
        facts["average"] = (
            f"dense component, decay {config.train.ema_decay:g} after a warm-up by (1 + step) / (10 + step); evaluation and "
            "inference use it"
        )
    if config.mode is not Mode.train:
        return facts
    frozen = config.train.freeze
    dense = "dense frozen" if Component.dense in frozen else f"{optimizer.name} {optimizer.lr:g}"
    tables = f"{optimizer.table_name} {optimizer.table_lr:g}"
    tables = "frozen" if Component.tables in frozen else tables
    facts |= {
        "batch": f"{config.train.batch_size:,} rows over all ranks, "
        + _count(config.train.epochs, "epoch"),
        "optimizer": f"{dense}, {config.model.embedding_dtype.value} tables {tables}, amp {config.train.amp.value}",
    }
    return facts


def _dense_states(config: Config) -> int:
    """Return the numbers per weight that the dense component keeps beside weight and gradient."""
    has_average = config.train.ema_decay is not None
    return dense_rule(config.effective_optimizer).states_per_weight + has_average
