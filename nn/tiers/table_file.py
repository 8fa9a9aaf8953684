"""All rows of some tables in mapped files, and a journal of the rows that have changed since the latest save.

The files have rows as `nn.tiers.initial_rows` does: those that never changed are holes, and are computed when they are read.
The rows of the files stay as they are between two saves, so that a checkpoint is streamed from them while training continues.
Changed rows go to the journal, in the order in which they arrive: mostly at its end, one after the other. The next generation
of the files is made at the next save, by copying the journal's rows in ascending order.

Nothing here outlives the process: a run resumes from its checkpoint, and removes the files of killed runs.
"""

import errno
import mmap
import os
import shutil
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from configs.messages import first_line
from dataloading.dataset.durable_files import (
    UnlockableError,
    clear_leftovers,
    lock_directory,
    partial_sibling,
)
from nn.distributed.errors import RankError
from nn.tiers.initial_rows import ROWS_AT_ONCE, InitialRows
from nn.tiers.row_items import row_items
from nn.tiers.row_store import WEIGHT, Kinds

FOLDER = "tables"
READERS = 64
"""Threads that read rows: each waits for one page at a time, and disks are fast with many reads at once."""
REMEDY = "free some space there and rerun the same command, or choose another directory"
READ_ROWS = 2**9
"""Rows that a thread reads at once."""
RUN_PAGES = 8
"""Adjoining pages from which on they are read ahead as one."""
BLOCK_ROWS = 2**16
"""Rows that are written at once, through a copy in memory."""
EXTENT_BYTES = 2**26
"""Bytes by which a file of the journal grows."""
EXTENT_PAGES = 2**8
"""Pages of a table's file that get room as one once half of them have some, so that few calls reserve a dense stretch."""
ATTEMPTS = 100

Toggle = Callable[[np.ndarray, np.ndarray], None]
"""Items of ascending rows, and these rows -> what the file has of them, or back, in place."""


class TierDirectory:
    """Directory of a rank below one that runs may share, best on a local disk; removed by `close`, or with this object."""

    def __init__(self, parent: Path) -> None:
        root = parent / FOLDER
        try:
            parent.mkdir(parents=True, exist_ok=True)
            self.path, lock = _locked_sibling(root)
        except UnlockableError:
            raise ValueError(
                f"sharding.disk_path={parent} is on a file system without locks; name a directory on a local disk"
            ) from None
        except OSError as error:
            raise ValueError(
                f"sharding.disk_path={parent} cannot be written: {error.strerror}; choose another directory, on a local disk "
                "with room"
            ) from None
        self._finalizer = weakref.finalize(self, _remove, self.path, lock)
        clear_leftovers(root, but=self.path)

    def close(self) -> None:
        """Remove the directory; files that are mapped keep their rows. A process may end without Python's finalizers."""
        self._finalizer()


def removable_bytes(parent: Path) -> int:
    """Return the bytes that killed runs have left below a directory, which the next `TierDirectory` removes."""
    total = 0
    for left in parent.glob(f".{FOLDER}.partial-*"):
        try:
            lock = lock_directory(left)
        except OSError:
            continue
        try:
            # A file has as many bytes as blocks were allocated.
            num_bytes = sum(512 * file.stat().st_blocks for file in left.iterdir())
            if os.access(left, os.W_OK) and os.access(parent, os.W_OK):
                total += num_bytes
        except OSError:
            continue
        finally:
            os.close(lock)
    return total


def _remove(path: Path, lock: int) -> None:
    """Remove a directory, which others remove too once it is not locked any more."""
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)


def _locked_sibling(root: Path) -> tuple[Path, int]:
    """Make and lock a directory; other processes remove those that nobody has locked."""
    for _ in range(ATTEMPTS):
        path = partial_sibling(root)
        path.mkdir()
        try:
            lock = lock_directory(path)
        except (BlockingIOError, FileNotFoundError):
            continue
        if path.exists():
            return path, lock
        os.close(lock)
    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))


@dataclass(frozen=True, slots=True)
class ShardOfFile:
    """Some rows of a table, and some of its columns, in a file."""

    num_rows: int
    initial: InitialRows
    first_row: int = 0  # of the table
    first_column: int = 0


