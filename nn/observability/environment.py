"""The machine, the software and the command of a run: the first line of `metrics.jsonl`."""

import os
import platform
import shlex
import subprocess
import sys
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from nn.distributed.process_group import Ranks
from nn.observability.gpu_topology import gpus_of_host


def environment(recipe: str, ranks: Ranks) -> dict[str, Any]:
    """Describe the machine, the software and the command of a run; entries without a value are None.

    Other ranks are assumed to have this rank's device.
    """
    is_cuda = ranks.device.type == "cuda"
    driver = Path("/sys/module/nvidia/version")
    return {
        "recipe": recipe,
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "git_commit": git_commit(Path(__file__).resolve().parents[2]),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchrec": _version("torchrec"),
        "fbgemm": _version("fbgemm-gpu") or _version("fbgemm-gpu-cpu"),
        "cuda": torch.version.cuda,
        "gpu": torch.cuda.get_device_name(ranks.device) if is_cuda else None,
        "gpu_driver": driver.read_text().strip() if is_cuda and driver.exists() else None,
        "gpus": gpus_of_host(ranks.local_world_size) if is_cuda else None,
        # Containers and schedulers may leave this process fewer CPUs than there are.
        "num_cpus": len(os.sched_getaffinity(0)),
        "world_size": ranks.world_size,
        "num_hosts": ranks.world_size // ranks.local_world_size,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def git_commit(root: Path) -> str | None:
    """Return the commit of the checkout at `root`, with suffix `-dirty` if files were changed.

    Return None for an installed copy: a repository in a parent folder would be a different project.
    """
    if not (root / ".git").exists():
        return None
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        completed = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return completed.stdout.strip() or None
