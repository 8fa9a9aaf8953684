"""Inputs of preprocessing: tables as text and Parquet, raw Criteo logs, the description of a table, a fitted dataset."""

import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from hypothesis import strategies as st

from tests.fuzz.commands import as_preproc
from tests.fuzz.harness import Fuzzer
from tests.fuzz.mutations import (
    JSON_LITERALS,
    BytesEdit,
    Edit,
    apply_bytes,
    apply_edits,
    as_json,
    bytes_edits,
    document_edits,
)
from tests.fuzz.tables import TableEdit, apply_table, table_edits
from tests.helpers.preproc_command import raw_line

CITIES = ("Rome", '"a, b"', "Oslo", "")


def _csv_line(row: int) -> str:
    age = "" if row % 5 == 0 else row * 1.5
    return f"{row % 2},{age},{CITIES[row % 4]},{'a|b' if row % 3 else ''}\n"


CSV = "y,age,city,tags\n" + "".join(map(_csv_line, range(24)))
TABLE: dict[str, Any] = {
    "sources": {"t": {"files": "FILE"}},
    "missing": ["NA", "-1"],
    "label": {"name": "y"},
    "numerical": [
        {"name": "age", "transforms": [{"fill": 0}, {"clip": [0, 50]}, {"log": 1}, "standardise"]}
    ],
    "categorical": [
        "city",
        {"name": "tags", "separator": "|"},
        {"name": "both", "cross": ["city", "tags"]},
        {"name": "hashed", "expression": "city", "buckets": 5},
        {"name": "home", "expression": "tags", "vocabulary_of": "city"},
    ],
    "history": [
        {"name": "past", "of": "city", "by": "tags", "order_by": "TRY_CAST(age AS DOUBLE)"}
        | {"length": 3, "filter": "y = '1'", "rows": "train"}
    ],
    "split": {"by": "fraction", "train": 0.75},
}
FIELDS = (
    *(
        "",
        "nan",
        "NaN",
        "inf",
        "1e300",
        "-1e999",
        "1e",
        "x",
        "é",
        "\x1b[31m",
        "\x00",
        " 1",
        "+1",
        "0x1",
    ),
    *('"', '""', '"a', 'a"b', '"a\nb"', "a,b", "\t", "\r", "true", "yes", "NA", "null", "9" * 30),
    *("1.0", "2", "-1", "1,5", "x" * 70_000, "\ufeff", "|", "||", "a|", "2020-01-01", "\u202e"),
)
HEADERS = (
    *("y,age,city,tags,tags", "y,y,city,tags", ",age,city,tags", "y,age,city", "age,city,tags,y"),
    *("Y,AGE,CITY,TAGS", "y;age;city;tags", '"y","age","city","tags"', "y, age, city, tags", ""),
    *(
        "y,age,city,tags,file_,order_",
        "y,age,city,\x1b[31m",
        "1,2,3,4",
        "y\tage\tcity\ttags",
        ",,,",
    ),
    *("y,age,city,tags\ny,age,city,tags", "\ufeffy,age,city,tags", "y,age,city," + "x" * 3000),
)
OPTIONS = st.fixed_dictionaries(
    {"on_bad": st.sampled_from(["fail", "skip", "quarantine"])},
    optional={
        "shuffle": st.booleans(),
        "frequency_limit": st.integers(0, 5),
        "numerical_dtype": st.sampled_from(["float16", "float32"]),
        "vocabulary": st.sampled_from(["train", "all"]),
    },
)
SOURCES = st.fixed_dictionaries(
    {},
    optional={
        "format": st.sampled_from(["csv", "tsv", "parquet"]),
        "header": st.booleans(),
        "delimiter": st.sampled_from([",", ";", "\t", "|", " ", "ab", "", "\n", '"', "é"]),
        "columns": st.sampled_from([["y", "age", "city", "tags"], ["y"], ["y", "y"], [""], [1]]),
    },
)


def _build(file: Path, table: dict[str, Any], options: dict[str, Any], room: Path) -> None:
    as_preproc(
        "dataset=any",
        f"output={room / 'out'}",
        table=_with_file(table, str(file)),
        **{key: value for key, value in options.items() if not isinstance(value, str)},
        **{key: value for key, value in options.items() if isinstance(value, str)},
    )


def _with_file(value: Any, file: str) -> Any:
    """Replace the placeholder by the path of the file."""
    if isinstance(value, dict):
        # OmegaConf refuses other keys before the description is read.
        return {str(key): _with_file(item, file) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_file(item, file) for item in value]
    return file if value == "FILE" else value


@dataclass(frozen=True, slots=True)
class TextChange:
    """A changed CSV: fields (row, column, text), header, bytes; and how it is described."""

    fields: list[tuple[int, int, str]]
    header: str | None
    edits: list[BytesEdit]
    source: dict[str, Any]
    options: dict[str, Any]


