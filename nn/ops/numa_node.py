"""CPUs of the NUMA node that a GPU is attached to: memory is on the node of the CPU that first touches it."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

SYSFS = Path("/sys")


def gpu_cpus(device: int, sysfs: Path = SYSFS) -> set[int]:
    """Return the CPUs near a GPU on which this process may run; none if the system does not tell.

    Args:
        device: number of the GPU.
        sysfs: where the kernel describes its devices.
    """
    # The stubs of torch lack its address.
    gpu: Any = torch.cuda.get_device_properties(device)
    return cpus_near(
        f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0", sysfs
    )


def cpus_near(pci_address: str, sysfs: Path = SYSFS) -> set[int]:
    """Return those near a device at an address; see `gpu_cpus`."""
    # A machine with one node says -1, for which there is no directory.
    with suppress(OSError, ValueError):
        node = (sysfs / "bus/pci/devices" / pci_address / "numa_node").read_text().strip()
        cpus = (sysfs / f"devices/system/node/node{int(node)}/cpulist").read_text().strip()
        return _numbers(cpus) & os.sched_getaffinity(0)
    return set()


def _numbers(text: str) -> set[int]:
    """Read `0-3,8`."""
    ranges = [part.partition("-") for part in text.split(",") if part]
    return {
        number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)
    }
