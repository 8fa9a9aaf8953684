"""Sequence groups of lists that rows have: texts such as `a^b^c`, or Parquet lists."""

import json
import random
import re
from time import sleep

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataloading.arrow_table import features_source
from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.dataset.open_dataset import open_dataset
from preproc.raw_tables import RawTables
from preproc.table import output_files
from preproc.transformed_rows import open_transformed_rows
from tests.helpers.preproc_command import Refused, preproc
from tests.preproc.table.test_pipeline import build
from tests.preproc.table.test_sequence import ids_of


def random_rows(seed: int, count: int = 40) -> list[dict]:
    """Return rows of which some have no events, some many, and some an empty item."""
    draw = random.Random(seed)
    rows = []
    for row in range(count):
        length = draw.choice([0, 1, 3, 7])
        times = sorted(draw.randint(1, 60) for _ in range(length))
        items = [draw.choice(["", *"abcd"]) for _ in times]
        rows.append(
            {"y": row % 2, "item": draw.choice("abcd"), "time": draw.choice([61, 99])}
            | {"items": items, "shops": [draw.choice("12") for _ in times]}
            | {"times": times, "prices": [draw.choice([0.5, 3.25]) for _ in times]}
        )
    # A single empty item is an empty text.
    return [row for row in rows if row["items"] != [""]]


def described(path, *, is_text: bool, **group) -> dict:
    lists = {"separator": "^"} if is_text else {"list": True}
    settings = {"name": "past", "lists": ["items", "shops"], "numbers": ["prices", "times"]}
    settings |= {"time": "times", "order_by": "CAST(time AS BIGINT)", "length": 4}
    return {
        "sources": {"t": {"files": str(path)}},
        "label": {"name": "y"},
        "categorical": [
            "item",
            {"name": "items", "vocabulary_of": "item"} | lists,
            {"name": "shops"} | lists,
        ],
        "sequence": [settings | group],
        "split": {"train": 0.5},
    }


def write(tmp_path, rows: list[dict], *, is_text: bool):
    path = tmp_path / ("t.csv" if is_text else "t.parquet")
    if not is_text:
        pq.write_table(pa.Table.from_pylist(rows), path)
        return path
    lines = [
        ",".join("^".join(map(str, v)) if isinstance(v, list) else str(v) for v in row.values())
        for row in rows
    ]
    path.write_text("\n".join([",".join(rows[0]), *lines]) + "\n")
    return path


def stored_lists(output) -> list[list[tuple]]:
    """Return what the rows see, training rows first; every split has its own events."""
    seen = []
    for split in ("train", "test"):
        columns = {"items": "i1", "shops": "i1", "prices": "<f4", "times": "<i8"}
        events = [np.fromfile(output / f"{split}/{n}.bin", d).tolist() for n, d in columns.items()]
        slices = np.fromfile(output / f"{split}/past.slices.bin", "<i8").reshape(-1, 2)
        seen += [list(zip(*(column[a:b] for column in events), strict=True)) for a, b in slices]
    return seen


@pytest.mark.parametrize("is_text", [True, False])
def test_rows_see_their_last_events(tmp_path, is_text):
    rows = random_rows(0)
    output = tmp_path / "out"
    build(
        output, described(write(tmp_path, rows, is_text=is_text), is_text=is_text), "shuffle=false"
    )
    items, shops = ids_of(output, "item"), ids_of(output, "shops")
    assert stored_lists(output) == [
        [
            (items.get(i, 0), shops.get(s, 0), p, t)
            for i, s, p, t in zip(row["items"], row["shops"], row["prices"], row["times"], strict=True)
        ][-4:]
        for row in rows
    ]  # fmt: skip
    spec = FeatureSpec.load(output)
    [group] = spec.sequences
    assert (group.features, group.time, group.max_length) == (("items", "shops"), "times", 4)
    assert not list(output.rglob("*.offsets.bin"))
    moments = [np.fromfile(output / f"{s}/past.moments.bin", "<i8") for s in ("train", "test")]
    assert np.concatenate(moments).tolist() == [row["time"] for row in rows]
    report = json.loads((output / "report.json").read_text())["sequences"]["past"]
    assert report["events"] == sum(min(len(row["items"]), 4) for row in rows)
    preproc("mode=verify", f"path={output}")


