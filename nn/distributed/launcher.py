"""What a rank and the launcher that started it (torchrun) owe each other; a process without a launcher owes nothing."""

import ctypes
import os
import signal
import sys
from typing import NoReturn

STARTED_BY = os.getppid()
# <sys/prctl.h>
PR_SET_PDEATHSIG = 1


def is_launched() -> bool:
    """Whether a launcher started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_node_leader() -> bool:
    """Whether this is the rank that says what all ranks of its node know."""
    return int(os.environ.get("LOCAL_RANK", 0)) == 0


def end_with_launcher() -> None:
    """Get SIGTERM when the launcher is gone, so that the run is saved and ends (Linux only).

    Otherwise its ranks would train on, nobody would see it, and the next start would find the run directory in use.
    """
    if not is_launched() or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != STARTED_BY:  # it was gone before it was asked for
        os.kill(os.getpid(), signal.SIGTERM)


def ask_launcher_to_end() -> None:
    """Let the launcher, if it is still there, end all ranks, rather than take an end for a failure and use up a restart."""
    if is_launched() and os.getppid() == STARTED_BY:
        os.kill(STARTED_BY, signal.SIGTERM)


def leave_launcher(exit_code: int = 0) -> NoReturn:
    """End a rank that torchrun started, all of whose files are closed.

    Torch's own threads may still run when Python takes itself down, and then abort the process ("terminate called without
    an active exception", 2 of 14 two-rank CPU runs), which torchrun would report as a failure of the whole run. After a
    failure, a thread may wait for ranks that are gone.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