def _text_changes(_: None) -> st.SearchStrategy[TextChange]:
    field = st.tuples(
        st.integers(1, 24),
        st.integers(0, 3),
        st.one_of(st.sampled_from(FIELDS), st.text(max_size=4)),
    )
    return st.builds(
        TextChange,
        st.lists(field, max_size=4),
        st.one_of(st.none(), st.none(), st.sampled_from(HEADERS)),
        st.one_of(st.just([]), bytes_edits(2)),
        st.one_of(st.just({}), SOURCES),
        OPTIONS,
    )


def _changed_text(_: None, change: TextChange, room: Path) -> None:
    lines = [line.split(",") for line in CSV.splitlines()]
    for row, column, text in change.fields:
        lines[row][column % len(lines[row])] = text
    if change.header is not None:
        lines[0] = [change.header]
    text = "".join(",".join(line) + "\n" for line in lines).encode("utf-8", "surrogatepass")
    (room / "t.csv").write_bytes(apply_bytes(text, change.edits))
    table = TABLE | {"sources": {"t": {"files": "FILE"} | change.source}}
    _build(room / "t.csv", table, change.options, room)


def _make_parquet(root: Path) -> Path:
    root.mkdir()
    table = {
        "y": pa.array([i % 2 for i in range(24)], pa.int64()),
        "age": pa.array([None if i % 5 == 0 else i * 1.5 for i in range(24)], pa.float64()),
        "city": pa.array([["Rome", "Oslo", None][i % 3] for i in range(24)]),
        "tags": pa.array([["a|b", "", "c"][i % 3] for i in range(24)]),
    }
    pq.write_table(pa.table(table), root / "t.parquet", row_group_size=10)
    return root / "t.parquet"


def _changed_table(
    path: Path, change: tuple[list[TableEdit], list[BytesEdit], dict[str, Any]], room: Path
) -> None:
    edits, byte_edits, options = change
    target = room / "t.parquet"
    if byte_edits:
        target.write_bytes(apply_bytes(path.read_bytes(), byte_edits))
    else:
        apply_table(pq.read_table(path), edits, target)
    table = TABLE | {"sources": {"t": {"files": "FILE", "format": "parquet"}}}
    _build(target, table, options, room)


def _changed_description(_: None, change: tuple[list[Edit], dict[str, Any]], room: Path) -> None:
    edits, options = change
    (room / "t.csv").write_text(CSV)
    _build(room / "t.csv", apply_edits(TABLE, edits), options, room)


@dataclass(frozen=True, slots=True)
class LogChange:
    """Changed raw logs: fields (line, column, text) and bytes; options."""

    fields: list[tuple[int, int, str]]
    edits: list[BytesEdit]
    options: dict[str, Any]


def _log_changes(_: None) -> st.SearchStrategy[LogChange]:
    text = st.one_of(st.sampled_from(FIELDS), st.integers().map(str), st.text(max_size=4))
    return st.builds(
        LogChange,
        st.lists(st.tuples(st.integers(0, 19), st.integers(0, 39), text), max_size=4),
        st.one_of(st.just([]), bytes_edits(2)),
        OPTIONS,
    )


def _changed_logs(_: None, change: LogChange, room: Path) -> None:
    lines = [raw_line(i % 2, i1=i, i2=-1, c1=f"{i % 3:08x}", c2="text") for i in range(20)]
    fields = [line.split("\t") for line in lines]
    for line, column, text in change.fields:
        fields[line][column] = text
    data = "".join("\t".join(line) + "\n" for line in fields).encode("utf-8", "surrogatepass")
    (room / "day_0").write_bytes(apply_bytes(data, change.edits))
    as_preproc(
        "dataset=criteo_kaggle",
        f"output={room / 'out'}",
        source=str(room / "day_0"),
        **change.options,
    )


def _make_fitted(root: Path) -> Path:
    root.mkdir()
    (root / "t.csv").write_text(CSV)
    _build(root / "t.csv", TABLE, {}, root)
    return root


@dataclass(frozen=True, slots=True)
class NewRows:
    """Rows that a fit of texts is applied to: numbers as they are, or texts with changed fields (row, column, text)."""

    of_numbers: bool
    fields: list[tuple[int, int, str]]
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class FittedChange:
    """A change of one file of a fitted dataset; with_checksum: the spec says that it is right."""

    file: str
    edits: list[Edit]
    byte_edits: list[BytesEdit]
    table_edits: list[TableEdit]
    with_checksum: bool
    rows: NewRows


@dataclass(frozen=True, slots=True)
class OtherFit:
    """Another fit of the same features, as a run could have written it: counts per value, and the fitted numbers of `age`."""

    feature: str
    counts: dict[str, int]
    fitted: tuple[float, float]
    rows: NewRows


def _new_rows() -> st.SearchStrategy[NewRows]:
    field = st.tuples(st.integers(1, 24), st.integers(0, 3), st.sampled_from(FIELDS))
    options = st.fixed_dictionaries(
        {
            # A history of training rows alone refuses rows that all become another split.
            "split_name": st.sampled_from([None, "train"]),
            "on_bad": st.sampled_from(["skip", "quarantine", "fail"]),
        }
    )
    return st.builds(NewRows, st.booleans(), st.lists(field, max_size=2), options)


