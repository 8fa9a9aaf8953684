"""What a checkpoint costs a run: how long training waits for it, how long it is written, and how long it takes to restore.

    torchrun --nproc-per-node 4 -m benchmarks.checkpoint --out DIR dlrm experiment=dlrm_criteo_t3 data.path=DATA

Builds the run as dlrm.py would, trains until the speed is known, saves below DIR/run/checkpoints while it trains on until all
ranks have written, takes three more copies of the state (the first also had to take the memory for them), checks and restores
what it wrote. Says how far it is, then prints a line a number and writes DIR/checkpoint.json. The cost of a save is the time
from its begin until it is written, less what the steps made in between would have taken: it holds the pause, and whatever
the writing takes from training. `python -m benchmarks.recovery` can go on from what this leaves.
"""

import json
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.rows import compose_row, run_parser
from configs.schema import Config, Mode
from dataloading.loader import Loader
from dataloading.source import Source
from nn.build import (
    build_loaders,
    build_plan,
    build_step,
    device_type,
    hardware_of,
    model_spec,
    open_source,
)
from nn.checkpoint.directory import find_damage, newest_first, read_facts
from nn.checkpoint.manager import CheckpointManager
from nn.checkpoint.staging import StagingBuffer, num_bytes
from nn.checkpoint.state import facts_of, restore, state_of
from nn.distributed.process_group import HostChannel, Ranks, process_group, ranks_from_environment
from nn.library_warnings import quiet_libraries
from nn.training.prefetch import Prefetcher
from nn.training.train_step import TrainStep

GIB = 2**30
INTERVAL_S = 300.0
WARM_UP_STEPS = 50
STEPS_AT_ONCE = 50
COPIES = 3
MOST_STEPS = 10**7
# What a trainer that has recorded and evaluated nothing yet would save.
NOTHING_RECORDED = {
    **{"loss_sum": 0.0, "loss_steps": 0, "test": {}, "untrained_test_auc": None},
    **{"best_auc": None, "best_step": None},
}


def main() -> None:
    """Measure what the command line names."""
    parser = run_parser(__doc__, out="for the checkpoint and the result")
    parser.add_argument("--baseline-s", type=float, default=5.0, help="training before the save")
    args = parser.parse_args()
    quiet_libraries()
    config = compose_row(args.recipe, *args.overrides, f"run_dir={args.out / 'run'}")
    ranks = ranks_from_environment(device_type(config))
    source = open_source(config)
    with build_loaders(config, source, ranks) as loaders, process_group(ranks):
        assert loaders.train is not None
        result = measured(config, source, loaders.train, ranks, args.baseline_s)
        if ranks.is_rank0:
            (args.out / "checkpoint.json").write_text(json.dumps(result, indent=2) + "\n")
            for name, value in result.items():
                print(
                    f"{name:28} {value:,.3f}" if isinstance(value, float) else f"{name:28} {value}"
                )


def measured(
    config: Config, source: Source, loader: Loader, ranks: Ranks, baseline_s: float
) -> dict[str, Any]:
    """Train, save, train on and restore; return seconds, bytes and shares, of the slowest rank where they differ."""
    assert config.mode is Mode.train
    hardware = hardware_of(config, ranks.device.type, ranks.world_size, ranks.local_world_size)
    plan, _ = ranks.run_on_rank0(lambda: build_plan(config, source, hardware))
    with closing(build_step(config, source, plan, ranks)) as step:
        return _measured(config, source, loader, step, ranks, baseline_s)


