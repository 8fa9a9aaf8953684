"""`mode=predict`: scores of rows in one file, in the order of the rows."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from logging import Logger
from typing import Any

import torch
from rich.console import Console

from configs.messages import shown
from configs.option_values import plain_values
from configs.schema import Config
from dataloading.batch import Batch
from dataloading.storage.local_copy import local_path
from dataloading.storage.object_store import is_remote
from nn.build import build_key_maps, build_step, checked_plan, device_type, hardware_of, open_source
from nn.checkpoint.directory import read_facts
from nn.checkpoint.other_tables import described_tables
from nn.checks import check_optimizers
from nn.distributed.failures import report_faults, report_lost_rank
from nn.distributed.process_group import Ranks, process_group, ranks_from_environment
from nn.models.registry import check_model
from nn.models.tasks import Task, scores_of, tasks_of_run
from nn.observability.console import make_logger, print_header
from nn.observability.environment import environment
from nn.resume import ResumePoint, load, named_resume_point
from nn.scores.output import ScoreOutput, open_output
from nn.scores.request import output_path, shown_output
from nn.scores.rows import SplitRows
from nn.scores.streamed_rows import RawRows, StreamedRows
from nn.scores.terminal import RowProgress
from nn.training.evaluator import predictions
from nn.training.train_step import TrainStep

Rows = SplitRows | StreamedRows


def predict(config: Config, console: Console, raw: RawRows | None = None) -> dict[str, Any]:
    """Score rows and write `output`.

    `raw`: rows of the raw files `config.source`; None: rows of a split. Returns `rows`, `bytes` of the file, `seconds`, of
    these `first_batch_s` for the first batch, and those after it that the pass waited: `data_wait_s` for the rows,
    `file_wait_s` for the writer. `scored_rows` leaves out rows that an earlier start has scored; `writer_s` is the work of the
    thread that writes. Raises ValueError: an invalid option or input; raised on all ranks. Raises RankError: an error that one
    rank alone finds, such as a bad row. Raises SharedError: the checkpoint is of another model, or a raw row is invalid;
    raised on all ranks. Raises LostRankError: another rank has ended.
    """
    logger = make_logger(console)
    ranks = ranks_from_environment(device_type(config))
    check_optimizers(config)
    rows: Rows
    if raw is None:
        source = open_source(config)
        key_maps = build_key_maps(config, source.spec, ranks)
        rows = SplitRows(config, source, ranks, key_maps)
    else:
        key_maps = build_key_maps(config, raw.spec, ranks)
        rows = StreamedRows(config, raw, ranks, key_maps)
    check_model(config.model, rows.source.spec)
    tasks = tasks_of_run(config, rows.source.spec)
    start = named_resume_point(config, rows.source)
    _check_corrections(config, tasks, start)
    with ExitStack() as stack:
        stack.enter_context(rows.opened)
        stack.enter_context(process_group(ranks))
        stack.enter_context(report_lost_rank(ranks))
        output, num_done = _open_output(stack, config, rows, tasks, start, ranks, logger)
        _print_header(console, config, ranks, start, rows)
        if rows.missing_rate is not None:
            logger.warning(
                f"the model was trained on rows with keep rates, column '{rows.missing_rate}', which these rows lack: their "
                "scores are not corrected, as if all negatives had been kept"
            )
        with report_faults(ranks):
            device, world_size = ranks.device.type, ranks.world_size
            hardware = hardware_of(config, device, world_size, ranks.local_world_size)
            plan, _, _ = ranks.run_on_rank0(partial(checked_plan, config, rows.source, hardware))
            step = build_step(config, rows.source, plan, ranks, key_maps)
            stack.callback(step.close)
            load(config, start, step, logger)
            with RowProgress(console, rows.num_rows, num_done) as progress:
                result = _score(step, rows, ranks, output, num_done, progress)
        if isinstance(rows, StreamedRows) and rows.unknown.note is not None:
            logger.warning(rows.unknown.note)
        return result


def _open_output(
    stack: ExitStack,
    config: Config,
    rows: Rows,
    tasks: Sequence[Task],
    start: ResumePoint,
    ranks: Ranks,
    logger: Logger,
) -> tuple[ScoreOutput | None, int]:
    """Open the output on rank 0 until `stack` is closed; return it there, and on all ranks the rows that it has already."""
    opened: list[ScoreOutput] = []

    def open_on_rank0() -> int:
        origin = {"checkpoint": str(start.checkpoint), "steps": str(start.num_steps)}
        others = config.checkpoint.restore_tables
        origin |= {f"checkpoint of {table}": path for table, path in others.items()}
        context = open_output(
            output_path(config),
            rows.named,
            [task.name for task in tasks],
            origin | {"data": rows.title},
            _facts(config, start) | {"rows": rows.facts},
            logger,
            config.output if is_remote(str(config.output)) else None,
        )
        opened.append(stack.enter_context(context))
        return opened[0].writer.num_rows

    num_done = ranks.run_on_rank0(open_on_rank0)
    return (opened[0] if opened else None), num_done


def _score(
    step: TrainStep,
    rows: Rows,
    ranks: Ranks,
    output: ScoreOutput | None,
    num_done: int,
    progress: RowProgress,
) -> dict[str, Any]:
    """Score the rows after `num_done`; rank 0, which has the output, writes them."""
    started = time.perf_counter()
    batches, num_skipped = rows.start(num_done)
    data_wait_s, num_rows = 0.0, num_done
    first_batch_s: float | None = None

    def timed() -> Iterator[Batch]:
        nonlocal data_wait_s
        while True:
            asked = time.perf_counter()
            batch = next(batches, None)
            data_wait_s += time.perf_counter() - asked
            if batch is None:
                return
            yield batch

    for batch, logits in predictions(step, timed(), ranks.device):
        gathered = ranks.gather(scores_of(step.tasks, logits, batch.keep_rates))
        if output is not None and gathered is not None:
            # Ranks hold consecutive rows, and padding is behind the last one.
            scores = gathered[0] if len(gathered) == 1 else torch.cat(gathered)
            output.writer.put(scores[num_skipped : batch.global_valid])
        num_rows += batch.global_valid - num_skipped
        num_skipped = 0
        if first_batch_s is None:
            # The loader starts, and on a GPU the step is captured.
            first_batch_s = time.perf_counter() - started
            data_wait_s = 0.0
        progress.advance(num_rows)
    num_bytes = ranks.run_on_rank0(lambda: output.finish() if output is not None else 0)
    return {
        "rows": num_rows,
        "scored_rows": num_rows - num_done,
        "bytes": num_bytes,
        "seconds": time.perf_counter() - started,
        "first_batch_s": first_batch_s or 0.0,
        "data_wait_s": data_wait_s,
        "file_wait_s": 0.0 if output is None else output.writer.wait_s,
        "writer_s": 0.0 if output is None else output.writer.busy_s,
    }


def _facts(config: Config, start: ResumePoint) -> dict[str, Any]:
    """Return all but the rows that the scores depend on: scores of an earlier start are kept if it is the same."""
    options = plain_values(config)
    others = {
        table: read_facts(local_path(path))["index_crc32"]
        for table, path in config.checkpoint.restore_tables.items()
    }
    return ({"tables": others} if others else {}) | {
        "checkpoint": {name: start.facts.get(name) for name in ("num_steps", "index_crc32")},
        "model": options["model"],
        "tasks": options["tasks"],
        "seed": config.seed,
        "data": {name: options["data"][name] for name in ("multi_hot", "synthetic")},
        "train": {name: options["train"][name] for name in ("amp", "tf32", "ema_decay")},
    }


def _check_corrections(config: Config, tasks: Sequence[Task], start: ResumePoint) -> None:
    """Compare the constants that correct predictions with those of the training, whose evaluation used them.

    Raises ValueError: the options name another keep rate or positive weight than those of the training.
    """
    if config.checkpoint.allow_changes:
        return
    trained = start.facts.get("config", {}).get("tasks") or {}
    for task in tasks:
        options = trained.get(task.name)
        for name, default in (("keep_rate", None), ("positive_weight", 1)):
            before = options.get(name, default) if isinstance(options, dict) else default
            now = getattr(task.options, name)
            if before != now:
                raise ValueError(
                    f"checkpoint.restore={start.path} was trained with tasks.{task.name}.{name}={shown(before)}, and now it "
                    f"is {shown(now)}: the scores would not be those of its evaluation; set the same tasks, or "
                    "checkpoint.allow_changes=true"
                )


def _print_header(
    console: Console, config: Config, ranks: Ranks, start: ResumePoint, rows: Rows
) -> None:
    spec = rows.source.spec
    number = "" if rows.num_rows is None else f", {rows.num_rows:,} rows"
    facts = {
        "model": f"{config.model.name}, {len(spec.numerical)} numerical and {len(spec.categorical)} categorical features",
        "restored": f"{start.path}, {start.num_steps:,} steps{described_tables(config.checkpoint)}",
        "data": f"{rows.title}{number}",
        "output": shown_output(config),
    }
    if config.train.ema_decay is not None:
        facts["average"] = f"of the dense component, decay {config.train.ema_decay:g}"
    print_header(console, environment(config.recipe, ranks) | {"model": config.model.name}, facts)
