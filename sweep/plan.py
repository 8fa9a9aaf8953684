"""The common part of all trials: the command, its options, the split and the metric they are chosen by; checked first."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from optuna.distributions import CategoricalDistribution

from configs.arguments import Choices as ArgumentChoices
from configs.arguments import hydra_arguments, is_below
from configs.command_line import command_of, compose_overrides, written_options
from configs.many_runs_schema import SweepConfig
from configs.messages import shown
from configs.option_values import plain_values, written
from configs.options import describe, refuse, require
from configs.overrides import WrittenOption, drop_replaced, no_option, one_line
from configs.schema import Config, DataConfig, Device, Mode
from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.dataset.file_states import data_state
from dataloading.dataset.row_columns import RowColumn
from dataloading.held_out_source import TRAIN, VALIDATION
from dataloading.storage.local_copy import local_path
from nn.early_checks import check_inputs
from nn.models.metric import Metric, best_of, further_metrics, metrics_of_label
from nn.models.options import without_effect
from nn.models.registry import options_of_own_models, typed_config
from sweep.space import Space, allows, as_override, corners, grid_of

ROOT = Path(__file__).parents[1]
GROUPS = ("experiment", "data")
CHOICES = ArgumentChoices(Config, GROUPS)
VALIDATION_FRACTION = 0.1
TEST = "test"
MODEL_OPTIONS = ("experiment", "model.name")
"""Options that choose the model of a trial."""


@dataclass(frozen=True, slots=True)
class TrialPlan:
    """The command of a trial without the values that are its own.

    `effective` leaves out those values of a trial that have no effect beside its others, such as those of another model.
    `own_values` are those that the recipe has for the options of the space; None if the space lacks one of them.
    """

    script: Path
    overrides: tuple[str, ...]
    metric: Metric
    split: str
    uses_gpus: bool
    data: DataConfig
    effective: Callable[[Mapping[str, Any]], dict[str, Any]]
    own_values: dict[str, Any] | None = None

    def data_state(self) -> dict[str, Any]:
        """Return what tells the data as they lie there now from other data; synthetic clicks are among the options."""
        if self.data.path is None:
            return {"data_samples": {}, "data_checksums": {}}
        return data_state(_spec_of(self.data))

    def command(self, values: Mapping[str, Any], run_dir: Path) -> list[str]:
        own = [as_override(option, value) for option, value in self.effective(values).items()]
        return [sys.executable, str(self.script), *self.overrides, *own, f"run_dir={run_dir}"]

    def test_command(self, values: Mapping[str, Any], checkpoint: Path, run_dir: Path) -> list[str]:
        """Return the command that evaluates a trial's checkpoint on all rows of the test split."""
        all_rows = ("mode=eval", "eval.max_steps=null", "eval.final_max_steps=null")
        last = (f"eval.split={TEST}", "eval.best_metric=null", f"checkpoint.restore={checkpoint}")
        # Those of trials are of the checkpoint that these begin from.
        whole = ("checkpoint.parts=[dense,tables]", "checkpoint.restore_tables=null")
        return [*self.command(values, run_dir), *all_rows, *last, *whole]


def plan_trials(config: SweepConfig, space: Space) -> TrialPlan:
    """Check the space and all options against those of the command, and return what trials have in common.

    Raises ValueError: an option does not exist or has an invalid value, in any corner of the space; or the sweep cannot choose.
    """
    command, named = command_of(config.recipe)
    script = ROOT / f"{command}.py"
    overrides = [*named, *config.overrides]
    own = [text.partition("=")[0].lstrip("+~") for text in overrides]
    for option in own:
        require(
            option not in space,
            f"{option} is in the space and among the options of all trials; write it once",
        )
    refuse("run_dir" in own, "run_dir: each trial has its own, below output; set output instead")
    if config.metric is not None:
        overrides.append(f"eval.best_metric={config.metric}")
    options = [option for option, _ in describe(Config)]
    for option in space:
        is_known = option in GROUPS or any(is_below(option, name) for name in options)
        if not is_known and not option.startswith("model."):
            raise ValueError(f"space: {no_option(option, [*options, *options_of_own_models()])}")
    first = _Composition(script.stem, tuple(overrides)).config({})
    split, added = _selection(first, own)
    # It is the same for all trials.
    overrides += [*added, *(["eval.baseline=false"] if "eval.baseline" not in own else [])]
    composition = _Composition(script.stem, tuple(overrides))
    yardstick, unused = None, set(space)
    try:
        models = {option: space[option] for option in MODEL_OPTIONS if option in space}
        for values in (corner | model for model in grid_of(models) for corner in corners(space)):
            checked = composition.config(values)
            unused -= composition.effective(values).keys()
            yardstick = _same_yardstick(checked, yardstick)
        for option in unused:
            composition.config(values, written=[option])
    except ValueError as error:
        raise ValueError(f"space: {str(error).removeprefix('space: ')}") from None
    check_inputs(checked)
    require(
        checked.checkpoint.save,
        "checkpoint.save=false: the best trial is tested from its checkpoint, and trials resume from theirs; leave it out",
    )
    require(checked.mode is Mode.train, f"mode={checked.mode.value}: trials train; leave mode out")
    metric = best_of(_metrics(checked), checked.eval.best_metric)
    return TrialPlan(
        script,
        (*overrides, f"eval.best_metric={metric.key}"),
        metric,
        split,
        checked.device is not Device.cpu,
        checked.data,
        composition.effective,
        _own_values(first, space),
    )


