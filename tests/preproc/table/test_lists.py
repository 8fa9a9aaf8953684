"""Lists: empty items are no ids, fixed hotness cuts and fills by rule, and both are counted; alike on every way to features."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from dataloading.dataset.feature_spec import FeatureSpec
from preproc.dataset_writer import checksum
from preproc.fitted_state import FITTED
from preproc.raw_tables import RawTables
from preproc.transformed_rows import open_transformed_rows
from serving.exporting.raw_values import write_raw_values
from serving.inference.raw_values import RawValues
from tests.helpers.preproc_command import Refused, preproc
from tests.preproc.table.test_pipeline import build, ids_of
from tests.serving.raw_manifest import raw_manifest

TAGS = ["a|b", "a||b", "|a", "a|", "|", "", "a | b", "a|b|c|d"]
LISTS = [["a", "", "b"], [None, "a"], None, [], [""], ["a", "b", "a"], ["b"], ["a"]]
# By frequency, and then by bytes: of 'a | b' the blanks belong to the items.
IDS = [[1, 2], [1, 2], [1], [1], [], [], [4, 3], [1, 2, 5, 6]]


def described(source: Path) -> dict:
    several = {"expression": "tags", "separator": "|", "hotness": 2}
    return {
        "sources": {"t": {"files": str(source)}},
        "label": {"name": "y"},
        "categorical": [
            {"name": "tags", "separator": "|"},
            {"name": "first", "length": True} | several,
            {"name": "last", "take": "last"} | several,
            {"name": "list", "list": True},
        ],
        "split": {"train": 0.5},
    }


def write(path: Path, rows: int = 32) -> Path:
    table = {
        "y": [i // 8 % 2 for i in range(rows)],
        "tags": [TAGS[i % 8] for i in range(rows)],
        "list": [LISTS[i % 8] for i in range(rows)],
    }
    pq.write_table(pa.table(table, schema=SCHEMA), path)
    return path


SCHEMA = pa.schema({"y": pa.int64(), "tags": pa.string(), "list": pa.list_(pa.string())})


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a directory with a source `t.parquet` and its dataset `data`, and the files of that."""
    root = tmp_path_factory.mktemp("lists")
    return root, build(root / "data", described(write(root / "t.parquet")))


def test_empty_items_are_no_ids_and_longer_lists_keep_the_first_or_the_last(made):
    _, files = made
    assert ids_of(files, "train/tags.bin") == 2 * [i for row in IDS for i in row]
    ends = np.cumsum([0, *map(len, 2 * IDS)]).tolist()
    assert ids_of(files, "train/tags.offsets.bin", "<i8") == ends
    for name, kept in (("first", slice(2)), ("last", slice(-2, None))):
        rows = [(row[kept] + [0, 0])[:2] for row in IDS]
        assert np.array(ids_of(files, f"train/{name}.bin")).reshape(-1, 2).tolist() == 2 * rows
    assert np.frombuffer(files["train/numerical.bin"], "<f2").tolist() == 2 * [
        min(len(row), 2) for row in IDS
    ]
    lists = [[value for value in row or () if value] for row in LISTS]
    ids = {"a": 1, "b": 2}
    assert ids_of(files, "train/list.bin") == 2 * [ids[value] for row in lists for value in row]


def test_what_was_left_out_cut_and_filled_is_counted(made, capsys):
    root, _ = made
    splits = json.loads((root / "data/report.json").read_text())["splits"]
    cut = {"empty_items": 10, "cut_rows": 2, "cut_items": 4, "filled_rows": 8}
    none = dict.fromkeys(cut, 0)
    for split in ("train", "test"):
        assert splits[split]["lists"] == {
            "tags": none | {"empty_items": 10},
            "first": cut,
            "last": cut,
            "list": none | {"empty_items": 6},
        }
    preproc("mode=verify", f"path={root / 'data'}")
    build(
        root / "again", described(root / "t.parquet"), "mode=transform", f"fitted={root / 'data'}"
    )
    printed = capsys.readouterr().out
    assert "note: 20 empty items of 'tags' are no ids" in printed
    for name, end in (("first", "last"), ("last", "first")):
        assert (
            f"note: '{name}' has hotness 2: 4 of 32 rows are longer and lose their {end} items, 8 in total; 16 are shorter"
        ) in printed


def served(root: Path, data: Path, rows: int):
    """Return the features that a server makes of the rows' texts and lists."""
    spec, directory = FeatureSpec.load(data), root / f"model_of_{data.name}"
    directory.mkdir()
    description = write_raw_values(directory, str(data), spec, {})
    raw = RawValues.load(directory, raw_manifest(spec, description, directory, "y"), {})
    lists = [[*(LISTS[i % 8] or []), None, None, None][:3] for i in range(rows)]
    inputs = {
        "tags": [TAGS[i % 8] for i in range(rows)],
        "list": [value for row in lists for value in row],
    }
    return raw.rows(inputs, {"tags": (rows,), "list": (rows, 3)}, rows)