def _measured(
    config: Config,
    source: Source,
    loader: Loader,
    step: TrainStep,
    ranks: Ranks,
    baseline_s: float,
) -> dict[str, Any]:
    channel = HostChannel()
    directory = Path(config.run_dir) / "checkpoints"
    directory.mkdir(parents=True, exist_ok=True)
    facts = facts_of(config, model_spec(config, source), ranks)
    checkpointer = CheckpointManager(
        directory, step, facts, source.spec, config.checkpoint, ranks, say=print
    )
    batches = loader.batches(0, MOST_STEPS)
    run = Steps(step, Prefetcher(batches, step.tables, ranks.device), ranks, channel)
    run.take(WARM_UP_STEPS)
    step_s = run.until(lambda: run.seconds >= baseline_s)
    _tell(ranks, f"{step_s * 1e3:.2f} ms a step; saving")

    run.seconds, run.count = 0.0, 0
    with timed(run):
        checkpointer.save(run.num_steps, NOTHING_RECORDED, {})
    paused_s = run.seconds
    _tell(ranks, f"paused for {paused_s:.2f} s; writing")
    run.until(lambda: not checkpointer.is_writing)
    save_s, steps_meanwhile = run.seconds, run.count
    assert checkpointer.wait() is None, "it could not be written"
    cost_s = save_s - steps_meanwhile * step_s
    _tell(ranks, f"written after {save_s:.1f} s; copying again, checking, restoring")
    batches.close()

    total_bytes = sum(channel.gather(num_bytes(state_of(step))))
    later_pause_s = median(later_copies(checkpointer.copy, step, ranks))
    path = newest_first(directory)[0]
    started = time.perf_counter()
    damages = channel.gather(find_damage(path, read_facts(path), ranks.rank, ranks.world_size))
    assert not any(damages), damages
    check_s = time.perf_counter() - started
    restore(path, step, with_optimizer=True)
    channel.gather(None)
    load_s = time.perf_counter() - started - check_s

    def slowest(value: float) -> float:
        return channel.maximum([value])[0]

    later_cost_s = slowest(cost_s - paused_s + later_pause_s)
    return {
        "ranks": ranks.world_size,
        "checkpoint GiB": total_bytes / GIB,
        "steps": run.num_steps,
        "step ms": slowest(step_s) * 1e3,
        "first pause s": slowest(paused_s),
        "later pause s": slowest(later_pause_s),
        "later pause GB/s": total_bytes / 1e9 / slowest(later_pause_s),
        "written after s": slowest(save_s),
        "written GB/s": total_bytes / 1e9 / slowest(save_s - paused_s),
        "steps meanwhile": steps_meanwhile,
        "step ms meanwhile": slowest((save_s - paused_s) / max(steps_meanwhile, 1)) * 1e3,
        "cost of the first save s": slowest(cost_s),
        "cost of a later save s": later_cost_s,
        "later save, % of 5 minutes": 100 * later_cost_s / INTERVAL_S,
        "check s": slowest(check_s),
        "load s": slowest(load_s),
    }


def _tell(ranks: Ranks, text: str) -> None:
    """Say how far it is: a large state takes minutes, and whoever stops it wants what was seen."""
    if ranks.is_rank0:
        print(text, flush=True)


class Steps:
    """Trains in bunches of steps, and counts them and their time.

    Attributes:
        num_steps: in all.
        count: since it was last set to 0.
        seconds: likewise.
    """

    def __init__(
        self, step: TrainStep, prefetcher: Prefetcher, ranks: Ranks, channel: HostChannel
    ) -> None:
        self._step, self._feed = step, prefetcher
        self._ranks, self._channel = ranks, channel
        self.num_steps = self.count = 0
        self.seconds = 0.0

    def take(self, num_steps: int) -> None:
        """Train some steps."""
        for _ in range(num_steps):
            self._step.train(self.num_steps, self._feed)
            self.num_steps += 1
        if self._ranks.device.type == "cuda":
            torch.cuda.synchronize(self._ranks.device)

    def until(self, is_over) -> float:
        """Train until it is over on all ranks; return the median seconds a step."""
        bunches = []
        while self._channel.maximum([float(not is_over())])[0]:
            before = self.seconds
            with timed(self):
                self.take(STEPS_AT_ONCE)
            self.count += STEPS_AT_ONCE
            bunches.append((self.seconds - before) / STEPS_AT_ONCE)
        return median(bunches) if bunches else 0.0


@contextmanager
def timed(run: Steps) -> Iterator[None]:
    """Add the time in here to `run.seconds`."""
    started = time.perf_counter()
    yield
    run.seconds += time.perf_counter() - started


def later_copies(copy: StagingBuffer, step: TrainStep, ranks: Ranks) -> list[float]:
    """Seconds of each of several copies of the state into host memory that is there already."""
    seconds = []
    for _ in range(COPIES):
        ranks.barrier()
        started = time.perf_counter()
        copy.take(state_of(step))
        seconds.append(time.perf_counter() - started)
    return seconds


if __name__ == "__main__":
    main()
