"""CPUs of the NUMA node that a GPU is attached to: memory is on the node of the CPU that first touches it."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

SYSFS = Path("/sys")


def pci_address(device: int) -> str:
    """Return the PCI address of a GPU, as the kernel writes it."""
    # The stubs of torch lack it.
    gpu: Any = torch.cuda.get_device_properties(device)
    return f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"


def node_near(pci_address: str, sysfs: Path = SYSFS) -> int | None:
    """Return the NUMA node of a device; None where a virtual machine or a container hides it."""
    try:
        node = int((sysfs / "bus/pci/devices" / pci_address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    # A machine with one node says -1.
    return node if node >= 0 else None


def cpus_near(pci_address: str, sysfs: Path = SYSFS) -> set[int]:
    """Return the CPUs near a device on which this process may run; none if the system does not tell."""
    node = node_near(pci_address, sysfs)
    if node is None:
        return set()
    with suppress(OSError, ValueError):
        cpus = (sysfs / f"devices/system/node/node{node}/cpulist").read_text().strip()
        return _numbers(cpus) & os.sched_getaffinity(0)
    return set()


def _numbers(text: str) -> set[int]:
    """Read `0-3,8`."""
    ranges = [part.partition("-") for part in text.split(",") if part]
    return {
        number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)
    }
