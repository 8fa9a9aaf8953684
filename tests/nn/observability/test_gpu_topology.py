"""NUMA node and peer access of GPUs, with a fake of torch's functions: machines of tests have none."""

from types import SimpleNamespace

import pytest
import torch

from nn.observability.gpu_topology import gpus_of_host, topology_text


@pytest.fixture
def four_gpus(monkeypatch, tmp_path):
    """Four GPUs in pairs with peer access; the kernel knows the node of the first three, and -1 of the last."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda gpu: SimpleNamespace(pci_domain_id=1, pci_bus_id=0xA0 + gpu, pci_device_id=0),
    )
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: a // 2 == b // 2)
    for bus, node in (("a0", 0), ("a1", 0), ("a2", 1), ("a3", -1)):
        folder = tmp_path / "bus/pci/devices" / f"0001:{bus}:00.0"
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    return tmp_path


def test_each_gpu_has_its_node_and_its_peers(four_gpus):
    assert gpus_of_host(4, four_gpus) == [
        {"numa_node": 0, "peers": [1]},
        {"numa_node": 0, "peers": [0]},
        {"numa_node": 1, "peers": [3]},
        {"numa_node": None, "peers": [2]},
    ]
    assert gpus_of_host(1, four_gpus) == [{"numa_node": 0, "peers": []}]
    assert [gpu["numa_node"] for gpu in gpus_of_host(8, four_gpus / "absent")] == [None] * 4


def gpu(node: int | None, *peers: int) -> dict:
    return {"numa_node": node, "peers": list(peers)}


@pytest.mark.parametrize(
    ("gpus", "text"),
    [
        ([gpu(None)], "NUMA nodes unknown"),
        ([gpu(1)], "NUMA node 1: GPU 0"),
        ([gpu(0, 1), gpu(1, 0)], "NUMA node 0: GPU 0, 1: GPU 1; peer access between all"),
        ([gpu(0), gpu(0)], "NUMA node 0: GPU 0-1; no peer access"),
        (
            [gpu(0, 1), gpu(0, 0), gpu(1, 3), gpu(None, 2)],
            "NUMA node 0: GPU 0-1, 1: GPU 2, unknown: GPU 3; peer access within GPU 0-1 and 2-3",
        ),
    ],
)
def test_the_topology_is_one_line(gpus, text):
    assert topology_text(gpus) == text
