"""Training speed of TorchRec with tables in host memory and FBGEMM's cache of their rows, on the lines of host_tables.

    python -m benchmarks.peers.with_fbgemm_cache --rows 22900000 14600000 24500000 5650000 20000000 --cache 0.1 0.01

The model, the ids and the rows on the GPU are those of `python -m benchmarks.host_tables` with the same options; the first
`--rows` tables lie in pinned memory (`uvm_host_mapped`), the others on the GPU. The cache starts empty, so a warm-up fills it. No
batch is trained twice. The measured batches wait in pinned memory; those of the warm-up are made meanwhile. A line ends with
FBGEMM's own counts of further steps.
"""

import argparse
import gc
import logging
import time
from collections.abc import Iterator
from itertools import chain, islice
from typing import cast

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torchrec.datasets.utils import Batch
from torchrec.distributed import TrainPipelineSparseDist
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.train_pipeline import PrefetchTrainPipelineSparseDist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.host_tables.model import add_options, config_of, device_kind, rows_on_device
from benchmarks.peers.torchrec_job import HostCache, build, measure
from configs.schema import Config, ShardingType
from dataloading.batch import Batch as RecipeBatch
from nn.build import build_train_loader, open_source
from nn.distributed.process_group import Ranks, process_group, ranks_from_environment

COUNTED_STEPS = 20
"""Steps whose rows FBGEMM counts."""
AHEAD = 3
"""Batches at work in TorchRec's pipeline."""


def main() -> None:
    """Measure the caches of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument("--dense", choices=["compiled", "shipped"], default="compiled")
    parser.add_argument("--warm-up", type=int, default=220, help="steps that fill the cache")
    parser.add_argument(
        "--no-prefetch", action="store_true", help="fetch rows when they are looked up"
    )
    args = parser.parse_args()
    if not args.rows:
        parser.error("no table would have a cache; want --rows with one or more numbers")
    logging.disable(logging.WARNING)
    ranks = ranks_from_environment(device_kind())
    measured = args.steps + COUNTED_STEPS + AHEAD
    model = argparse.Namespace(**vars(args), batches=measured + args.warm_up, disk=None, staged=1.0)
    if ranks.device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
    with process_group(ranks):
        config = config_of(model, 1)
        # TorchRec's planner would take column-wise tables, which cost a permutation.
        config.sharding.types = [ShardingType.table_wise]
        kept = list(islice(batches_of(config, ranks, measured), measured))
        if ranks.device.type == "cuda":
            kept = [batch.pin_memory() for batch in kept]
        for cache in args.cache:
            further = batches_of(config, ranks, measured + args.warm_up)
            source = chain(islice(further, measured, None), kept)
            print(line(config, ranks, source, args, cache), flush=True)
            # The memory of the tables is given back before the next ones are built.
            gc.collect()


def batches_of(config: Config, ranks: Ranks, count: int) -> Iterator[Batch]:
    """Read the recipe's batches as TorchRec's."""
    return map(
        torchrec_batch, build_train_loader(config, open_source(config), ranks).batches(0, count)
    )


def torchrec_batch(batch: RecipeBatch) -> Batch:
    """Return a batch of TorchRec with ids and lengths of 64 bits, as its own data sets have them."""
    ids = batch.ids
    return Batch(
        batch.numerical.clone(),
        KeyedJaggedTensor(
            keys=ids.keys(),
            values=ids.values().to(torch.int64, copy=True),
            lengths=ids.lengths().to(torch.int64),
            stride=len(batch.labels),
        ),
        batch.labels.clone(),
    )


def line(
    config: Config, ranks: Ranks, batches: Iterator[Batch], args: argparse.Namespace, cache: float
) -> str:
    """Measure one line."""
    start = time.perf_counter()
    on_gpu = ranks.device.type == "cuda"
    # Neither the cache nor the pipeline that fills it has code for CPUs.
    has_prefetch = on_gpu and not args.no_prefetch
    host_cache = HostCache(
        frozenset(f"cat_{index}" for index in range(len(args.rows))),
        load_factor=sum(rows_on_device(args, cache)) / sum(args.rows),
        prefetch=has_prefetch,
        kernel=EmbeddingComputeKernel.FUSED_UVM_CACHING if on_gpu else EmbeddingComputeKernel.FUSED,
    )
    model, optimizer = build(
        config,
        open_source(config).spec,
        args.batch,
        ranks.device,
        is_compiled=args.dense == "compiled",
        cache=host_cache,
    )
    lookups = cached_lookups(model)
    for lookup in lookups:
        lookup.gather_uvm_cache_stats = False
    ready_s = time.perf_counter() - start
    kind = PrefetchTrainPipelineSparseDist if has_prefetch else TrainPipelineSparseDist
    pipeline = kind(model, optimizer, ranks.device)
    speeds = measure(pipeline, batches, args.batch, args.steps, args.warm_up)
    text = f"TorchRec ({args.dense}), cache {cache:g}: " + ", ".join(
        f"{speed / 1e6:.2f}" for speed in speeds
    )
    text += f" M samples/s, {args.batch / max(speeds) * 1e3:.2f} ms/step, built in {ready_s:.1f} s"
    for lookup in lookups:
        lookup.gather_uvm_cache_stats = True
        lookup.reset_uvm_cache_stats()
    for _ in range(COUNTED_STEPS):
        pipeline.progress(batches)
    for lookup in lookups:
        _, _, distinct, missing, *_ = (
            count / COUNTED_STEPS for count in lookup.get_uvm_cache_stats().tolist()
        )
        text += f", distinct rows {distinct:,.0f}, missing {missing:,.0f} per step"
    if on_gpu:
        text += f", HBM {torch.cuda.max_memory_reserved() / 2**30:.1f} GiB"
    return text


def cached_lookups(model: torch.nn.Module) -> list[SplitTableBatchedEmbeddingBagsCodegen]:
    """Return FBGEMM's lookups with a cache.

    Raises:
        RuntimeError: one has memory that CUDA manages.
    """
    sharded = [
        module for module in model.modules() if isinstance(module, ShardedEmbeddingBagCollection)
    ]
    lookups = [
        cast(SplitTableBatchedEmbeddingBagsCodegen, module)
        for collection in sharded
        for lookup in collection._lookups
        for module in lookup.modules()
        if isinstance(module, SplitTableBatchedEmbeddingBagsCodegen)
    ]
    if not all(lookup.uvm_host_mapped for lookup in lookups):
        raise RuntimeError("tables must lie in pinned memory (`uvm_host_mapped`)")
    return [lookup for lookup in lookups if lookup.lxu_cache_weights.numel()]


if __name__ == "__main__":
    main()
