"""Cost of a checkpoint: the pause of training, the time of writing, and the time of restoring.

    torchrun --nproc-per-node 4 -m benchmarks.checkpoint --out DIR dlrm experiment=dlrm_criteo_t3 data.path=DATA

The run is built as dlrm.py builds it. It trains until its speed is known. It then saves below DIR/run/checkpoints and trains
on until all ranks have written. Three more copies of the state follow, since the first one also allocated the memory of the
copy. At the end the checkpoint is checked and restored. Progress is printed, then one line per number; DIR/checkpoint.json
holds the same numbers.

The cost of a save is the time from its start until the files are written, less the time that the steps made meanwhile would
have taken. It holds the pause and the slowdown of training by the writing.
"""

import json
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from logging import getLogger
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.launch import held_output
from benchmarks.rows import compose_row, run_parser
from configs.schema import Config, Mode
from dataloading.dataset.source import Source
from dataloading.loader import Loader
from nn.build import (
    build_loaders,
    build_plan,
    build_step,
    device_type,
    hardware_of,
    model_spec,
    open_source,
)
from nn.checkpoint.directory import find_damage, list_checkpoints, read_facts
from nn.checkpoint.manager import CheckpointManager, SavedRun
from nn.checkpoint.staging import StagingBuffer, num_bytes
from nn.checkpoint.state import facts_of, restore
from nn.distributed.process_group import HostChannel, Ranks, process_group, ranks_from_environment
from nn.library_warnings import quiet_libraries
from nn.training.prefetch import Prefetcher
from nn.training.train_step import TrainStep

GIB = 2**30
INTERVAL_S = 300.0
WARM_UP_STEPS = 50
STEPS_PER_BUNCH = 50
COPIES = 3
MOST_STEPS = 10**7
# State of a trainer that has recorded and evaluated nothing yet.
NOTHING_RECORDED = {
    **{"loss_sum": 0.0, "loss_steps": 0, "test": {}, "untrained_test_auc": None},
    **{"best_auc": None, "best_step": None},
}


def main() -> None:
    """Measure the run of the command line."""
    parser = run_parser(__doc__, out="for the checkpoint and the result")
    parser.add_argument("--baseline-s", type=float, default=5.0, help="training before the save")
    args = parser.parse_args()
    quiet_libraries()
    config = compose_row(args.recipe, *args.overrides, f"run_dir={args.out / 'run'}")
    ranks = ranks_from_environment(device_type(config))
    source = open_source(config)
    held = held_output(args.out) if ranks.is_rank0 else nullcontext()
    with held, build_loaders(config, source, ranks) as loaders, process_group(ranks):
        assert loaders.train is not None
        result = measured(config, source, loaders.train, ranks, args.baseline_s)
        if ranks.is_rank0:
            (args.out / "checkpoint.json").write_text(json.dumps(result, indent=2) + "\n")
            for name, value in result.items():
                print(f"{name:28} {value:{',.3f' * isinstance(value, float)}}")


def measured(
    config: Config, source: Source, loader: Loader, ranks: Ranks, baseline_s: float
) -> dict[str, Any]:
    """Train, save, train on and restore."""
    assert config.mode is Mode.train
    hardware = hardware_of(config, ranks.device.type, ranks.world_size, ranks.local_world_size)
    plan, _ = ranks.run_on_rank0(lambda: build_plan(config, source, hardware))
    with closing(build_step(config, source, plan, ranks)) as step:
        channel = HostChannel()
        directory = Path(config.run_dir) / "checkpoints"
        directory.mkdir(parents=True, exist_ok=True)
        facts = facts_of(config, model_spec(config, source), ranks)
        manager = CheckpointManager(
            directory, step, SavedRun(facts, source.spec), config.checkpoint, ranks, getLogger()
        )
        batches = loader.batches(0, MOST_STEPS)
        run = Steps(step, Prefetcher(batches, step.runner, ranks.device), ranks, channel)
        save = time_save(run, manager, baseline_s)
        batches.close()
        total_bytes = sum(channel.gather(num_bytes(step.state_dict())))
        later_pause_s = median(later_copies(manager.copy, step, ranks))
        restored = time_restore(list_checkpoints(directory)[0], step, ranks, channel)
        return {
            "ranks": ranks.world_size,
            "checkpoint GiB": total_bytes / GIB,
            "steps": run.num_steps,
            **_save_numbers(save, later_pause_s, total_bytes, channel),
            **restored,
        }


