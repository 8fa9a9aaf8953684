"""The checkpoint that a run starts from: the latest one of its `run_dir`, the one that `checkpoint.restore` names, or none.

A run resumes in its own `run_dir` only with the same data and the same settings that decide what is learnt.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from logging import Logger
from pathlib import Path
from typing import Any

from configs.messages import printable, shortened
from configs.option_values import plain_values
from configs.options import default_values
from configs.schema import RENAMED, Component, Config, Mode
from dataloading.dataset.documents import read_mapping
from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.dataset.file_states import changed_data, changed_files, verify_small_files
from dataloading.dataset.source import Source
from dataloading.loader import Loader
from dataloading.storage.local_copy import local_path
from nn.build import model_spec
from nn.checkpoint.compatibility import feature_mismatch
from nn.checkpoint.directory import (
    CHECKPOINTS,
    NewerFormatError,
    UnreadableError,
    clear,
    find_damage,
    list_checkpoints,
    mark_damaged,
    prune,
    read_facts,
    step_of,
)
from nn.checkpoint.other_tables import check_other_tables
from nn.checkpoint.run_facts import check_resumable
from nn.checkpoint.state import Trained, check, facts_of, restore
from nn.checkpoint.tensor_index import read_index
from nn.distributed.errors import SharedError
from nn.distributed.process_group import HostChannel, Ranks
from nn.embedding.declared_tables import table_of_feature
from nn.loggers.run_logger import flat_options
from nn.models.metric import PR_AUC
from nn.models.registry import declared_tables
from nn.next_day import CHANGES, day_to_train, first_day, next_day_hint
from nn.observability.records import (
    CONFIG,
    METRICS,
    SUMMARY,
    UNSAVED,
    KeptRecords,
    has_records,
    records_until,
)
from nn.training.limits import Day, early_stop
from nn.training.lr_scheduler import has_ended

# Settings that may differ between two starts of one run: they change neither what is learnt up to a step nor the order.
FREE = (
    *("run_dir", "config", "mode", "day", "device", "data.path", "data.prefetch", "data.workers"),
    "data.watch_idle_s",
    *("train.epochs", "train.max_steps", "train.compile", "train.capture", "train.tf32"),
    "train.batch_size_per_rank",  # train.batch_size has the global batch that it results in
    *("eval.", "inference.", "sharding.", "checkpoint.", "log.", "profile.", "predict.", "output"),
)
MISSING = "nothing"


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The point at which a run begins, its run.json if it is a checkpoint, and whether that is one of this `run_dir`."""

    path: Path | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    is_continuation: bool = False
    day: Day = field(default_factory=Day)

    @property
    def num_steps(self) -> int:
        """Updates made before it."""
        return self.facts.get("num_steps", 0)

    @property
    def loop(self) -> dict[str, Any]:
        """The state of the training loop, in a checkpoint of this run."""
        return self.facts["trainer"]

    @property
    def checkpoint(self) -> Path:
        assert self.path is not None, "the run does not start from a checkpoint"
        return self.path


def named_resume_point(config: Config, source: Source) -> ResumePoint:
    """Check the checkpoint that `checkpoint.restore` names, which a run with its own ignores, before any process group exists."""
    return ResumePoint() if _has_own_checkpoint(config) else _named_start(config, source)


def own_resume_point(
    config: Config, source: Source, ranks: Ranks, logger: Logger, named: ResumePoint
) -> ResumePoint:
    """Find the checkpoint of its own that a run resumes from, without one return `named`, that of `named_resume_point`.

    All ranks must call it, and raise ValueError if the checkpoint is another run's.
    """
    if ranks.run_on_rank0(lambda: _has_own_checkpoint(config)):
        start = _latest_intact(config, model_spec(config, source), ranks, logger)
        if start.is_continuation:
            return start
    if config.day is not None and config.mode is Mode.train:
        raise ValueError(
            f"day=next continues the run in run_dir={config.run_dir}, which has no checkpoint; train its first day "
            "without day=next, or set run_dir to that of the run"
        )
    # If all of its own checkpoints are damaged, the run starts as it did the first time.
    return _named_start(config, source) if named.path is None else named


def tidy(directory: Path, start: ResumePoint, keep: int) -> None:
    """Remove what the previous start left in the directory of checkpoints, and those older than the latest `keep`."""
    clear(directory, start.num_steps if start.is_continuation else 0)
    if start.is_continuation:
        # Now, not after the next save: the user may have lowered checkpoint.keep because the disk is full.
        prune(directory, start.num_steps, keep, start.loop["best_step"])


