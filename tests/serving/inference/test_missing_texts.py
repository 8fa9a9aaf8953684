"""Texts of `table.missing` are missing by the kind of column in the fit: a value is the same one however it arrives.

Rows are read from CSV and from Parquet, and arrive at the server and at `Run.predict` as texts and as numbers. All become the
features that the fit itself has made of them.
"""

import csv
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.dataset.open_dataset import open_dataset
from preproc.raw_tables import RawTables
from preproc.transformed_rows import open_transformed_rows
from serving.exporting.raw_values import write_raw_values
from serving.inference.raw_values import RawValues
from tests.preproc.table.test_pipeline import build
from tests.preproc.test_fitted_state import record_again
from tests.serving.raw_manifest import raw_manifest

MISSING = ["NA", "-1", "-0.5", "none", "-999"]
KINDS = {"code": pa.int64(), "count": pa.int32(), "amount": pa.float64(), "city": pa.string()}
FEATURES = {
    "numerical": [
        {"name": "count", "transforms": [{"fill": 40}]},
        {"name": "amount", "transforms": [{"fill": 80}]},
        {"name": "clipped", "expression": "amount", "transforms": [{"clip": [-9, 9]}, "minmax"]},
    ],
    "categorical": [
        "code",
        {"name": "hashed", "expression": "code", "buckets": 50},
        {"name": "counts", "expression": "count", "buckets": 50},
        "city",
        {"name": "cities", "expression": "city", "separator": " "},
        {"name": "both", "cross": ["code", "city"]},
    ],
}


def values(count: int, seed: int) -> dict[str, list]:
    """Return columns of values that `MISSING` names and of others, also of some that no training row has."""
    draw = np.random.default_rng(seed)
    pick = {
        "code": [-1, -999, 5, 7, 0, -10, *range(100 + seed, 103 + seed)],
        "count": [-1, -999, 0, 3, 12],
        "amount": [-1.0, -0.5, -999.0, 2.5, 0.0, 0.125, 3.0],
        "city": ["NA", "-1", "-1.0", "-0.5", "Rome", "Oslo Rome", "NA Rome", "none", "None", "7"],
    }
    columns = {
        name: [of[i] for i in draw.integers(len(of), size=count)] for name, of in pick.items()
    }
    columns["y"] = [i % 2 for i in range(count)]
    return columns


def as_texts(columns: dict[str, list]) -> dict[str, list[str]]:
    return {
        name: [f"{v:g}" if isinstance(v, float) else str(v) for v in of]
        for name, of in columns.items()
    }


def write_csv(path: Path, columns: dict[str, list]) -> Path:
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows(
            [list(columns), *zip(*as_texts(columns).values(), strict=True)]
        )
    return path


def as_arrow(columns: dict[str, list]) -> pa.Table:
    return pa.table(
        {name: pa.array(of, KINDS.get(name, pa.int64())) for name, of in columns.items()}
    )


def write_parquet(path: Path, columns: dict[str, list]) -> Path:
    pq.write_table(as_arrow(columns), path)
    return path


OPTIONS = ["numerical_dtype=float32", "frequency_limit=2"]
WRITERS = {"csv": write_csv, "parquet": write_parquet}


def described(*files: Path, **more) -> dict:
    return (
        {
            "sources": {"logs": {"files": [str(file) for file in files]}},
            "missing": MISSING,
            "label": {"name": "y"},
            "split": {"by": "fraction", "train": 0.75},
        }
        | FEATURES
        | more
    )


@dataclass
class Fit:
    """A fit, and the values of its test rows with the features that it has made of them."""

    root: Path
    is_text: bool
    more: dict
    columns: dict[str, list]
    wanted: dict[str, list]


