"""`mode=inference`: latency and throughput of the forward pass with id exchange; batches are on the device already."""

import time
from typing import Any

import torch
from torch import Tensor

from configs.schema import Config, InferenceConfig
from dataloading.batch import Batch
from dataloading.loader import LoaderSettings
from nn.build import loader_of_rank
from nn.checks import count, sizes_to_time
from nn.distributed.process_group import Ranks
from nn.observability.console import print_inference
from nn.session import open_session
from nn.training.train_step import TrainStep


def inference(config: Config, config_yaml: str) -> None:
    with open_session(config, config_yaml) as session:
        if session is None:
            return
        source, ranks = session.source, session.ranks
        session.step.set_training(False)
        sizes = sizes_to_time(config, source, ranks)
        left_out = [f"{size:,}" for size in config.inference.batch_sizes if size not in sizes]
        if left_out:
            session.console.print(
                f"left out: batch sizes {', '.join(left_out)}, which split '{config.eval.split}' of "
                f"{source.num_rows(config.eval.split):,} rows or {count(ranks.world_size, 'rank')} cannot fill"
            )
        results = []
        for batch_size in sizes:
            settings = LoaderSettings(batch_size=batch_size)
            loader = loader_of_rank(
                source, config.eval.split, settings, ranks, session.step.key_maps
            )
            batch = loader.batch(0).to(ranks.device)
            results.append(measure(session.step, batch, config.inference, ranks))
        print_inference(session.console, results)
        session.finish({"inference": results})


def measure(step: TrainStep, batch: Batch, config: InferenceConfig, ranks: Ranks) -> dict[str, Any]:
    """Time the forward pass of one batch.

    Returns `batch_size` (global), `samples_per_s`, and `p50_ms`, `p90_ms`, `p99_ms` of single, synchronised passes.
    """
    for _ in range(config.warmup_steps):
        _forward(step, batch)
    latencies_ms = torch.tensor([_timed_ms(step, batch, ranks) for _ in range(config.steps)])
    p50, p90, p99 = torch.quantile(latencies_ms, torch.tensor([0.5, 0.9, 0.99])).tolist()
    return {
        "batch_size": batch.global_valid,
        "samples_per_s": batch.global_valid * 1e3 / latencies_ms.mean().item(),
        "p50_ms": p50,
        "p90_ms": p90,
        "p99_ms": p99,
    }


def _timed_ms(step: TrainStep, batch: Batch, ranks: Ranks) -> float:
    _synchronize(ranks)
    start = time.perf_counter()
    _forward(step, batch)
    _synchronize(ranks)
    return (time.perf_counter() - start) * 1e3


def _forward(step: TrainStep, batch: Batch) -> Tensor:
    return step.predict(*step.runner.start(batch))


def _synchronize(ranks: Ranks) -> None:
    if ranks.device.type == "cuda":
        torch.cuda.synchronize(ranks.device)
