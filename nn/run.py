"""One run from its typed configuration: check, plan, build, then train, evaluate or time."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from configs.schema import Config, Mode
from dataloading.loader import Loader
from dataloading.source import Source
from dataloading.synthetic import SyntheticSource
from nn.build import (
    TRAIN_SPLIT,
    Loaders,
    build_loaders,
    build_plan,
    build_step,
    check_table_dtype,
    device_type,
    hardware_of,
    model_spec,
    open_source,
    planned_hardware,
)
from nn.checkpoint import state as checkpoint
from nn.checkpoint.directory import clear, prune
from nn.checkpoint.manager import CheckpointManager
from nn.distributed.errors import DivergedError, SharedError, StoppedError
from nn.distributed.failures import lost_rank_message, report_faults, report_lost_rank
from nn.distributed.process_group import (
    Ranks,
    launcher_restarts,
    process_group,
    process_rank,
    ranks_from_environment,
)
from nn.distributed.signals import StopRequest
from nn.models.registry import check_model
from nn.observability.console import (
    Progress,
    make_console,
    print_hardware,
    print_header,
    print_inference,
    print_memory,
    print_plan,
    print_summary,
)
from nn.observability.profiler import Profiler, check_profile
from nn.observability.run_directory import SUMMARY_KEYS, RunDirectory, default_run_dir, environment
from nn.resume import ResumePoint, can_restart
from nn.sharding.memory_estimate import plan_memory
from nn.sharding.planner import needs_dense_kernel
from nn.start import is_over, load, named_resume_point, own_resume_point
from nn.training.evaluator import Evaluator
from nn.training.latency import measure
from nn.training.train_step import TrainStep
from nn.training.trainer import Trainer, eval_steps, total_steps


def run(config: Config, config_yaml: str) -> None:
    """Do what `config.mode` says.

    Args:
        config: the checked configuration.
        config_yaml: the same as text, for the run directory.

    Raises:
        ValueError: something the user wrote or gave cannot be; raised alike on all ranks.
        RankError: the same, found by one rank only, such as a bad row.
        DivergedError: the loss stopped being a number; raised alike on all ranks.
        SharedError: what all ranks found while they trained, such as a checkpoint of another model.
        LostRankError: another rank has ended.
        StoppedError: a signal asked for it; raised alike on all ranks.
    """
    source = open_source(config)
    check_model(config.model, source.spec)
    check_table_dtype(config, source.spec)
    console = make_console(process_rank())
    if config.mode is Mode.plan:
        hardware = planned_hardware(config)
        _, rows = build_plan(config, source, hardware)
        print_hardware(console, config, hardware)
        print_plan(console, rows, hardware.world_size)
        if hardware.device_type == "cuda":
            memory = plan_memory(config, source.spec, rows, hardware.world_size)
            print_memory(console, memory, hardware.hbm_bytes)
        return
    ranks = ranks_from_environment(device_type(config))
    start = named_resume_point(config, source)
    loaders = build_loaders(config, source, ranks)
    _check(config, source, ranks, loaders, start.num_steps)
    torch.set_float32_matmul_precision("high" if config.train.tf32 else "highest")
    with ExitStack() as stack:
        stack.enter_context(loaders)
        stack.enter_context(process_group(ranks))
        stack.enter_context(report_lost_rank(ranks))
        start = own_resume_point(config, source, ranks, console) or start
        if loaders.train is not None and is_over(config, loaders.train, ranks, start):
            console.print(
                f"run_dir={config.run_dir} holds the whole run already ({start.num_steps:,} steps); nothing to do. "
                "Raise train.epochs or train.max_steps to train on, or set another run_dir",
                soft_wrap=True,
            )
            return
        hardware = hardware_of(config, ranks.device.type, ranks.world_size, ranks.local_world_size)
        plan, rows = ranks.run_on_rank0(lambda: build_plan(config, source, hardware))
        facts = environment(
            config.recipe,
            ranks.device,
            world_size=ranks.world_size,
            num_hosts=ranks.world_size // ranks.local_world_size,
        )
        facts["teacher_auc"] = _teacher_auc(config, source) if ranks.is_rank0 else None
        recorder = stack.enter_context(_recorder(config, config_yaml, facts, ranks, start))
        recorder.write_plan(rows)
        print_header(console, facts, _head(config, source, recorder.run_dir, start))
        if config.mode is Mode.train:
            print_plan(console, rows, ranks.world_size)
            if ranks.device.type == "cuda":
                memory = plan_memory(config, source.spec, rows, ranks.world_size)
                recorder.write_memory(memory)
                print_memory(console, memory, hardware.hbm_bytes)

        session = Session(config, source, loaders, ranks, recorder, console, start)
        with report_faults(ranks):
            step = build_step(config, source, plan, ranks)
            stack.callback(step.close)
            if ranks.device.type == "cuda":
                reason = step.capture_blocker
                console.print(
                    "step: a CUDA graph" if reason is None else f"step: no CUDA graph, {reason}"
                )
            load(config, start, step)
            summary = WORK[config.mode](session, step, facts)
        print_summary(console, summary, recorder.run_dir)


@dataclass(frozen=True, slots=True)
class Session:
    """What every mode works with, once all is built."""

    config: Config
    source: Source
    loaders: Loaders
    ranks: Ranks
    recorder: RunDirectory
    console: Console
    start: ResumePoint

    def evaluator(self, step: TrainStep, alive: Callable[[], None] = lambda: None) -> Evaluator:
        """What scores the split to evaluate on."""
        assert self.loaders.test is not None
        return Evaluator(step, self.loaders.test, self.ranks, self.config.eval.max_steps, alive)

    def profiler(self) -> Profiler | None:
        """What takes a profile of training, if one is asked for; the first start of a run has taken it."""
        if not self.config.profile.steps or self.start.is_continuation:
            return None
        return Profiler(
            self.config.profile,
            self.start.num_steps,
            self.recorder.run_dir,
            self.console,
            self.ranks,
        )

    def say(self, line: str) -> None:
        """Print a line that no terminal's width breaks."""
        self.console.print(line, soft_wrap=True)