def features_of(root: Path, split: str = "test") -> dict[str, list]:
    """Return the features of a dataset's rows: a number, an id or a list of ids per row."""
    spec = FeatureSpec.load(root)
    rows = open_dataset(spec).read(split, np.array([[0, spec.rows_of(split)]]))
    found = {name: rows.numerical[:, i].tolist() for i, name in enumerate(spec.numerical)}
    for feature, ids, lengths in zip(spec.categorical, rows.ids, rows.lengths, strict=True):
        matrix = ids if feature.hotness in (None, 1) else ids.reshape(-1, feature.hotness)
        found[feature.name] = matrix.tolist() if lengths is None else parted(ids, lengths)
    return found


def parted(ids, lengths) -> list[list[int]]:
    ends = np.cumsum(lengths).tolist()
    return [np.asarray(ids)[end - n : end].tolist() for end, n in zip(ends, lengths, strict=True)]


def features_of_table(table: pa.Table) -> dict[str, list]:
    return {name: table[name].to_pylist() for name in table.column_names}


@pytest.fixture(scope="module", params=["csv", "parquet", "csv, query", "parquet, query"])
def fit(request, tmp_path_factory) -> Fit:
    """Fit 300 rows, and keep the 100 behind them."""
    kind, _, query = request.param.partition(", ")
    root = tmp_path_factory.mktemp("fit")
    train = WRITERS[kind](root / f"train.{kind}", values(300, 0))
    columns = values(100, 1)
    test = WRITERS[kind](root / f"test.{kind}", columns)
    more = {"query": "SELECT * FROM logs", "order_by": ["file_", "order_"]} if query else {}
    build(root / "data", described(train, test, **more), *OPTIONS)
    return Fit(root / "data", kind == "csv", more, columns, features_of(root / "data"))


def served(root: Path, directory: Path) -> RawValues:
    """Return the transformation of a server of the fit in `root`."""
    directory.mkdir()
    spec = FeatureSpec.load(root)
    description = write_raw_values(directory, str(root), spec, {})
    return RawValues.load(directory, raw_manifest(spec, description, directory, "y"), {})


def scored(raw: RawValues, columns: dict) -> dict[str, list]:
    """Return the features that a server makes of columns, lists of texts or arrays of numbers."""
    shapes = {name: np.shape(of) for name, of in columns.items()}
    flat = {
        name: of if isinstance(of, np.ndarray) else flattened(of) for name, of in columns.items()
    }
    rows = raw.rows(flat, shapes, len(next(iter(columns.values()))))
    found = {name: rows.numerical[:, i].tolist() for i, name in enumerate(raw._manifest.numerical)}
    for name, own in raw._manifest.id_slices().items():
        ids = rows.ids[:, own]
        found[name] = ids[:, 0].tolist() if ids.shape[1] == 1 else ids.tolist()
    return found | {n: parted(r.values.numpy(), r.lengths.numpy()) for n, r in rows.ragged.items()}


def flattened(texts: list) -> list:
    return [text for row in texts for text in row] if isinstance(texts[0], list) else texts


def inputs_of(columns: dict[str, list]) -> dict[str, list]:
    return {name: of for name, of in columns.items() if name != "y"}


def test_training_takes_missing_texts_in_columns_of_text_only(fit):
    texts = as_texts(fit.columns)
    for name, column in (("hashed", "code"), ("counts", "count")):
        missing = [fit.is_text and text in MISSING for text in texts[column]]
        assert [i == 0 for i in fit.wanted[name]] == missing
        assert any(missing) == fit.is_text
    filled = [80.0 if fit.is_text and text in MISSING else float(text) for text in texts["amount"]]
    assert fit.wanted["amount"] == filled
    assert [ids == [] for ids in fit.wanted["cities"]] == [
        text in MISSING for text in texts["city"]
    ]
    saved = json.loads((fit.root / "preproc.json").read_text())["is_text"]
    kinds = dict.fromkeys(["code", "count", "amount"], fit.is_text) | {
        "city": True,
        "y": fit.is_text,
    }
    assert saved == {"sources": {"logs": kinds}, "result": kinds}


