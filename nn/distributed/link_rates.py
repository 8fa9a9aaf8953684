"""Rates of the links between ranks, as an all-to-all among those of a node, and one between nodes, reach them."""

import time

import torch
import torch.distributed as dist

from nn.distributed.process_group import Ranks

SIZES = (2**20, 2**23, 2**26)
"""Bytes that a rank sends at once."""
REPEATS = 5


def measured_rates(ranks: Ranks) -> tuple[float | None, float | None]:
    """Return the GB/s that a rank sends to others of its node, and to other nodes; None where there are no such ranks.

    Every rank sends equally much to each of them. Of each size the slowest rank counts, and of all sizes the fastest. So all
    ranks return the same.
    """
    node = ranks.rank // ranks.local_world_size
    is_here = [rank // ranks.local_world_size == node for rank in range(ranks.world_size)]
    within = [here and rank != ranks.rank for rank, here in enumerate(is_here)]
    between = [not here for here in is_here]
    return _rate(ranks, within), _rate(ranks, between)


def _rate(ranks: Ranks, sends: list[bool]) -> float | None:
    """Return the GB/s that a rank sends to those of `sends`."""
    if not any(sends):
        return None
    return max(_rate_of(ranks, sends, size) for size in SIZES)


def _rate_of(ranks: Ranks, sends: list[bool], size: int) -> float:
    sizes = [size // sum(sends) * sent for sent in sends]
    sent = torch.zeros(sum(sizes), dtype=torch.uint8, device=ranks.device)
    received = torch.empty_like(sent)
    times = []
    # The first exchange connects the ranks.
    for _ in range(1 + REPEATS):
        ranks.barrier()
        start = time.perf_counter()
        dist.all_to_all_single(received, sent, sizes, sizes)
        if ranks.device.type == "cuda":
            torch.cuda.synchronize(ranks.device)
        times.append(time.perf_counter() - start)
    slowest = ranks.all_reduce_max(torch.tensor(times[1:], device=ranks.device))
    return sum(sizes) / float(slowest.median()) / 1e9