class Steps:
    """Training in bunches of steps, with a count and a clock."""

    def __init__(
        self, step: TrainStep, prefetcher: Prefetcher, ranks: Ranks, channel: HostChannel
    ) -> None:
        self._step, self._prefetcher = step, prefetcher
        self._ranks, self._channel = ranks, channel
        self.num_steps = self.count = 0
        self.seconds = 0.0

    def take(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._step.train(self.num_steps, self._prefetcher)
            self.num_steps += 1
        if self._ranks.device.type == "cuda":
            torch.cuda.synchronize(self._ranks.device)

    def until(self, is_over) -> float:
        """Train until `is_over()` is true on all ranks; return the median seconds per step."""
        bunches = []
        while self._channel.maximum([float(not is_over())])[0]:
            before = self.seconds
            with timed(self):
                self.take(STEPS_PER_BUNCH)
            self.count += STEPS_PER_BUNCH
            bunches.append((self.seconds - before) / STEPS_PER_BUNCH)
        return median(bunches) if bunches else 0.0

    def report(self, text: str) -> None:
        """Print progress on rank 0: a large state takes minutes."""
        if self._ranks.is_rank0:
            print(text, flush=True)


@contextmanager
def timed(run: Steps) -> Iterator[None]:
    """Add the time of the block to `run.seconds`."""
    started = time.perf_counter()
    yield
    run.seconds += time.perf_counter() - started


@dataclass(frozen=True, slots=True)
class SaveTimes:
    """Times of one save on this rank."""

    step_s: float
    paused_s: float
    total_s: float
    steps_meanwhile: int

    @property
    def cost_s(self) -> float:
        """Time of the save less the time that its steps would have taken without it."""
        return self.total_s - self.steps_meanwhile * self.step_s


def time_save(run: Steps, manager: CheckpointManager, baseline_s: float) -> SaveTimes:
    """Train for `baseline_s`, save, and train on until all ranks have written."""
    run.take(WARM_UP_STEPS)
    step_s = run.until(lambda: run.seconds >= baseline_s)
    run.report(f"{step_s * 1e3:.2f} ms per step; saving")
    run.seconds, run.count = 0.0, 0
    with timed(run):
        manager.save(run.num_steps, NOTHING_RECORDED, {})
    paused_s = run.seconds
    run.report(f"paused for {paused_s:.2f} s; writing")
    run.until(lambda: not manager.is_writing)
    assert manager.wait() is None, "the checkpoint could not be written"
    run.report(f"written after {run.seconds:.1f} s; copying again, checking, restoring")
    return SaveTimes(step_s, paused_s, run.seconds, run.count)


def later_copies(copy: StagingBuffer, step: TrainStep, ranks: Ranks) -> list[float]:
    """Copy the state several times into host memory that is allocated already; return the seconds of each copy."""
    seconds = []
    for _ in range(COPIES):
        ranks.barrier()
        started = time.perf_counter()
        copy.take(step.state_dict())
        seconds.append(time.perf_counter() - started)
    return seconds


def time_restore(path: Path, step: TrainStep, ranks: Ranks, channel: HostChannel) -> dict[str, Any]:
    """Check and restore a checkpoint; return the seconds of both."""
    started = time.perf_counter()
    damages = channel.gather(find_damage(path, read_facts(path), ranks.rank, ranks.world_size))
    assert not any(damages), damages
    check_s = time.perf_counter() - started
    restore(path, step, with_optimizer=True)
    channel.gather(None)
    load_s = time.perf_counter() - started - check_s
    return {"check s": channel.maximum([check_s])[0], "load s": channel.maximum([load_s])[0]}


def _save_numbers(
    save: SaveTimes, later_pause_s: float, total_bytes: int, channel: HostChannel
) -> dict[str, Any]:
    """Combine the times of a save over ranks."""

    def slowest(value: float) -> float:
        return channel.maximum([value])[0]

    writing_s = save.total_s - save.paused_s
    later_cost_s = slowest(save.cost_s - save.paused_s + later_pause_s)
    return {
        "step ms": slowest(save.step_s) * 1e3,
        "first pause s": slowest(save.paused_s),
        "later pause s": slowest(later_pause_s),
        "later pause GB/s": total_bytes / 1e9 / slowest(later_pause_s),
        "written after s": slowest(save.total_s),
        "written GB/s": total_bytes / 1e9 / slowest(writing_s),
        "steps meanwhile": save.steps_meanwhile,
        "step ms meanwhile": slowest(writing_s / max(save.steps_meanwhile, 1)) * 1e3,
        "cost of the first save s": slowest(save.cost_s),
        "cost of a later save s": later_cost_s,
        "later save, % of 5 minutes": 100 * later_cost_s / INTERVAL_S,
    }


if __name__ == "__main__":
    main()
