"""Exceptions that end a run early, except `ValueError` for user errors; `configs.exit_codes` has their exit codes."""


class EndOfRunError(Exception):
    """Base of all of them."""


class RankError(EndOfRunError, ValueError):
    """Error in the input of one rank; only this rank can report it."""


class Rank0Error(EndOfRunError, ValueError):
    """Error of rank 0, which all ranks raise; one of them reports it."""


class SharedError(EndOfRunError):
    """Error during training that all ranks have; one of them reports it."""


class LostRankError(EndOfRunError):
    """Another rank has exited, so this rank cannot continue; the text is empty if another rank has reported it."""


class DeviceError(EndOfRunError):
    """The GPU of this rank, or NCCL, has failed; the run resumes from its latest checkpoint."""


class DivergedError(EndOfRunError):
    """The loss or a gradient is not finite; all ranks raise this, and no update has used it."""


class StoppedError(EndOfRunError):
    """A signal requested the end of the run, and all ranks have stopped after the same step."""