def _same_yardstick(config: Config, before: dict[str, Any] | None) -> dict[str, Any]:
    """Return the options that decide which rows and labels measure a trial; refuse others than those of `before`."""
    plain = plain_values(config)
    data, evaluation = plain["data"], plain["eval"]
    found = {f"data.{name}": data[name] for name in ("path", "feature_spec", "validation_fraction")}
    if config.data.path is None:
        found |= {f"data.synthetic.{name}": value for name, value in data["synthetic"].items()}
        found["seed"] = config.seed  # of other clicks, and of labels by another rule
    names = ("split", "best_metric", "group", "max_steps", "final_max_steps")
    found |= {f"eval.{name}": evaluation[name] for name in names}
    if config.eval.max_steps is not None:
        found["eval.batch_size"] = config.eval.batch_size
    tasks = (plain["tasks"] or {}).items()
    found |= {f"tasks.{name}.keep_rate": task.get("keep_rate") for name, task in tasks}
    for option in () if before is None else sorted(found | before):
        old, new = (shown(options.get(option)) for options in (before or {}, found))
        if old != new:
            raise ValueError(
                f"space: trials with {option}={old} and with {new} would be measured on different rows or labels; leave what "
                "makes the difference out of the space, or set it for all of them"
            )
    return found


def _own_values(config: Config, space: Space) -> dict[str, Any] | None:
    """Return the values of the options without those of a trial, as a trial writes them; None if the space lacks one."""
    plain, own = plain_values(config), {}
    for option, values in space.items():
        value: Any = plain
        for name in option.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        if not allows(values, value):
            return None
        own[option] = written(value) if isinstance(values, CategoricalDistribution) else value
    return own


def _selection(config: Config, own: Sequence[str]) -> tuple[str, list[str]]:
    """Return the split that trials are chosen by, and the options that make it; ValueError if it would be the test split."""
    if "eval.split" in own:
        split = config.eval.split
        require(
            split not in (TEST, TRAIN),
            f"eval.split={split}: trials chosen by the {split} split would be {split}ed by what they were chosen by; leave it "
            "out, or name another split",
        )
        return config.eval.split, []
    added = [f"eval.split={VALIDATION}"]
    has_split = config.data.path is not None and VALIDATION in _spec_of(config.data).splits
    if not has_split and config.data.validation_fraction is None:
        added.append(f"data.validation_fraction={VALIDATION_FRACTION}")
    return VALIDATION, added


class _Composition:
    """The options of a run as its command composes them, to which values of trials are added."""

    def __init__(self, recipe: str, overrides: Sequence[str]) -> None:
        self._recipe = recipe
        self._overrides = overrides
        self._written = hydra_arguments(overrides, CHOICES)
        self._composed = _composed(recipe, overrides)
        self._configs: dict[str, Config] = {}

    def config(self, values: Mapping[str, Any], written: Iterable[str] = ()) -> Config:
        """Return the checked options of a run with values of a trial, without those that have no effect beside the others.

        Raises ValueError: an option does not exist, or has an invalid value, or one of `written` has no effect.
        """
        key = str((dict(values), list(written)))
        if key not in self._configs:
            self._configs[key] = self._checked(values, written)
        return self._configs[key]

    def _checked(self, values: Mapping[str, Any], written: Iterable[str]) -> Config:
        added = [as_override(option, value) for option, value in values.items()]
        # One value may be several arguments.
        arguments = hydra_arguments(added, CHOICES)
        if any(option in GROUPS for option in values):
            composed = _composed(self._recipe, [*self._overrides, *added])
        else:
            # Faster than to compose all files again.
            composed = deepcopy(self._composed)
            for text in arguments:
                override = OverridesParser.create().parse_override(text)
                try:
                    OmegaConf.update(
                        composed, override.key_or_group, override.value(), force_add=True
                    )
                except OmegaConfBaseException as error:
                    raise ValueError(one_line(error)) from None
        drop_replaced(composed, [*self._written, *arguments], Config)
        must = [WrittenOption(option) for option in written]
        return typed_config(composed, [*written_options(self._written), *must])

    def effective(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of a trial that have an effect on its model."""
        try:
            model = self.config(values).model
        except ValueError:
            return dict(values)  # the trial says what is wrong
        idle = without_effect(model)
        own = {f"model.{item.name}" for item in fields(model) if item.name not in idle}
        return {
            option: value
            for option, value in values.items()
            if not option.startswith("model.") or any(is_below(option, name) for name in own)
        }


def _composed(recipe: str, overrides: Sequence[str]) -> DictConfig:
    # The sweep's own command line is composed already.
    before = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        return compose_overrides(Config, "schema", recipe, overrides, GROUPS)
    finally:
        GlobalHydra.instance().hydra = before


def _spec_of(data: DataConfig) -> FeatureSpec:
    assert data.path is not None
    return FeatureSpec.load(local_path(data.path), data.feature_spec, measure=False)


def _metrics(config: Config) -> list[Metric]:
    labels: Sequence[RowColumn] = (RowColumn("label"),)
    if config.data.path is not None:
        labels = _spec_of(config.data).labels
    further = further_metrics(config.eval.metrics)
    return [
        metric
        for label in labels
        for metric in metrics_of_label(
            label,
            further=further,
            has_groups=config.eval.group is not None,
            is_single=len(labels) == 1,
        )
    ]
