"""Room on disk for tables with `tier: disk`: what a plan needs, and whether `sharding.disk_path` has it."""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nn.planning.host_tables import disk_row_bytes
from nn.planning.plan import TablePlan
from nn.tiers.table_file import removable_bytes

GIB = 2**30
REMEDY = "name a directory on a local disk that can be written"


@dataclass(frozen=True, slots=True)
class DiskNeed:
    table_bytes: float  # of the files if all rows have changed
    # of the journals, as expected: rows that change between two saves, unless host memory has room for all
    journal_bytes: float
    # of the weights that are written at the start, of tables with vectors of files (model.pretrained)
    filled_bytes: float = 0.0

    def __str__(self) -> str:
        at_start = (
            f" ({self.filled_bytes / GIB:,.2f} GiB at the start)" if self.filled_bytes else ""
        )
        return (
            f"the tables with tier: disk take at most {self.table_bytes / GIB:,.2f} GiB{at_start}, and rows that change between "
            f"two saves {self.journal_bytes / GIB:,.2f} GiB more"
        )


def disk_need(
    tables: Sequence[TablePlan],
    local_world_size: int,
    groups: int = 1,
    filled: Mapping[str, int] | None = None,
) -> DiskNeed | None:
    """Return what the node needs whose tables need most, of so many groups that hold the same; None without tables on disk.

    `filled`: bytes of the weights of tables with vectors of files.
    """
    needs: dict[int, DiskNeed] = {}
    for table in tables:
        size = sum(table.disk_bytes_per_rank)
        for rank, of_rank in zip(table.ranks, table.disk_bytes_per_rank, strict=False):
            node, share = rank // local_world_size, groups * of_rank / size
            before = needs.get(node, DiskNeed(0.0, 0.0))
            needs[node] = DiskNeed(
                before.table_bytes + groups * of_rank,
                before.journal_bytes + share * table.journal_rows * disk_row_bytes(table),
                before.filled_bytes + share * (filled or {}).get(table.table, 0),
            )
    return max(needs.values(), key=lambda need: need.table_bytes + need.journal_bytes, default=None)


def check_disk(path: Path, need: DiskNeed, *, may_be_elsewhere: bool) -> str:
    """Return what a directory has room for, as one line; ValueError: no access, or no room for a journal and vectors of files.

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
    if free < need.journal_bytes + need.filled_bytes:
        raise ValueError(
            f"sharding.disk_path={path} has {free / GIB:,.2f} GiB free, and {need}; free some space there, choose another "
            "directory, save more often (checkpoint.save_every), or keep fewer tables on disk"
        )
    return f"{path} has {free / GIB:,.2f} GiB free; {need}"
