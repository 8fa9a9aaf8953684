"""The files of a sequence group of lists that the rows have: numbers, and per row a slice of its own events and its moment."""

from collections.abc import Callable
from contextlib import ExitStack

import numpy as np

from configs.messages import shown
from dataloading.dataset.sequences import SequenceGroup
from dataloading.dataset.split_files import OFFSET_DTYPE, mapped
from preproc.report.console import LogCounts, RowEvents
from preproc.table.output_files import TableFiles


def write_lists(
    files: TableFiles,
    number: int,
    group: SequenceGroup,
    counts: LogCounts,
    where: Callable[[int], str],
) -> None:
    """Write numbers, slices and moments of group `number` of lists, whose ids are written, in place of their offsets.

    `where`: of a row of the dataset, for messages. Raises ValueError: a number that float32 does not hold, a time that is
    not before the moment of its row, or before the one in front of it.
    """
    selected = ["row_", *(f"numbers{number}_{j}_" for j in range(len(group.numbers)))]
    selected += [f"moment{number}_"] * (group.time is not None)
    for split, rows in files.splits.items():
        seen = counts.splits[split] = RowEvents(len(rows))
        offsets = mapped(files.dataset / split / f"{group.features[0]}.offsets.bin", OFFSET_DTYPE)
        names = [f"{name}.bin" for name in (c.name for c in group.numbers)]
        names += [f"{group.name}.slices.bin"]
        names += [f"{group.name}.moments.bin"] * (group.time is not None)
        with ExitStack() as stack:
            made = [stack.enter_context(files.file(f"{split}/{n}")) for n in names]
            slices = made[len(group.numbers)]
            first = rows.start
            for batch in files.batches(files.rows_in, selected, rows):
                ends = offsets[first - rows.start :][: len(batch) + 1]
                stop = ends[1:]
                start = np.maximum(ends[:-1], stop - group.max_length)
                moments = np.zeros(len(batch), np.int64)
                if group.time is not None:
                    known = batch.column(selected[-1])
                    # A row without a moment sees none.
                    start = np.where(np.asarray(known.is_valid()), start, stop)
                    moments = np.asarray(known.fill_null(0))
                    made[-1].append(moments.astype("<i8"))
                for j, column in enumerate(group.numbers):
                    found = np.asarray(batch.column(selected[1 + j]).flatten())
                    with np.errstate(over="ignore"):
                        wrong = ~np.isfinite(found.astype(np.float32))
                    problem = "holds a number that float32 does not hold"
                    if column.name == group.time:
                        found = np.floor(found)
                        inside = np.arange(len(found)) + ends[0]
                        of = np.repeat(np.arange(len(batch)), np.diff(ends))
                        later = np.diff(found, prepend=found[:1]) < 0
                        later &= inside > ends[:-1][of]
                        wrong |= (later | (found >= moments[of])) & (inside >= start[of])
                        problem = "holds a time that is not before the moment of its row, or earlier than the one before it"
                    if wrong.any():
                        row = int(np.searchsorted(ends - ends[0], wrong.argmax(), "right")) - 1
                        raise ValueError(
                            f"{where(first + row)}: {shown(column.name)} {problem}; correct it, oldest event first"
                        )
                    made[j].append(found.astype(column.dtype.newbyteorder("<")))
                seen.add(stop - start, moments)
                slices.append(np.stack([start, stop], axis=1).astype("<i8"))
                first += len(batch)
        for file in made:
            files.records |= file.record
        counts.events += seen.events
        for name in group.features:
            files.remove(f"{split}/{name}.offsets.bin")
