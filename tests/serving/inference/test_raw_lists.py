"""Raw values of lists with a number per item at a server are those that preprocessing makes of them."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.dataset.open_dataset import open_dataset
from serving.exporting.raw_values import write_raw_values
from serving.inference.raw_values import RawValues
from serving.inference.requests import InputError
from serving.manifest import Sequence
from serving.raw_description import ModelParts, check_raw
from serving.raw_records import RawDescription
from tests.preproc.table.test_event_lists import described, random_rows, write
from tests.preproc.table.test_pipeline import build
from tests.serving.raw_manifest import raw_manifest

ROWS = random_rows(7)


def raw_of(root: Path, *, is_text: bool, **group) -> tuple[FeatureSpec, RawValues]:
    settings = {"numbers": ["prices"], "time": "", "order_by": ""} | group
    table = described(write(root, ROWS, is_text=is_text), is_text=is_text, **settings)
    build(root / "data", table | {"split": {"train": 0.5}}, "vocabulary=all")
    (root / "model").mkdir()
    spec = FeatureSpec.load(root / "data")
    description = write_raw_values(root / "model", str(root / "data"), spec, {})
    manifest = raw_manifest(spec, description, root / "model", "y")
    manifest.sequences.append(
        Sequence("past", ["items", "shops"], ["prices"], None, 4, weight="prices")
    )
    return spec, RawValues.load(root / "model", manifest, {})


def padded(lists: list[list], fill: object) -> list:
    width = max(map(len, lists))
    return [x for values in lists for x in [*values, *[fill] * (width - len(values))]]


def inputs_of_rows(rows: list[dict], *, is_text: bool) -> tuple[dict, dict]:
    inputs = {"item": [row["item"] for row in rows]}
    for name in ("items", "shops", "prices"):
        lists = [row[name] for row in rows]
        if is_text:
            inputs[name] = ["^".join(map(str, values)) for values in lists]
        elif name == "prices":
            inputs[name] = np.array(padded(lists, np.nan))
        else:
            inputs[name] = padded(lists, "")
    num_rows = len(rows)
    return inputs, {n: (num_rows, len(v) // num_rows)[: 1 + (len(v) > num_rows)] for n, v in inputs.items()}  # fmt: skip


@pytest.mark.parametrize("is_text", [True, False])
def test_lists_are_those_of_preprocessing(tmp_path, is_text):
    spec, raw = raw_of(tmp_path, is_text=is_text)
    # At the end of a padded list an empty item cannot be told from what fills it.
    rows = [row for row in ROWS if is_text or row["items"][-1:] != [""]]
    got = raw.rows(*inputs_of_rows(rows, is_text=is_text), len(rows))
    source = open_dataset(spec)
    halves = [
        source.read(split, np.array([[0, source.num_rows(split)]])) for split in ("train", "test")
    ]
    kept = np.flatnonzero([is_text or row["items"][-1:] != [""] for row in ROWS])
    for index, name in enumerate(["items", "shops", "prices"]):
        found = got.numbers[name] if name == "prices" else got.ragged[name]
        lengths = np.concatenate([half.lengths[1] for half in halves])
        parts = [h.events[0] if name == "prices" else h.ids[1 + index] for h in halves]
        by_row = np.split(np.concatenate(parts), lengths.cumsum()[:-1])
        np.testing.assert_array_equal(found.lengths.numpy(), lengths[kept])
        np.testing.assert_array_equal(
            found.values.numpy(), np.concatenate([by_row[r] for r in kept])
        )
    assert max(lengths) == 4 < max(len(row["items"]) for row in ROWS)


ROW = {"y": 1, "item": "a", "items": ["a", "b"], "shops": ["1", "2"], "prices": [1.0, 2.0]}
BAD = [
    ({"prices": [1.0]}, "row 1: 'prices' has 1 items, and 'items' 2; want equally many"),
    ({"shops": ["1"]}, "row 1: 'shops' has 1 items, and 'items' 2; want equally many"),
    ({"prices": [1.0, -0.5]}, "'prices': an event has -0.5 at row 1; want a weight that is not negative"),
    ({"prices": [float("nan"), 0.5]}, "row 1: 'prices' lacks the number of an item"),
    ({"prices": [float("inf"), 0.5]}, "row 1: 'prices' is 'inf', wanted a number"),
    ({"prices": [1e39, 0.5]}, "'prices': an event has inf at row 1; want a finite number that float32"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_lists_are_refused_on_one_line(tmp_path, change, message):
    _, raw = raw_of(tmp_path, is_text=True)
    with pytest.raises(InputError, match=f"^{re.escape(message)}") as refused:
        raw.rows(*inputs_of_rows([ROW, ROW | change], is_text=True), 2)
    assert "\n" not in str(refused.value)


def test_numbers_behind_the_items_of_a_padded_list_are_refused(tmp_path):
    _, raw = raw_of(tmp_path, is_text=False)
    inputs, shapes = inputs_of_rows([ROW, ROW | {"items": ["a"]}], is_text=False)
    with pytest.raises(InputError, match=r"^row 1: 'shops' has 2 items, and 'items' 1"):
        raw.rows(inputs, shapes, 2)
    inputs, shapes = inputs_of_rows([ROW, ROW | {"items": ["a"], "shops": ["1"]}], is_text=False)
    with pytest.raises(InputError, match=r"^row 1: 'prices' has 2 items, and 'items' 1"):
        raw.rows(inputs, shapes, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": 0}, "'past': length: got 0, want a whole number, 1 to"),
        ({"separator": "|"}, "lists 'past': got ['^', '^'], want features of one separator"),
        ({"features": ["item"]}, "want features of one separator"),
        ({"numbers": []}, "lists 'past': got ['items', 'shops'], want the columns of the model's"),
        ({"numbers": [{"name": "prices", "column": "nothing"}]}, "nothing"),
    ],
)
def test_a_description_that_anybody_may_have_written_is_checked(tmp_path, change, message):
    _, raw = raw_of(tmp_path, is_text=True)
    manifest = raw._manifest
    features = {f.name: (f.cardinality, f.hotness) for f in manifest.categorical}
    groups = {"past": ["items", "shops", "prices"]}
    parts = ([], ModelParts(features, manifest.keys, manifest.files, groups))
    check_raw(RawDescription.of(manifest.raw), *parts)
    description = json.loads(json.dumps(manifest.raw))
    description["lists"][0] |= change
    with pytest.raises((ValueError, LookupError), match=re.escape(message)):
        check_raw(RawDescription.of(description), *parts)


def test_lists_with_times_and_numbers_by_expression_are_refused(tmp_path):
    with pytest.raises(ValueError, match="'past' are lists with times, and a server takes"):
        raw_of(tmp_path, is_text=False, numbers=["times"], time="times", order_by="time")
    (tmp_path / "more").mkdir()
    number = {"name": "n", "expression": "list_transform(prices, lambda x: x + 1)"}
    with pytest.raises(ValueError, match="'n'"):
        raw_of(tmp_path / "more", is_text=False, numbers=[number])