@pytest.mark.parametrize("kind", ["texts", "numbers", "small numbers", "texts and numbers"])
def test_a_server_makes_the_features_of_the_fit(fit, kind, tmp_path):
    raw = served(fit.root, tmp_path / "model")
    columns = inputs_of(fit.columns)
    texts = inputs_of(as_texts(fit.columns))
    sent = {
        "texts": texts,
        "numbers": texts | arrays(columns, code=np.int64, count=np.int64, amount=np.float64),
        "small numbers": texts | arrays(columns, code=np.int16, count=np.int16, amount=np.float32),
        "texts and numbers": texts | arrays(columns, code=np.int32, amount=np.float16),
    }[kind]
    assert scored(raw, sent) == fit.wanted


def arrays(columns: dict[str, list], **dtypes) -> dict[str, np.ndarray]:
    return {name: np.array(columns[name], dtype) for name, dtype in dtypes.items()}


@pytest.mark.parametrize("kind", WRITERS)
def test_new_rows_become_the_features_of_the_fit(fit, kind, tmp_path):
    new = WRITERS[kind](tmp_path / f"new.{kind}", fit.columns)
    # The source may be called otherwise.
    table = described(new, **fit.more) | {
        "sources": {"logs" if fit.more else "new": {"files": [str(new)]}}
    }
    build(tmp_path / "out", table, *OPTIONS, "mode=transform", f"fitted={fit.root}")
    assert features_of(tmp_path / "out") == fit.wanted
    if fit.is_text == (kind == "csv"):
        return  # rows of the kind of the fit; those of the other kind show the rest
    # What was no value in the fit is none where the description leaves it out.
    bare = table | {"missing": ["?"]}
    build(tmp_path / "bare", bare, *OPTIONS, "mode=transform", f"fitted={fit.root}")
    assert features_of(tmp_path / "bare") == fit.wanted
    # A fit of a fit.
    build(tmp_path / "again", table, *OPTIONS, "mode=transform", f"fitted={tmp_path / 'bare'}")
    assert features_of(tmp_path / "again") == fit.wanted


@pytest.mark.parametrize("kind", WRITERS)
def test_rows_that_are_transformed_as_they_are_read_are_those_of_the_fit(fit, kind, tmp_path):
    new = WRITERS[kind](tmp_path / f"new.{kind}", fit.columns)
    with open_transformed_rows(fit.root, [new]) as batches:
        found = pa.Table.from_batches([batch.features for batch in batches])
    assert features_of_table(found) == fit.wanted


@pytest.mark.parametrize("kind", ["texts", "numbers", "single precision"])
def test_a_table_in_memory_becomes_the_features_of_the_fit(fit, kind):
    table = pa.table(as_texts(fit.columns)) if kind == "texts" else as_arrow(fit.columns)
    if kind == "single precision":
        table = table.set_column(2, "amount", table["amount"].cast(pa.float32()))
    assert features_of_table(RawTables(fit.root).transformed(table)) == fit.wanted


def test_the_next_day_has_the_columns_of_the_fit(tmp_path):
    first = write_parquet(tmp_path / "first.parquet", values(300, 0))
    build(tmp_path / "one", described(first), *OPTIONS, "rare_counts=true")
    columns = values(100, 1)
    found = []
    for kind, write in WRITERS.items():
        new = write(tmp_path / f"new.{kind}", columns)
        day = ["mode=extend", f"fitted={tmp_path / 'one'}", *OPTIONS[:1]]
        build(tmp_path / kind, described(new), *day)
        found.append({split: features_of(tmp_path / kind, split) for split in ("train", "test")})
    assert found[0] == found[1]
    saved = [
        json.loads((tmp_path / name / "preproc.json").read_text())["is_text"]
        for name in ("one", "csv")
    ]
    assert saved[0] == saved[1]


