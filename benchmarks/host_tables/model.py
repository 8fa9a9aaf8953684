"""The model of the lines, its options and its batches."""

import argparse

import torch

from benchmarks.rows import compose_row
from configs.schema import Config
from dataloading.batch import Batch
from nn.build import build_train_loader, open_source
from nn.distributed.process_group import Ranks

LIVE_BATCHES = 3
"""Batches whose rows an arena holds at least."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the model, its ids and its length."""
    parser.add_argument("--rows", type=int, nargs="+", default=[], help="rows of every table")
    parser.add_argument("--small", type=int, default=21, help="further tables of 10,000 rows")
    parser.add_argument("--cache", type=float, nargs="+", default=[1, 0.1], help="fractions")
    parser.add_argument("--batch", type=int, default=65_536, help="rows of a batch")
    parser.add_argument("--dim", type=int, default=128, help="columns of a table")
    parser.add_argument("--exponent", type=float, default=1.05, help="of the ids; 0 is uniform")
    parser.add_argument("--steps", type=int, default=100, help="measured steps")


def device_kind() -> str:
    """Return `cuda` on a machine with a GPU, otherwise `cpu`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def rows_on_device(args: argparse.Namespace, cache: float) -> list[int]:
    """Return the rows on the device per table: a fraction, but room for the live batches."""
    at_least = LIVE_BATCHES * args.batch
    return [min(max(round(cache * rows), at_least), rows) for rows in args.rows]


def config_of(args: argparse.Namespace, cache: float) -> Config:
    """Return the configuration of a line.

    Args:
        args: values of `add_options`; `batches`, different ones; `disk`, directory of the tables or None; `staged`, GiB of
            host memory for those on disk.
        cache: fraction of the rows on the device; with 1, no table lies in host memory or on disk.
    """
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
        *("train.amp=bf16" if device_kind() == "cuda" else "train.amp=off", "data.workers=16"),
        *("optimizer.name=sgd", "optimizer.lr=0.01", "data.prefetch=16", "sharding.reserve=0.02"),
        *([f"sharding.tables={{{tables}}}"] if cache < 1 else []),
        *([f"sharding.disk_path={args.disk}"] if args.disk else []),
        f"sharding.staged_gib={args.staged}",
    )


def batches_of(config: Config, ranks: Ranks, count: int) -> list[Batch]:
    """Read batches into host memory, pinned for a GPU."""
    loader = build_train_loader(config, open_source(config), ranks)
    return list(loader.batches(0, count))
