"""What a run begins with: the latest checkpoint of its own `run_dir`, the one that `checkpoint.restore` names, or nothing."""

from pathlib import Path

from rich.console import Console

from configs.schema import Component, Config, Mode
from dataloading.loader import Loader
from dataloading.source import Source
from nn import resume
from nn.build import model_spec
from nn.checkpoint import state as checkpoint
from nn.checkpoint.directory import newest_first
from nn.distributed.errors import SharedError
from nn.distributed.process_group import HostChannel, Ranks
from nn.embedding.declared_tables import table_of_feature
from nn.models.registry import declared_tables
from nn.resume import ResumePoint
from nn.training.train_step import TrainStep
from nn.training.trainer import total_steps


def named_resume_point(config: Config, source: Source) -> ResumePoint:
    """Check what `checkpoint.restore` names, before any process group; a run that goes on by itself needs it no more.

    Raises:
        ValueError: mode=eval names none, what it names is no checkpoint, or not of this dataset, or has nothing left to train.
    """
    return ResumePoint() if _has_own_checkpoint(config) else _named(config, source)


def own_resume_point(
    config: Config, source: Source, ranks: Ranks, console: Console
) -> ResumePoint | None:
    """Find the checkpoint of its own run directory that a run goes on from; all ranks must call it.

    Raises:
        ValueError: on all ranks, when what is there is of another run, or of a newer version.
    """
    if not ranks.broadcast_object(_has_own_checkpoint(config)):
        return None

    def say(line: str) -> None:
        console.print(line, soft_wrap=True)

    start = resume.find_resume_point(config, model_spec(config, source), ranks, HostChannel(), say)
    # Where all of its own are damaged it begins as it did at first.
    return start if start.is_continuation else _named(config, source)


def is_over(config: Config, loader: Loader, ranks: Ranks, start: ResumePoint) -> bool:
    """Whether nothing is left to do in the run that is continued; all ranks must call it."""
    if not start.is_continuation:
        return False
    last_step = total_steps(config, loader.steps_per_epoch)
    return ranks.run_on_rank0(lambda: resume.is_over(config, start, last_step))


def load(config: Config, start: ResumePoint, step: TrainStep) -> None:
    """Load what a run begins with; its own checkpoint is always taken whole.

    Raises:
        SharedError: it is of another model or optimizer, or cannot be read.
    """
    if start.path is None:
        return
    parts = config.checkpoint
    is_training = config.mode is Mode.train
    try:
        checkpoint.restore(
            start.path,
            step,
            with_optimizer=is_training and (start.is_continuation or parts.takes_optimizer),
            components=tuple(Component) if start.is_continuation else parts.components,
            grow=parts.grow and not start.is_continuation,
            is_own=start.is_continuation,
        )
    except ValueError as error:
        raise SharedError(str(error)) from error


def _has_own_checkpoint(config: Config) -> bool:
    if config.mode is not Mode.train or config.run_dir is None:
        return False
    return bool(newest_first(Path(config.run_dir) / "checkpoints"))


def _named(config: Config, source: Source) -> ResumePoint:
    parts = config.checkpoint
    if parts.restore is None and config.mode is Mode.eval:
        raise ValueError(f"mode=eval needs a trained model: {_how_to_name_one(config.run_dir)}")
    if parts.restore is None:
        return ResumePoint()
    path = Path(parts.restore)
    facts = checkpoint.check(
        path,
        model_spec(config, source),
        table_of_feature(declared_tables(config.model, source.spec)),
        components=parts.components,
        grow=parts.grow,
        allow_changes=parts.allow_changes,
    )
    begins_anew = config.mode is Mode.train and not parts.takes_optimizer
    return ResumePoint(path, {"num_steps": 0} if begins_anew else facts)


def _how_to_name_one(run_dir: str | None) -> str:
    """Say how to name a checkpoint; the latest of the run directory, if there is one: that may be what was meant."""
    found = newest_first(Path(run_dir) / "checkpoints") if run_dir is not None else []
    if not found:
        return "set checkpoint.restore to a run's checkpoints/step_N"
    return f"set checkpoint.restore={found[0]}, and another run_dir, or none, for the results"
