"""Input of NVIDIA's transcoder: headerless CSV files, and a `feature_spec.yaml` that names their columns.

Its chunks are of type `csv`. `features` lists the columns in order, and the files follow one another. Several
chunks of a split hold different columns of the same rows. A cardinality may be `auto`: then all files are
read first, and it is the largest id plus one.

The transcoder knows `train` and `test` alone; earlier versions wrote `validation.csv` beside `test.csv` without naming it.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc

from configs.messages import first_line, shortened
from dataloading.dataset.documents import read_yaml
from dataloading.dataset.feature_spec import SPEC_NAME, FeatureSpec
from dataloading.dataset.row_columns import RowColumn
from dataloading.dataset.split_files import SplitFiles, expect, find_file, names_of
from preproc.convert.rows import CHUNK_ROWS, Chunk, input_feature

TYPE = "csv"
AUTO = "auto"
BLOCK_BYTES = 16 << 20


def is_csv_spec(root: Path) -> bool:
    """Return whether the spec in `root` has a chunk of type csv; ValueError if it is not plain yaml."""
    document = read_yaml(root / SPEC_NAME)
    sources = document.get("source_spec") if isinstance(document, Mapping) else None
    splits = sources.values() if isinstance(sources, Mapping) else ()
    chunks = [chunk for chunks in splits if isinstance(chunks, list) for chunk in chunks]
    return any(isinstance(chunk, Mapping) and chunk.get("type") == TYPE for chunk in chunks)


class CsvRows:
    """Rows of a directory in NVIDIA's CSV format; without `has_tables` ids are any integers."""

    kind = "NVIDIA's CSV"
    left_out: Sequence[str] = ()
    """Nothing: every column of a file is a feature of the spec, or refused."""

    def __init__(self, root: Path, numerical_dtype: str, *, has_tables: bool = True) -> None:
        document = read_yaml(root / SPEC_NAME)
        where = str(root / SPEC_NAME)
        channels = _section(document, where, "channel_spec")
        features = _section(document, where, "feature_spec")
        self._sources = _section(document, where, "source_spec")
        categorical, labels, numerical = (
            names_of(channels.get(channel) or [], f"{where}: channel_spec.{channel}")
            for channel in ("categorical", "label", "numerical")
        )
        expect(len(labels) == 1, f"{where}: channel_spec.label", labels, "exactly one label")
        few = "at least one feature"
        expect(len(categorical) > 0, f"{where}: channel_spec.categorical", [], few)
        self._names = [*labels, *numerical, *categorical]
        twice = sorted({name for name in self._names if self._names.count(name) > 1})
        expect(not twice, f"{where}: channel_spec", twice, "every feature in one channel, once")
        cardinalities = {name: _cardinality(features, where, name) for name in categorical}
        table_of = {name: features[name].get("table", name) for name in categorical}
        for name, table in table_of.items():
            is_named, key = isinstance(table, str) and bool(table), f"feature_spec.{name}.table"
            expect(is_named, f"{where}: {key}", table, "the name of a table")
        self._root, self._label = root, labels[0]
        self._numerical, self._categorical = numerical, categorical
        self._check_chunks(where)
        self._sources = {**self._sources, **_unnamed_validation(root, self._sources)}
        # A table has a row at least, also if all of its ids are negative, which the writer refuses.
        counted = {name: table_of[name] for name, rows in cardinalities.items() if rows == AUTO}
        rows_of = dict.fromkeys(counted.values(), 1)
        if counted and has_tables:
            for split in self._sources:
                for chunk in self._tables(split):
                    for name, table in counted.items():
                        rows_of[table] = max(
                            rows_of[table], int(np.asarray(chunk.column(name)).max()) + 1
                        )

        def rows_of_feature(name: str) -> int | None:
            if not has_tables:
                return None
            return rows_of[table_of[name]] if name in counted else int(cardinalities[name])

        self.spec = FeatureSpec(
            root=root,
            numerical=numerical,
            numerical_dtype=np.dtype(numerical_dtype),
            labels=(RowColumn(labels[0]),),
            categorical=tuple(
                input_feature(name, rows_of_feature(name), 1, table_of[name])
                for name in categorical
            ),
            splits={name: SplitFiles(0) for name in self._sources},
            metadata={},
        )

    def chunks(self, split: str) -> Iterator[Chunk]:
        for table in self._tables(split):
            numbers = [np.asarray(table.column(name), np.float64) for name in self._numerical]
            yield Chunk(
                np.asarray(table.column(self._label), np.float64),
                np.stack(numbers, axis=1) if numbers else None,
                {name: np.asarray(table.column(name)) for name in self._categorical},
                {},
            )

    def _check_chunks(self, where: str) -> None:
        splits = list(self._sources)
        named = all(isinstance(split, str) for split in splits) and {"train", "test"} <= {*splits}
        expect(named, f"{where}: source_spec", splits, "train, test and any other split")
        for split, chunks in self._sources.items():
            here = f"{where}: source_spec.{split}"
            expect(isinstance(chunks, list), here, chunks, "a list of chunks")
            listed: list[str] = []
            for number, chunk in enumerate(chunks):
                key = f"{here}[{number}]"
                expect(isinstance(chunk, Mapping), key, chunk, "a mapping with type and features")
                kind = chunk.get("type")
                expect(kind == TYPE, f"{key}.type", kind, f"{TYPE} in every chunk")
                listed += names_of(chunk.get("features"), f"{key}.features")
                files = chunk.get("files")
                some = isinstance(files, list) and bool(files)
                expect(some, f"{key}.files", files, "a list of files")
            same = sorted(listed) == sorted(self._names)
            expect(same, here, sorted(listed), "every feature of channel_spec, once")

    def _tables(self, split: str) -> Iterator[pa.Table]:
        readers = [self._batches(chunk) for chunk in self._sources[split]]
        waiting = [next(reader, None) for reader in readers]
        while True:
            tables = [table for table in waiting if table is not None]
            if len(tables) < len(waiting):
                break
            count = min(len(table) for table in tables)
            parts = [table.slice(0, count) for table in tables]
            columns = {name: part.column(name) for part in parts for name in part.column_names}
            yield pa.table(columns)
            rests = [table.slice(count) for table in tables]
            waiting = [
                rest if len(rest) else next(reader, None)
                for rest, reader in zip(rests, readers, strict=True)
            ]
        if tables:
            raise ValueError(
                f"{self._root}: the chunks of split '{split}' hold different numbers of rows"
            )

    def _batches(self, chunk: Mapping[str, Any]) -> Iterator[pa.Table]:
        names = list(chunk["features"])
        types = dict.fromkeys(self._categorical, pa.int64())
        types |= dict.fromkeys([self._label, *self._numerical], pa.float64())
        for name in chunk["files"]:
            path = find_file(self._root, name)
            row = 0
            try:
                reader = pc.open_csv(
                    path,
                    pc.ReadOptions(use_threads=False, block_size=BLOCK_BYTES, column_names=names),
                    pc.ParseOptions(newlines_in_values=False),
                    pc.ConvertOptions(column_types={name: types[name] for name in names}),
                )
                for batch in reader:
                    table = pa.Table.from_batches([batch])
                    for column in names:
                        if table.column(column).null_count:
                            at = row + int(np.asarray(table.column(column).is_null()).argmax())
                            raise ValueError(f"row {at}: no {column}")
                    row += len(table)
                    for start in range(0, len(table), CHUNK_ROWS):
                        yield table.slice(start, CHUNK_ROWS)
            except (pa.ArrowException, ValueError) as error:
                text = shortened(first_line(error))
                raise ValueError(
                    f"{path}: {text}; want {len(names)} numbers per line, no header"
                ) from None


