"""Raw Criteo lines to a column store: read, parsed by several threads, written in order.

A line has 40 tab-separated columns: the label (0 or 1), 13 integers and 26 categories; a missing
value is an empty field. Nothing is quoted. Blank lines are skipped.

The store holds `label.u8`, the numericals in their stored dtype, one bit per numerical for missing values, and one column of
32-bit codes per category. A category of eight lower-case hexadecimal digits is its own code. Every other text is non-hex and is
stored in Parquet files (column, row, value) beside the codes. Nothing is lost, and no dictionary has to fit in memory.
"""

import os
import time
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isal.isal_zlib import crc32

from configs.preproc_schema import OnBad, PreprocConfig
from dataloading.dataset.durable_files import sync_stream
from preproc.column_store import ColumnAppender, StoredColumn, size_and_crc32
from preproc.criteo.parse_block import BlockParser, NonHexTexts, Parsed
from preproc.line_blocks import blocks
from preproc.ordered_map import ordered_map
from preproc.raw_files import RawFile
from preproc.report.console import Phase, Progress
from preproc.vocabulary_sql import CATEGORICAL, NUMERICAL
from preproc.work_directory import Work, connected

# Key of the record and directory of the files. Earlier versions wrote them, and their runs resume here.
NON_HEX_FILES = "odd"
# Text per block that a thread parses: large enough for little overhead, small enough for many blocks.
BLOCK_BYTES = 1 << 22
# Memory per block, with its columns. Columns take at most four times the text. If most fields are non-hex
# texts of one character, lines are longer, and columns and texts take less than seven times the text.
MEMORY_BYTES = 8 * BLOCK_BYTES
CHECKPOINT_SECONDS = 10.0
# Non-hex texts in memory before a checkpoint writes them, and the memory of the DuckDB that writes.
NON_HEX_BYTES = 1 << 24
NON_HEX_MEMORY = "128MB"


