"""Start and exit of a rank under a launcher (torchrun); no-ops without a launcher."""

import ctypes
import os
import re
import signal
import socket
import sys
from collections import deque
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

PARENT_PID = os.getppid()
# <sys/prctl.h>
PR_SET_PDEATHSIG = 1
_reserved = deque[socket.socket](maxlen=64)


def is_launched() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def node_name() -> str:
    """Return SLURM's name of this node, which is unique even if nodes share a machine, or the host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def is_single_node() -> bool:
    return os.environ.get("WORLD_SIZE", "1") == os.environ.get("LOCAL_WORLD_SIZE", "1")


def is_node_leader() -> bool:
    """Return whether this is local rank 0, which reports errors that all ranks of the node have."""
    return int(os.environ.get("LOCAL_RANK", 0)) == 0


def reserved_port() -> int:
    """Return a port that only a server with `SO_REUSEADDR`, as torch's store, gets while this process lives (the newest 64)."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("", 0))
    _reserved.append(holder)
    return int(holder.getsockname()[1])


def check_variables() -> None:
    """Raise ValueError unless the variables are those of one rank: others would train something else, or wait without end."""
    problems = []
    counts = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    for name, default in counts.items():
        text = os.environ.get(name, str(default))
        if text.isascii() and text.isdecimal():
            counts[name] = int(text)
        else:
            problems.append(f"{name} is {text!r}, which is no number")
    for name, limit in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if counts[name] >= counts[limit]:
            unset = "" if limit in os.environ else ", which is not set"
            problems.append(f"{name} is {counts[name]}, and {limit} {counts[limit]}{unset}")
    world_size = counts["WORLD_SIZE"]
    if counts["LOCAL_WORLD_SIZE"] > world_size:
        problems.append("LOCAL_WORLD_SIZE is larger than WORLD_SIZE")
    if world_size > 1:
        needed = ("RANK", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in needed if name not in os.environ]
        problems += [f"WORLD_SIZE is {world_size}, and {name} is not set" for name in missing]
        if "LOCAL_RANK" in os.environ and "LOCAL_WORLD_SIZE" not in os.environ:
            # On all ranks alike: one that passes would wait for those that do not.
            problems.insert(0, "LOCAL_RANK is set, and LOCAL_WORLD_SIZE is not")
    if problems:
        raise ValueError(
            f"the environment is not that of a rank: {problems[0]}; start the ranks with torchrun, which sets RANK, WORLD_SIZE, "
            "LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or unset these to train with one process"
        )


def refuse_elastic_nodes(launcher: Path = Path(f"/proc/{PARENT_PID}/cmdline")) -> None:
    """Raise ValueError for `--nnodes MIN:MAX` of the launcher (seen on Linux): at a change the ranks would stop for good."""
    if not is_launched():
        return
    words: list[str] = []
    with suppress(OSError):  # no Linux, a process that has ended, or one of somebody else
        words = launcher.read_bytes().decode(errors="replace").split("\0")
    # torchrun takes the beginning of a flag's name for it.
    is_named = re.compile(r"--nn(o(d(es?)?)?)?(=|$)").match
    pairs = pairwise([*words, ""])
    named = [word.partition("=")[2] or after for word, after in pairs if is_named(word)]
    # torchrun's variable for the same option.
    nodes = next(iter(named), os.environ.get("PET_NNODES", ""))
    least, _, most = nodes.partition(":")
    if most not in ("", least):
        raise ValueError(
            f"torchrun --nnodes={nodes}: nodes cannot join or leave a run yet; write --nnodes={most} (or {least}). A run that "
            "is started again on another number of nodes resumes"
        )


def end_with_launcher() -> None:
    """Request SIGTERM when the launcher dies; the ranks would continue unnoticed and hold the run directory."""
    if not is_launched():
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    # The launcher may have died before the request.
    if os.getppid() != PARENT_PID:
        os.kill(os.getpid(), signal.SIGTERM)


def ask_launcher_to_end() -> None:
    """Ask the launcher to stop all ranks, so that it does not count the exit as a failure and use up a restart."""
    if is_launched() and os.getppid() == PARENT_PID:
        os.kill(PARENT_PID, signal.SIGTERM)


def leave_launcher(exit_code: int = 0) -> NoReturn:
    """Exit a rank, whose files are closed, without Python's shutdown, in which threads of torch may abort or wait for others."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