def _toggle(shards: Sequence[ShardOfFile], values: Tensor, rows: np.ndarray) -> None:
    """Turn weights of ascending rows, on any device, into changes or back, in place."""
    first = 0
    for shard in shards:
        end = first + shard.num_rows
        mine = slice(*np.searchsorted(rows, (first, end)).tolist())
        numbers = torch.from_numpy(rows[mine] - first + shard.first_row).to(values.device)
        shard.initial.toggle(values[mine], numbers, shard.first_column)
        first = end


def _toggle_items(
    shards: Sequence[ShardOfFile], dtype: torch.dtype, items: np.ndarray, rows: np.ndarray
) -> None:
    memory = items.view(np.uint8).reshape(len(items), items.dtype.itemsize)
    _toggle(shards, torch.from_numpy(memory).view(dtype), rows)


class TableFile:
    """Rows of tables of one width and dtype, numbered table after table.

    `rows` are those of the latest save by the name of the part, [num_rows, columns], weights as changes of the initial ones.
    Raises RankError: the disk has no room, or a file cannot be made.
    """

    def __init__(
        self, directory: TierDirectory, name: str, shards: Sequence[ShardOfFile], kinds: Kinds
    ) -> None:
        self._directory = directory
        self._shards = shards
        toggle = partial(_toggle_items, shards, kinds[WEIGHT][1])
        num_rows = sum(shard.num_rows for shard in shards)
        self._parts = [
            _Part(
                directory.path / f"{name}_{part}",
                num_rows,
                columns,
                dtype,
                toggle if part == WEIGHT else None,
            )
            for part, (columns, dtype) in kinds.items()
        ]
        self.rows = {part: files.rows for part, files in zip(kinds, self._parts, strict=True)}
        self._change_of_row = np.full(num_rows, -1, np.int32)
        self._num_changes = 0
        self._knows_holes = True
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="table-file")

    def initial(self, rows: np.ndarray, device: torch.device) -> list[Tensor]:
        """Return the parts of ascending rows, int64 [n], as they begin, [n, columns] each, without reading a file."""
        parts = [
            torch.zeros(len(rows), *part.rows.shape[1:], dtype=part.rows.dtype, device=device)
            for part in self._parts
        ]
        _toggle(self._shards, parts[0], rows)
        return parts

    def read(self, rows: np.ndarray, targets: Sequence[np.ndarray], positions: np.ndarray) -> None:
        """Read the newest values of ascending rows, int64 [n], to `positions` of `targets`, one per part.

        Rows that nothing was written to are computed, without a page of the file, until `rows` are written to directly.
        """
        changes = self._change_of_row[rows]
        in_table = changes < 0
        jobs = []
        for part, target in zip(self._parts, targets, strict=True):
            in_file = in_table & part.table.has_room(rows) if self._knows_holes else in_table
            for chosen, every, mapping, step in (
                (in_file, rows, part.table, READ_ROWS),
                (~in_table, changes, part.journal, READ_ROWS),
                (in_table & ~in_file, rows, None, ROWS_AT_ONCE),  # is computed
            ):
                numbers, places = every[chosen], positions[chosen]
                if mapping is not None:
                    mapping.read_ahead(numbers)
                source = None if mapping is None else mapping.items
                toggle = None if mapping is part.journal else part.toggle
                for first in range(0, len(numbers), step):
                    some = slice(first, first + step)
                    copied = source, numbers[some], target, places[some], toggle, numbers[some]
                    jobs.append(self._pool.submit(_copy, *copied))
        for job in jobs:
            job.result()

    def keep(self, rows: np.ndarray, sources: Sequence[np.ndarray], positions: np.ndarray) -> None:
        """Write new values of distinct rows, at `positions` of `sources`, one per part, to the journal; RankError: disk full."""
        changes = self._change_of_row[rows]
        is_new = changes < 0
        count = int(is_new.sum())
        for part in self._parts:
            part.journal.grow(self._num_changes + count)
        changes[is_new] = np.arange(self._num_changes, self._num_changes + count, dtype=np.int32)
        for part, source in zip(self._parts, sources, strict=True):
            _copy_blocks(source, positions, part.journal.items, changes)
        self._change_of_row[rows] = changes
        self._num_changes += count

    def merge(self) -> None:
        """Make the journal's rows those of the files, in ascending order; nobody reads the files meanwhile."""
        if self._num_changes:
            changed = np.flatnonzero(self._change_of_row >= 0)
            for part in self._parts:
                positions = self._change_of_row[changed]
                part.write(part.journal.items, positions, changed)
        self.forget()

    def store(self, rows: np.ndarray, sources: Sequence[np.ndarray], positions: np.ndarray) -> None:
        """Write values at `positions` of `sources`, one per part, to ascending rows of files that nobody reads, after `merge`."""
        for part, source in zip(self._parts, sources, strict=True):
            part.write(source, positions, rows)

    def fill(self, rows: np.ndarray, values: Tensor) -> None:
        """Give ascending rows weights [n, columns], which are other ones than the initial, before the first change."""
        self._parts[0].write(row_items(values), np.arange(len(rows)), rows)

    def note_other_writes(self) -> None:
        """Read all rows from the files from now on, since their memory was written to directly."""
        self._knows_holes = False

    def num_bytes(self) -> tuple[int, int]:
        """Return the bytes that the files and the journal take on the disk, and those of files that have all rows."""
        mappings = [each for part in self._parts for each in (part.table, part.journal)]
        full = sum(part.table.row_bytes for part in self._parts) * len(self._change_of_row)
        return sum(mapping.stored_bytes() for mapping in mappings), full

    def forget(self) -> None:
        if self._num_changes:
            self._change_of_row.fill(-1)
        self._num_changes = 0