def _fitted_changes(root: Path) -> st.SearchStrategy[FittedChange | OtherFit]:
    document = yaml.safe_load((root / "out/preproc.json").read_text())
    vocabularies = sorted(path.name for path in (root / "out/vocabulary").iterdir())
    damage = st.builds(
        FittedChange,
        st.sampled_from(["preproc.json", *(f"vocabulary/{name}" for name in vocabularies)]),
        document_edits(document, JSON_LITERALS),
        st.one_of(st.just([]), st.just([]), bytes_edits(2)),
        table_edits(["value", "id", "count"]),
        st.sampled_from([True, True, True, False]),
        _new_rows(),
    )
    text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6)
    number = st.floats(allow_nan=False, allow_infinity=False)
    other = st.builds(
        OtherFit,
        st.sampled_from([name.removesuffix(".parquet") for name in vocabularies]),
        st.dictionaries(
            st.one_of(st.sampled_from(["Rome", "a", "b", *FIELDS[1:]]), text),
            st.integers(1, 2**40),
            max_size=12,
        ),
        st.tuples(*(st.one_of(st.sampled_from([0.0, 1.0, 2.5]), number) for _ in range(2))),
        _new_rows(),
    )
    return st.sampled_from([False, True, True]).flatmap(lambda valid: other if valid else damage)


def _changed_fitted(root: Path, change: FittedChange | OtherFit, room: Path) -> None:
    fitted = shutil.copytree(root / "out", room / "fitted")
    if isinstance(change, OtherFit):
        _write_other_fit(fitted, change)
    else:
        _damage_fit(fitted, change)
    options = {"mode": "transform", "fitted": str(fitted), **change.rows.options}
    _build(_write_new_rows(change.rows, room), TABLE, options, room)


def _write_new_rows(rows: NewRows, room: Path) -> Path:
    if rows.of_numbers:
        return _make_parquet(room / "new")
    lines = [line.split(",") for line in CSV.splitlines()]
    for row, column, text in rows.fields:
        lines[row][column % len(lines[row])] = text
    text = "".join(",".join(line) + "\n" for line in lines)
    (room / "t.csv").write_bytes(text.encode("utf-8", "surrogatepass"))
    return room / "t.csv"


def _damage_fit(fitted: Path, change: FittedChange) -> None:
    path = fitted / change.file
    if change.byte_edits:
        path.write_bytes(apply_bytes(path.read_bytes(), change.byte_edits))
    elif change.file == "preproc.json":
        document = yaml.safe_load(path.read_text())
        text = as_json(apply_edits(document, change.edits))
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
    else:
        apply_table(pq.read_table(path), change.table_edits, path)
    if change.with_checksum:
        _record(fitted, change.file)


def _write_other_fit(fitted: Path, change: OtherFit) -> None:
    """Write the vocabulary and the fitted numbers of a change, with their checksums and the size of the table."""
    ranked = sorted(change.counts.items(), key=lambda item: (-item[1], item[0].encode()))
    values = pa.array([value for value, _ in ranked], pa.string())
    counts = pa.array([count for _, count in ranked], pa.int64())
    ids = pa.array(range(1, len(ranked) + 1), pa.int64())
    file = f"vocabulary/{change.feature}.parquet"
    pq.write_table(pa.table({"value": values, "id": ids, "count": counts}), fitted / file)
    path = fitted / "preproc.json"
    document = yaml.safe_load(path.read_text())
    document["statistics"]["age"][-1] = list(change.fitted)
    path.write_text(as_json(document))
    _record(fitted, file, "preproc.json")
    spec = yaml.safe_load((fitted / "feature_spec.yaml").read_text())
    spec["feature_spec"][change.feature]["cardinality"] = len(ranked) + 1
    (fitted / "feature_spec.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))


def _record(fitted: Path, *files: str) -> None:
    """Give the spec the checksums of changed files."""
    spec = yaml.safe_load((fitted / "feature_spec.yaml").read_text())
    for file in files:
        data = (fitted / file).read_bytes()
        entry = {"bytes": len(data), "crc32": f"{zlib.crc32(data):08x}"}
        spec["metadata"].setdefault("files", {})[file] = entry
    (fitted / "feature_spec.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))


def _no_artifact(_: Path) -> None:
    return None


FUZZERS = [
    Fuzzer("preproc: CSV", _no_artifact, _text_changes, _changed_text, 14),
    Fuzzer(
        "preproc: Parquet",
        _make_parquet,
        lambda _: st.tuples(
            table_edits(["y", "age", "city", "tags"]),
            st.one_of(st.just([]), st.just([]), bytes_edits(2)),
            OPTIONS,
        ),
        _changed_table,
        14,
    ),
    Fuzzer(
        "preproc: description",
        _no_artifact,
        lambda _: st.tuples(document_edits(TABLE), OPTIONS),
        _changed_description,
        14,
    ),
    Fuzzer("preproc: Criteo's logs", _no_artifact, _log_changes, _changed_logs, 4),
    Fuzzer("preproc: fitted", _make_fitted, _fitted_changes, _changed_fitted, 12),
]