def test_texts_that_no_number_has_are_missing_where_the_fit_had_numbers(tmp_path):
    train = write_parquet(tmp_path / "train.parquet", values(300, 0))
    build(tmp_path / "data", described(train), *OPTIONS)
    columns = values(4, 2) | {
        "code": ["NA", "-1", "", "none"],
        "amount": ["none", "-0.5", "NA", ""],
    }
    bare = columns | {"code": ["", "-1", "", ""], "amount": ["", "-0.5", "", ""]}
    raw = served(tmp_path / "data", tmp_path / "model")
    found = []
    for rows in (columns, bare):
        new = write_csv(tmp_path / "new.csv", rows)
        with open_transformed_rows(tmp_path / "data", [new]) as batches:
            found.append(features_of_table(pa.Table.from_batches([b.features for b in batches])))
        found.append(scored(raw, inputs_of(as_texts(rows))))
    assert found[0] == found[1] == found[2] == found[3]
    assert found[0]["amount"] == [80.0, -0.5, 80.0, 80.0]


def test_items_of_lists_are_no_fields_and_those_of_a_history_were(tmp_path):
    count = 60
    table = {
        "y": [i % 2 for i in range(count)],
        "user": [i % 5 for i in range(count)],
        "time": list(range(count)),
        "city": [["NA", "Rome", "-1"][i % 3] for i in range(count)],
        "code": [[-1, 5, 7][i % 3] for i in range(count)],
        "tags": [[["NA", "a"], ["-1"], ["b", "NA"], []][i % 4] for i in range(count)],
    }
    pq.write_table(pa.table(table), tmp_path / "t.parquet")
    order = {"by": "user", "order_by": "time", "length": 4}
    description = described(
        tmp_path / "t.parquet",
        numerical=[],
        categorical=["city", "code", {"name": "tags", "list": True}],
        history=[{"name": f"past_{of}", "of": of} | order for of in ("city", "code")],
        split={"by": "fraction", "train": 0.5},
    )
    build(tmp_path / "data", description, "numerical_dtype=float32")
    raw = served(tmp_path / "data", tmp_path / "model")
    wanted = features_of(tmp_path / "data")
    rows = range(count // 2, count)
    past = [[j for j in range(i - 5, -1, -5)][:4] for i in rows]
    sent = {name: [str(table[name][i]) for i in rows] for name in ("city", "code")}
    sent["tags"] = [(table["tags"][i] + ["", ""])[:2] for i in rows]
    # The last values that were no missing ones; the rest of the row is filled.
    cities = [
        [table["city"][j] for j in range(i - 5, -1, -5) if table["city"][j] == "Rome"][:4]
        for i in rows
    ]
    sent["past_city"] = [(["NA", *of, "-1", "", "", "", ""])[:6] for of in cities]
    sent["past_code"] = [([str(table["code"][j]) for j in of] + [""] * 4)[:4] for of in past]
    assert scored(raw, sent) == wanted
    codes = np.array([[table["code"][j] for j in of] for of in past])
    assert scored(raw, sent | {"past_code": codes}) == wanted
    assert 0 not in {i for ids in wanted["tags"] for i in ids}
    assert {len(ids) for ids in wanted["tags"]} == {0, 1, 2}


def test_what_is_no_record_of_columns_is_refused(tmp_path):
    train = write_csv(tmp_path / "train.csv", values(300, 0))
    build(tmp_path / "data", described(train), *OPTIONS)
    path = tmp_path / "data/preproc.json"
    saved = json.loads(path.read_text())
    for changed, message in (
        ([], r"is_text: got \[\], want sources and result"),
        ({"sources": {}}, "want sources and result"),
        ({"sources": 5, "result": {}}, "is_text.sources: got 5"),
        ({"sources": {"logs": {"code": 1}}, "result": {}}, "want true or false by column"),
        ({"sources": {}, "result": {"Code": True}}, "in lower case"),
        ({"sources": {}, "result": {"code": True}}, "has no column 'count'"),
    ):
        path.write_text(json.dumps(saved | {"is_text": changed}))
        record_again(tmp_path / "data", "preproc.json")
        (tmp_path / "model").mkdir(exist_ok=True)
        with pytest.raises(ValueError, match=message) as refused:
            write_raw_values(
                tmp_path / "model", str(tmp_path / "data"), FeatureSpec.load(tmp_path / "data"), {}
            )
        assert "fit again" in str(refused.value)
        assert "\n" not in str(refused.value)
