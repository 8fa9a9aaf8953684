"""Ctrl-C and other signals before a command has begun its work: one line and an exit code, without a traceback.

Imports take seconds, and an exception that a signal raises inside an import may become another one. So the process ends in
the handler itself. This module is imported first, and imports nothing that takes time.
"""

import os
import signal
import sys
from types import FrameType

from configs.exit_codes import INTERRUPTED_EXIT_CODE, RESUME_EXIT_CODE

INTERRUPTED = "interrupted"
NOTHING_WRITTEN = "nothing was written; rerun the same command"


def end_at_once_on_signals() -> None:
    """Install the handlers of SIGINT and SIGTERM for the start of a command.

    Under torchrun SIGTERM keeps its default: torchrun sends it to the other ranks when one has failed.
    """
    signal.signal(signal.SIGINT, _end)
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        signal.signal(signal.SIGTERM, _end)


def restore_signals() -> None:
    """Restore Python's handlers, which raise KeyboardInterrupt; call it when the work begins."""
    for signum, default in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGTERM, signal.SIG_DFL),
    ):
        if signal.getsignal(signum) is _end:
            signal.signal(signum, default)


def _end(signum: int, frame: FrameType | None) -> None:
    name = signal.Signals(signum).name
    is_interrupt = signum == signal.SIGINT
    # Of the ranks of a node, one prints. Python's buffers may be in use by the code that was interrupted.
    if os.environ.get("LOCAL_RANK", "0") == "0":
        what = INTERRUPTED if is_interrupt else f"stopped by {name}"
        os.write(sys.stderr.fileno(), f"{what}: {NOTHING_WRITTEN}\n".encode())
    os._exit(INTERRUPTED_EXIT_CODE if is_interrupt else RESUME_EXIT_CODE)