def _train(session: Session, step: TrainStep, facts: dict[str, Any]) -> dict[str, Any]:
    config, ranks, start = session.config, session.ranks, session.start
    loader = session.loaders.train
    assert loader is not None
    last_step = total_steps(config, loader.steps_per_epoch)
    with ExitStack() as stack:
        checkpointer = stop = None
        alive = _nothing
        if config.checkpoint.save:
            stop = stack.enter_context(
                StopRequest(ranks.world_size > 1, lambda: _as_error(lost_rank_message(ranks)))
            )
            alive = stop.moved
            directory = session.recorder.run_dir / "checkpoints"
            if ranks.is_rank0:
                clear(directory, start.num_steps if start.is_continuation else 0)
                if start.is_continuation:
                    # Now, not after the next save: it may be for want of room that fewer shall be kept.
                    best = start.facts["trainer"]["best_step"]
                    prune(directory, start.num_steps, config.checkpoint.keep, best)
            checkpointer = CheckpointManager(
                directory,
                step,
                checkpoint.facts_of(config, model_spec(config, session.source), ranks),
                session.source.spec,
                config.checkpoint,
                ranks,
                session.say,
                alive,
            )
        progress = stack.enter_context(
            Progress(session.console, last_step, start_step=start.num_steps)
        )
        trainer = Trainer(
            step,
            loader,
            session.evaluator(step, alive),
            session.recorder,
            progress,
            config,
            ranks,
            session.profiler(),
            checkpointer,
            stop,
        )
        if start.is_continuation:
            rows = checkpoint.trainer_rows(start.path) if ranks.is_rank0 else None
            trainer.resume_from(start.num_steps, start.facts["trainer"], rows)
        else:
            trainer.start_at(start.num_steps)
        try:
            summary = trainer.train()
        except BaseException as error:
            # Where all ranks are here, what is being written will be whole; other ranks may wait for ever.
            is_shared = isinstance(error, DivergedError | SharedError | StoppedError)
            if checkpointer is not None and (is_shared or ranks.world_size == 1):
                checkpointer.wait()
            raise
        summary["teacher_auc"] = facts["teacher_auc"]
        has_trained = trainer.num_steps > start.num_steps or not start.is_continuation
        if checkpointer is not None and has_trained:
            trainer.save(is_last=True)
        session.recorder.finish(summary)
        problem = None if checkpointer is None else checkpointer.wait()
        if problem is not None:
            raise SharedError(
                f"the checkpoint could not be written below {checkpointer.directory}: {problem}; the run's other "
                "results are there. Make room and start the same command again, or set checkpoint.save=false"
            )
    return summary


def _as_error(text: str) -> str:
    return f"error: {text}\n" if text else ""


def _nothing() -> None:
    """Called where nobody watches whether the loop moves."""


def _evaluate(session: Session, step: TrainStep, facts: dict[str, Any]) -> dict[str, Any]:
    num_steps = session.start.num_steps
    record = {"step": num_steps, **session.evaluator(step).run()}
    session.recorder.write_test(record)
    with Progress(session.console, num_steps) as progress:
        progress.show_test(record)
    summary = dict.fromkeys(SUMMARY_KEYS) | {"steps": num_steps} | record
    summary["teacher_auc"] = facts["teacher_auc"]
    session.recorder.finish(summary)
    return summary


def _inference(session: Session, step: TrainStep, facts: dict[str, Any]) -> dict[str, Any]:
    config, source, ranks = session.config, session.source, session.ranks
    step.set_training(False)
    sizes = _sizes_to_time(config, source, ranks)
    left_out = [f"{each:,}" for each in config.inference.batch_sizes if each not in sizes]
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
            batch_size=batch_size,
            rank=ranks.rank,
            world_size=ranks.world_size,
            device=ranks.device,
        )
        batch = loader.batch(0).to(ranks.device)
        results.append(measure(step, batch, config.inference, ranks))
    print_inference(session.console, results)
    summary = dict.fromkeys(SUMMARY_KEYS) | {"steps": session.start.num_steps}
    summary |= {"inference": results, "teacher_auc": facts["teacher_auc"]}
    session.recorder.finish(summary)
    return summary