def finished_run(
    config: Config, loader: Loader | None, ranks: Ranks, start: ResumePoint
) -> str | None:
    """Return the message that the directory has the complete result, or None, on all ranks; ValueError for another run's."""
    if config.run_dir is None:
        return None
    run_dir = Path(config.run_dir)
    if not start.is_continuation:
        if not ranks.run_on_rank0(lambda: _is_repeated(config, run_dir)):
            return None
        return (
            f"run_dir={config.run_dir} holds the complete result of this command already; nothing to do. Set another "
            "run_dir, or none, to run it again"
        )
    if start.day.is_new:
        return None
    assert loader is not None, "only a training continues"
    last_step = start.day.last_step(config, loader.steps_per_epoch)
    if not ranks.run_on_rank0(lambda: _has_ended(config, run_dir, start, last_step)):
        return None
    return (
        f"run_dir={config.run_dir} holds the complete run already ({start.num_steps:,} steps); nothing to do. "
        "Raise train.epochs or train.max_steps to train on, or set another run_dir"
    )


def _has_ended(config: Config, run_dir: Path, start: ResumePoint, last_step: int) -> bool:
    summary = read_mapping(run_dir / SUMMARY) or {}
    # That of the step of its latest checkpoint.
    if summary.get("steps") != start.num_steps or summary.get(UNSAVED):
        return False
    evals = start.loop["evals_since_best"]
    reason = early_stop(config, start.loop["test"], start.num_steps, evals)
    return start.num_steps >= last_step or reason is not None


def load(config: Config, start: ResumePoint, step: Trained, logger: Logger) -> None:
    """Load the checkpoint that a run starts from, one of its own completely; SharedError if it does not fit."""
    if start.path is None:
        return
    parts = config.checkpoint
    is_training = config.mode is Mode.train
    try:
        note = restore(
            start.path,
            step,
            with_optimizer=is_training and (start.is_continuation or parts.takes_optimizer),
            components=tuple(Component) if start.is_continuation else parts.components,
            grow=start.day.is_new if start.is_continuation else parts.grow,
            is_own=start.is_continuation,
            others=None if start.is_continuation else parts.restore_tables,
        )
    except ValueError as error:
        raise SharedError(str(error)) from error
    if note is not None:
        logger.info(f"note: {note}")


def kept_records(run_dir: Path, start: ResumePoint, logger: Logger) -> KeptRecords | None:
    """Return the records that a run keeps, None for one that starts from nothing; only rank 0 may call it."""
    if not start.is_continuation:
        return None
    last_record, day = start.loop["last_record"], start.day
    kept = records_until(
        run_dir / METRICS, start.num_steps, last_record, day.number, is_new_day=day.is_new
    )
    if last_record is not None and kept.last_step != last_record:
        ends = "has no record" if kept.last_step is None else f"ends at step {kept.last_step:,}"
        logger.warning(
            f"{run_dir / METRICS} {ends}, but the checkpoint of step {start.num_steps:,} was saved after a record of "
            f"step {last_record:,}: records are missing there and in curves.png; the model is not affected"
        )
    return kept


def can_restart(run_dir: Path, config: Config) -> bool:
    """Tell whether a run directory holds an unfinished run of the same settings, which may restart without a checkpoint."""
    summary = read_mapping(run_dir / SUMMARY)
    if summary is not None and not summary.get(UNSAVED):
        return False
    before = read_mapping(run_dir / CONFIG)
    return (
        before is not None
        and before.get("mode", config.mode.value) == config.mode.value
        and not _differences(before, config)
    )