def test_lists_stay_with_their_rows_in_another_order(tmp_path, monkeypatch):
    # Offsets are removed, whose sync may still wait for the disk.
    sync = output_files.sync_named
    monkeypatch.setattr(output_files, "sync_named", lambda path: sleep(0.05) or sync(path))
    rows = random_rows(4)
    path = write(tmp_path, rows, is_text=True)
    table = described(path, is_text=True, length=9) | {"split": {"by": "random", "train": 0.5}}
    build(tmp_path / "out", table, "shuffle=true")
    seen = [[event[2:] for event in events] for events in stored_lists(tmp_path / "out")]
    wanted = [list(zip(row["prices"], row["times"], strict=True)) for row in rows]
    assert sorted(seen) == sorted(wanted)
    assert seen != wanted
    preproc("mode=verify", f"path={tmp_path / 'out'}")


def test_raw_rows_with_lists_are_refused_with_the_reason(tmp_path):
    path = write(tmp_path, random_rows(4), is_text=False)
    build(tmp_path / "out", described(path, is_text=False))
    with pytest.raises(
        ValueError, match="the lists of 'past' are written in slices; make a dataset"
    ):
        open_transformed_rows(tmp_path / "out", [path])


@pytest.mark.parametrize("is_text", [True, False])
def test_raw_rows_have_the_lists_of_the_dataset(tmp_path, is_text):
    rows = random_rows(6)
    path = write(tmp_path, rows, is_text=is_text)
    table = described(path, is_text=is_text, numbers=["prices"], time="", order_by="")
    build(tmp_path / "out", table, "vocabulary=all")
    source = open_dataset(FeatureSpec.load(tmp_path / "out"))
    halves = [
        source.read(split, np.array([[0, source.num_rows(split)]])) for split in ("train", "test")
    ]
    with open_transformed_rows(tmp_path / "out", [path]) as batches:
        found = pa.Table.from_batches([features for features, _ in batches])
    if not is_text:  # as `Run.predict` takes them
        assert found.equals(RawTables(tmp_path / "out").transformed(pq.read_table(path)))
    read = features_source(found, source.spec, "rows").read("rows", np.array([[0, len(rows)]]))
    for name, ids, lengths, *parts in zip(
        [feature.name for feature in source.spec.categorical],
        read.ids,
        read.lengths,
        *(half.ids for half in halves),
        *(half.lengths for half in halves),
        strict=True,
    ):
        np.testing.assert_array_equal(ids, np.concatenate(parts[:2]), err_msg=name)
        assert lengths is None or (lengths == np.concatenate(parts[2:])).all()
    np.testing.assert_array_equal(read.events[0], np.concatenate([h.events[0] for h in halves]))


