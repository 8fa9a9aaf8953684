"""Raw values of a log's events at a server are the events that preprocessing makes of them: the same rows, ids and numbers."""

import csv
import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.dataset.open_dataset import open_dataset
from preproc.raw_tables import RawTables
from serving.exporting.raw_values import write_raw_values
from serving.inference.raw_values import RawValues
from serving.inference.requests import InputError
from serving.raw_description import ModelParts, check_raw
from serving.raw_records import RawDescription
from tests.helpers.preproc_command import preproc
from tests.serving.raw_manifest import raw_manifest

COLUMNS = ["click", "user", "item", "shop", "price", "action", "time"]
TABLE = """{
  sources: {logs: {files: '%s'}}, missing: [NA], label: {name: click},
  categorical: [{name: c0, expression: user}, {name: item, frequency_limit: 3}, {name: place, cross: [shop, item], buckets: 40},
    {name: kind, expression: 'lower(shop)'}],
  sequence: [
    {name: seen, of: [item, place, kind], by: user, order_by: 'CAST(time AS DOUBLE)', length: 5,
     numbers: [price, {name: bought, expression: "action = 'buy'"}]},
    {name: bought, of: [kind], by: user, order_by: 'to_timestamp(CAST(time AS DOUBLE))', length: 3,
     filter: "action = 'buy'"}],
}"""


def written_rows(count: int) -> list[list[str]]:
    draw = np.random.default_rng(3)

    def pick(*values: str) -> str:
        return values[draw.integers(len(values))]

    return [
        [
            str(number % 2),
            f"u{draw.integers(25)}",
            pick("", "NA", f"i{draw.integers(9)}", f"new{number}"),
            pick("A", "a", "B", ""),
            pick("", "NA", "nan", f"{draw.normal():.6g}", "1e-3"),
            pick("buy", "view", ""),
            # Equal seconds, parts of a second, and rows without a time.
            pick(f"{number // 4}.{draw.integers(10)}", f"{number // 4}", "NA"),
        ]
        for number in range(count)
    ]


