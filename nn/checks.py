"""The checks of a run that need its data or its device, and neither a process group nor a file."""

import numpy as np
import torch

from configs.schema import Config, Fp8, Mode
from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.dataset.source import Source
from nn.build import TRAIN_SPLIT, Loaders, device_type, open_source, planned_device
from nn.distributed.process_group import Ranks, launcher_restarts
from nn.embedding.optimizer import check_table_rule, table_rule
from nn.embedding.pretrained import check_pretrained
from nn.models.metric import PR_AUC
from nn.models.registry import build_meta, check_model, declared_tables, find_model
from nn.models.tasks import tasks_of_run
from nn.observability.profiler import check_profile
from nn.ops.fp8 import MULTIPLE
from nn.resume import ResumePoint
from nn.training.dense_optimizer import check_dense_rule
from nn.training.limits import EvalSteps, total_steps

MOST_SORTED_ROWS = 1_000_000
RARE, SAMPLED_ROWS = 0.05, 16_384
"""Mean below which a label is rare, among the first rows of the split to evaluate."""

FP8_CAPABILITY = (8, 9)
"""Compute capability from which tensor cores multiply in 8 bits: Ada and Hopper."""


def open_checked(config: Config) -> Source:
    """Open the data of a run, and check model, optimizers and tasks against it; no process group is needed.

    Raises ValueError: the data cannot be opened, or an option is not for it.
    """
    source = open_source(config)
    check_model(config.model, source.spec)
    check_optimizers(config)
    if config.fills_tables:
        check_pretrained(declared_tables(config.model, source.spec), config.effective_optimizer)
    check_fp8(config, source.spec)
    check_chunks(config)
    _measure_rare_labels(config, source)
    tasks_of_run(config, source.spec)
    if config.mode is Mode.train:
        _check_teachers(config, source.spec)
    return source


def _check_teachers(config: Config, spec: FeatureSpec) -> None:
    known = [column.name for column in spec.teachers]
    files = spec.splits.get(TRAIN_SPLIT)
    held = [name for name in known if files is None or name not in files.absent]
    for label, options in config.task_options.items():
        if options.teacher is not None and options.teacher not in held:
            raise ValueError(
                f"tasks.{label}.teacher={options.teacher}: the training rows have no such scores of a teacher, only "
                f"{', '.join(held) or 'none'}; name a column of the channel teacher (table.teacher)"
            )
        if options.teacher is not None and spec.keep_rate is not None:
            raise ValueError(
                f"tasks.{label}.teacher={options.teacher}: its scores are probabilities among all negatives, and the training "
                f"rows have keep rates of negatives, '{spec.keep_rate.name}'; leave one of the two out"
            )


def _measure_rare_labels(config: Config, source: Source) -> None:
    """Add PR-AUC to `eval.metrics` if a label of the rows to evaluate is rare: an AUC says little of so few rows."""
    split = config.eval.split
    is_evaluated = config.mode in (Mode.train, Mode.eval, Mode.importance)
    if not is_evaluated or config.data.path is None or PR_AUC.name in config.eval.metrics:
        return
    if source.num_rows(split) > MOST_SORTED_ROWS:
        return  # one rank sorts all rows of an evaluation
    rows = min(source.num_rows(split), SAMPLED_ROWS)
    labels = source.read(split, np.array([[0, rows]])).labels.reshape(rows, -1)
    for label, values in zip(source.spec.labels, labels.T, strict=True):
        if label.is_binary and 0 < values.mean() < RARE:
            config.eval.metrics = [*config.eval.metrics, PR_AUC.name]
            return


def check_optimizers(config: Config) -> None:
    """Refuse optimizers that do not exist or cannot train on the device.

    Raises ValueError: `package.module:NAME` is no optimizer, or fails, or the tables' optimizer lacks an option that
    `optimizer.embedding_options` names, or it has no kernel for GPUs and would train on one.
    """
    check_dense_rule(config.effective_optimizer)
    rule = table_rule(config.effective_optimizer.table_name)
    check_table_rule(config.effective_optimizer)
    if rule.kernel is not None:
        return
    is_plan = config.mode is Mode.plan
    if (planned_device(config) if is_plan else device_type(config)) == "cuda":
        raise ValueError(
            f"table optimizer {rule.name} has no kernel for GPUs; set its TableRule's kernel, or device=cpu"
        )


