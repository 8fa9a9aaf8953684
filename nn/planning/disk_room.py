"""Room on disk for tables with `tier: disk`: what a plan needs, and whether `sharding.disk_path` has it."""

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nn.planning.host_tables import journal_row_bytes
from nn.planning.plan import TablePlan
from nn.tiers.table_file import removable_bytes

GIB = 2**30
REMEDY = "name a directory on a local disk that can be written"


@dataclass(frozen=True, slots=True)
class DiskNeed:
    table_bytes: float  # of the files if all rows have changed
    # of the journals, as expected: rows that change between two saves, unless host memory has room for all
    journal_bytes: float

    def __str__(self) -> str:
        return (
            f"the tables with tier: disk take at most {self.table_bytes / GIB:,.2f} GiB, and rows that change between two saves "
            f"{self.journal_bytes / GIB:,.2f} GiB more"
        )


def disk_need(
    tables: Sequence[TablePlan], local_world_size: int, groups: int = 1
) -> DiskNeed | None:
    """Return what the node needs whose tables need most, of so many groups that hold the same; None without tables on disk."""
    files: dict[int, float] = {}
    journals: dict[int, float] = {}
    for table in tables:
        size = sum(table.disk_bytes_per_rank)
        for rank, of_rank in zip(table.ranks, table.disk_bytes_per_rank, strict=False):
            node = rank // local_world_size
            files[node] = files.get(node, 0.0) + of_rank
            journal = journal_row_bytes(table) * of_rank / size
            journals[node] = journals.get(node, 0.0) + journal
    if not files:
        return None
    fullest = max(files, key=lambda node: files[node] + journals[node])
    return DiskNeed(groups * files[fullest], groups * journals[fullest])


def check_disk(path: Path, need: DiskNeed, *, may_be_elsewhere: bool) -> str:
    """Return what a directory has room for, as one line; ValueError: no access, or no room for a journal.

    How many rows change in a run is not known: a disk that is full then ends it.
    """
    existing = next(here for here in (path, *path.absolute().parents) if os.path.lexists(here))
    if may_be_elsewhere and existing != path:
        return f"{path} does not exist here, so its room is not checked; {need}"
    if not existing.is_dir():
        raise ValueError(f"sharding.disk_path={path}: {existing} is not a directory; {REMEDY}")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(
            f"sharding.disk_path={path}: {existing} cannot be written by this user; {REMEDY}"
        )
    # Files of killed runs are removed when the tables are made.
    free = shutil.disk_usage(existing).free + removable_bytes(path)
    if free < need.journal_bytes:
        raise ValueError(
            f"sharding.disk_path={path} has {free / GIB:,.2f} GiB free, and {need}; free some space there, choose another "
            "directory, save more often (checkpoint.save_every), or keep fewer tables on disk"
        )
    return f"{path} has {free / GIB:,.2f} GiB free; {need}"