class _Part:
    """A part of all rows; `toggle` turns it into what the file has, or back."""

    def __init__(
        self,
        path: Path,
        num_rows: int,
        columns: Sequence[int],
        dtype: torch.dtype,
        toggle: Toggle | None,
    ) -> None:
        self.toggle = toggle
        shape = torch.Size([num_rows, *columns])
        self.table = _Mapping(path, num_rows, shape[1:].numel() * dtype.itemsize)
        self.journal = _Mapping(
            path.with_name(f"{path.name}.journal"), num_rows, self.table.row_bytes
        )
        # A mapping of its own, which the kernel reads ahead: it is read and written in order.
        try:
            items = torch.from_file(str(path), shared=True, size=shape.numel(), dtype=dtype)
        except RuntimeError as error:
            raise _unwritable(path, first_line(error)) from None
        self.rows: Tensor = items.view(shape)

    def write(self, source: np.ndarray, positions: np.ndarray, rows: np.ndarray) -> None:
        """Write values at `positions` of a source to ascending rows of the file; RankError: disk full."""
        self.table.reserve(rows)
        _copy_blocks(source, positions, row_items(self.rows), rows, self.toggle)


def _unwritable(path: Path, reason: str | None) -> RankError:
    return RankError(
        f"sharding.disk_path={path.parent.parent}: {path.name} cannot be written: {reason}; {REMEDY}"
    )


