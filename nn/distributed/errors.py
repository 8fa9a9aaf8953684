"""Exceptions that end a run early, except `ValueError` for user errors; `configs.exit_codes` has their exit codes."""

import errno

from configs.messages import printable

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def os_error_text(error: OSError) -> str:
    """Describe an error of the system in one line: reason, path and, on a full disk, the remedy."""
    where = printable(str(error.filename or "")) or "while a file of the run was read or written"
    remedy = "; free some space and rerun the same command" if error.errno in _NO_SPACE else ""
    return f"{error.strerror or error}: {where}{remedy}"


class RankError(Exception):
    """Error in the input of one rank; only this rank can report it."""


class SharedError(Exception):
    """Error during training that all ranks have; one of them reports it."""


class LostRankError(Exception):
    """Another rank has exited, so this rank cannot continue; the text is empty if another rank has reported it."""


class DivergedError(Exception):
    """The loss or a gradient is not finite; all ranks raise this, and no update has used it."""


class StoppedError(Exception):
    """A signal requested the end of the run, and all ranks have stopped after the same step."""