def features_of(data: Path, source: Path) -> dict[str, list]:
    with open_transformed_rows(data, [source]) as rows:
        (batch,) = rows
    return batch.features.to_pydict()


def test_predicted_and_served_rows_have_the_features_of_preprocessing(made):
    root, _ = made
    found = features_of(root / "data", write(root / "new.parquet", 8))
    assert found["tags"] == IDS
    assert found["first"] == [[*row[:2], 0, 0][:2] for row in IDS]
    assert found["last"] == [[*row[-2:], 0, 0][:2] for row in IDS]
    assert found["first_length"] == [min(len(row), 2) for row in IDS]
    rows = served(root, root / "data", 8)
    assert rows.numerical[:, 0].tolist() == found["first_length"]
    assert rows.ids.tolist() == [a + b for a, b in zip(found["first"], found["last"], strict=True)]
    for name in ("tags", "list"):
        assert rows.ragged[name].values.tolist() == [i for row in found[name] for i in row]
        assert rows.ragged[name].lengths.tolist() == [len(row) for row in found[name]]


def test_a_table_whose_lists_are_all_missing_has_empty_ones(made):
    found = RawTables(made[0] / "data").transformed(pa.table({"tags": ["a"], "list": pa.nulls(1)}))
    assert (found["tags"].to_pylist(), found["list"].to_pylist()) == ([[1]], [[]])


def test_a_fit_of_an_earlier_version_keeps_its_empty_items(made, capsys):
    root, _ = made
    old = root / "old"
    build(old, described(root / "t.parquet"))
    saved = json.loads((old / FITTED).read_text())
    del saved["rows"]["empty_items"], saved["read"]
    (old / FITTED).write_text(json.dumps(saved))
    spec = yaml.safe_load((old / "feature_spec.yaml").read_text())
    spec["metadata"]["files"][FITTED] = checksum(old / FITTED)
    (old / "feature_spec.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))
    wanted = [[1, 2], [1, 0, 2], [0, 1], [1, 0], [0, 0], [], [4, 3], [1, 2, 5, 6]]
    new = write(root / "eight.parquet", 8)
    for mode in ("transform", "extend"):
        table = described(new)
        out = root / mode
        files = build(out, table, f"mode={mode}", f"fitted={old}")
        splits = ("train", "test") if mode == "extend" else ("test",)
        ids = [i for split in splits for i in ids_of(files, f"{split}/tags.bin")]
        assert ids == [i for row in wanted for i in row]
        assert (
            "empty items of 'tags' have id 0, as in the fit of an earlier"
            in capsys.readouterr().out
        )
        # The rule goes from day to day.
        assert json.loads((out / FITTED).read_text())["rows"]["empty_items"] == "unknown"
    found = features_of(old, new)
    assert found["tags"] == wanted
    assert found["first_length"] == [2, 2, 2, 2, 2, 0, 2, 2]
    rows = served(root, old, 8)
    assert rows.ragged["tags"].values.tolist() == [i for row in wanted for i in row]
    assert rows.numerical[:, 0].tolist() == found["first_length"]


def test_values_in_several_writings_have_a_note(tmp_path, capsys):
    values = ["5", "5.0", " Rome", "Rome", "07", "x", "0012e003", "00012000"]
    lines = [f"{i % 2},{values[i % 8]}" for i in range(32)]
    (tmp_path / "t.csv").write_text("\n".join(["y,c", *lines]) + "\n")
    table = described(tmp_path / "t.csv") | {"categorical": ["c"]}
    build(tmp_path / "out", table)
    (note,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("note"))
    assert note.startswith(
        "note: 4 values of 'c' are 2 in other writing, such as ' Rome' and 'Rome'"
    )


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        ({"take": "middle"}, "take: got 'middle', want one of first, last"),
        (
            {"hotness": None, "take": "last"},
            "take and length are for lists that are cut and filled",
        ),
        (
            {"hotness": None, "length": True},
            "take and length are for lists that are cut and filled",
        ),
        ({"hotness": 4096, "length": True}, "got hotness 4096 and a length"),
        ({"length": 3}, "length: got 3, want true or false"),
    ],
)
def test_bad_settings_of_a_list_are_one_line(tmp_path, more, wanted):
    table = described(tmp_path / "none.csv")
    table["categorical"] = [{"name": "tags", "separator": "|", "hotness": 2} | more]
    with pytest.raises(Refused, match=wanted):
        build(tmp_path / "out", table)
