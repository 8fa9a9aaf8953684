"""Speed and bits of training with tables in host memory or on disk, beside the same training with all rows on the device.

    python -m benchmarks.host_tables --check
    python -m benchmarks.host_tables --rows 22900000 14600000 24500000 5650000 20000000 --cache 1 0.1 0.01
    python -m benchmarks.host_tables --rows 4000000 4000000 --cache 1 0.06 --batch 4096 --dim 16 --steps 40
    python -m benchmarks.host_tables --disk DIR --read-ahead 0.3 --rows 4194304 4194304 4194304 4194304 --small 22 \
        --cache 1 0.025 --batch 2048 --steps 60

`--check` trains small tables both ways with every optimizer of tables, and compares the bits of losses and states. Otherwise
every cache is a line: all tables have room for this fraction of their rows on the device, and at least for those of the live
batches; with 1, no table lies in host memory. With `--disk` tables lie on disk instead. Synthetic batches lie in host memory, one
per step, without a loader. A line has the rows that a step moves beside those of the plan.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from itertools import cycle, islice, product
from typing import Any

import torch

from benchmarks.launch import command_parser
from benchmarks.rows import compose_row
from configs.schema import Config
from dataloading.batch import Batch
from nn.build import build_plan, build_step, build_train_loader, hardware_of, open_source
from nn.distributed.process_group import Ranks, process_group, ranks_from_environment
from nn.distributed.sharded_tensor import local_tensors
from nn.planning.host_tables import link_ms
from nn.planning.plan import TablePlan
from nn.training.prefetch import Prefetcher
from nn.training.train_step import TrainStep

OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam", "ftrl")
CHECKED = (
    "data.synthetic.cardinalities=[60000,500,7,9000,40000]",
    # 300 rows per batch leave 37 for the last one of an epoch.
    "data.synthetic.train_rows=7537",
    *("model.embedding_dim=16", "model.bottom_mlp=[32,16]", "model.top_mlp=[32,1]"),
    *("train.batch_size=300", "eval.batch_size=300", "train.tf32=false", "optimizer.lr=0.01"),
)
CHECKED_STEPS = 52
IN_HOST = "sharding.tables={cat_0:{tier: host, cache: 0.06},cat_4:{tier: host, cache: 0.1}}"
CHECKED_GIB = "sharding.read_ahead_gib=0.0015"
WARM_UP = 20
LIVE_BATCHES = 3
"""Batches whose rows an arena holds at least."""


def main() -> None:
    """Compare bits, or measure the caches of the command line."""
    parser = command_parser(__doc__)
    parser.add_argument(
        "--check",
        nargs="*",
        choices=OPTIMIZERS,
        help="compare bits; without names of all optimizers",
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[], help="rows of every table")
    parser.add_argument("--small", type=int, default=21, help="further tables of 10,000 rows")
    parser.add_argument("--cache", type=float, nargs="+", default=[1, 0.1], help="fractions")
    parser.add_argument("--batch", type=int, default=65_536, help="rows of a batch")
    parser.add_argument("--dim", type=int, default=128, help="columns of a table")
    parser.add_argument("--exponent", type=float, default=1.05, help="of the ids; 0 is uniform")
    parser.add_argument("--steps", type=int, default=100, help="measured steps")
    parser.add_argument("--disk", help="directory for tables on disk")
    parser.add_argument("--read-ahead", type=float, default=4.0, help="GiB of host memory for them")
    parser.add_argument(
        "--batches", type=int, help="different batches, used in turn; else one per step"
    )
    args = parser.parse_args()
    args.batches = args.batches or WARM_UP + args.steps
    ranks = ranks_from_environment("cuda" if torch.cuda.is_available() else "cpu")
    with process_group(ranks):
        if args.check is not None:
            check(ranks, args.check or OPTIMIZERS, args.disk)
        batches: list[Batch] = []
        for cache in args.cache if args.rows else []:
            config = config_of(args, cache)
            if not batches:
                loader = build_train_loader(config, open_source(config), ranks)
                batches = list(loader.batches(0, args.batches))
            print(line(config, ranks, batches, args, cache), flush=True)


def rows_on_device(args: argparse.Namespace, cache: float) -> list[int]:
    """Return the rows on the device per table: a fraction, but room for the live batches."""
    at_least = LIVE_BATCHES * args.batch
    return [min(max(round(cache * rows), at_least), rows) for rows in args.rows]


def config_of(args: argparse.Namespace, cache: float) -> Config:
    """Return the configuration of a line; with a cache of 1, no table lies in host memory or on disk."""
    sizes = [*args.rows, *[10_000] * args.small]
    tier = "disk" if args.disk else "host"
    tables = ",".join(
        f"cat_{index}:{{tier: {tier}, cache: {kept / rows}}}"
        for index, (kept, rows) in enumerate(
            zip(rows_on_device(args, cache), args.rows, strict=True)
        )
    )
    return compose_row(
        "dlrm",
        f"data.synthetic.cardinalities={sizes}",
        f"data.synthetic.exponent={args.exponent}",
        f"data.synthetic.train_rows={args.batch * args.batches}",
        *(f"data.synthetic.test_rows={args.batch}", "data.synthetic.num_numerical=13"),
        *(f"model.embedding_dim={args.dim}", f"model.bottom_mlp=[512,256,{args.dim}]"),
        "model.top_mlp=[1024,1024,512,256,1]" if args.dim > 32 else "model.top_mlp=[64,1]",
        *(f"train.batch_size={args.batch}", f"eval.batch_size={args.batch}"),
        *("train.amp=bf16" if torch.cuda.is_available() else "train.amp=off", "data.workers=16"),
        *("optimizer.name=sgd", "optimizer.lr=0.01", "data.prefetch=16", "sharding.reserve=0.02"),
        *([f"sharding.tables={{{tables}}}"] if cache < 1 else []),
        *([f"sharding.disk_path={args.disk}"] if args.disk else []),
        f"sharding.read_ahead_gib={args.read_ahead}",
    )


def planned_and_built(config: Config, ranks: Ranks) -> tuple[Sequence[TablePlan], TrainStep]:
    """Plan the tables, and build them and the dense component."""
    source = open_source(config)
    hardware = hardware_of(config, ranks.device.type, ranks.world_size, ranks.local_world_size)
    plan, rows = ranks.run_on_rank0(lambda: build_plan(config, source, hardware))
    return rows, build_step(config, source, plan, ranks)


def check(ranks: Ranks, optimizers: Sequence[str], disk: str | None) -> None:
    """Train both ways, and end the command unless losses and states have the same bits; with `disk`, tables lie there."""
    tiered = [IN_HOST]
    if disk is not None:
        tiered = [IN_HOST.replace("host", "disk"), f"sharding.disk_path={disk}", CHECKED_GIB]
    for optimizer, dtype in product(optimizers, ("fp32", "bf16")):
        own = (f"optimizer.embedding_name={optimizer}", f"model.embedding_dtype={dtype}")
        results = [
            trained(compose_row("dlrm", *CHECKED, *own, *more), ranks) for more in ([], tiered)
        ]
        (losses, state, _), (other_losses, other_state, counts) = results
        differing = [name for name in state if not torch.equal(state[name], other_state[name])]
        same = losses == other_losses and not differing
        hits = counts["tier_hit_rate"]
        print(
            f"{optimizer:16s} {dtype}  equal {same}  hit rate {hits:.3f} {differing[:3]}",
            flush=True,
        )
        if not same:
            raise SystemExit("the bits differ")


def trained(config: Config, ranks: Ranks) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    """Train `CHECKED_STEPS` steps; return losses, states in host memory and traffic."""
    _, step = planned_and_built(config, ranks)
    loader = build_train_loader(config, open_source(config), ranks)
    prefetcher = Prefetcher(loader.batches(0, CHECKED_STEPS), step.runner, ranks.device)
    losses = [step.train(number, prefetcher).loss for number in range(CHECKED_STEPS)]
    state = {
        f"{name}/{index}": tensor.detach().cpu().clone()
        for name, value in step.state_dict().items()
        for index, tensor in enumerate(local_tensors(value))
    }
    for name, initial in step.tables.initial_rows().items():  # of which the state has changes
        initial.toggle(weights := state[f"tables.{name}/0"], torch.arange(len(weights)))
    counts = step.tables.host_traffic(CHECKED_STEPS)
    step.close()
    return losses, state, counts


def line(
    config: Config, ranks: Ranks, batches: list[Batch], args: argparse.Namespace, cache: float
) -> str:
    """Measure one line."""
    start = time.perf_counter()
    planned, step = planned_and_built(config, ranks)
    ready_s = time.perf_counter() - start
    cpu_start = time.process_time()
    steps = WARM_UP + args.steps
    source: Iterator[Batch] = islice(cycle(batches), steps)
    prefetcher = Prefetcher(source, step.runner, ranks.device)
    for number in range(steps):
        if number == WARM_UP:
            synchronize(ranks)
            step.tables.host_traffic(WARM_UP)
            start, cpu_start = time.perf_counter(), time.process_time()
        step.train(number, prefetcher)
    synchronize(ranks)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    speed = args.steps * args.batch / seconds / 1e6
    text = f"cache {cache:g}: {speed:.2f} M samples/s, {seconds / args.steps * 1e3:.2f} ms/step, "
    text += f"{cpu_seconds / args.steps * 1e3:.1f} of CPUs, built in {ready_s:.1f} s"
    for name, value in step.tables.host_traffic(args.steps).items():
        text += f", {name.removeprefix('tier_')} {value:,.4g}"
    rows = sum(row.fetched_rows for row in planned)
    if rows:
        text += f"; planned rows_in {rows:,.4g}, link {link_ms(planned):.2f} ms"
    if ranks.device.type == "cuda":
        text += f"; HBM {torch.cuda.memory_allocated() / 2**30:.1f} GiB"
    step.close()
    return text


def synchronize(ranks: Ranks) -> None:
    """Wait for the GPU."""
    if ranks.device.type == "cuda":
        torch.cuda.synchronize(ranks.device)


if __name__ == "__main__":
    main()
