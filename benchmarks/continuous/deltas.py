"""Cost of deltas: time per step of tracking the changed rows, pause and bytes of a delta.

    python -m benchmarks.continuous.deltas --out DIR dlrm experiment=dlrm_criteo_t15

The step is built twice, with and without tracking, and both train in turns on the same batches, which are on the device
already: what is compared is the step alone. Then deltas are written while training continues, with the rows of 20 batches and
--share of all rows. After each one the same number of steps trains without a delta; the difference of both times is what
training has lost. One line per number; the last one is what a delta per minute costs.
"""

import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from itertools import cycle, islice
from logging import getLogger

import torch

from benchmarks.launch import held_output
from benchmarks.rows import compose_row, run_parser
from configs.schema import Config
from dataloading.batch import Batch
from dataloading.dataset.source import Source
from dataloading.loader import Loader, LoaderSettings
from nn.build import (
    TRAIN_SPLIT,
    build_plan,
    build_step,
    device_type,
    hardware_of,
    model_spec,
    open_source,
)
from nn.checkpoint.state import facts_of
from nn.deltas.delta import Delta, read_delta
from nn.deltas.writer import THREAD_NAME, DeltaRun, DeltaWriter
from nn.distributed.process_group import Ranks, process_group, ranks_from_environment
from nn.library_warnings import quiet_libraries
from nn.training.prefetch import Prefetcher
from nn.training.train_step import TrainStep

BATCHES = 20
TURNS = 8
# Of a trainer that has recorded nothing yet.
STATE = {"loss_sum": 0.0, "loss_steps": 0, "test": {}, "best_step": None}


def main() -> None:
    """Measure the run of the command line."""
    parser = run_parser(__doc__, out="for the delta")
    parser.add_argument("--steps", type=int, default=100, help="steps per turn")
    parser.add_argument("--alone", action="store_true", help="only the step that tracks rows")
    parser.add_argument("--share", type=float, default=0, help="of all rows, further ones changed")
    parser.add_argument("--deltas", type=int, default=3, help="number of deltas")
    args = parser.parse_args()
    quiet_libraries()
    ranks = ranks_from_environment("cuda" if torch.cuda.is_available() else "cpu")
    plain = compose_row(args.recipe, *args.overrides)
    tracking = compose_row(args.recipe, *args.overrides, "checkpoint.delta_every=1000000000")
    source = open_source(plain)
    with held_output(args.out), process_group(ranks), ExitStack() as stack:
        batches = _batches(plain, source, ranks)
        configs = [tracking] if args.alone else [plain, tracking]
        steps = [stack.enter_context(closing(_built(c, source, ranks))) for c in configs]
        times = _times(steps, batches, ranks, args.steps)
        tracked = statistics.median(times[-1])
        if not args.alone:
            without = statistics.median(times[0])
            print(f"ms per step, untracked     {without:10.4f}  {_shown(times[0])}")
            print(f"cost of tracking           {tracked / without - 1:10.2%}")
        print(f"ms per step, tracked       {tracked:10.4f}  {_shown(times[-1])}")
        facts = facts_of(tracking, model_spec(tracking, source), ranks)
        step = steps[-1]
        writer = DeltaWriter(
            args.out / "deltas",
            step.tables,
            step.dense_weights,
            DeltaRun(facts, None),
            tracking.checkpoint,
            ranks,
            getLogger(),
        )
        writer.save(0, STATE)
        lost = [
            _time_delta(writer, step, batches, number, args.share)
            for number in range(1, args.deltas + 1)
        ]
        _print_bytes(read_delta(args.out / f"deltas/step_{args.deltas}"))
        of_delta = statistics.median(lost)
        print(f"a delta per minute         {of_delta / 60:10.2%}  (median of {len(lost)} deltas)")
        if not args.alone:
            cost = tracked / without - 1 + of_delta / 60
            print(f"with tracking              {cost:10.2%}")


def _batches(config: Config, source: Source, ranks: Ranks) -> list[Batch]:
    settings = LoaderSettings(batch_size=config.train.batch_size, workers=4, prefetch=2)
    loader = Loader(source, TRAIN_SPLIT, settings)
    with closing(loader.batches(0, BATCHES)) as read:
        return [batch.to(ranks.device) for batch in read]


def _built(config: Config, source: Source, ranks: Ranks) -> TrainStep:
    hardware = hardware_of(config, device_type(config), ranks.world_size, ranks.local_world_size)
    plan, _ = build_plan(config, source, hardware)
    step = build_step(config, source, plan, ranks)
    step.set_training(True)
    return step


def _times(
    steps: Sequence[TrainStep], batches: Sequence[Batch], ranks: Ranks, num_steps: int
) -> list[list[float]]:
    """Return the milliseconds per step of every turn of both steps; the first turn, which captures, is left out."""
    times: list[list[float]] = [[] for _ in steps]
    for turn in range(TURNS + 1):
        for of_step, step in zip(times, steps, strict=True):
            endless: Iterator[Batch] = islice(cycle(batches), num_steps)
            prefetcher = Prefetcher(endless, step.path, ranks.device)
            began = time.perf_counter()
            for number in range(num_steps):
                step.train(turn * num_steps + number, prefetcher)
            _synchronize(ranks.device)
            if turn:
                of_step.append((time.perf_counter() - began) * 1e3 / num_steps)
    return times


def _shown(times: Sequence[float]) -> str:
    return f"({min(times):.4f} to {max(times):.4f} in {len(times)} turns)"


def _time_delta(
    writer: DeltaWriter, step: TrainStep, batches: Sequence[Batch], number: int, share: float
) -> float:
    """Write a delta while the step trains on, then train as many steps without one; return the seconds lost."""
    device = batches[0].numerical.device
    for one in step.tables.touched_shards():
        if share:
            one.touched[:: max(1, round(1 / share))] = 1
    prefetcher = Prefetcher(cycle(batches), step.path, device)
    for index in range(len(batches)):
        step.train(index, prefetcher)
    _synchronize(device)
    began = time.perf_counter()
    writer.save(number, STATE)
    pause = time.perf_counter() - began
    num_steps = 0
    while any(thread.name == THREAD_NAME for thread in threading.enumerate()):
        step.train(num_steps, prefetcher)
        num_steps += 1
    _synchronize(device)
    took = time.perf_counter() - began
    writer.wait()
    began = time.perf_counter()
    for index in range(num_steps):
        step.train(index, prefetcher)
    _synchronize(device)
    without = time.perf_counter() - began
    print(
        f"delta {number}: pause {pause:.3f} s, written after {took:.3f} s and {num_steps} steps, which take {without:.3f} s "
        f"without it; lost {took - without:.3f} s",
        flush=True,
    )
    return took - without


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _print_bytes(delta: Delta) -> None:
    rows = sum(table.touched for table in delta.tables.values())
    total = sum(table.rows for table in delta.tables.values())
    weights = sum(table.touched * table.columns * 4 for table in delta.tables.values())
    dense = sum(tensor.num_bytes for tensor in delta.dense.values())
    stored = sum(path.stat().st_size for path in delta.path.iterdir())
    print(f"changed rows               {rows:,} of {total:,}")
    print(f"their bytes in float32     {weights:,}")
    print(f"bytes of the delta         {stored:,}, of them dense component {dense:,}")
    print(f"without dense, per byte    {(stored - dense) / weights:10.4f}")


if __name__ == "__main__":
    main()
