"""What an error means that a rank meets while all ranks work: its own fault, no memory, or that another rank is gone."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from nn.distributed.errors import LostRankError, RankError
from nn.distributed.process_group import Ranks, is_first_reporter, is_lost_peer


@contextmanager
def report_lost_rank(ranks: Ranks) -> Iterator[None]:
    """Say of a collective that fails in here that another rank has ended.

    Raises:
        LostRankError: it has.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_lost_peer(error):
            raise
        raise LostRankError(lost_rank_message(ranks)) from error


@contextmanager
def report_faults(ranks: Ranks) -> Iterator[None]:
    """Say of an error that one rank meets by itself which rank that is.

    Raises:
        RankError: for `ValueError`, and where memory ran out.
    """
    try:
        yield
    except ValueError as error:
        finder = f"rank {ranks.rank}: " if ranks.world_size > 1 else ""
        raise RankError(f"{finder}{error}") from error
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        first_line = str(error).partition("\n")[0]
        raise RankError(
            f"rank {ranks.rank} is out of memory: {first_line}; lower train.batch_size, or "
            "spread the tables over more ranks. Checkpoints of the run are whole"
        ) from error


def is_out_of_memory(error: Exception) -> bool:
    """Whether a device or the host had no memory left."""
    kinds = (torch.OutOfMemoryError, MemoryError)
    return isinstance(error, kinds) or "can't allocate memory" in str(error)


def lost_rank_message(ranks: Ranks) -> str:
    """What the first of the ranks that are left says of the one that is gone; nothing for the others."""
    if not is_first_reporter("lost rank"):
        return ""
    return (
        f"rank {ranks.rank} stopped, since another rank has ended; its message, or the launcher's, says why. The "
        "same command with the same run_dir goes on from the latest checkpoint"
    )