def fit(root: Path, rows: list[list[str]], table: str = TABLE) -> Path:
    with (root / "logs.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([COLUMNS, *rows])
    table = re.sub(r",\s*([\]}])", r"\1", table.replace("%s", str(root / "logs.csv")))
    options = (f"output={root / 'data'}", "train_fraction=0.5", "plot=false")
    preproc("dataset=any", f"table={' '.join(table.split())}", *options)
    return root / "data"


@pytest.fixture(scope="module")
def rows() -> list[list[str]]:
    return written_rows(300)


@pytest.fixture(scope="module")
def data(rows, tmp_path_factory) -> Path:
    return fit(tmp_path_factory.mktemp("events"), rows)


@pytest.fixture(scope="module")
def raw(data, tmp_path_factory) -> RawValues:
    directory, spec = tmp_path_factory.mktemp("model"), FeatureSpec.load(data)
    description = write_raw_values(directory, str(data), spec, {})
    return RawValues.load(directory, raw_manifest(spec, description, directory, "click"), {})


def inputs_for(raw: RawValues, rows: list[list[str]], first: int) -> tuple[dict, dict]:
    """Return the inputs and shapes of the rows from `first` on: with each all lines of its user, and empty texts behind."""
    scored = [dict(zip(COLUMNS, row, strict=True)) for row in rows[first:]]
    events = [[e for e in rows if e[1] == row["user"]] for row in scored]
    width = max(map(len, events))
    inputs, shapes = {}, {}
    for name, size in raw.inputs.items():
        column = name.rpartition("_")[2]
        inputs[name] = [row[column] for row in scored]
        if size == 2:
            at = COLUMNS.index(column)
            inputs[name] = [
                x for of in events for x in [*(e[at] for e in of), *[""] * (width - len(of))]
            ]
        shapes[name] = (len(scored), width)[:size]
    return inputs, shapes


def test_events_are_those_of_preprocessing(data, raw, rows):
    spec = FeatureSpec.load(data)
    num_rows = spec.rows_of("test")
    wanted = open_dataset(spec).read("test", np.array([[0, num_rows]]))
    got = raw.rows(*inputs_for(raw, rows, len(rows) - num_rows), num_rows)
    for feature, ids, lengths in zip(spec.categorical, wanted.ids, wanted.lengths, strict=True):
        if lengths is not None:
            found = got.ragged[feature.name]
            np.testing.assert_array_equal(found.lengths.numpy(), lengths, err_msg=feature.name)
            np.testing.assert_array_equal(found.values.numpy(), ids, err_msg=feature.name)
            assert len(np.unique(ids)) > 1
            assert len(np.unique(lengths)) > 2
    names = [column.name for column in spec.event_columns]
    assert names == ["seen_price", "seen_bought", "seen_time", "bought_time"]
    for name, numbers in zip(names, wanted.events, strict=True):
        np.testing.assert_array_equal(got.numbers[name].values.numpy(), numbers, err_msg=name)
    assert len(raw.describe_inputs()) == len(raw.inputs) == 12


def test_tables_of_rows_and_events_become_those_of_preprocessing(data, raw, rows):
    spec = FeatureSpec.load(data)
    num_rows = spec.rows_of("test")
    wanted = open_dataset(spec).read("test", np.array([[0, num_rows]]))
    inputs, shapes = inputs_for(raw, rows, len(rows) - num_rows)
    lists = {
        name: np.array([value or None for value in values], object).reshape(shapes[name]).tolist()
        for name, values in inputs.items()
    }
    tables = RawTables(data)
    found = tables.transformed(pa.table(lists))
    numbers = {
        name: np.concatenate(found[name].to_pylist()) for name in ("seen_price", "seen_bought")
    }
    for feature, ids, lengths in zip(spec.categorical, wanted.ids, wanted.lengths, strict=True):
        if lengths is not None:
            values = found[feature.name].to_pylist()
            assert [*map(len, values)] == lengths.tolist()
            np.testing.assert_array_equal(np.concatenate(values), ids, err_msg=feature.name)
    for name in ("seen", "bought"):
        times = zip(found[name].to_pylist(), found[f"{name}_time"].to_pylist(), strict=True)
        ages = [np.array(moment - np.array(of_row), np.float32) for moment, of_row in times]
        numbers[f"{name}_time"] = np.concatenate(ages)
    for name, of_events in zip(numbers, wanted.events, strict=True):
        np.testing.assert_array_equal(numbers[name], of_events, err_msg=name)
    lists["seen_shop"][3] = lists["seen_shop"][3][:-1]
    with pytest.raises(
        ValueError,
        match=r"^column 'seen_shop': \d+ events at row 3 of the table, and 'seen_item' has",
    ):
        tables.transformed(pa.table(lists))
    with pytest.raises(
        ValueError,
        match=r"^the table has no events of 'bought'; want columns of lists such",
    ):
        tables.transformed(pa.table({n: v for n, v in lists.items() if not n.startswith("bought")}))
    bad = (
        lists
        | {"seen_price": [["x" for _ in of_row] for of_row in lists["seen_item"]]}
        | {"seen_shop": lists["seen_item"]}
    )
    with pytest.raises(
        ValueError,
        match=r"^events of 'seen', counted over all rows: the table, row 1: .* 'price' is x, wanted a",
    ):
        tables.transformed(pa.table(bad))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seen_price": ["x"]}, "events of 'seen', counted over all rows: row 0: 'seen_price' is 'x', wanted a number"),
        ({"bought_time": ["soon"]}, "events of 'bought', counted over all rows: Conversion Error: Could not convert string"),
        ({"seen_item": np.array([1.5])}, "events of 'seen', counted over all rows: column 'item' has floating-point numbers;"),
        ({"seen_shop": ["a", "b"]}, "list 'seen_shop' has shape [1, 2], and 'seen_item' [1, 1]; want an item per event in each"),
        ({"seen_time": None}, "there is no column 'seen_time'; want user, item, shop, time, seen_item, seen_shop, seen_price,"),
    ],
)  # fmt: skip
def test_bad_events_are_refused_on_one_line(change, message, raw):
    inputs: dict = {n: ["1"] for n in raw.inputs} | change
    inputs = {name: values for name, values in inputs.items() if values is not None}
    shapes = {n: (1, len(v))[: raw.inputs[n]] for n, v in inputs.items()}
    with pytest.raises(InputError, match=f"^{re.escape(message)}") as refused:
        raw.rows(inputs, shapes, 1)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": 0}, "'seen': length: got 0, want a whole number, 1 to"),
        ({"moment": "nothing(time)"}, "function nothing"),
        ({"events.times": {}}, "want the columns of expressions"),
        ({"events.filter": "getenv(action)"}, "function getenv"),
        ({"events.columns": {"item": 1}}, "'shop'"),
        ({"events.categorical": []}, "want ragged features"),
        (
            {"events.sequences": [{"moment": "1) AS v0; SELECT (1"}]},
            "events.sequences: no such key",
        ),
        ({"name": "other"}, "sequences: got ['bought', 'other'], want all of the model"),
    ],
)
def test_a_description_of_events_that_anybody_may_have_written_is_checked(change, message, raw):
    manifest = raw._manifest
    description = json.loads(json.dumps(manifest.raw))
    ((path, value),) = change.items()
    of = description["sequences"][0]
    (of["events"] if "." in path else of)[path.rpartition(".")[2]] = value
    features = {f.name: (f.cardinality, f.hotness) for f in manifest.categorical}
    groups = {
        "seen": ["seen_item", "seen_place", "seen_kind", "seen_price", "seen_bought", "seen_time"]
    }
    parts = ([], ModelParts(features, manifest.keys, manifest.files, groups))
    check_raw(RawDescription.of(manifest.raw), *parts)
    with pytest.raises((ValueError, LookupError), match=re.escape(message)):
        check_raw(RawDescription.of(description), *parts)


