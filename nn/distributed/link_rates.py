"""Rates of links and times of messages, as an all-to-all among the ranks of a node, and one between nodes, reach them."""

import time

import torch
import torch.distributed as dist

from nn.distributed.process_group import Ranks

SIZES = (2**20, 2**23, 2**26)
"""Bytes that a rank sends at once."""
MESSAGE = 64
"""Bytes of a message whose time is measured."""
REPEATS = 5


def measured_rates(ranks: Ranks) -> tuple[tuple[float, float] | None, tuple[float, float] | None]:
    """Return GB/s and microseconds a message of a rank to others of its node, and to other nodes; None without such ranks.

    Every rank sends equally much to each of them. Of each size the slowest rank counts, and of all sizes the fastest. So all
    ranks return the same. Messages are of `MESSAGE` bytes, and share the time of their exchange.
    """
    node = ranks.rank // ranks.local_world_size
    is_here = [rank // ranks.local_world_size == node for rank in range(ranks.world_size)]
    within = [here and rank != ranks.rank for rank, here in enumerate(is_here)]
    between = [not here for here in is_here]
    return _rate(ranks, within), _rate(ranks, between)


def _rate(ranks: Ranks, sends: list[bool]) -> tuple[float, float] | None:
    """Return the GB/s that a rank sends to those of `sends`, and the microseconds of a message."""
    messages = sum(sends)
    if not messages:
        return None
    gb_s = max(size / _seconds_of(ranks, sends, size // messages) / 1e9 for size in SIZES)
    return gb_s, _seconds_of(ranks, sends, MESSAGE) / messages * 1e6


def _seconds_of(ranks: Ranks, sends: list[bool], size: int) -> float:
    sizes = [size * sent for sent in sends]
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
    return float(slowest.median())
