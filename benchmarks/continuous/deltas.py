"""Cost of deltas: time per step of tracking the changed rows, pause and bytes of a delta.

    python -m benchmarks.continuous.deltas --out DIR dlrm experiment=dlrm_criteo_t15

The step is built twice, with and without tracking, and both train in turns on the same batches, which are on the device
already: what is compared is the step alone. Then a delta is written after --steps steps. One line per number.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import cycle, islice
from logging import getLogger
from pathlib import Path

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
from nn.deltas.writer import DeltaRun, DeltaWriter
from nn.distributed.process_group import Ranks, process_group, ranks_from_environment
from nn.library_warnings import quiet_libraries
from nn.training.prefetch import Prefetcher
from nn.training.train_step import TrainStep

BATCHES = 20
TURNS = 8


def main() -> None:
    """Measure the run of the command line."""
    parser = run_parser(__doc__, out="for the delta")
    parser.add_argument("--steps", type=int, default=100, help="steps per turn")
    args = parser.parse_args()
    quiet_libraries()
    ranks = ranks_from_environment("cuda" if torch.cuda.is_available() else "cpu")
    plain = compose_row(args.recipe, *args.overrides)
    tracking = compose_row(args.recipe, *args.overrides, "checkpoint.delta_every=1000000000")
    source = open_source(plain)
    with held_output(args.out), process_group(ranks):
        batches = _batches(plain, source, ranks)
        steps = [_built(config, source, ranks) for config in (plain, tracking)]
        with closing(steps[0]), closing(steps[1]):
            times = _times(steps, batches, ranks, args.steps)
            without, tracked = map(statistics.median, times)
            print(f"ms per step, untracked    {without:10.4f}  {_shown(times[0])}")
            print(f"ms per step, tracked      {tracked:10.4f}  {_shown(times[1])}")
            print(f"cost of tracking           {tracked / without - 1:10.2%}")
            _write(steps[1], tracking, source, ranks, args.out)


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
            if ranks.device.type == "cuda":
                torch.cuda.synchronize()
            if turn:
                of_step.append((time.perf_counter() - began) * 1e3 / num_steps)
    return times


def _shown(times: Sequence[float]) -> str:
    return f"({min(times):.4f} to {max(times):.4f} in {len(times)} turns)"


def _write(step: TrainStep, config: Config, source: Source, ranks: Ranks, out: Path) -> None:
    """Write a delta of all steps so far, twice: the second one finds warm memory."""
    facts = facts_of(config, model_spec(config, source), ranks)
    checkpoint = config.checkpoint
    writer = DeltaWriter(
        out / "deltas",
        step.tables,
        step.dense_weights,
        DeltaRun(facts, None),
        checkpoint,
        ranks,
        getLogger(),
    )
    masks = [one.touched.clone() for one in step.tables.touched_shards()]
    for number in range(3):
        for one, kept in zip(step.tables.touched_shards(), masks, strict=True):
            one.touched.copy_(kept)
        if ranks.device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        writer.save(number, {"loss_sum": 0.0, "loss_steps": 0, "test": {}, "best_step": None})
        pause = time.perf_counter() - began
        writer.wait()
        if number:
            print(f"pause of a delta, s        {pause:10.3f}")
            print(f"written after, s           {time.perf_counter() - began:10.3f}")
    _print_bytes(read_delta(out / "deltas" / "step_2"))


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