class _Mapping:
    """Mapped file of rows read in any order; `items` are all rows as raw bytes, of which those beyond `grow` are untouchable."""

    def __init__(self, path: Path, num_rows: int, row_bytes: int) -> None:
        self._path, self.row_bytes = path, row_bytes
        self._num_bytes, self._allocated = num_rows * row_bytes, 0
        # Of the pages of whole extents; unused ones take no memory.
        num_extents = -(-self._num_bytes // (EXTENT_PAGES * mmap.PAGESIZE))
        self._has_room = np.zeros(num_extents * EXTENT_PAGES, bool)
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            weakref.finalize(self, os.close, self._descriptor)
            os.ftruncate(self._descriptor, self._num_bytes)
            self._pages = mmap.mmap(self._descriptor, self._num_bytes)
        except OSError as error:
            raise _unwritable(path, error.strerror) from None
        self._pages.madvise(mmap.MADV_RANDOM)
        self.items = np.frombuffer(self._pages, np.dtype((np.void, row_bytes)))

    def grow(self, num_rows: int) -> None:
        """Let the disk have room for the first rows, where a page without would end the process; RankError if it is full."""
        needed = num_rows * self.row_bytes
        if needed <= self._allocated:
            return
        end = min(-(-needed // EXTENT_BYTES) * EXTENT_BYTES, self._num_bytes)
        try:
            os.posix_fallocate(self._descriptor, self._allocated, end - self._allocated)
        except OSError as error:
            raise self._no_room(end - self._allocated, error) from None
        self._allocated = end

    def reserve(self, rows: np.ndarray) -> None:
        """Let the disk have room for ascending rows, as `grow` does for the first ones; pages that have it cost no call."""
        pages = pages_of(rows * self.row_bytes, self.row_bytes)
        pages = _distinct(pages[~self._has_room[pages]])
        self._has_room[pages] = True
        extents = _distinct(pages // EXTENT_PAGES)
        used = self._has_room.reshape(-1, EXTENT_PAGES)[extents].sum(axis=1)
        dense = extents[2 * used >= EXTENT_PAGES, None] * EXTENT_PAGES + np.arange(EXTENT_PAGES)
        self._has_room[dense] = True
        pages = _distinct(np.concatenate([pages, dense.ravel()]))
        try:
            reserve_pages(self._descriptor, pages)
        except OSError as error:
            raise self._no_room(len(pages) * mmap.PAGESIZE, error) from None

    def has_room(self, rows: np.ndarray) -> np.ndarray:
        """Return which rows may have been written to; the others are holes, unless the memory was written to directly."""
        return self._has_room[rows * self.row_bytes // mmap.PAGESIZE]

    def stored_bytes(self) -> int:
        """Return the bytes of the file that take room on the disk."""
        return 512 * os.fstat(self._descriptor).st_blocks

    def _no_room(self, num_bytes: int, error: OSError) -> RankError:
        free = shutil.disk_usage(self._path.parent).free
        return RankError(
            f"sharding.disk_path={self._path.parent.parent}: no room for {num_bytes / 2**30:,.2f} GiB more of "
            f"the tables with tier: disk ({error.strerror}, {free / 2**30:,.2f} GiB free); {REMEDY}"
        )

    def read_ahead(self, rows: np.ndarray) -> None:
        """Let the kernel read runs of adjoining pages as one; single pages are read when they are touched."""
        page = mmap.PAGESIZE
        pages = np.sort(rows * self.row_bytes // page)
        ends = np.flatnonzero(np.diff(pages, append=np.inf) > 1)
        last = pages[ends]
        first = pages[np.concatenate([[0], ends[:-1] + 1])] if len(ends) else last
        is_run = last - first + 1 >= RUN_PAGES
        for start, end in zip(first[is_run].tolist(), last[is_run].tolist(), strict=True):
            num_bytes = min((end + 1) * page, self._num_bytes) - start * page
            self._pages.madvise(mmap.MADV_WILLNEED, start * page, num_bytes)


def pages_of(starts: np.ndarray, num_bytes: int) -> np.ndarray:
    """Return the pages of a file that have some of `num_bytes` bytes from each start on, int64, of which some are repeated."""
    firsts, lasts = starts // mmap.PAGESIZE, (starts + num_bytes - 1) // mmap.PAGESIZE
    spans = range(int((lasts - firsts).max(initial=0)) + 1)
    return np.concatenate([np.minimum(firsts + step, lasts) for step in spans])


def reserve_pages(descriptor: int, pages: np.ndarray) -> None:
    """Let the disk have room for pages of a file, distinct and ascending, which keeps its size; OSError: it is full."""
    size = os.fstat(descriptor).st_size
    is_first = np.diff(pages, prepend=-2) > 1
    is_last = np.append(is_first[1:], True)[: len(pages)]
    for first, last in zip(pages[is_first].tolist(), pages[is_last].tolist(), strict=True):
        begin, end = first * mmap.PAGESIZE, min((last + 1) * mmap.PAGESIZE, size)
        os.posix_fallocate(descriptor, begin, end - begin)


def _distinct(numbers: np.ndarray) -> np.ndarray:
    """Return each of some numbers once, ascending; those of one row after the other are nearly sorted."""
    ordered = np.sort(numbers, kind="stable")
    return ordered[np.diff(ordered, prepend=-1) != 0]


def _copy(
    source: np.ndarray | None,
    source_positions: np.ndarray,
    target: np.ndarray,
    target_positions: np.ndarray,
    toggle: Toggle | None = None,
    rows: np.ndarray | None = None,
) -> None:
    """Copy items; those of no source are zero."""
    count = len(source_positions)
    items = np.zeros(count, target.dtype) if source is None else source.take(source_positions)
    if toggle is not None and rows is not None:
        toggle(items, rows)
    target[target_positions] = items


def _copy_blocks(
    source: np.ndarray,
    source_positions: np.ndarray,
    target: np.ndarray,
    target_positions: np.ndarray,
    toggle: Toggle | None = None,
) -> None:
    for first in range(0, len(source_positions), BLOCK_ROWS):
        some = slice(first, first + BLOCK_ROWS)
        rows = target_positions[some]
        _copy(source, source_positions[some], target, rows, toggle, rows)