def _section(document: object, where: str, key: str) -> Mapping[str, Any]:
    section = document.get(key) if isinstance(document, Mapping) else None
    expect(
        isinstance(section, Mapping), f"{where}: {key}", section, "a mapping, as in NVIDIA's spec"
    )
    assert isinstance(section, Mapping)
    return section


def _cardinality(features: Mapping[str, Any], where: str, name: str) -> int | str:
    entry = features.get(name)
    rows = entry.get("cardinality") if isinstance(entry, Mapping) else None
    is_count = isinstance(rows, int) and not isinstance(rows, bool) and rows >= 1
    want = f"an integer of at least 1, or {AUTO}: NVIDIA's spec has a cardinality per feature"
    expect(is_count or rows == AUTO, f"{where}: feature_spec.{name}.cardinality", rows, want)
    assert rows is not None
    return rows


def _unnamed_validation(root: Path, sources: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chunks of split `validation` if an earlier version left it unnamed."""
    chunks = [
        {
            **chunk,
            "files": [f"validation{str(name).removeprefix('test')}" for name in chunk["files"]],
        }
        for chunk in sources["test"]
        if all(str(name).startswith("test") for name in chunk["files"])
    ]
    names = [name for chunk in chunks for name in chunk["files"]]
    is_written = len(chunks) == len(sources["test"]) and all((root / n).is_file() for n in names)
    return {"validation": chunks} if is_written and "validation" not in sources else {}
