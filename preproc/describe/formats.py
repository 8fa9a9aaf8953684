"""The table that the files of `source` hold: format, separator, and names where no header has them, by their first lines."""

import csv
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.table_schema import LINE_FORMATS, NUMBER, Source
from dataloading.storage.object_store import is_remote
from preproc.line_blocks import blocks
from preproc.raw_files import RawFile, find_files
from preproc.table.line_formats import LINE
from preproc.table.source_files import SourceFiles, find_source, read_columns
from preproc.vocabulary_sql import COLUMNS as CRITEO
from preproc.vocabulary_sql import NUM_NUMERICAL

DELIMITERS = ("\t", ",", ";", "|")
KAGGLE = ["label", *(f"i{i}" for i in range(1, 14)), *(f"c{i}" for i in range(1, 27))]
"""Names of Criteo's columns in files with a header, in lower case."""
LINES = 200
"""First lines of a file that tell its format."""
REGULAR = 0.9
"""Share of them that a separator parts into equally many fields."""


@dataclass(frozen=True, slots=True)
class FoundTable:
    source: Source  # its `files` are those of the option
    files: SourceFiles  # resolved, with their columns
    # other files of the directory, with their columns or why they cannot be read
    others: dict[Path, str]
    is_criteo: bool  # whether its columns are those of Criteo's logs


def find_table(source: Any) -> FoundTable:
    """Return the table of a file, several, a pattern, or a directory, of which the largest counts."""
    is_directory = isinstance(source, str) and not is_remote(source) and Path(source).is_dir()
    others: dict[Path, str] = {}
    if is_directory:
        kinds, others = _in_directory(Path(source))
    else:
        kinds = {file: _kind(file) for file in find_files(source, "source", tables=True)}
    tables: dict[tuple[Any, ...], list[RawFile]] = {}
    columns = {
        file: read_columns(Source(files=str(file.path), **kind), [file]).columns
        for file, kind in kinds.items()
    }
    for file, kind in kinds.items():
        names = () if kind.get("format") in LINE_FORMATS else tuple(sorted(columns[file]))
        tables.setdefault((kind.get("format"), kind.get("delimiter"), names), []).append(file)
    chosen = max(tables.values(), key=lambda group: sum(f.path.stat().st_size for f in group))
    if len(tables) > 1 and not is_directory:
        other = next(file for file in kinds if file not in chosen)
        raise ValueError(
            f"{other.path}: other columns than {chosen[0].path}; describe one table at a time, and join them by a query "
            "(docs/your_data.md)"
        )
    others |= {file.path: ", ".join(columns[file]) for file in kinds if file not in chosen}
    kind = kinds[chosen[0]]
    if kind.get("format") in LINE_FORMATS:
        # Later files may lack what the lines of these name.
        every = list(dict.fromkeys(name for file in chosen for name in columns[file]))
        if kind["format"] != "jsonl" or any(columns[file] != every for file in chosen):
            kind |= {"columns": every}
    paths = [str(file.path) for file in chosen]
    described = Source(files=_as_named(source, paths, others) if is_directory else source, **kind)
    files_of = read_columns(*find_source("rows", Source(files=paths, **kind)))
    is_criteo = [name.strip().lower() for name in files_of.columns] in (KAGGLE, list(CRITEO))
    return FoundTable(described, files_of, others, is_criteo)


def _in_directory(directory: Path) -> tuple[dict[RawFile, dict[str, Any]], dict[Path, str]]:
    """Return the kinds of the tables below a directory, and why its other files are none."""
    kinds: dict[RawFile, dict[str, Any]] = {}
    others: dict[Path, str] = {}
    for path in sorted(directory.rglob("*")):
        if path.is_dir() or path.name[0] in "._":
            continue
        try:
            (file,) = find_files([str(path)], "source", tables=True)
            kinds[file] = _kind(file)
        except ValueError as error:
            others[path] = str(error).removeprefix(f"{path}: ")
    # A text without separators is rather a README than a table.
    tables = {
        file: kind for file, kind in kinds.items() if kind["format"] != "csv" or "delimiter" in kind
    }
    if not tables:
        raise ValueError(f"{directory}: no file in it holds a table; give the files")
    others |= {file.path: "no table" for file in kinds if file not in tables}
    return tables, others


