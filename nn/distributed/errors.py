"""The ways a run ends early, beside `ValueError` for what the user wrote; `configs.exit_codes` tells them apart."""


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
