"""The ways a run ends early, beside `ValueError` for what the user wrote, and the exit codes that tell them apart."""

# What Python ends with after any other error: it says nothing of whether the same would happen again.
LOST_RANK_EXIT_CODE = 1
USER_ERROR_EXIT_CODE = 2
DIVERGED_EXIT_CODE = 3
# EX_TEMPFAIL of sysexits.h: start the same command again, and it goes on. Batch scripts requeue on it.
RESUME_EXIT_CODE = 75
INTERRUPTED_EXIT_CODE = 130


class RankError(Exception):
    """What one rank found wrong with its input: the others do not know, so the one that does must say it."""


class SharedError(Exception):
    """What all ranks know to be wrong, found while they train; one of them says it."""


class LostRankError(Exception):
    """Another rank has ended, and this one cannot go on; the text is empty where another rank has said so already."""


class DivergedError(Exception):
    """The loss or a gradient stopped being a number; all ranks know, and nothing was updated with it."""


class StoppedError(Exception):
    """The run was asked to end by a signal, and all ranks have left at the same step."""
