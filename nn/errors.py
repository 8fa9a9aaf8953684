"""The ways a run ends early, beside `ValueError` for what the user wrote."""


class RankError(Exception):
    """What one rank found wrong with its input: the others do not know, so the one that does must say it."""


class DivergedError(Exception):
    """The loss or a gradient stopped being a number; all ranks know, and nothing was updated with it."""
