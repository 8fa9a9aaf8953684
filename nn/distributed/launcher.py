"""Start and exit of a rank under a launcher (torchrun); no-ops without a launcher."""

import ctypes
import os
import signal
import sys
from typing import NoReturn

PARENT_PID = os.getppid()
# <sys/prctl.h>
PR_SET_PDEATHSIG = 1


def is_launched() -> bool:
    """Return whether a launcher started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_single_node() -> bool:
    """Return whether all ranks run on this node."""
    return os.environ.get("WORLD_SIZE", "1") == os.environ.get("LOCAL_WORLD_SIZE", "1")


def is_node_leader() -> bool:
    """Return whether this is local rank 0, which reports errors that all ranks of the node have."""
    return int(os.environ.get("LOCAL_RANK", 0)) == 0


def end_with_launcher() -> None:
    """Request SIGTERM for this process when the launcher dies, so that the run saves a checkpoint and exits (Linux only).

    Otherwise the ranks would continue unnoticed, and the next start would find the run directory in use.
    """
    if not is_launched() or sys.platform != "linux":
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
    """Exit a rank that torchrun started without Python's shutdown; all files must be closed.

    Threads of torch may still run during Python's shutdown and abort the process ("terminate called without an active
    exception", 2 of 14 two-rank CPU runs). torchrun would report that as a failure of the run. After a failure, threads
    may also wait for lost ranks.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