def _as_named(directory: str, paths: list[str], others: dict[Path, str]) -> Any:
    """Return the files of a directory as a description names them: one, a pattern, or a list."""
    if len(paths) == 1:
        return paths[0]
    suffix = "".join(Path(paths[0]).suffixes[-2:])
    pattern = f"{directory.rstrip('/')}/**/*{suffix}"
    is_whole = all(path.endswith(suffix) for path in paths) and suffix
    return paths if not is_whole or any(str(p).endswith(suffix) for p in others) else pattern


def _kind(file: RawFile) -> dict[str, Any]:
    """Return `format`, `delimiter` and `columns` of a source by the first lines of its file."""
    if file.is_parquet:
        return {"format": "parquet"}
    head = next(blocks(file, 0), b"\n")
    try:
        lines = head.decode("utf-8-sig").splitlines(keepends=True)[:LINES]
    except UnicodeDecodeError:
        raise ValueError(
            f"{file.path}: not UTF-8 text; convert it, as by iconv -f latin1 -t utf-8"
        ) from None
    bare = [" ".join(line.split("#")[0].split()) for line in lines]
    bare = [line for line in bare if line] or [""]
    if bare[0].startswith("{"):
        return {"format": "jsonl"}
    if re.match(r"\[\s*(\{|$)", bare[0]):
        raise ValueError(
            f"{file.path}: one array of JSON; write a line per row, as jq -c '.[]' does"
        )
    if any(re.match(r"@relation\b", line, re.IGNORECASE) for line in bare):
        raise ValueError(
            f"{file.path}: an ARFF file; write it as CSV, as pandas does with scipy.io.arff"
        )
    for name in ("libffm", "libsvm"):
        if all(re.fullmatch(LINE[name], line) for line in bare) and ":" in "".join(bare):
            return {"format": name}
    delimiter, rows, above = _separated(lines)
    if above:
        raise ValueError(
            f"{file.path}: the rows begin in line {above + 1}, with other fields than above; remove what is no header, as by "
            f"tail -n +{above + 1} FILE"
        )
    kind: dict[str, Any] = {"format": "csv"}
    if delimiter == "\t" and not any(cell.startswith('"') for row in rows for cell in row):
        kind = {"format": "tsv"}
    elif delimiter is not None:
        kind["delimiter"] = delimiter
    # A header has different texts, no numbers, which the rows below do not have.
    first, rest = rows[0], rows[1:]
    named = [cell for cell in first if cell]
    has_header = (
        len(set(named)) == len(named) >= len(first) - 1
        and not any(NUMBER.fullmatch(cell) for cell in named)
        and not any(row[i] == cell for row in rest for i, cell in enumerate(first) if cell)
    )
    if not has_header:
        plain = [f"c{i + 1}" for i in range(len(rows[0]))]
        kind["columns"] = list(CRITEO) if all(map(_is_criteo, rows)) else plain
    return kind


def _separated(lines: list[str]) -> tuple[str | None, list[list[str]], int]:
    """Return the separator that most equal lines have, or None; their rows, and the number of lines above them."""
    found = []
    for delimiter in DELIMITERS:
        rows = [row for row in csv.reader(lines, delimiter=delimiter) if row]
        ((width, times),) = Counter(map(len, rows)).most_common(1) or [(0, 0)]
        if width > 1 and times >= REGULAR * len(rows):
            above = next(number for number, row in enumerate(rows) if len(row) == width)
            found.append((delimiter, [row for row in rows if len(row) == width], above))
    without = None, [[line.rstrip("\r\n")] for line in lines], 0
    return min(found, key=lambda each: (each[2] > 0, -len(each[1][0])), default=without)


def _is_criteo(row: list[str]) -> bool:
    numbers, values = row[1 : 1 + NUM_NUMERICAL], row[1 + NUM_NUMERICAL :]
    return (
        len(row) == len(CRITEO)
        and row[0] in ("0", "1")
        and all(re.fullmatch(r"-?\d*", number) for number in numbers)
        and all(re.fullmatch(r"([0-9a-f]{8})?", value) for value in values)
    )
