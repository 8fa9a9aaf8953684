"""Classification of errors during training: user errors, out of memory, lost ranks."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from configs.messages import first_line
from dataloading.keys.rekeyed import TableFullError
from nn.distributed.errors import DeviceError, LostRankError, Rank0Error, RankError, SharedError
from nn.distributed.process_group import Ranks, has_device_failed, is_first_reporter, is_lost_peer


@contextmanager
def report_lost_rank(ranks: Ranks) -> Iterator[None]:
    """Convert the failure of a collective whose other rank has exited to `LostRankError`."""
    try:
        yield
    except RuntimeError as error:
        if not is_lost_peer(error):
            raise
        raise LostRankError(lost_rank_message(ranks)) from error


@contextmanager
def report_faults(ranks: Ranks) -> Iterator[None]:
    """Convert errors of one rank to `RankError`, a full table of raw keys to SharedError, a failed GPU to DeviceError."""
    try:
        yield
    except (Rank0Error, RankError):
        raise
    except TableFullError as error:
        # All ranks meet it at the same batch.
        raise SharedError(str(error)) from error
    except ValueError as error:
        prefix = f"rank {ranks.rank}: " if ranks.world_size > 1 else ""
        raise RankError(f"{prefix}{error}") from error
    except (RuntimeError, MemoryError) as error:
        if has_device_failed(error) and not is_out_of_memory(error):
            raise DeviceError(
                f"rank {ranks.rank}: {ranks.device} or NCCL has failed: {first_line(error)}; the kernel's log (dmesg) may name "
                "an XID. The same command with the same run_dir resumes from the latest checkpoint"
            ) from error
        if not is_out_of_memory(error):
            raise
        raise RankError(
            f"rank {ranks.rank} is out of memory: {first_line(error)}; lower train.batch_size, or "
            "shard the tables over more ranks. Checkpoints of the run are complete"
        ) from error


def is_out_of_memory(error: Exception) -> bool:
    kinds = (torch.OutOfMemoryError, MemoryError)
    return isinstance(error, kinds) or "can't allocate memory" in str(error)


def lost_rank_message(ranks: Ranks) -> str:
    """Return the message about a lost rank for the first rank that reports it; an empty text for the others."""
    if not is_first_reporter("lost rank"):
        return ""
    return (
        f"rank {ranks.rank} stopped because another rank has exited; see the message of that rank or of the launcher. The "
        "same command with the same run_dir resumes from the latest checkpoint"
    )
