"""GPUs of this host: the NUMA node beside each of them, and the GPUs whose memory it reaches directly."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from nn.observability.layout import ranges
from nn.ops.numa_node import SYSFS, node_near, pci_address


def gpus_of_host(num_gpus: int, sysfs: Path = SYSFS) -> list[dict[str, Any]]:
    """Describe the first GPUs that this process sees.

    `num_gpus`: ranks of this host; a process that sees fewer GPUs describes those. Returns Per GPU `numa_node`, None where
    the kernel knows none, and `peers`, the numbers of the others with peer access.
    """
    visible = range(min(num_gpus, torch.cuda.device_count()))
    return [
        {
            "numa_node": node_near(pci_address(gpu), sysfs),
            "peers": [
                other
                for other in visible
                if other != gpu and torch.cuda.can_device_access_peer(gpu, other)
            ],
        }
        for gpu in visible
    ]


def topology_text(gpus: Sequence[Mapping[str, Any]]) -> str:
    """Return the topology as a line, such as `NUMA node 0: GPU 0-3, 1: GPU 4-7; peer access between all`."""
    nodes: dict[int | None, list[int]] = {}
    for number, gpu in enumerate(gpus):
        nodes.setdefault(gpu["numa_node"], []).append(number)
    if set(nodes) == {None}:
        text = "NUMA nodes unknown"
    else:
        text = "NUMA node " + ", ".join(
            f"{'unknown' if node is None else node}: GPU {ranges(found)}"
            for node, found in nodes.items()
        )
    if len(gpus) < 2:
        return text
    groups = {tuple(sorted({number, *gpu["peers"]})): None for number, gpu in enumerate(gpus)}
    if len(groups) == 1:
        return f"{text}; peer access between all"
    if all(len(group) == 1 for group in groups):
        return f"{text}; no peer access"
    return f"{text}; peer access within GPU {' and '.join(map(ranges, groups))}"