def _is_repeated(config: Config, run_dir: Path) -> bool:
    """Tell whether a run without a start has its complete result, as an evaluation may; ValueError for another run's records."""
    path = run_dir / METRICS
    is_finished = path.exists() and read_mapping(run_dir / SUMMARY) is not None
    # A start that was killed, or had no room, before its first record left nothing to lose.
    if not (has_records(path) or is_finished) or can_restart(run_dir, config):
        return False
    before = read_mapping(run_dir / CONFIG)

    def chosen(options: dict[str, Any]) -> dict[str, Any]:
        paths = ("run_dir", "config")
        return {key: v for key, v in options.items() if key not in paths and v is not None}

    is_same = False
    if before is not None:
        earlier = chosen(_complete(before, config))
        # PR-AUC comes by itself where labels are rare, after the options were written.
        named = [*(earlier.get("eval.metrics") or []), PR_AUC.name]
        now = chosen(_flat(plain_values(config)))
        is_same = now in (earlier, earlier | {"eval.metrics": named})
    # A training that saves has lost its checkpoints if it starts from nothing.
    is_training_that_saves = config.mode is Mode.train and config.checkpoint.save
    if is_same and is_finished and not is_training_that_saves:
        return True
    text = f"run_dir={run_dir} already holds the {METRICS} of an earlier run"
    set_another = "set another run_dir, or none for a new runs/<recipe>/<time>"
    checkpoints = run_dir / CHECKPOINTS
    if list_checkpoints(checkpoints):
        raise ValueError(f"{text}; {set_another}")
    damaged = sorted(path.name for path in checkpoints.glob("step_*.damaged"))
    unusable = f" ({', '.join(damaged)} cannot be used)" if damaged else ""
    raise ValueError(
        f"{text}, but no complete checkpoint to resume from{unusable}; {set_another}, or delete {path} to restart there"
    )


def _has_own_checkpoint(config: Config) -> bool:
    if config.mode is not Mode.train or config.run_dir is None:
        return False
    try:
        return bool(list_checkpoints(Path(config.run_dir) / CHECKPOINTS))
    except UnreadableError as error:
        raise ValueError(_unreadable_message(config.run_dir, str(error))) from None


def _named_start(config: Config, source: Source) -> ResumePoint:
    """Return the start at a checkpoint that a run names, at its position in its data; other data begin with their first row."""
    parts, day = config.checkpoint, first_day(source)
    is_training = config.mode is Mode.train
    if parts.restore is None:
        return ResumePoint(day=day)
    path, declared = local_path(parts.restore), declared_tables(config.model, source.spec)
    facts = check(
        path,
        model_spec(config, source),
        table_of_feature(declared),
        components=parts.components,
        grow=parts.grow,
        allow_changes=parts.allow_changes,
        multi_hot=config.data.multi_hot,
    )
    is_resumed = is_training and parts.takes_optimizer
    check_other_tables(parts, declared, source.spec, is_resumed=is_resumed)
    if is_training and not parts.takes_optimizer:
        facts = {"num_steps": 0}
    trained = Day.of_facts(facts)
    is_other = None not in (trained.identity, day.identity) and trained.identity != day.identity
    # Which rows of a stream another run has trained is not known here.
    is_other = is_other or (is_training and config.data.watch_dir is not None)
    first_step = facts["num_steps"] if is_other else trained.first_step
    if is_other and is_training and has_ended(first_step, config.scheduler):
        raise ValueError(
            f"the schedule has ended before step {first_step:,} of checkpoint.restore={path}, so that other data would be "
            "trained with a learning rate of 0; set scheduler.decay_start_step=null, or a later one, or "
            "checkpoint.parts=[dense,tables] to start at step 0"
        )
    return ResumePoint(path, facts, day=replace(day, first_step=first_step))


def _latest_intact(config: Config, spec: FeatureSpec, ranks: Ranks, logger: Logger) -> ResumePoint:
    """Find the latest intact checkpoint of `config.run_dir`; all ranks must call it, and share the reading of its bytes."""
    channel = HostChannel()
    while True:
        latest = ranks.run_on_rank0(lambda: _latest(config, logger))
        if latest is None:
            return ResumePoint()
        path, facts = latest
        damage, unreadable = None, None
        try:
            damage = find_damage(path, facts, ranks.rank, ranks.world_size)
        except UnreadableError as error:
            unreadable = str(error)
        damages, problems = zip(*channel.gather((damage, unreadable)), strict=True)
        if any(problems):
            raise ValueError(_unreadable_message(config.run_dir, next(filter(None, problems))))
        damage = next(filter(None, damages), None)
        if damage is None:
            day = ranks.run_on_rank0(
                partial(_check_same_run, config, spec, ranks, path, facts, logger)
            )
            return ResumePoint(path, facts, is_continuation=True, day=day)
        ranks.run_on_rank0(partial(_report_damage, path, damage, logger))


def _unreadable_message(run_dir: str | None, problem: str) -> str:
    return (
        f"run_dir={run_dir}: {problem}; nothing was changed there. Make it readable and rerun the same command, or set "
        "another run_dir"
    )


