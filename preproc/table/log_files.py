"""The files of a sequence group of a log: its events once, and per split the slice and the moment of every row.

One pass over the line of the group (`preproc/table/pipeline/sequences.py`) in constant memory; only the slices of the rows,
which are in the order of the dataset, lie in a mapped file.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from configs.table_schema import EventLog
from dataloading.dataset.sequences import EVENTS, EventColumn
from preproc.fitted_state import latest_name
from preproc.report.console import LogCounts, RowEvents
from preproc.table.output_files import GROUP_ROWS, TableFiles, allocate
from preproc.table.text_codes import NO_CODE
from preproc.table.transformation import NO_VALUE


@dataclass(frozen=True, slots=True)
class LineValues:
    columns: dict[str, str]  # by kind, as `kinds_of_values`
    dtype: np.dtype  # of stored ids
    ids_of_codes: np.ndarray | None
    texts_of_codes: pa.LargeStringArray | None

    def ids(self, lines: pa.RecordBatch) -> np.ndarray:
        """Return the ids; 0 for a missing value."""
        ids = np.asarray(lines[self.columns["i"]] if "i" in self.columns else 0)
        if self.ids_of_codes is None:
            return ids
        found = self.ids_of_codes.take(lines[self.columns["k"]].fill_null(NO_CODE))
        return np.where(found == NO_VALUE, ids, found)

    def texts(self, lines: pa.RecordBatch) -> pa.Array:
        found = [lines[self.columns["v"]]] if "v" in self.columns else []
        if self.texts_of_codes is not None:
            found.append(self.texts_of_codes.take(lines[self.columns["k"]]).cast(pa.string()))
        return pc.coalesce(*found)


class LogCursor:
    """Slices of the lines of a log that arrive user by user, oldest first, chunk by chunk."""

    def __init__(self, length: int) -> None:
        self._length = length
        self.events = 0  # so far
        self._first = self._stop = 0  # of the user's events, and behind those before the last time
        self._who, self._time = -1, 0

    def advance(
        self, who: np.ndarray, time: np.ndarray, item: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return of each line the first event and the stop of what it sees, the events before it, and if its user is new."""
        new_user = np.diff(who, prepend=self._who) != 0
        new_time = new_user | (np.diff(time, prepend=self._time) != 0)
        before = self.events + np.cumsum(item) - item  # events in earlier lines
        firsts = np.maximum.accumulate(np.where(new_user, before, self._first))
        stops = np.maximum.accumulate(np.where(new_time, before, self._stop))
        self._first, self._stop = int(firsts[-1]), int(stops[-1])
        self._who, self._time = int(who[-1]), int(time[-1])
        self.events += int(np.count_nonzero(item))
        return np.maximum(firsts, stops - self._length), stops, before, new_user


def write_log(
    files: TableFiles,
    number: int,
    log: EventLog,
    values: Sequence[LineValues],
    numbers: Sequence[EventColumn],
    counts: LogCounts,
    *,
    keeps_latest: bool,
) -> None:
    """Write log `number`, and add what rows see to its counts.

    `keeps_latest`: whether to write the last `length` events of every user as raw values, too, for the next day.
    """
    line, num_rows = f"line_{number}", max(rows.stop for rows in files.splits.values())
    columns = [*(f"m{j}" for j in range(len(log.numbers))), "time_"]
    of_ids = [name for of in values for kind, name in of.columns.items() if kind != "v"]
    names = [*log.features, *log.number_names]
    dtypes = [*(of.dtype for of in values), *(column.dtype for column in numbers)]
    path = files.directory / f"{line}.slices.bin"
    allocate(path, 24 * max(num_rows, 1))
    # Start, stop and moment; zeros for a row without a user or a time.
    of_rows = np.memmap(path, np.int64, "r+", shape=(num_rows, 3))
    firsts = files.directory / f"{line}.firsts.bin"
    cursor = LogCursor(log.length)
    with ExitStack() as stack:
        written = [stack.enter_context(files.file(f"{EVENTS}/{name}.bin")) for name in names]
        stream = stack.enter_context(firsts.open("wb"))
        every = ["who_", "item_", "out_", *of_ids, *columns]
        for lines in files.batches(line, every):
            item, who, time = (np.asarray(lines[name]) for name in ("item_", "who_", "time_"))
            starts, stops, before, is_new = cursor.advance(who, time, item)
            before[is_new].tofile(stream)
            is_row = np.asarray(lines["out_"].is_valid())
            out = np.asarray(lines["out_"].drop_null())
            of_rows[out] = np.stack([starts, stops, time], axis=1)[is_row]
            events = lines.filter(lines["item_"])
            found = [of.ids(events) for of in values]
            found += [np.asarray(events[column]) for column in columns]
            for file, array, dtype in zip(written, found, dtypes, strict=True):
                file.append(array.astype(dtype.newbyteorder("<")))
        np.array([cursor.events]).tofile(stream)
    counts.events = cursor.events
    for file in written:
        files.records |= file.record
    _write_slices(files, log.name, of_rows, counts)
    if keeps_latest:
        _write_latest(files, number, log, values, np.memmap(firsts, np.int64, "r"))


def _write_slices(files: TableFiles, name: str, of_rows: np.ndarray, counts: LogCounts) -> None:
    for split, rows in files.splits.items():
        seen = counts.splits[split] = RowEvents(len(rows))
        with (
            files.file(f"{split}/{name}.slices.bin") as slices,
            files.file(f"{split}/{name}.moments.bin") as moments,
        ):
            for start in range(rows.start, rows.stop, GROUP_ROWS):
                part = of_rows[start : min(start + GROUP_ROWS, rows.stop)]
                seen.add(part[:, 1] - part[:, 0], part[:, 2])
                slices.append(part[:, :2].astype("<i8"))
                moments.append(part[:, 2].astype("<i8"))
        files.records |= slices.record | moments.record


def _write_latest(
    files: TableFiles, number: int, log: EventLog, values: Sequence[LineValues], firsts: np.ndarray
) -> None:
    """Write latest/NAME.parquet. `firsts`: first event of each user, and behind them the number of all events."""
    of_texts = [name for of in values for kind, name in of.columns.items() if kind != "i"]
    numbers = [f"m{j}" for j in range(len(log.numbers))]
    kinds = {"row_": pa.int64(), "who_": pa.string(), "time_": pa.int64()}
    kinds |= dict.fromkeys([f"c{j}" for j in range(len(log.of))], pa.string())
    schema = pa.schema(kinds | dict.fromkeys(numbers, pa.float32()))
    users = files.texts(f"who_{number}", "who_", f"who_{number}")
    kept = 0
    target = files.dataset / latest_name(log.name)
    target.parent.mkdir(exist_ok=True)
    cursor = LogCursor(log.length)
    with pq.ParquetWriter(target, schema, compression="zstd") as writer:
        columns = ["who_", "time_", "item_", *of_texts, *numbers]
        for lines in files.batches(f"line_{number}", columns):
            item, who, time = (np.asarray(lines[name]) for name in ("item_", "who_", "time_"))
            *_, before, _ = cursor.advance(who, time, item)
            # Behind the first event of the next user.
            chosen = lines.filter(pa.array(item & (before >= firsts[who + 1] - log.length)))
            rows = pa.array(np.arange(kept, kept + len(chosen)))
            kept += len(chosen)
            found = [rows, users.take(chosen["who_"]).cast(pa.string()), chosen["time_"]]
            found += [of.texts(chosen) for of in values]
            found += [chosen[name] for name in numbers]
            writer.write_batch(pa.record_batch(found, schema=schema))
