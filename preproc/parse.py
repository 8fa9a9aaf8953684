"""Raw Criteo lines to staged columns: read, parsed by several threads, written in their order.

A line has 40 tab-separated columns: the label (0 or 1), 13 integers and 26 categories; a missing
value is an empty field. Nothing is quoted. Blank lines are skipped.

Staged are `label.u8`, the numericals as they will be stored, one bit a numerical that says whether
it was missing, and a column of 32-bit codes a category. A category of eight lower-case hexadecimal
digits is its own code; every other text is kept in Parquet files (column, row, value) beside the
codes, so that nothing is lost and no dictionary has to fit in memory.
"""

import os
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import numpy as np

from configs.preproc_schema import OnBad, PreprocConfig
from preproc.fields import (
    NO_INTEGER,
    ODD,
    PADDING,
    BadBlockError,
    find_fields,
    hexadecimal,
    integers,
    labels,
)
from preproc.lines import Sorted, blocks, sort_lines
from preproc.raw_files import RawFile
from preproc.report import Progress, Stage
from preproc.sql import CATEGORICAL, COLUMNS, NUMERICAL, numerical
from preproc.staged import ColumnAppender, StagedColumn
from preproc.work import Work

# Text that one task parses: enough rows for one SQL query, little enough to have many in flight.
TASK_BYTES = 1 << 22
CHECKPOINT_SECONDS = 10.0
# Odd texts held in memory before a checkpoint writes them.
ODD_VALUES = 500_000
LABELS = slice(0, 1)
INTEGERS = slice(1, 1 + len(NUMERICAL))
CATEGORIES = slice(1 + len(NUMERICAL), len(COLUMNS))