WORK = {Mode.train: _train, Mode.eval: _evaluate, Mode.inference: _inference}


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _check(config: Config, source: Source, ranks: Ranks, loaders: Loaders, start_step: int) -> None:
    """Refuse what would be refused later, before any process group or file exists."""
    if config.mode is Mode.inference:
        _sizes_to_time(config, source, ranks)
    if loaders.train is not None:
        if config.run_dir is None and launcher_restarts():
            raise ValueError(
                f"run_dir must be named under --max-restarts={launcher_restarts()}: it is where a restarted run finds "
                "its checkpoints"
            )
        steps_per_epoch = loaders.train.steps_per_epoch
        last_step = total_steps(config, steps_per_epoch)
        if start_step >= last_step:
            raise ValueError(
                f"checkpoint.restore={config.checkpoint.restore} has {start_step} steps behind it, and "
                f"this run ends after {last_step}; raise train.epochs or train.max_steps, or set mode=eval"
            )
        evaluations = eval_steps(last_step, steps_per_epoch, config.eval.per_epoch)
        check_profile(config.profile, start_step, last_step, evaluations, ranks)


def _sizes_to_time(config: Config, source: Source, ranks: Ranks) -> list[int]:
    """Batch sizes of `mode=inference` that divide over the ranks and that the split can fill."""
    num_rows = source.num_rows(config.eval.split)
    asked = config.inference.batch_sizes
    sizes = [each for each in asked if each % ranks.world_size == 0 and each <= num_rows]
    if not sizes:
        raise ValueError(
            f"inference.batch_sizes={asked}: none can be timed with the {num_rows} rows of split "
            f"'{config.eval.split}' on {_count(ranks.world_size, 'rank')}; name a size that is no larger "
            "and divides over the ranks"
        )
    return sizes


def _teacher_auc(config: Config, source: Source) -> float | None:
    """The best AUC that any model can reach, known for the synthetic stream only."""
    return source.teacher_auc(config.eval.split) if isinstance(source, SyntheticSource) else None


def _recorder(
    config: Config, config_yaml: str, facts: dict[str, Any], ranks: Ranks, start: ResumePoint
) -> RunDirectory:
    """Make the run directory on rank 0; a directory that cannot be is an error on all ranks."""

    def make(rank: int, run_dir: Path) -> RunDirectory:
        resume_step = start.num_steps if start.is_continuation else None
        if rank == 0 and resume_step is None and config.mode is Mode.train:
            resume_step = 0 if can_restart(run_dir, config) else None
        return RunDirectory(
            run_dir,
            rank=rank,
            config_yaml=config_yaml,
            environment=facts,
            tensorboard=config.log.tensorboard,
            resume_step=resume_step,
        )

    made: list[RunDirectory] = []

    def make_on_main() -> Path:
        run_dir = Path(config.run_dir) if config.run_dir else default_run_dir(config.recipe)
        made.append(make(0, run_dir))
        return run_dir

    run_dir = ranks.run_on_rank0(make_on_main)
    return made[0] if made else make(ranks.rank, run_dir)


def _head(config: Config, source: Source, run_dir: Path, start: ResumePoint) -> dict[str, str]:
    """Facts of the run for its first lines."""
    spec, data, optimizer = source.spec, config.data, config.optimizer
    facts = {
        "model": f"{config.model.name}, {len(spec.numerical)} numerical and "
        f"{len(spec.categorical)} categorical features, dim {config.model.embedding_dim}",
        "data": f"{data.path or 'built-in synthetic clicks'}, "
        f"{source.num_rows(TRAIN_SPLIT):,} training rows, "
        f"{source.num_rows(config.eval.split):,} {config.eval.split} rows",
        "seed": str(config.seed),
        "run_dir": str(run_dir),
    }
    if start.path is not None:
        how = "goes on" if start.is_continuation else "restored"
        facts[how] = f"{start.path}"
        begins_anew = config.mode is Mode.train and not config.checkpoint.takes_optimizer
        if start.is_continuation or not begins_anew:
            facts[how] += f", {start.num_steps:,} steps"
        if not start.is_continuation:
            facts[how] += ", " + ", ".join(each.name for each in config.checkpoint.parts)
            facts[how] += "; training begins at step 0" if begins_anew else ""
    if config.mode is not Mode.train:
        return facts
    facts |= {
        "batch": f"{config.train.batch_size:,} rows over all ranks, "
        + _count(config.train.epochs, "epoch"),
        "optimizer": f"{optimizer.name.value} {optimizer.lr:g}, {config.model.embedding_dtype.value} tables "
        f"{optimizer.table_name.value} {optimizer.table_lr:g}, amp {config.train.amp.value}",
    }
    if config.train.freeze:
        facts["frozen"] = ", ".join(each.name for each in config.train.freeze)
    if needs_dense_kernel(config.effective_optimizer.table_name, device_type(config)):
        facts["note"] = (
            "FBGEMM has no fused adam for tables on a CPU; the tables take the dense kernel and the "
            "same rule after the backward pass, which needs memory for a gradient as large as they are"
        )
    return facts