def test_events_of_another_source_are_refused_at_the_export(tmp_path, rows):
    table = """{sources: {logs: {files: '%s'}, more: {files: '%s'}}, label: {name: click}, missing: [NA],
      query: 'SELECT logs.* FROM logs', order_by: ['CAST(time AS DOUBLE)'], categorical: [user],
      sequence: [{name: seen, length: 4, source: more, of: [user], by: user, order_by: 'CAST(time AS DOUBLE)'}]}"""
    data = fit(tmp_path, rows[:40], table)
    message = "^the events 'seen' are of source 'more', and a server takes raw values of those that are rows; leave fitted out"
    with pytest.raises(ValueError, match=message):
        write_raw_values(tmp_path, str(data), FeatureSpec.load(data), {})


def test_times_of_requests_and_tables_count_by_their_zones(tmp_path):
    """A text such as 12:00+02:00 is the moment 10:00Z, not two hours later."""
    table = """{sources: {logs: {files: '%s'}}, label: {name: click}, categorical: [item],
      sequence: [{name: seen, of: [item], by: user, order_by: 'CAST(time AS TIMESTAMP)', length: 4}]}"""
    lines = [
        [str(n % 2), "u", f"i{n}", "A", "1", "buy", f"2026-03-01 10:00:{n:02d}"] for n in range(20)
    ]
    data = fit(tmp_path, lines, table)
    spec = FeatureSpec.load(data)
    description = write_raw_values(tmp_path, str(data), spec, {})
    raw = RawValues.load(tmp_path, raw_manifest(spec, description, tmp_path, "click"), {})
    found = []
    for time, events in (
        ("2026-03-01 11:00:00", ["2026-03-01 10:00:00", "2026-03-01 10:30:00"]),
        ("2026-03-01T13:00:00+02:00", ["2026-03-01T10:00:00Z", "2026-03-01 07:30:00-03"]),
    ):
        inputs = {"item": ["i1"], "time": [time], "seen_item": ["i2", "i3"], "seen_time": events}
        shapes = {name: (1, len(of))[: raw.inputs[name]] for name, of in inputs.items()}
        rows = raw.rows(inputs, shapes, 1)
        lists = {name: [of] if raw.inputs[name] == 2 else of for name, of in inputs.items()}
        of_table = RawTables(data).transformed(pa.table(lists))
        found.append((of_table.to_pydict(), rows.numbers["seen_time"].values.tolist()))
    assert found[0] == found[1]
    assert found[0][1] == [3600, 1800]
    assert len(found[0][0]["seen_time"][0]) == 2