@dataclass(slots=True)
class Staged:
    """The staged columns of all rows."""

    label: StagedColumn
    numerical: StagedColumn
    missing: StagedColumn
    codes: dict[str, StagedColumn]
    odd: Path

    @classmethod
    def below(cls, directory: Path, numerical_dtype: str) -> "Staged":
        """Name the files of a work directory."""
        width = len(NUMERICAL)
        return cls(
            StagedColumn(directory / "label.u8", "u1"),
            StagedColumn(directory / "numerical.bin", numerical_dtype, width),
            StagedColumn(directory / "missing.bits", "u1", (width + 7) // 8),
            {name: StagedColumn(directory / f"{name}.u32", "<u4") for name in CATEGORICAL},
            directory / "odd",
        )

    @property
    def columns(self) -> list[StagedColumn]:
        """All of them."""
        return [self.label, self.numerical, self.missing, *self.codes.values()]

    @property
    def row_bytes(self) -> int:
        """Bytes a row in all files."""
        return sum(column.row_bytes for column in self.columns)


@dataclass(slots=True)
class OddTexts:
    """Texts that have no code: the number of their column, their row, themselves."""

    columns: np.ndarray
    rows: np.ndarray
    texts: list[str]

    @classmethod
    def joined(cls, parts: "list[OddTexts]") -> "OddTexts":
        """Return one after another."""
        nothing = [np.empty(0, np.int64)]
        return cls(
            np.concatenate(nothing + [part.columns for part in parts]),
            np.concatenate(nothing + [part.rows for part in parts]),
            [text for part in parts for text in part.texts],
        )

    def moved(self, rows: int) -> "OddTexts":
        """Return them with row numbers that are larger by `rows`."""
        return OddTexts(self.columns, self.rows + rows, self.texts)


@dataclass(slots=True)
class Parsed:
    """A piece of text as columns; `odd` counts rows within the piece."""

    columns: list[np.ndarray]
    odd: "OddTexts"
    bad: list[tuple[int, str, bytes]]
    num_lines: int
    num_bytes: int

    @property
    def num_rows(self) -> int:
        """Good lines."""
        return len(self.columns[0])


def parse_files(
    files: list[RawFile], config: PreprocConfig, work: Work, staged: Staged, progress: Progress
) -> list[int]:
    """Stage all files in order, from where the record of `work` ends; return the rows of each.

    Raises:
        ValueError: a bad line under `on_bad=fail`, a damaged file, a file without a good line.
    """
    identities = [_identity(file) for file in files]
    state = _recorded(work, identities)
    if state.get("done"):
        return state["rows"]
    threads = config.threads or os.cpu_count() or 1
    with (
        progress.stage("parse") as stage,
        _Writer(work, staged, state) as writer,
        duckdb.connect(config={"threads": 1}) as connection,
        ThreadPoolExecutor(threads) as pool,
    ):
        task = _Task(connection, staged.numerical.dtype)
        stage.total = sum(file.path.stat().st_size for file in files)
        done_bytes = 0
        for number, file in enumerate(files):
            if number < state["whole_files"]:
                done_bytes += file.path.stat().st_size
                continue
            if len(state["rows"]) == number:
                state["files"].append(identities[number])
                state["rows"].append(0)
                state["offset"] = state["lines"] = 0
                state["before"] = {key: state[key] for key in ("odd", "bad", "bad_bytes")}
            stage.detail = str(file.path)
            _parse_file(file, config, writer, task, pool, stage, done_bytes)
            done_bytes += file.path.stat().st_size
            if state["rows"][number] == 0:
                raise ValueError(
                    f"{file.path}: no line in it; drop it from the sources, or fetch it again"
                )
            state["whole_files"] += 1
            writer.checkpoint()
        state["done"] = True
        work.save()
        what = str(files[0].path) if len(files) == 1 else f"{len(files)} files"
        bad = f", {state['bad']:,} bad lines left out" if state["bad"] else ""
        stage.name = f"parse {what}: {sum(state['rows']):,} rows{bad}"
    return state["rows"]


def _parse_file(
    file: RawFile,
    config: PreprocConfig,
    writer: "_Writer",
    task: "_Task",
    pool: ThreadPoolExecutor,
    stage: Stage,
    done_bytes: int,
) -> None:
    """Stage the rest of one file."""
    size = file.path.stat().st_size
    # What a compressed file holds is not known; about a third is what logs pack to.
    plain = size if file.compression == "none" else 3 * size
    for parsed in _in_order(blocks(file, writer.state["offset"], TASK_BYTES), task, pool):
        for index, reason, line in parsed.bad:
            number = writer.state["lines"] + index + 1
            if config.on_bad is OnBad.fail:
                if number == 1 and not line[:1].isdigit():
                    reason += " (a header line? on_bad=skip leaves it out)"
                raise ValueError(f"{file.path}, line {number}: {reason}")
            if config.on_bad is OnBad.quarantine:
                writer.quarantine(file.path, number, reason, line)
        writer.append(parsed)
        stage.update(done_bytes + min(size, size * writer.state["offset"] / plain))
        writer.checkpoint_if_due()


def _recorded(work: Work, identities: list[list[Any]]) -> dict[str, Any]:
    """Return the record to go on from: files that have changed since, and all after them, are out."""
    counts = {"whole_files": 0, "offset": 0, "lines": 0, "odd": 0, "bad": 0, "bad_bytes": 0}
    fresh = counts | {"files": [], "rows": []}
    state = work.state.get("parse", fresh)
    known = state["files"]
    if known == identities or (known == identities[: len(known)] and not state.get("done")):
        pass
    elif state["whole_files"] == len(known) - 1 and known[:-1] == identities[: len(known) - 1]:
        # The file that was being read was corrected meanwhile: only its rows go.
        state |= state["before"] | {"files": known[:-1], "rows": state["rows"][:-1]}
    else:
        state = fresh
        for later in set(work.state) - {"identity"}:
            del work.state[later]
    work.state["parse"] = state
    return state


def _identity(file: RawFile) -> list[Any]:
    status = file.path.stat()
    return [str(file.path.resolve()), status.st_size, status.st_mtime_ns]


def _in_order(texts: Iterator[bytes], task: "_Task", pool: ThreadPoolExecutor) -> Iterator[Parsed]:
    """Yield the parsed texts in their order, a few being parsed ahead."""
    ahead = 2 * pool._max_workers
    parsing: deque[Future[Parsed]] = deque()
    for text in texts:
        parsing.append(pool.submit(task, text))
        if len(parsing) >= ahead:
            yield parsing.popleft().result()
    while parsing:
        yield parsing.popleft().result()


class _Task:
    """Parses one piece of text; several threads may call it."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, dtype: np.dtype) -> None:
        self._connection = connection
        self._dtype = dtype
        given = ", ".join(f"nullif({name}, {NO_INTEGER}) AS {name}" for name in NUMERICAL)
        wanted = ", ".join(f"{numerical(name)} AS {name}" for name in NUMERICAL)
        self._query = f"SELECT {wanted} FROM (SELECT {given} FROM piece)"

    def __call__(self, text: bytes) -> Parsed:
        size = 1 << 19
        parts, odd, bad = [], [], []
        start = rows = lines = 0
        while start < len(text):
            stop = text.rfind(b"\n", start, start + size) + 1 or text.find(b"\n", start) + 1
            found = self._parse_block(text[start:stop], bad, lines)
            start = stop
            lines += found[-1]
            parts.append(found[:3])
            odd.append(found[3].moved(rows))
            rows += len(found[0])
        label = np.concatenate([part[0] for part in parts])
        values = np.concatenate([part[1] for part in parts], axis=1)
        codes = np.concatenate([part[2] for part in parts], axis=1)
        missing = np.packbits((values == NO_INTEGER).T, axis=1)
        if missing.shape[1] == 1:
            missing = missing[:, 0]
        columns = [label, self._numericals(values), missing, *codes]
        return Parsed(columns, OddTexts.joined(odd), bad, lines, len(text))

    def _parse_block(self, block: bytes, bad: list, line: int) -> tuple:
        """Return labels, integers, codes, odd texts and lines; append what is bad, by line of the text."""
        num_lines = block.count(b"\n")
        try:
            if not block.isascii():
                block.decode()
            return *_fields(block), num_lines
        except (BadBlockError, UnicodeDecodeError):
            found: Sorted = sort_lines(block)
        bad += [(line + index, reason, text) for index, reason, text in found.bad]
        if not found.good:
            nothing = np.empty((len(NUMERICAL), 0), np.int64)
            codes = np.empty((len(CATEGORICAL), 0), np.uint32)
            return np.empty(0, np.uint8), nothing, codes, OddTexts.joined([]), num_lines
        return *_fields(found.good), num_lines

    def _numericals(self, values: np.ndarray) -> np.ndarray:
        """Return the transformed numericals [rows, 13] in the dtype that is stored."""
        stored = np.empty((values.shape[1], len(NUMERICAL)), self._dtype)
        if values.shape[1]:
            with self._connection.cursor() as cursor:
                piece = dict(zip(NUMERICAL, values, strict=True))  # noqa: F841, the query reads it
                for column, each in enumerate(cursor.execute(self._query).fetchnumpy().values()):
                    stored[:, column] = each
        return stored


def _fields(block: bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray, list]:
    """Return labels [n], integers [13, n], codes [26, n] and the odd texts."""
    fields = find_fields(block, len(COLUMNS))
    codes = hexadecimal(fields, CATEGORIES)
    columns, rows = np.nonzero(codes == ODD)
    at = (columns + CATEGORIES.start, rows)
    places = zip(fields.starts[at].tolist(), fields.ends[at].tolist(), strict=True)
    # A place counts from before the block, where eight more bytes stand.
    texts = [block[start - PADDING : end - PADDING].decode() for start, end in places]
    odd = OddTexts(columns, rows, texts)
    return labels(fields, 0), integers(fields, INTEGERS), codes, odd


class _Writer:
    """Appends parsed pieces to the staged columns and records how far they go."""

    def __init__(self, work: Work, staged: Staged, state: dict[str, Any]) -> None:
        self.state = state
        self._work = work
        self._odd_directory = staged.odd
        self._num_rows = sum(state["rows"])
        self._columns = ColumnAppender(staged.columns, self._num_rows)
        staged.odd.mkdir(exist_ok=True)
        for path in staged.odd.iterdir():
            if int(path.stem) >= state["odd"]:
                path.unlink()
        bad = work.directory / "bad_rows.tsv"
        self._bad = bad.open("r+b" if bad.exists() else "wb")
        self._bad.truncate(state["bad_bytes"])
        self._bad.seek(0, os.SEEK_END)
        self._odd: list[OddTexts] = []
        self._num_odd = 0
        self._saved = time.monotonic()

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, *_: object) -> None:
        self._columns.close()
        self._bad.close()

    def append(self, parsed: Parsed) -> None:
        """Append one piece; it is on record only after the next checkpoint."""
        self._columns.append(parsed.columns)
        if parsed.odd.texts:
            self._odd.append(parsed.odd.moved(self._num_rows))
            self._num_odd += len(parsed.odd.texts)
        self._num_rows += parsed.num_rows
        self.state["rows"][-1] += parsed.num_rows
        self.state["offset"] += parsed.num_bytes
        self.state["lines"] += parsed.num_lines
        self.state["bad"] += len(parsed.bad)

    def quarantine(self, path: Path, line: int, reason: str, text: bytes) -> None:
        """Keep a bad line aside: file, line number, reason and the line as it stands."""
        self._bad.write(f"{path}\t{line}\t{reason}\t".encode() + text + b"\n")

    def checkpoint_if_due(self) -> None:
        """Make a checkpoint now and then."""
        due = time.monotonic() - self._saved > CHECKPOINT_SECONDS
        if due or self._num_odd > ODD_VALUES:
            self.checkpoint()

    def checkpoint(self) -> None:
        """Bring everything to the disk, then record it."""
        self._columns.sync()
        if self._odd:
            odd = OddTexts.joined(self._odd)
            _write_odd(odd, self._odd_directory / f"{self.state['odd']}.parquet")
            self.state["odd"] += 1
            self._odd, self._num_odd = [], 0
        self._bad.flush()
        os.fsync(self._bad.fileno())
        self.state["bad_bytes"] = self._bad.tell()
        self._work.save()
        self._saved = time.monotonic()


def _write_odd(odd: OddTexts, path: Path) -> None:
    """Write texts that have no code, ordered by column and row."""
    texts = {  # noqa: F841, the query reads it
        "column": odd.columns.astype(np.int32),
        "row": odd.rows,
        "value": np.array(odd.texts, object),
    }
    name = str(path).replace("'", "''")
    with duckdb.connect(config={"threads": 1}) as connection:
        connection.execute(
            'COPY (SELECT "column", "row", CAST(value AS VARCHAR) AS value FROM texts '
            f'ORDER BY "column", "row") TO \'{name}\' (FORMAT parquet)'
        )
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
