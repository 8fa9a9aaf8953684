"""Which checkpoint of its own `run_dir` a run goes on from, and whether it is still the same run."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from configs.schema import Config
from dataloading.feature_spec import FeatureSpec
from dataloading.file_states import changed_files, changed_samples
from nn.checkpoint.compatibility import feature_mismatch
from nn.checkpoint.directory import (
    NewerFormatError,
    find_damage,
    newest_first,
    read_facts,
    set_aside,
    step_of,
)
from nn.checkpoint.state import facts_of, plain_config
from nn.checkpoint.tensor_index import read_index
from nn.distributed.process_group import HostChannel, Ranks
from nn.embedding.declared_tables import table_of_feature
from nn.models.registry import declared_tables
from nn.training.trainer import is_good_enough

# Settings that may differ between two starts of one run: they change neither what is learnt up to a step nor its order.
FREE = (
    *("run_dir", "mode", "device", "data.path", "data.prefetch", "data.workers"),
    "data.threads",  # what data.workers was called in runs that began before it
    *("train.epochs", "train.max_steps", "train.compile", "train.capture", "train.tf32"),
    *("eval.", "inference.", "sharding.", "checkpoint.", "log.", "profile."),
)
MISSING = "nothing"


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where a run begins.

    Attributes:
        path: checkpoint to load, or None.
        facts: its run.json, or nothing.
        is_continuation: it is one of this `run_dir`, whose records are kept.
    """

    path: Path | None = None
    facts: dict[str, Any] | None = None
    is_continuation: bool = False

    @property
    def num_steps(self) -> int:
        """Updates behind it."""
        return self.facts["num_steps"] if self.facts else 0


def find_resume_point(
    config: Config,
    spec: FeatureSpec,
    ranks: Ranks,
    channel: HostChannel,
    say: Callable[[str], None],
) -> ResumePoint:
    """Find the latest whole checkpoint of `config.run_dir`; all ranks must call it, and read its bytes together.

    Args:
        config: the whole run, of mode train.
        spec: the dataset as the model sees it.
        ranks: this process.
        channel: between the hosts.
        say: prints a line; only rank 0's is called.

    Raises:
        ValueError: on all ranks, when what is there is of another run, or of a newer version.
    """
    directory = Path(config.run_dir) / "checkpoints"
    while True:
        found = ranks.run_on_rank0(lambda: _latest(directory, say))
        if found is None:
            return ResumePoint()
        path, facts = found
        damages = channel.gather(find_damage(path, facts, ranks.rank, ranks.world_size))
        damage = next((each for each in damages if each), None)
        if damage is None:
            start = ResumePoint(path, facts, is_continuation=True)
            ranks.run_on_rank0(lambda start=start: _check_same_run(config, spec, ranks, start, say))
            return start
        if ranks.is_rank0:
            _report_damage(path, damage, say)
        ranks.barrier()


def is_over(config: Config, start: ResumePoint, last_step: int) -> bool:
    """Whether a run that goes on has come to its end already: its summary is of the step of its latest checkpoint."""
    try:
        summary = json.loads((Path(config.run_dir) / "summary.json").read_text())
    except (OSError, json.JSONDecodeError):
        return False
    if summary.get("steps") != start.num_steps:
        return False
    test = start.facts["trainer"]["test"]
    return start.num_steps >= last_step or is_good_enough(config, test, start.num_steps)


def can_restart(run_dir: Path, config: Config) -> bool:
    """Whether a run directory holds a run of the same settings that was killed before its first checkpoint."""
    if (run_dir / "summary.json").exists():
        return False
    try:
        before = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        return False
    return isinstance(before, dict) and not _differences(before, plain_config(config))


def _latest(directory: Path, say: Callable[[str], None]) -> tuple[Path, dict[str, Any]] | None:
    for path in newest_first(directory):
        try:
            return path, read_facts(path)
        except NewerFormatError as error:
            raise ValueError(
                f"{path} cannot be gone on from: {error}, or set another run_dir"
            ) from None
        except ValueError as error:
            _report_damage(path, str(error), say)
    return None


def _report_damage(path: Path, damage: str, say: Callable[[str], None]) -> None:
    aside = set_aside(path)
    say(
        f"warning: the checkpoint of step {step_of(path)} is not used: {damage}; it is {aside} now, and the run "
        "goes on from the one before it, if there is one"
    )


def _check_same_run(
    config: Config,
    spec: FeatureSpec,
    ranks: Ranks,
    start: ResumePoint,
    say: Callable[[str], None],
) -> None:
    """Refuse to go on with other data or settings.

    Files of the dataset may have other times, as those that were put back have: their samples are what counts, as they
    do for a dataset that has moved.
    """
    if config.checkpoint.allow_changes:
        return
    facts, now = start.facts, facts_of(config, spec, ranks)
    differences = _differences(facts["config"], now["config"])
    if differences:
        raise ValueError(
            f"run_dir={config.run_dir} holds a run with other settings: {'; '.join(differences[:4])}. Set "
            "another run_dir (with checkpoint.restore to start from this run's model), or "
            "checkpoint.allow_changes=true to go on with the new ones"
        )
    problem = feature_mismatch(
        read_index(start.path),
        facts["feature_spec"],
        spec,
        table_of_feature(declared_tables(config.model, spec)),
        grow=False,
        how_to_grow="begin a new run with larger tables: "
        f"checkpoint.restore={start.path} checkpoint.grow=true and another run_dir",
    )
    if problem is not None:
        raise ValueError(f"run_dir={config.run_dir} {problem}")
    changed = changed_samples(facts["data_samples"], now["data_samples"])
    if changed:
        raise ValueError(
            f"files of {spec.root} have changed since the checkpoint of step {facts['num_steps']} of "
            f"run_dir={config.run_dir}: {', '.join(changed[:3])}; put the same bytes back (their times may differ) or "
            "set data.path to a copy of the dataset it was trained on, or checkpoint.allow_changes=true if its rows "
            "are the same"
        )
    is_at_its_place = facts["config"]["data"]["path"] == config.data.path
    if is_at_its_place and changed_files(facts["data_files"], now["data_files"]):
        say(
            f"note: files of {spec.root} were touched or put back since the checkpoint of step {facts['num_steps']}; "
            f"their sizes and samples are the same. python -m preproc mode=verify path={spec.root} compares every byte "
            "with the checksums of its feature_spec.yaml"
        )


def _differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    old, new = _flat(before), _flat(now)
    return [
        f"{key}={old.get(key, MISSING)} instead of {new.get(key, MISSING)}"
        for key in sorted(old | new)
        if old.get(key, MISSING) != new.get(key, MISSING)
        and not _is_of_another_model(key, new)
        and not any(key == free or (free.endswith(".") and key.startswith(free)) for free in FREE)
    ]


def _is_of_another_model(key: str, now: dict[str, Any]) -> bool:
    """Tell whether the model lacks an option: runs of before had those of all models."""
    return key.startswith("model.") and key not in now


def _flat(content: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
