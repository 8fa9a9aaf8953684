"""`mode=predict`: scores of all rows of a split in one file, in the order of the rows."""

import time
from contextlib import ExitStack
from logging import Logger
from typing import Any

import torch
from rich.console import Console

from configs.option_values import plain_values
from configs.schema import Config
from dataloading.dataset.file_states import file_samples
from dataloading.dataset.source import Source
from dataloading.loader import Loader
from nn.build import (
    Loaders,
    build_plan,
    build_step,
    build_test_loader,
    check_optimizers,
    device_type,
    hardware_of,
    open_source,
)
from nn.distributed.failures import report_faults, report_lost_rank
from nn.distributed.process_group import Ranks, process_group, ranks_from_environment
from nn.models.registry import check_model
from nn.models.tasks import scores_of, tasks_of_run
from nn.observability.console import make_logger, print_header
from nn.observability.run_directory import environment
from nn.resume import ResumePoint, load, named_resume_point
from nn.scores.named_rows import KeptRows, NamedRows, RowNumbers
from nn.scores.output import ScoreOutput, open_output
from nn.scores.request import output_path, split_to_score
from nn.scores.terminal import RowProgress
from nn.training.prediction_pass import predictions
from nn.training.train_step import TrainStep


def predict(config: Config, console: Console) -> dict[str, Any]:
    """Score a split and write `output`.

    Args:
        config: of mode predict.
        console: of rank 0.

    Returns:
        `rows`, `bytes` of the file, `seconds`, and of these those that the pass waited: `data_wait_s` for the loader,
        `file_wait_s` for the writer. `scored_rows` leaves out rows that an earlier start has scored.

    Raises:
        ValueError: an invalid option or input; raised on all ranks.
        RankError: an error that one rank alone finds, such as a bad row.
        SharedError: the checkpoint is of another model; raised on all ranks.
        LostRankError: another rank has ended.
    """
    logger = make_logger(console)
    ranks = ranks_from_environment(device_type(config))
    source = open_source(config)
    check_model(config.model, source.spec)
    check_optimizers(config)
    tasks = tasks_of_run(config, source.spec)
    start = named_resume_point(config, source)
    _check_keep_rates(config, source, start, logger)
    split = split_to_score(config, source.spec)
    named = _named_rows(config, source, split)
    loader = build_test_loader(config, source, ranks, split)
    with ExitStack() as stack:
        stack.enter_context(Loaders(None, loader))
        stack.enter_context(process_group(ranks))
        stack.enter_context(report_lost_rank(ranks))
        opened: list[ScoreOutput] = []

        def open_on_rank0() -> int:
            origin = {"checkpoint": str(start.checkpoint), "steps": str(start.num_steps)}
            origin |= {"data": str(config.data.path), "split": split}
            facts = _facts(config, source, start, split)
            names = [task.name for task in tasks]
            context = open_output(output_path(config), named, names, origin, facts, logger)
            opened.append(stack.enter_context(context))
            return opened[0].writer.num_rows

        num_done = ranks.run_on_rank0(open_on_rank0)
        output = opened[0] if opened else None
        _print_header(console, config, ranks, start, loader)
        with report_faults(ranks):
            step = _build(config, source, ranks)
            stack.callback(step.close)
            load(config, start, step, logger)
            with RowProgress(console, loader.num_rows, num_done) as progress:
                return _score(step, loader, ranks, output, num_done, progress)


