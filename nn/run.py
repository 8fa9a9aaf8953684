"""One run from its typed configuration: check, plan, build, then train, evaluate or time."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from configs.schema import Config, Mode
from dataloading.columns import Source
from dataloading.loader import Loader
from dataloading.synthetic import SyntheticSource
from nn import checkpoint
from nn.build import (
    TRAIN_SPLIT,
    build_plan,
    build_step,
    build_test_loader,
    build_train_loader,
    device_type,
    hardware_of,
    model_spec,
    open_source,
    planned_hardware,
)
from nn.console import (
    Progress,
    make_console,
    print_hardware,
    print_head,
    print_inference,
    print_memory,
    print_plan,
    print_summary,
)
from nn.distributed import (
    Ranks,
    is_lost_peer,
    process_group,
    process_rank,
    ranks_from_environment,
)
from nn.errors import RankError
from nn.evaluation import Evaluator
from nn.inference import measure
from nn.memory import plan_memory
from nn.planner import needs_dense_kernel
from nn.profiler import Profiler, check_profile
from nn.recorder import SUMMARY_KEYS, Recorder, default_run_dir, environment
from nn.step import Step
from nn.trainer import Trainer, eval_steps, total_steps


def run(config: Config, config_yaml: str) -> None:
    """Do what `config.mode` says.

    Args:
        config: the checked configuration.
        config_yaml: the same as text, for the run directory.

    Raises:
        ValueError: something the user wrote or gave cannot be; raised alike on all ranks.
        RankError: the same, found by one rank only, such as a bad row.
        DivergedError: the loss stopped being a number; raised alike on all ranks.
    """
    source = open_source(config)
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
    start_step = _restored_steps(config, source)
    _check(config, source, ranks, start_step)
    torch.set_float32_matmul_precision("high" if config.train.tf32 else "highest")
    with ExitStack() as stack:
        stack.enter_context(process_group(ranks))
        hardware = hardware_of(config, ranks.device.type, ranks.world_size, ranks.local_world_size)
        plan, rows = ranks.call_on_main(lambda: build_plan(config, source, hardware))
        facts = environment(
            config.recipe,
            ranks.device,
            world_size=ranks.world_size,
            num_hosts=ranks.world_size // ranks.local_world_size,
        )
        facts["teacher_auc"] = _teacher_auc(config, source) if ranks.is_main else None
        recorder = stack.enter_context(_recorder(config, config_yaml, facts, ranks))
        recorder.write_plan(rows)
        print_head(console, facts, _head(config, source, recorder.run_dir, start_step))
        if config.mode is Mode.train:
            print_plan(console, rows, ranks.world_size)
            if ranks.device.type == "cuda":
                memory = plan_memory(config, source.spec, rows, ranks.world_size)
                recorder.write_memory(memory)
                print_memory(console, memory, hardware.hbm_bytes)

        step = build_step(config, source, plan, ranks)
        stack.callback(step.close)
        if ranks.device.type == "cuda":
            reason = step.why_not_captured
            console.print(
                "step: a CUDA graph" if reason is None else f"step: no CUDA graph, {reason}"
            )
        if config.checkpoint.restore is not None:
            path = Path(config.checkpoint.restore)
            checkpoint.restore(
                path,
                step,
                with_optimizer=config.mode is Mode.train and config.checkpoint.takes_optimizer,
                halves=config.checkpoint.halves,
                grow=config.checkpoint.grow,
            )
        session = Session(config, source, ranks, step, recorder, console, start_step)
        try:
            summary = WORK[config.mode](session)
        except ValueError as error:
            finder = f"rank {ranks.rank}: " if ranks.world_size > 1 else ""
            raise RankError(f"{finder}{error}") from error
        except RuntimeError as error:
            if not is_lost_peer(error):
                raise
            raise RankError(
                f"rank {ranks.rank} stopped, since another rank has ended; its message says why"
            ) from error
        summary["teacher_auc"] = facts["teacher_auc"]
        recorder.finish(summary)
        if config.mode is Mode.train and config.checkpoint.save:
            directory = recorder.run_dir / "checkpoints"
            spec = model_spec(config, source)
            checkpoint.save(directory, step, summary["steps"], spec, ranks)
        print_summary(console, summary, recorder.run_dir)


@dataclass(frozen=True, slots=True)
class Session:
    """What every mode works with, once all is built."""

    config: Config
    source: Source
    ranks: Ranks
    step: Step
    recorder: Recorder
    console: Console
    start_step: int

    def evaluator(self) -> Evaluator:
        """What scores the split to evaluate on."""
        loader = build_test_loader(self.config, self.source, self.ranks)
        return Evaluator(self.step, loader, self.ranks, self.config.eval.max_steps)

    def profiler(self) -> Profiler | None:
        """What takes a profile of training, if one is asked for."""
        if not self.config.profile.steps:
            return None
        return Profiler(
            self.config.profile, self.start_step, self.recorder.run_dir, self.console, self.ranks
        )


def _train(session: Session) -> dict[str, Any]:
    config, ranks = session.config, session.ranks
    loader = build_train_loader(config, session.source, ranks)
    last_step = total_steps(config, loader.steps_per_epoch)
    with Progress(session.console, last_step, start_step=session.start_step) as progress:
        trainer = Trainer(
            session.step,
            loader,
            session.evaluator(),
            session.recorder,
            progress,
            config,
            ranks,
            session.profiler(),
        )
        return trainer.train(session.start_step)


def _evaluate(session: Session) -> dict[str, Any]:
    record = {"step": session.start_step, **session.evaluator().run()}
    session.recorder.write_test(record)
    with Progress(session.console, session.start_step) as progress:
        progress.show_test(record)
    return dict.fromkeys(SUMMARY_KEYS) | {"steps": session.start_step} | record


def _inference(session: Session) -> dict[str, Any]:
    config, source, ranks = session.config, session.source, session.ranks
    session.step.set_training(False)
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
        results.append(measure(session.step, batch, config.inference, ranks))
    print_inference(session.console, results)
    nothing = dict.fromkeys(SUMMARY_KEYS)
    return nothing | {"steps": session.start_step, "inference": results}


WORK = {Mode.train: _train, Mode.eval: _evaluate, Mode.inference: _inference}


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _check(config: Config, source: Source, ranks: Ranks, start_step: int) -> None:
    """Refuse what would be refused later, before any process group or file exists."""
    if config.mode is Mode.inference:
        _sizes_to_time(config, source, ranks)
        return
    if config.mode is Mode.train:
        loader = build_train_loader(config, source, ranks)
        last_step = total_steps(config, loader.steps_per_epoch)
        _check_steps_left(config, start_step, last_step)
        evaluations = eval_steps(last_step, loader.steps_per_epoch, config.eval.per_epoch)
        check_profile(config.profile, start_step, last_step, evaluations, ranks)
    build_test_loader(config, source, ranks)


def _check_steps_left(config: Config, start_step: int, last_step: int) -> None:
    if start_step >= last_step:
        raise ValueError(
            f"checkpoint.restore={config.checkpoint.restore} has {start_step} steps behind it, and "
            f"this run ends after {last_step}; raise train.epochs or train.max_steps, or set mode=eval"
        )


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


def _restored_steps(config: Config, source: Source) -> int:
    if config.checkpoint.restore is None:
        return 0
    num_steps = checkpoint.check(
        Path(config.checkpoint.restore),
        model_spec(config, source),
        halves=config.checkpoint.halves,
        grow=config.checkpoint.grow,
    )
    begins_anew = config.mode is Mode.train and not config.checkpoint.takes_optimizer
    return 0 if begins_anew else num_steps


def _teacher_auc(config: Config, source: Source) -> float | None:
    """The best AUC that any model can reach, known for the synthetic stream only."""
    return source.teacher_auc(config.eval.split) if isinstance(source, SyntheticSource) else None


def _recorder(config: Config, config_yaml: str, facts: dict[str, Any], ranks: Ranks) -> Recorder:
    """Make the run directory on rank 0; a directory that cannot be is an error on all ranks."""

    def make(rank: int, run_dir: Path) -> Recorder:
        return Recorder(
            run_dir,
            rank=rank,
            config_yaml=config_yaml,
            environment=facts,
            tensorboard=config.log.tensorboard,
        )

    made: list[Recorder] = []

    def make_on_main() -> Path:
        run_dir = Path(config.run_dir) if config.run_dir else default_run_dir(config.recipe)
        made.append(make(0, run_dir))
        return run_dir

    run_dir = ranks.call_on_main(make_on_main)
    return made[0] if made else make(ranks.rank, run_dir)


def _head(config: Config, source: Source, run_dir: Path, start_step: int) -> dict[str, str]:
    """Facts of the run for its first lines."""
    spec, data, optimizer = source.spec, config.data, config.optimizer
    facts = {
        "model": f"{config.model.name.value}, {len(spec.numerical)} numerical and "
        f"{len(spec.categorical)} categorical features, dim {config.model.embedding_dim}",
        "data": f"{data.path or 'built-in synthetic clicks'}, "
        f"{source.num_rows(TRAIN_SPLIT):,} training rows, "
        f"{source.num_rows(config.eval.split):,} {config.eval.split} rows",
        "seed": str(config.seed),
        "run_dir": str(run_dir),
    }
    if config.checkpoint.restore is not None:
        parts = ", ".join(each.name for each in config.checkpoint.parts)
        facts["restored"] = f"{config.checkpoint.restore} ({parts}), {start_step:,} steps"
    if config.mode is not Mode.train:
        return facts
    facts |= {
        "batch": f"{config.train.batch_size:,} rows over all ranks, "
        + _count(config.train.epochs, "epoch"),
        "optimizer": f"{optimizer.name.value} {optimizer.lr:g}, tables "
        f"{optimizer.table_name.value} {optimizer.table_lr:g}, amp {config.train.amp.value}",
    }
    if config.train.freeze:
        facts["frozen"] = ", ".join(each.name for each in config.train.freeze)
    if needs_dense_kernel(config.rules.table_name, device_type(config)):
        facts["note"] = (
            "FBGEMM has no fused adam for tables on a CPU; the tables take the dense kernel and the "
            "same rule after the backward pass, which needs memory for a gradient as large as they are"
        )
    return facts
