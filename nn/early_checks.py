"""Checks of what a run's options name, before torch is imported: dataset, checkpoint, run directory.

They take tenths of a second, torch and TorchRec take ten. What is found here is read again when the run opens it.
"""

import os
from pathlib import Path

from configs.built_in import MODELS, SEVERAL_LABELS
from configs.messages import shown
from configs.schema import Config, Mode
from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.held_out_source import TRAIN, VALIDATION
from dataloading.storage.local_copy import local_path
from nn.checkpoint.directory import no_checkpoint
from nn.checkpoint.tf2 import find_tf2_tables
from nn.distributed.launcher import is_single_node
from nn.loggers.choice import check_loggers
from nn.models.features import chosen_group
from nn.models.metric import further_metrics
from nn.scores.request import is_held_out, output_path, split_to_score

LABELLED = (Mode.train, Mode.eval, Mode.importance)
"""Modes that compare predictions with labels."""


def check_inputs(config: Config) -> None:
    """Check that dataset, checkpoint and run directory of a run can be used; ValueError on all ranks, or OSError."""
    if config.data.path is not None:
        _check_dataset(config)
    watched = config.data.watch_dir if config.mode is Mode.train else None
    if watched is not None and not Path(watched).is_dir():
        raise ValueError(f"data.watch_dir={watched} is no directory; create it")
    if config.fitted is not None:
        FeatureSpec.load_features(Path(config.fitted))
    if config.mode is Mode.plan:
        if config.run_dir is not None:
            _check_run_dir(config)
            if (Path(config.run_dir) / "metrics.jsonl").exists():
                raise ValueError(
                    f"run_dir={config.run_dir} holds a run, whose plan.json it has already; set another directory for the plan, "
                    "or leave run_dir out"
                )
        return
    check_loggers(config.log.loggers)
    further_metrics(config.eval.metrics)
    # A run with checkpoints of its own ignores the option.
    own = Path(config.run_dir or "") / "checkpoints"
    may_resume = config.mode is Mode.train and config.run_dir and any(own.glob("step_*"))
    if config.checkpoint.restore is None and config.mode in (Mode.eval, Mode.importance):
        raise ValueError(
            f"mode={config.mode.value} needs a trained model: set checkpoint.restore to a run's checkpoints/step_N, and "
            "another run_dir, or none, for the results"
        )
    if config.checkpoint.restore is not None and not may_resume:
        path = local_path(config.checkpoint.restore)
        if not (path / "run.json").exists() and find_tf2_tables(path) is None:
            raise no_checkpoint("checkpoint.restore", path)
    if not is_single_node():
        return  # other nodes would wait for the node of rank 0, which writes
    if config.mode is Mode.predict:
        output_path(config)
    else:
        _check_run_dir(config)


def _check_dataset(config: Config) -> None:
    assert config.data.path is not None
    root = local_path(config.data.path)
    spec = FeatureSpec.load(root, config.data.feature_spec, measure=False)
    name, labels = config.model.name, [label.name for label in spec.labels]
    if len(labels) > 1 and name in MODELS and name not in SEVERAL_LABELS:
        raise ValueError(
            f"model.name={name} predicts one label, and the dataset has {len(labels)} ({', '.join(labels)}); set model.name to "
            f"a model of several: {', '.join(SEVERAL_LABELS)}; or list one label in the spec's channel_spec.label"
        )
    if name in MODELS and hasattr(config.model, "sequence"):
        chosen_group(config.model, spec)
    if config.mode is Mode.predict:
        split = split_to_score(config, spec)
        if config.predict.columns:
            # Imported here, since only columns of raw data need pyarrow.
            from nn.scores.named_rows import kept_rows

            kept_rows(root, TRAIN if is_held_out(config) else split, None, config.predict.columns)
    elif config.mode is not Mode.plan:
        spec.rows_of(_evaluated_split(config))
    if config.mode in LABELLED:
        trained = ["train"] if config.mode is Mode.train else []
        for split in (*trained, _evaluated_split(config)):
            spec.require_labels(split)
    if not any(files.parquet for files in spec.splits.values()):
        # Measuring compares sizes only. In Parquet it reads every file, so the run alone does that.
        FeatureSpec.load(root, config.data.feature_spec)


def _evaluated_split(config: Config) -> str:
    """Return the split of the dataset that has the rows to evaluate on: those held out are training rows."""
    is_held_out = config.data.validation_fraction is not None
    return TRAIN if is_held_out and config.eval.split == VALIDATION else config.eval.split


def _check_run_dir(config: Config) -> None:
    run_dir = Path(config.run_dir or Path("runs") / config.recipe)
    option = "run_dir" if config.run_dir else f"run_dir is not set, and {run_dir} is used"
    existing = next(path for path in (run_dir, *run_dir.parents) if os.path.lexists(path))
    if not existing.is_dir():
        problem = f"{existing} is not a directory"
    elif not os.access(existing, os.W_OK | os.X_OK):
        problem = f"{existing.resolve()} cannot be written by this user"
    else:
        return
    got = f"{option}={shown(config.run_dir)}" if config.run_dir else option
    raise ValueError(f"{got}: {problem}; set run_dir to a directory that can be created or written")
