"""Memory of this node that the processes of a run may use: a container or a SLURM job may have less than the machine."""

import os
from contextlib import suppress
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


def host_memory(cgroups: Path = CGROUPS, own: Path = OWN_CGROUPS) -> int:
    """Return the bytes of memory of this node, or the limit of a control group that this process is in."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [physical]
    with suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                limits += _limits(cgroups, path, "memory.max")
            elif "memory" in controllers.split(","):
                limits += _limits(cgroups / "memory", path, "memory.limit_in_bytes")
    return min(limits)


def _limits(root: Path, path: str, name: str) -> list[int]:
    """Return the limits of a control group and of those around it; a container may see its own one as the root."""
    inner = root / path.lstrip("/")
    found = []
    for group in (inner, *inner.parents):
        with suppress(OSError, ValueError):
            found.append(int((group / name).read_text()))
        if group == root:
            break
    return found