def check_fp8(config: Config, spec: FeatureSpec) -> None:
    """Refuse `train.fp8` where it cannot work.

    Raises ValueError: the GPU has no such products, the model has no layers that gain from them, or they are of other sizes.
    """
    fp8 = config.train.fp8.value
    if config.train.fp8 is Fp8.off:
        return
    if config.mode is not Mode.plan and device_type(config) == "cuda":
        capability = torch.cuda.get_device_capability()
        if capability < FP8_CAPABILITY:
            raise ValueError(
                f"train.fp8={fp8} needs a GPU of compute capability {'.'.join(map(str, FP8_CAPABILITY))}, such as an H100, "
                f"and {torch.cuda.get_device_name()} has {'.'.join(map(str, capability))}; set train.fp8=off"
            )
    model = build_meta(config.model, spec)
    layers = model.fp8_layers()
    if not layers:
        raise ValueError(
            f"train.fp8={fp8} is for models with wide layers, and model.name={config.model.name} names none; set "
            "train.fp8=off, or model.name=dcnv2, or rankmixer with model.experts=1"
        )
    names = {id(layer): name for name, layer in model.named_modules()}
    misfits = [
        f"{names[id(layer)]}.{name} of {inputs:,} inputs and {outputs:,} outputs"
        for layer in layers
        for name, inputs, outputs in layer.fp8_products()
        if inputs % MULTIPLE or outputs % MULTIPLE
    ]
    if misfits:
        raise ValueError(
            f"train.fp8={fp8} needs inputs and outputs that are multiples of {MULTIPLE}, got {misfits[0]}; change "
            "model.embedding_dim or the widths of the layers, or set train.fp8=off"
        )


def check_chunks(config: Config) -> None:
    """Refuse chunks of a batch for a model that adds losses of the complete batch.

    Raises ValueError: `train.accumulate` and `model.name` do not fit.
    """
    if config.train.accumulate > 1 and find_model(config.model.name).adds_to_loss():
        raise ValueError(
            f"train.accumulate={config.train.accumulate} takes a batch in chunks, and model.name={config.model.name} adds "
            "losses of complete batches; set train.accumulate=1"
        )


def check_run(
    config: Config, source: Source, ranks: Ranks, loaders: Loaders, start: ResumePoint
) -> None:
    """Refuse invalid options before any process group or file exists."""
    if config.mode is Mode.inference:
        sizes_to_time(config, source, ranks)
    if loaders.train is not None:
        if config.run_dir is None and launcher_restarts():
            raise ValueError(
                f"run_dir must be named under --max-restarts={launcher_restarts()}: a restarted run looks there for "
                "its checkpoints"
            )
        steps_per_epoch = loaders.train.steps_per_epoch
        position = start.day.position(start.num_steps)
        last_position = total_steps(config, steps_per_epoch)
        if position >= last_position:
            last_step = start.day.last_step(config, steps_per_epoch)
            raise ValueError(
                f"checkpoint.restore={config.checkpoint.restore} has {start.num_steps} steps behind it, and "
                f"this run ends after {last_step}; raise train.epochs or train.max_steps, or set mode=eval"
            )
        evaluations = EvalSteps.of(config, steps_per_epoch)
        check_profile(config.profile, position, last_position, evaluations, ranks)


def sizes_to_time(config: Config, source: Source, ranks: Ranks) -> list[int]:
    """Return the batch sizes of `mode=inference` that divide over the ranks and that the split can fill."""
    num_rows = source.num_rows(config.eval.split)
    requested = config.inference.batch_sizes
    sizes = [size for size in requested if size % ranks.world_size == 0 and size <= num_rows]
    if not sizes:
        raise ValueError(
            f"inference.batch_sizes={requested}: none can be timed with the {num_rows} rows of split '{config.eval.split}' on "
            f"{count(ranks.world_size, 'rank')}; name a size that is no larger and divides over the ranks"
        )
    return sizes


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