def _latest(config: Config, logger: Logger) -> tuple[Path, dict[str, Any]] | None:
    assert config.run_dir is not None, "a run that resumes has a directory"
    for path in list_checkpoints(Path(config.run_dir) / CHECKPOINTS):
        try:
            facts = read_facts(path)
            check_resumable(facts, step_of(path))
            return path, facts
        except NewerFormatError as error:
            resume = f"cannot resume from {path}: {error}, or set another run_dir"
            raise ValueError(resume) from None
        except UnreadableError as error:
            # Its bytes may be intact: a renamed checkpoint would cost the steps since the one before it.
            raise ValueError(_unreadable_message(config.run_dir, str(error))) from None
        except ValueError as error:
            _report_damage(path, str(error), logger)
    return None


def _report_damage(path: Path, damage: str, logger: Logger) -> None:
    aside = mark_damaged(path)
    logger.warning(
        f"the checkpoint of step {step_of(path)} is not used: {damage}; it was renamed to {aside}, and "
        "the run resumes from the one before it, if there is one"
    )


def _check_same_run(
    config: Config,
    spec: FeatureSpec,
    ranks: Ranks,
    path: Path,
    facts: dict[str, Any],
    logger: Logger,
) -> Day:
    """Refuse to resume with other data, whatever the times of its files, or other settings; return the day to train."""
    now = facts_of(config, spec, ranks)
    day = day_to_train(config, spec, facts, now)
    if config.checkpoint.allow_changes:
        return day
    if hint := next_day_hint(config, spec, facts):
        raise ValueError(hint)
    differences = _differences(facts["config"], config, CHANGES if day.is_new else ())
    if differences:
        raise ValueError(
            f"run_dir={config.run_dir} holds a run with other settings: {'; '.join(differences[:4])}. Set another run_dir (with "
            "checkpoint.restore to start from this run's model), or checkpoint.allow_changes=true to resume with the new ones"
        )
    problem = feature_mismatch(
        read_index(path),
        facts["feature_spec"],
        spec,
        table_of_feature(declared_tables(config.model, spec)),
        grow=day.is_new,
        how_to_grow="start a new run with larger tables: "
        f"checkpoint.restore={path} checkpoint.grow=true and another run_dir",
    )
    if problem is not None:
        raise ValueError(f"run_dir={config.run_dir} {problem}")
    if day.is_new:
        return day
    if changed := changed_data(facts, now):
        raise ValueError(
            f"files of {spec.root} have changed since the checkpoint of step {facts['num_steps']} of run_dir={config.run_dir}: "
            f"{', '.join(changed[:3])}; restore the same bytes (their times may differ) or set data.path to a copy of the "
            "dataset it was trained on, or checkpoint.allow_changes=true if its rows are the same"
        )
    verify_small_files(spec)
    is_same_directory = facts["config"]["data"]["path"] == config.data.path
    if is_same_directory and changed_files(facts["data_files"], now["data_files"]):
        logger.info(
            f"note: files of {spec.root} were touched or restored since the checkpoint of step {facts['num_steps']}; "
            f"their sizes and samples are the same. python -m preproc mode=verify path={spec.root} compares every byte "
            "with the checksums of its feature_spec.yaml"
        )
    return day


def _differences(
    before: dict[str, Any], config: Config, changes: tuple[str, ...] = ()
) -> list[str]:
    """Describe what differs from an earlier start and changes what is learnt, but for `FREE` and `changes`."""
    old, new = _complete(before, config), _flat(plain_values(config))
    free = (*FREE, *changes)
    sections = tuple(name for name in free if name.endswith("."))

    def short(value: Any) -> str:
        return shortened(printable(str(value)))

    return [
        f"{printable(option)}={short(old.get(option, MISSING))} instead of {short(new.get(option, MISSING))}"
        for option in sorted(old | new)
        if old.get(option, MISSING) != new.get(option, MISSING)
        and not (option in free or option.startswith(sections))
    ]


def _flat(content: dict[str, Any]) -> dict[str, Any]:
    """Return options by dotted name; an empty section, which is not always recorded, has none."""
    return {option: value for option, value in flat_options(content) if value != {}}


def _complete(before: dict[str, Any], config: Config) -> dict[str, Any]:
    """Return recorded options by their dotted names now; those of later versions have their default, which changes nothing."""
    recorded = {RENAMED.get(option, option): value for option, value in _flat(before).items()}
    return default_values(config) | recorded
