"""A session: what every mode but the plan works with, opened in the one order that is safe.

The order is the contract of `open_session`; each line relies on those above it.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from logging import Logger
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from configs.schema import Component, Config, Mode
from configs.user_objects import described, has_raised
from dataloading.dataset.file_states import data_identity
from dataloading.dataset.source import Source
from dataloading.stream_source import Part, StreamSource
from dataloading.synthetic import SyntheticSource
from nn.build import (
    TRAIN_SPLIT,
    Loaders,
    build_key_maps,
    build_loaders,
    build_step,
    build_test_loader,
    checked_plan,
    device_type,
    hardware_of,
    model_spec,
    without_a_node,
)
from nn.checkpoint.directory import CHECKPOINTS
from nn.checkpoint.mirror import catch_up
from nn.checkpoint.other_tables import described_tables
from nn.checks import check_run, count, open_checked
from nn.distributed.errors import DivergedError, EndOfRunError, RankError, SharedError
from nn.distributed.failures import is_out_of_memory, report_faults, report_lost_rank
from nn.distributed.preemption import Heartbeat
from nn.distributed.process_group import (
    Ranks,
    has_device_failed,
    process_group,
    process_rank,
    ranks_from_environment,
)
from nn.loggers.choice import make_loggers
from nn.models.description import describe_model
from nn.models.metric import METRIC_FACTS, METRICS, Metric, further_metrics
from nn.models.registry import find_model
from nn.models.tasks import metrics_of, tasks_of_run
from nn.observability.console import make_console, make_logger, print_header, print_summary
from nn.observability.environment import environment
from nn.observability.model_summary import size_line
from nn.observability.plan_table import BesidePlan, print_memory, print_plan
from nn.observability.profiler import Profiler
from nn.observability.records import DATA_IDENTITY, DAY, ENDED, PLAN, PROBLEM
from nn.observability.run_directory import (
    RunDirectory,
    draw_missing_pictures,
    empty_summary,
    write_model,
    write_plan,
)
from nn.observability.run_lock import RunLock
from nn.planning.exchange import busiest_links, planned_exchange
from nn.planning.memory_estimate import RankMemory, plan_memory
from nn.planning.plan import Hardware, TablePlan
from nn.resume import (
    ResumePoint,
    finished_run,
    kept_records,
    load,
    named_resume_point,
    own_resume_point,
    tidy,
)
from nn.training.dense_optimizer import dense_rule
from nn.training.evaluator import Evaluator
from nn.training.train_step import TrainStep

SYNTHETIC = "built-in synthetic clicks"


@dataclass(frozen=True, slots=True)
class Session:
    """The objects of a run that every mode works with."""

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
        return metrics_of(self.step.tasks)

    def evaluator(self, heartbeat: Heartbeat | None = None) -> Evaluator:
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

    def finish(self, summary: dict[str, Any]) -> None:
        """Complete the results of a mode that trains nothing; `summary` has what it measured."""
        known = {
            "steps": self.start.num_steps,
            "teacher_auc": self.teacher_auc,
            "split": self.config.eval.split,
        }
        summary = empty_summary(self.metrics) | known | summary
        self.recorder.finish(summary, pictures=self.config.log.pictures)
        self.conclude(summary)

    def conclude(self, summary: dict[str, Any], problem: str | None = None) -> None:
        """Print the summary; SharedError for a `problem` with a file, DivergedError if the metrics are undefined."""
        print_summary(self.console, summary, self.metrics, self.recorder.run_dir)
        if problem is not None:
            raise SharedError(problem)
        if summary.get(PROBLEM) is not None:
            raise DivergedError(f"the run is complete, but {summary[PROBLEM]}")

    def profiler(self) -> Profiler | None:
        """Return the profiler, if `profile.steps` is set; a run that resumes records no profile, and prints that."""
        if not self.config.profile.steps:
            return None
        if self.start.is_continuation:
            self.logger.info(
                "note: a run that resumes records no profile; set another run_dir, with checkpoint.restore, for profile.steps"
            )
            return None
        run_dir, steps = self.recorder.run_dir, self.start.num_steps
        return Profiler(self.config.profile, steps, run_dir, self.console, self.ranks)


@contextmanager
def open_session(
    config: Config, config_yaml: str, console: Console | None = None
) -> Iterator[Session | None]:
    """Check, open the process group, plan and build; None if nothing is left to do.

    1. Refuse what can be refused before any process group or file exists.
    2. Fork the readers, which must have neither a CUDA context nor a communicator.
    3. Open the process group. From here on all ranks raise an error together.
    4. Lock the run directory, before anything in it is read or renamed.
    5. Find the checkpoint to start from; end if the run is complete.
    6. Plan, before the run directory is created: a plan that does not fit leaves nothing behind.
    7. Create the run directory and its records.
    8. Build tables and dense component, and load the checkpoint into them.
    """
    source = open_checked(config)
    console = make_console(process_rank()) if console is None else console
    logger = make_logger(console)
    ranks = ranks_from_environment(device_type(config))
    start = named_resume_point(config, source)
    key_maps = build_key_maps(config, source.spec, ranks)
    loaders = build_loaders(config, source, ranks, key_maps)
    check_run(config, source, ranks, loaders, start)
    with ExitStack() as stack:
        stack.enter_context(loaders)
        stack.enter_context(process_group(ranks))
        stack.enter_context(report_lost_rank(ranks))
        lock = stack.enter_context(RunLock(logger))
        ranks.run_on_rank0(partial(_take_run_directory, config, lock, logger))
        start = _own_start(config, source, ranks, logger, start)
        finished = finished_run(config, loaders.train, ranks, start)
        if finished is not None:
            ranks.run_on_rank0(lambda: _complete_results(config, start, logger))
            logger.info(finished)
            yield None
            return
        hardware = hardware_of(config, ranks.device.type, ranks.world_size, ranks.local_world_size)
        plan, rows, disk_room = ranks.run_on_rank0(partial(checked_plan, config, source, hardware))
        memory: list[RankMemory] = []
        if config.mode is Mode.train and ranks.device.type == "cuda":
            memory = plan_memory(config, source.spec, rows, ranks.world_size, dense_states(config))
        facts = _environment(config, source, ranks, start)
        recorder = stack.enter_context(_recorder(config, config_yaml, facts, ranks, start, lock))
        ranks.run_on_rank0(lambda: write_plan(recorder.run_dir, rows, memory))
        size = ranks.run_on_rank0(lambda: _write_model(config, source, recorder, logger))
        print_header(console, facts, _header_facts(config, source, recorder.run_dir, start, size))
        if config.mode is Mode.train:
            beside = ranks.run_on_rank0(
                partial(beside_plan, config, source, rows, hardware, disk_room, recorder.run_dir)
            )
            print_plan(console, rows, hardware.table_ranks, beside)
        if memory:
            print_memory(console, memory, hardware.hbm_bytes)
        with report_faults(ranks):
            step = build_step(config, source, plan, ranks, key_maps)
            stack.callback(step.close)
            if ranks.device.type == "cuda":
                blocker = step.capture_blocker
                logger.info(f"step: {f'no CUDA graph, {blocker}' if blocker else 'a CUDA graph'}")
            load(config, start, step, logger)
            teacher_auc = facts["teacher_auc"]
            session = Session(
                config, source, loaders, ranks, recorder, console, logger, start, step, teacher_auc
            )
            with _errors_of_own_model(config.model.name):
                yield session


def _own_start(
    config: Config, source: Source, ranks: Ranks, logger: Logger, named: ResumePoint
) -> ResumePoint:
    """Find the point that a run starts from; a stream takes the parts that were trained until then.

    Raises ValueError: the rows that were trained are not those of a stream.
    """
    start = own_resume_point(config, source, ranks, logger, named)
    if start.is_continuation and isinstance(source, StreamSource):
        rows = start.day.position(start.num_steps) * config.train.batch_size
        for facts in start.loop.get("parts", []):
            source.append(Part(**facts), rows)
        if rows > source.known_rows:
            raise ValueError(
                f"run_dir={config.run_dir} has trained {rows:,} rows without data.watch_dir, and {config.data.path} has "
                f"{source.known_rows:,}: its last batch or epoch goes beyond them, and a stream has every row once. Set another "
                f"run_dir, with checkpoint.restore={start.path} to start from this run's model"
            )
    return start


def beside_plan(
    config: Config,
    source: Source,
    rows: Sequence[TablePlan],
    hardware: Hardware,
    disk_room: str | None,
    run_dir: Path | None,
    floor_ms: float | None = None,
) -> BesidePlan:
    """Return what is printed beside a plan, which `run_dir` gets complete."""
    listed = "run_dir=DIR writes them to DIR/plan.json" if run_dir is None else str(run_dir / PLAN)
    links = busiest_links(planned_exchange(config, source.spec, rows, hardware))
    less, has_gpus = without_a_node(config, source, hardware), hardware.device_type == "cuda"
    return BesidePlan(listed, links, floor_ms, disk_room, has_gpus, hardware.groups, less)


@contextmanager
def _errors_of_own_model(name: str) -> Iterator[None]:
    """Report an error in the code of a model outside the project, `package.module:Class`, as a RankError of one line."""
    try:
        yield
    except EndOfRunError:
        raise
    except Exception as error:
        # Nothing of the model is on the stack of its backward pass.
        modules = name.partition(":")[0], "torch.autograd"
        is_other = is_out_of_memory(error) or has_device_failed(error)
        if ":" in name and not is_other and any(has_raised(module, error) for module in modules):
            raise RankError(
                f"the model {name} has failed ({described(error)}); correct it"
            ) from error
        raise


def describe(config: Config, source: Source, logger: Logger) -> dict[str, Any] | None:
    """Return the description of the model; None, with a warning, if its layers cannot be run on the CPU."""
    drawn = torch.get_rng_state()
    try:
        content = describe_model(config.model, source.spec, model_spec(config, source))
        if not torch.equal(drawn, torch.get_rng_state()):
            logger.warning(
                f"model.name={config.model.name}: forward() draws random numbers in evaluation too, so its scores are random; "
                "torch.nn.functional.dropout needs training=self.training"
            )
        return content
    except Exception as error:  # of a model's own code, which may need a GPU
        logger.warning(
            f"no summary of the model and no model.json ({described(error)}); training fails too, unless its layers need a GPU"
        )
        return None


def _write_model(
    config: Config, source: Source, recorder: RunDirectory, logger: Logger
) -> dict[str, str]:
    """Write `model.json`; return the line of the header that tells the size of the model."""
    description = describe(config, source, logger)
    if description is None:
        return {}
    write_model(recorder.run_dir, description)
    return {"size": size_line(description)}


def dense_states(config: Config) -> int:
    """Return the numbers per weight that the dense component keeps beside weight and gradient."""
    has_average = config.train.ema_decay is not None
    return dense_rule(config.effective_optimizer).states_per_weight + has_average


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
        tidy(Path(config.run_dir) / CHECKPOINTS, start, config.checkpoint.keep)


def _environment(
    config: Config, source: Source, ranks: Ranks, start: ResumePoint
) -> dict[str, Any]:
    facts = environment(config.recipe, ranks) | {
        "teacher_auc": teacher_auc(config, source) if ranks.is_rank0 else None,
        # The title of the pictures.
        "model": config.model.name,
        "data": config.data.path or SYNTHETIC,
        DATA_IDENTITY: data_identity(source.spec) if ranks.is_rank0 else None,
        "batch_size": config.train.batch_size,
        "seed": config.seed,
        "split": config.eval.split,
        # Whether one panel of the curves may call both losses by that name.
        "trains_log_loss": not find_model(config.model.name).adds_to_loss()
        and all(task.trains_log_loss for task in tasks_of_run(config, source.spec)),
        # The point that the curves mark as the restored model.
        "restored": config.checkpoint.restore,
        "start_step": start.num_steps,
    }
    if start.day.is_new:
        facts[DAY] = start.day.number
    if others := [m for m in further_metrics(config.eval.metrics) if m not in METRICS]:
        facts[METRIC_FACTS] = {
            m.name: {"title": m.title, "larger_is_better": m.larger_is_better} for m in others
        }
    return facts


def teacher_auc(config: Config, source: Source) -> float | None:
    """Return the best AUC that any model can reach, known for synthetic clicks only."""
    return source.teacher_auc(config.eval.split) if isinstance(source, SyntheticSource) else None


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


def _recorder(
    config: Config,
    config_yaml: str,
    facts: dict[str, Any],
    ranks: Ranks,
    start: ResumePoint,
    lock: RunLock,
) -> RunDirectory:
    """Create the run directory and its files on rank 0; if that fails, all ranks raise the error."""
    made: list[RunDirectory] = []
    make = partial(
        RunDirectory,
        rank=ranks.rank,
        config_yaml=config_yaml,
        environment=facts,
        logger=lock.logger,
    )

    def make_on_rank0() -> Path:
        if config.run_dir is None:
            run_dir = lock.create_new(config.recipe)
        else:
            run_dir = Path(config.run_dir)
            lock.create(run_dir)
        kept = kept_records(run_dir, start, lock.logger)
        loggers = make_loggers(config.log.loggers, lock.logger)
        made.append(make(run_dir, loggers=loggers, kept=kept))
        return run_dir

    run_dir = ranks.run_on_rank0(make_on_rank0)
    return made[0] if made else make(run_dir, loggers=None, kept=None)


def _header_facts(
    config: Config, source: Source, run_dir: Path, start: ResumePoint, size: dict[str, str]
) -> dict[str, str]:
    spec, train, optimizer = source.spec, config.train, config.optimizer
    if isinstance(source, StreamSource):
        rows = f"{source.known_rows:,} training rows and those of {config.data.watch_dir}"
    else:
        rows = f"{source.num_rows(TRAIN_SPLIT):,} training rows"
    facts = {
        "model": f"{config.model.name}, {len(spec.numerical)} numerical and "
        f"{len(spec.categorical)} categorical features, dim {config.model.embedding_dim}",
        **size,
        "data": f"{config.data.path or SYNTHETIC}, {rows}, "
        f"{source.num_rows(config.eval.split):,} {config.eval.split} rows",
    }
    negatives = config.data.negatives
    if negatives.features:
        avoided = f", none of them in {negatives.history}" if negatives.history else ""
        names = ", ".join(negatives.features)
        counts = f"{negatives.per_row} of {1 + negatives.per_row} rows"
        facts["negatives"] = f"{counts}, {names} by {negatives.rule}{avoided}"
    facts |= {"seed": str(config.seed), "run_dir": str(run_dir)}
    starts_at_zero = config.mode is Mode.train and not config.checkpoint.takes_optimizer
    if start.is_continuation:
        facts["resumes"] = f"{start.path}, {start.num_steps:,} steps"
    elif start.path is not None:
        steps = "" if starts_at_zero else f", {start.num_steps:,} steps"
        parts = ", ".join(part.name for part in config.checkpoint.parts)
        begins = "; training starts at step 0" * starts_at_zero
        parts += described_tables(config.checkpoint)
        facts["restored"] = f"{start.path}{steps}, {parts}{begins}"
    if train.ema_decay is not None:
        facts["average"] = (
            f"dense component, decay {train.ema_decay:g} after a warm-up by (1 + step) / (10 + step); evaluation and "
            "inference use it"
        )
    if config.mode is Mode.train:
        dense = f"{optimizer.name} {optimizer.lr:g}"
        dense = "dense frozen" if Component.dense in train.freeze else dense
        tables = f"{optimizer.table_name} {optimizer.table_lr:g}"
        tables = "frozen" if Component.tables in train.freeze else tables
        kind, epochs = config.model.embedding_dtype.value, count(train.epochs, "epoch")
        facts["batch"] = f"{train.batch_size:,} rows over all ranks, {epochs}"
        facts["optimizer"] = f"{dense}, {kind} tables {tables}, amp {train.amp.value}"
    return facts
