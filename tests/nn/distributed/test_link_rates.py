"""Measured rates of links within and between nodes."""

import time
from unittest.mock import patch

import torch.distributed as dist

from nn.distributed import link_rates
from nn.distributed.link_rates import MESSAGE, measured_rates
from tests.helpers.composed import ranks_of_cpu
from tests.helpers.distributed import run_distributed

SIZE, WAIT_S = 2**20, 0.2


def rates_of_slow_nodes() -> tuple[tuple[float, float] | None, ...]:
    """Measure where what goes to another node, and nothing else, takes `WAIT_S` more."""
    own = dist.all_to_all_single
    with ranks_of_cpu() as ranks:

        def slow(received, sent, received_sizes, sizes):
            own_node = ranks.rank // ranks.local_world_size * ranks.local_world_size
            here = sizes[own_node : own_node + ranks.local_world_size]
            assert received_sizes == sizes
            assert sizes[ranks.rank] == 0
            assert sum(sizes) in (SIZE, MESSAGE * sum(size > 0 for size in sizes))
            assert sum(here) in (0, sum(sizes))
            time.sleep(0 if sum(here) else WAIT_S)
            return own(received, sent, received_sizes, sizes)

        with (
            patch.object(dist, "all_to_all_single", slow),
            patch.object(link_rates, "SIZES", (SIZE,)),
        ):
            return measured_rates(ranks)


def test_bytes_within_and_between_nodes_are_measured_apart():
    rates = run_distributed(rates_of_slow_nodes, 4, local_world_size=2)
    assert len(set(rates)) == 1, "ranks disagree"
    (within, within_us), (between, between_us) = rates[0]
    assert between < SIZE / WAIT_S / 1e9
    assert within > between
    # Two messages share the wait.
    assert WAIT_S / 2 <= between_us / 1e6 < WAIT_S
    assert within_us < between_us
    [(within, between), _] = run_distributed(rates_of_slow_nodes, 2, local_world_size=2)
    assert min(within) > 0
    assert between is None