def _score(
    step: TrainStep,
    loader: Loader,
    ranks: Ranks,
    output: ScoreOutput | None,
    num_done: int,
    progress: RowProgress,
) -> dict[str, Any]:
    """Score the rows after `num_done`; rank 0, which has the output, writes them."""
    started = time.perf_counter()
    data_wait_ms = 0.0
    first_step = num_done // loader.batch_size
    # The rest of a batch of another size.
    num_skipped = num_done - first_step * loader.batch_size
    batches = loader.batches(first_step, loader.steps_per_epoch - first_step)
    for batch, logits in predictions(step, batches, ranks.device):
        data_wait_ms += loader.data_wait_ms
        gathered = ranks.gather(scores_of(step.tasks, logits, batch.keep_rates))
        if output is not None and gathered is not None:
            # Ranks hold consecutive rows, and padding is behind the last one.
            scores = gathered[0] if len(gathered) == 1 else torch.cat(gathered)
            output.writer.put(scores[num_skipped : batch.global_valid])
            progress.advance(output.writer.num_rows)
        num_skipped = 0
    num_bytes = ranks.run_on_rank0(lambda: output.finish() if output is not None else 0)
    return {
        "rows": loader.num_rows,
        "scored_rows": loader.num_rows - num_done,
        "bytes": num_bytes,
        "seconds": time.perf_counter() - started,
        "data_wait_s": data_wait_ms / 1e3,
        "file_wait_s": 0.0 if output is None else output.writer.wait_s,
        "writer_s": 0.0 if output is None else output.writer.busy_s,
    }


def _build(config: Config, source: Source, ranks: Ranks) -> TrainStep:
    hardware = hardware_of(config, ranks.device.type, ranks.world_size, ranks.local_world_size)
    plan, _ = ranks.run_on_rank0(lambda: build_plan(config, source, hardware))
    return build_step(config, source, plan, ranks)


def _named_rows(config: Config, source: Source, split: str) -> NamedRows:
    """Return the columns beside the scores.

    Raises:
        ValueError: the dataset does not keep one of `predict.columns`.
    """
    names, root = config.predict.columns, source.spec.root
    if not names:
        return RowNumbers()
    if root is None:
        raise ValueError(
            f"predict.columns={names}: the synthetic clicks keep no columns; set data.path, or leave predict.columns out"
        )
    return KeptRows(root, split, source.num_rows(split), names)


def _facts(config: Config, source: Source, start: ResumePoint, split: str) -> dict[str, Any]:
    """Return all that the scores depend on, as values of JSON: scores of an earlier start are kept if it is the same."""
    options = plain_values(config)
    return {
        "checkpoint": {name: start.facts.get(name) for name in ("num_steps", "index_crc32")},
        "files": file_samples(source.spec),
        "split": split,
        "rows": source.num_rows(split),
        "model": options["model"],
        "tasks": options["tasks"],
        "seed": config.seed,
        "data": {name: options["data"][name] for name in ("multi_hot", "synthetic")},
        "train": {name: options["train"][name] for name in ("amp", "tf32", "ema_decay")},
    }


def _check_keep_rates(config: Config, source: Source, start: ResumePoint, logger: Logger) -> None:
    """Compare the keep rates of negatives with those of the training, which decide whether scores are probabilities.

    Raises:
        ValueError: the options name another rate than those of the training.
    """
    trained = start.facts.get("config", {}).get("tasks") or {}
    for task in tasks_of_run(config, source.spec):
        options = trained.get(task.name)
        before = options.get("keep_rate") if isinstance(options, dict) else None
        now = task.options.keep_rate
        if before != now and not config.checkpoint.allow_changes:
            raise ValueError(
                f"checkpoint.restore={start.path} was trained with tasks.{task.name}.keep_rate={before or 'null'}, and now it is "
                f"{now or 'null'}: the scores would not be those of its evaluation; set the same tasks, or "
                "checkpoint.allow_changes=true"
            )


def _print_header(
    console: Console, config: Config, ranks: Ranks, start: ResumePoint, loader: Loader
) -> None:
    spec = loader.source.spec
    facts = {
        "model": f"{config.model.name}, {len(spec.numerical)} numerical and {len(spec.categorical)} categorical features",
        "restored": f"{start.path}, {start.num_steps:,} steps",
        "data": f"{config.data.path or 'built-in synthetic clicks'}, split {loader.split}, {loader.num_rows:,} rows",
        "output": str(config.output),
    }
    if config.train.ema_decay is not None:
        facts["average"] = f"of the dense component, decay {config.train.ema_decay:g}"
    num_hosts = ranks.world_size // ranks.local_world_size
    described = environment(
        config.recipe, ranks.device, world_size=ranks.world_size, num_hosts=num_hosts
    )
    print_header(console, described, facts)
