"""Pinned memory lies on the NUMA node of the GPU: the threads that touch it first run there."""

import os

import pytest

from nn.ops.numa_node import cpus_near
from nn.ops.pinned_memory import touching_threads

ADDRESS = "0000:0f:00.0"


@pytest.mark.parametrize(
    ("node", "cpus", "near"),
    [
        ("1", "0-1,8", {0, 1}),
        ("1", "64-127", set()),
        # One node, or a virtual machine that tells nothing.
        ("-1", "0-3", set()),
        (None, "0-3", set()),
    ],
)
def test_cpus_are_those_of_the_node_on_which_the_process_may_run(
    node, cpus, near, tmp_path, monkeypatch
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    device = tmp_path / "bus/pci/devices" / ADDRESS
    nodes = tmp_path / "devices/system/node/node1"
    device.mkdir(parents=True)
    nodes.mkdir(parents=True)
    (nodes / "cpulist").write_text(f"{cpus}\n")
    if node is not None:
        (device / "numa_node").write_text(f"{node}\n")
    assert cpus_near(ADDRESS, tmp_path) == near


def test_memory_is_touched_by_threads_on_these_cpus_alone():
    allowed = os.sched_getaffinity(0)
    one = {min(allowed)}
    for cpus, wanted in ((one, one), (set(), allowed)):
        with touching_threads(cpus) as pool:
            assert set(pool.map(lambda _: frozenset(os.sched_getaffinity(0)), range(32))) == {
                frozenset(wanted)
            }
    assert os.sched_getaffinity(0) == allowed