@dataclass(slots=True)
class ColumnStore:
    label: StoredColumn
    numerical: StoredColumn
    missing: StoredColumn
    codes: dict[str, StoredColumn]
    non_hex: Path

    @classmethod
    def below(cls, directory: Path, numerical_dtype: str) -> "ColumnStore":
        width = len(NUMERICAL)
        return cls(
            StoredColumn(directory / "label.u8", "u1"),
            StoredColumn(directory / "numerical.bin", numerical_dtype, width),
            StoredColumn(directory / "missing.bits", "u1", (width + 7) // 8),
            {name: StoredColumn(directory / f"{name}.u32", "<u4") for name in CATEGORICAL},
            directory / NON_HEX_FILES,
        )

    @property
    def columns(self) -> list[StoredColumn]:
        return [self.label, self.numerical, self.missing, *self.codes.values()]

    @property
    def row_bytes(self) -> int:
        return sum(column.row_bytes for column in self.columns)


@dataclass(frozen=True, slots=True)
class ParsedFiles:
    """Counts of the lines of all files, whose rows are in the column store."""

    rows: list[int]  # per file
    num_bad: int  # lines that are left out
    has_non_hex: bool

    @classmethod
    def of(cls, record: dict[str, Any]) -> "ParsedFiles":
        return cls(record["rows"], record["bad"], record[NON_HEX_FILES] > 0)


def parse_files(
    files: list[RawFile],
    config: PreprocConfig,
    memory: int,
    work: Work,
    store: ColumnStore,
    progress: Progress,
) -> ParsedFiles:
    """Store the lines of all files in order, resuming from the record of `work`."""
    identities = [file.identity for file in files]
    state = _recorded(work, identities)
    if state.get("done"):
        return ParsedFiles.of(state)
    threads = config.threads or os.cpu_count() or 1
    # Two more blocks are being read and written.
    ahead = max(1, min(2 * threads, memory // MEMORY_BYTES - 2))
    parser = BlockParser(store.numerical.dtype.name)

    def parse(texts: Iterator[bytes]) -> Iterator[Parsed]:
        for parsed in ordered_map(parser, texts, threads, ahead):
            yield parsed
            parser.reuse(parsed.arrays)  # the caller has written them

    with progress.phase("parse") as phase, _Writer(work, store, state) as writer:
        phase.total = sum(file.path.stat().st_size for file in files)
        done_bytes = 0
        for number, file in enumerate(files):
            if number < state["whole_files"]:
                done_bytes += file.path.stat().st_size
                continue
            if len(state["rows"]) == number:
                state["files"].append(identities[number])
                state["rows"].append(0)
                state["offset"] = state["lines"] = 0
                state["before"] = {key: state[key] for key in (NON_HEX_FILES, "bad", "bad_bytes")}
            phase.detail = str(file.path)
            _parse_file(file, config, writer, parse, phase, done_bytes)
            done_bytes += file.path.stat().st_size
            if state["rows"][number] == 0:
                raise ValueError(
                    f"{file.path}: no line in it; drop it from the sources, or fetch it again"
                )
            state["whole_files"] += 1
            writer.checkpoint()
        state["done"] = True
        work.state["growing"] = []
        work.save()
        what = str(files[0].path) if len(files) == 1 else f"{len(files)} files"
        bad = f", {state['bad']:,} bad lines left out" if state["bad"] else ""
        phase.name = f"parse {what}: {sum(state['rows']):,} rows{bad}"
    return ParsedFiles.of(state)


def _parse_file(
    file: RawFile,
    config: PreprocConfig,
    writer: "_Writer",
    parse: Callable[[Iterator[bytes]], Iterator[Parsed]],
    phase: Phase,
    done_bytes: int,
) -> None:
    size, plain = file.path.stat().st_size, file.plain_bytes
    for parsed in parse(blocks(file, writer.state["offset"], BLOCK_BYTES)):
        for index, reason, line in parsed.bad:
            number = writer.state["lines"] + index + 1
            if config.on_bad is OnBad.fail:
                if number == 1 and not line[:1].isdigit() and b"\t" in line:
                    is_marked = line.startswith(BOM_UTF8)
                    cause = "a byte order mark? remove the first three bytes" * is_marked
                    reason += f" ({cause or 'a header line? on_bad=skip leaves it out'})"
                raise ValueError(f"{file.path}, line {number}: {reason}")
            if config.on_bad is OnBad.quarantine:
                writer.quarantine(file.path, number, reason, line)
        writer.append(parsed)
        phase.update(done_bytes + min(size, size * writer.state["offset"] / plain))
        writer.checkpoint_if_due()


def _recorded(work: Work, identities: list[list[Any]]) -> dict[str, Any]:
    """Return the record to resume from, without files that have changed since and those after them."""
    counts = {"whole_files": 0, "offset": 0, "lines": 0, NON_HEX_FILES: 0, "bad": 0, "bad_bytes": 0}
    fresh: dict[str, Any] = counts | {"files": [], "rows": []}
    state = work.state.get("parse", fresh)
    known = state["files"]
    if known == identities or (known == identities[: len(known)] and not state.get("done")):
        pass
    elif state["whole_files"] == len(known) - 1 and known[:-1] == identities[: len(known) - 1]:
        # The file that was being read has been corrected since: only its rows are dropped.
        state |= state["before"] | {"files": known[:-1], "rows": state["rows"][:-1]}
    else:
        state = fresh
        work.restart()
    work.state["parse"] = state
    return state


class _Writer(AbstractContextManager["_Writer"]):
    """Appends parsed blocks to the column store and records its progress."""

    def __init__(self, work: Work, store: ColumnStore, state: dict[str, Any]) -> None:
        self.state = state
        self._work = work
        self._non_hex_directory = store.non_hex
        self._num_rows = sum(state["rows"])
        self._bad_path = work.directory / "bad_rows.tsv"
        columns = [self._kept(c.path, self._num_rows * c.row_bytes) for c in store.columns]
        self._bad_crc32 = self._kept(self._bad_path, state["bad_bytes"])[1]
        # Recorded as shorter, before the files are.
        checked, directory = work.state["checked"], store.non_hex
        stale = [
            path
            for path in (directory.iterdir() if directory.is_dir() else ())
            if not path.stem.isdigit() or int(path.stem) >= state[NON_HEX_FILES]
        ]
        for path in stale:
            checked.pop(f"{directory.name}/{path.name}", None)
        work.state["growing"] = [name for name in checked if "/" not in name]
        if work.has_progress:
            work.save()
        self._columns = ColumnAppender(store.columns, columns)
        store.non_hex.mkdir(exist_ok=True)
        for path in stale:
            path.unlink()
        self._bad = self._bad_path.open("r+b" if self._bad_path.exists() else "wb")
        self._bad.truncate(state["bad_bytes"])
        self._bad.seek(0, os.SEEK_END)
        self._non_hex: list[NonHexTexts] = []
        self._non_hex_bytes = 0
        self._saved = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._columns.close()
        self._bad.close()

    def _kept(self, path: Path, num_bytes: int) -> tuple[int, int]:
        """Return bytes and CRC-32 of what remains of a recorded file, and record them."""
        checked = self._work.state["checked"]
        before = checked.get(path.name)
        if before and before[0][0] == num_bytes:
            return num_bytes, before[0][1]
        kept = size_and_crc32(path, 0, num_bytes) if num_bytes else (0, 0)
        checked[path.name] = [list(kept)]
        return kept

    def append(self, parsed: Parsed) -> None:
        self._columns.append(parsed.columns)
        for non_hex in parsed.non_hex:
            self._non_hex.append(non_hex.moved(self._num_rows))
            self._non_hex_bytes += self._non_hex[-1].num_bytes
        self._num_rows += parsed.num_rows
        self.state["rows"][-1] += parsed.num_rows
        self.state["offset"] += parsed.num_bytes
        self.state["lines"] += parsed.num_lines
        self.state["bad"] += len(parsed.bad)

    def quarantine(self, path: Path, line: int, reason: str, text: bytes) -> None:
        """Write a bad line to the quarantine: file, line number, reason and the line unchanged."""
        row = f"{path}\t{line}\t{reason}\t".encode() + text + b"\n"
        self._bad_crc32 = crc32(row, self._bad_crc32)
        self._bad.write(row)

    def checkpoint_if_due(self) -> None:
        due = time.monotonic() - self._saved > CHECKPOINT_SECONDS
        if due or self._non_hex_bytes > NON_HEX_BYTES:
            self.checkpoint()

    def checkpoint(self) -> None:
        """Sync everything to disk, then record it."""
        self._columns.sync()
        checked = self._work.state["checked"]
        if self._non_hex:
            path = self._non_hex_directory / f"{self.state[NON_HEX_FILES]}.parquet"
            _write_non_hex(self._non_hex, path)
            checked |= self._work.synced_records(path)
            self.state[NON_HEX_FILES] += 1
            self._non_hex, self._non_hex_bytes = [], 0
        sync_stream(self._bad)
        self.state["bad_bytes"] = self._bad.tell()
        checked |= self._columns.records
        checked[self._bad_path.name] = [[self.state["bad_bytes"], self._bad_crc32]]
        self._work.save()
        self._saved = time.monotonic()


def _write_non_hex(non_hex: list[NonHexTexts], path: Path) -> None:
    """Write non-hex texts ordered by column and row; `path` is in the work directory."""
    import pyarrow as pa

    columns = {"column": "columns", "row": "rows", "value": "texts"}
    texts = pa.table(  # noqa: F841, the query reads it
        {
            name: pa.chunked_array([getattr(part, of) for part in non_hex])
            for name, of in columns.items()
        }
    )
    name = str(path).replace("'", "''")
    spill = str(path.parent.with_name("spill"))
    with connected(
        {"threads": 1, "memory_limit": NON_HEX_MEMORY, "temp_directory": spill}
    ) as connection:
        connection.execute(
            'COPY (SELECT CAST("column" AS INTEGER) AS "column", "row", value FROM texts '
            f'ORDER BY "column", "row") TO \'{name}\' (FORMAT parquet)'
        )