def test_lists_without_times_or_numbers(tmp_path):
    rows = random_rows(1)
    path = write(tmp_path, rows, is_text=True)
    table = described(path, is_text=True, numbers=[], time="", order_by="")
    build(tmp_path / "out", table, "vocabulary=all")
    [group] = FeatureSpec.load(tmp_path / "out").sequences
    assert (group.numbers, group.time) == ((), None)
    slices = np.fromfile(tmp_path / "out/train/past.slices.bin", "<i8").reshape(-1, 2)
    half = rows[: len(rows) // 2]
    assert np.diff(slices)[:, 0].tolist() == [min(len(row["items"]), 4) for row in half]


BAD = [
    ({"shops": ["1"]}, "row 2: past has other numbers of items: 2 of items, 1 of shops, 2 of prices, 2 of times"),
    ({"prices": [1.0, 2.0, 3.0]}, "2 of shops, 3 of prices, 2 of times; correct or remove it, or set on_bad="),
    ({"times": [2, 50]}, "row 2: 'times' holds a time that is not before the moment of its row"),
    ({"times": [3, 1]}, "or earlier than the one before it; correct it, oldest event first"),
    ({"prices": [1.0, ""]}, "row 2: 'prices' of 'past' lacks the number of an item; correct or remove it"),
    ({"prices": ["a", 2.0]}, "row 2: 'prices' of 'past' lacks the number of an item; correct or remove it"),
    ({"prices": [1e39, 2.0]}, "row 2: 'prices' holds a number that float32 does not hold"),
]  # fmt: skip


@pytest.mark.parametrize("is_text", [True, False])
@pytest.mark.parametrize(("change", "message"), BAD)
def test_a_bad_row_is_named(tmp_path, change, message, is_text):
    row = {"y": 1, "item": "a", "time": 50, "items": ["a", "b"], "shops": ["1", "2"]}
    row |= {"times": [1, 2], "prices": [1.0, 2.0]}
    if not is_text:
        change = {
            name: [None if isinstance(x, str) and name == "prices" else x for x in values]
            for name, values in change.items()
        }
    path = write(tmp_path, [row, row | change, row, row], is_text=is_text)
    with pytest.raises(Refused, match=re.escape(message)) as caught:
        build(tmp_path / "out", described(path, is_text=is_text))
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lists": ["item"]}, "table.sequence: 'past': lists: got 'item', want a list feature without hotness"),
        ({"lists": []}, "table.sequence[0]: got lists [], want a list of categorical features"),
        ({"time": "when"}, "'past': got time 'when', want one of the numbers"),
        ({"time": ""}, "'past': time, of an event, and order_by, the moment of a row, belong together; set both, or none"),
        ({"length": 0}, "'past': length: got 0, want a whole number, 1 to 1,048,576"),
        ({"numbers": ["y"], "time": "", "order_by": ""}, "table: 'y' is named twice: a number of 'past' and a label"),
        (
            {"numbers": [{"name": "n", "expression": "length(items)"}], "time": "", "order_by": ""},
            "'past': numbers: 'n': got 'length(items)', which is bigint; want a list of numbers",
        ),
        (
            {"order_by": "'2026-01-01'"},
            "'past': order_by \"'2026-01-01'\" is varchar, want a number, a date or a timestamp: text would put '10' before '9'; "
            "write CAST('2026-01-01' AS BIGINT) or AS TIMESTAMP",
        ),
        ({"order_by": "[time]"}, "'past': order_by '[time]' is varchar[], want a number, a date or a timestamp"),
        ({"by": "user"}, "table.sequence[0].by: no such key; want one of name, lists, length, numbers, time, order_by"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_group_of_lists_is_named(tmp_path, change, message):
    path = write(tmp_path, random_rows(2), is_text=True)
    with pytest.raises(Refused, match=re.escape(message)):
        build(tmp_path / "out", described(path, is_text=True, **change))


def test_lists_of_times_are_refused_with_the_numbers_to_write(tmp_path):
    rows = random_rows(0)
    path = write(tmp_path, rows, is_text=False)
    build(tmp_path / "numbers", described(path, is_text=False))
    times = [pa.scalar(row["times"], pa.list_(pa.int64())) for row in rows]
    kind = pa.list_(pa.timestamp("s", "Asia/Tokyo"))
    table = pq.read_table(path)
    stamps = pa.array([time.as_py() for time in times]).cast(kind)
    pq.write_table(table.set_column(table.schema.get_field_index("times"), "times", stamps), path)
    message = "numbers: 'times': got '\"times\"', a list of dates or times; want numbers, such as {name: NAME, expression: "
    with pytest.raises(Refused, match=re.escape(message)) as caught:
        build(tmp_path / "out", described(path, is_text=False))
    expression = re.search('expression: "(.*)"}', caught.value.message)[1]
    numbers = ["prices", {"name": "times", "expression": expression}]
    build(tmp_path / "out", described(path, is_text=False, numbers=numbers))
    assert stored_lists(tmp_path / "out") == stored_lists(tmp_path / "numbers")
