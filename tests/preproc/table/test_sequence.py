"""Sequence groups of a log: the events of the same user before a row, as in a few lines of Python, and attacks on that."""

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import groupby
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataloading.dataset.feature_spec import FeatureSpec
from preproc.table.duckdb_engine import DuckDBEngine
from preproc.table.output_files import TableFiles
from preproc.transformed_rows import open_transformed_rows
from tests.helpers.preproc_command import Refused, preproc
from tests.preproc.table.test_pipeline import SHARED, build

SPLITS = ("train", "test")


@dataclass(frozen=True)
class Row:
    """One row of a table; empty text is a missing value."""

    user: str
    item: str
    shop: str
    time: str
    rating: str
    label: int

    @property
    def is_event(self) -> bool:
        return bool(self.user and self.time and self.item)


def random_rows(seed: int, count: int = 80, times: range = range(5, 25)) -> list[Row]:
    """Return rows with equal times, missing values, and users with a single row; not in the order of time."""
    draw = random.Random(seed)
    rows = [
        Row(
            draw.choice(["", "u", "v", "w", "x"]),
            draw.choices(["", *"abcde", "rare"], [2, 8, 4, 4, 4, 4, 1])[0],
            draw.choice(["", "1", "2"]),
            draw.choice(["", *map(str, times)]),
            draw.choice(["", "1", "3.5", "4", "5"]),
            draw.randint(0, 1),
        )
        for _ in range(count)
    ]
    rows[draw.randrange(count)] = Row("alone", "a", "1", "9", "5", 1)
    return rows


def write_rows(path: Path, rows: Sequence[Row]) -> Path:
    lines = [f"{r.label},{r.user},{r.item},{r.shop},{r.time},{r.rating}" for r in rows]
    path.write_text("\n".join(["y,user,item,shop,time,rating", *lines]) + "\n")
    return path


def described(*paths: Path, split: dict | None = None, **log: object) -> dict:
    settings = {"name": "past", "of": ["item", "shop"], "by": '"user"', "length": 3}
    settings |= {"order_by": 'CAST("time" AS BIGINT)', "numbers": ["rating"]}
    return {
        "sources": {"t": {"files": list(map(str, paths))}},
        "label": {"name": "y"},
        "categorical": ["user", "item", "shop"],
        "sequence": [settings | log],
        "split": split or {"train": 0.5},
    }


Events = list[tuple[str, str, float, int]]


def reference(
    rows: Sequence[Row],
    length: int = 3,
    is_event: Callable[[int, Row], bool] = lambda *_: True,
    events: Sequence[Row] | None = None,
) -> list[Events]:
    """Return what every row sees, oldest first: slow and plain. `events`: other rows than these."""
    seen = []
    for row in rows:
        found = [
            (int(e.time), number, (e.item, e.shop, float(e.rating or 0), int(e.time)))
            for number, e in enumerate(rows if events is None else events)
            if row.user and row.time and e.is_event and is_event(number, e)
            if e.user == row.user and int(e.time) < int(row.time)
        ]
        seen.append([event for *_, event in sorted(found)][-length:])
    return seen


def stored(output: Path, name: str = "past") -> tuple[list[Events], list[int]]:
    """Return what the rows see, ids in place of values, and their moments, training rows first."""
    spec = FeatureSpec.load(output)
    [group] = [group for group in spec.sequences if group.name == name]
    columns = {f.name: f.dtype for f in spec.categorical} | {c.name: c.dtype for c in group.numbers}
    log = [np.fromfile(output / f"events/{n}.bin", columns[n]).tolist() for n in group.columns]
    seen, moments = [], []
    for split in SPLITS:
        slices = np.fromfile(output / f"{split}/{name}.slices.bin", "<i8").reshape(-1, 2)
        moments += np.fromfile(output / f"{split}/{name}.moments.bin", "<i8").tolist()
        assert len(slices) == spec.splits[split].num_rows
        seen += [list(zip(*(column[a:b] for column in log), strict=True)) for a, b in slices]
    return seen, moments


def ids_of(output: Path, feature: str) -> dict[str, int]:
    path = output / f"vocabulary/{feature}.parquet"
    live = " WHERE NOT retired" if "retired" in pq.read_schema(path).names else ""
    return dict(duckdb.sql(f"SELECT value, id FROM '{path}'{live}").fetchall())


def check(output: Path, wanted: list[Events], name: str = "past") -> list[int]:
    """Compare what rows see; return their moments."""
    items, shops = ids_of(output, "item"), ids_of(output, "shop")
    seen, moments = stored(output, name)
    assert seen == [
        [(items.get(item, 0), shops.get(shop, 0), *numbers) for item, shop, *numbers in events]
        for events in wanted
    ]
    return moments


@pytest.mark.parametrize("seed", range(3))
def test_rows_see_the_events_of_the_reference(tmp_path, seed, capsys):
    rows = random_rows(seed)
    table = described(write_rows(tmp_path / "t.csv", rows))
    lengths = {"past_1": 1, "past_3": 3, "past_200": 200}
    [log] = table["sequence"]
    table["sequence"] = [log | {"name": name, "length": of} for name, of in lengths.items()]
    # A rare value is an event with id 0.
    build(tmp_path / "out", table, "frequency_limit=3")
    for name, length in lengths.items():
        wanted = reference(rows, length)
        assert 0 in map(len, wanted)
        moments = check(tmp_path / "out", wanted, name)
        assert moments == [int(r.time) if r.user and r.time else 0 for r in rows]
    spec = FeatureSpec.load(tmp_path / "out")
    by_name = {feature.name: feature for feature in spec.categorical}
    assert [by_name["past_3_item"].table, by_name["past_3_shop"].table] == ["item", "shop"]
    assert [group.max_length for group in spec.sequences] == [1, 3, 200]
    assert spec.sequences[0].time == "past_1_time"
    report = json.loads((tmp_path / "out/report.json").read_text())["sequences"]["past_3"]
    wanted = reference(rows)[40:]
    assert report["splits"]["test"] == {
        "rows": 40,
        "without_events": sum(not events for events in wanted),
        "events": sum(map(len, wanted)),
        "longest": 3,
        "latest": max(int(row.time) for row in rows[40:] if row.user and row.time),
    }
    assert (
        report["read"]
        == 80
        == sum(
            report[key] for key in ("events", "without_user_or_time", "filtered", "without_value")
        )
    )
    assert f"'past_3': 80 rows read = {report['events']} events + " in capsys.readouterr().out
    preproc("mode=verify", f"path={tmp_path / 'out'}")


@pytest.mark.parametrize("unit", [1, 1000])
def test_a_note_tells_of_times_that_seem_to_be_milliseconds(tmp_path, unit, capsys):
    rows = [Row("u", f"i{n}", "1", str((1_700_000_000 + n) * unit), "5", n % 2) for n in range(40)]
    build(tmp_path / "out", described(write_rows(tmp_path / "t.csv", rows)))
    note = "note: times of 'past' count seconds, and one is 1,700,000,039,000, after the year 5000"
    assert (note in " ".join(capsys.readouterr().out.split())) == (unit == 1000)


def test_no_row_sees_itself_its_time_or_its_future_in_files_out_of_order(tmp_path):
    times = [3, 1, 2, 2, 2, 3, 5, 4]
    rows = [Row("u", f"i{n}", "1", str(time), "5", n % 2) for n, time in enumerate(times)]
    files = [write_rows(tmp_path / f"{n}.csv", rows[4 * n : 4 * n + 4]) for n in range(2)]
    build(tmp_path / "out", described(*files, length=8), "vocabulary=all")
    names = [["i1", "i2", "i3", "i4"], [], *[["i1"]] * 3, ["i1", "i2", "i3", "i4"]]
    names += [["i1", "i2", "i3", "i4", "i0", "i5", "i7"], ["i1", "i2", "i3", "i4", "i0", "i5"]]
    wanted = reference(rows, 8)
    assert [[event[0] for event in events] for events in wanted] == names
    check(tmp_path / "out", wanted)


@pytest.mark.parametrize("rule", ["random", "column"])
@pytest.mark.parametrize("rows_of", ["train", "all"])
def test_splits_and_shuffles_change_nothing_that_is_seen(tmp_path, rule, rows_of):
    rows = random_rows(12)
    split = {"by": "random", "train": 0.5}
    if rule == "column":  # rows that are left out are events
        halves = (
            "WHEN CAST(time AS INT) % 2 = 0 THEN 'train' WHEN rating IS NOT NULL THEN 'test' END"
        )
        split = {"by": "column", "expression": f"CASE {halves}"}
    table = described(write_rows(tmp_path / "t.csv", rows), split=split, rows=rows_of)
    # The number of the row is a feature, so that rows are found again.
    table["categorical"].append({"name": "row", "expression": "order_"})
    build(tmp_path / "out", table, "shuffle=true", "vocabulary=all")
    number_of = {i: int(value) - 1 for value, i in ids_of(tmp_path / "out", "row").items()}
    written = {
        name: [number_of[i] for i in np.fromfile(tmp_path / f"out/{name}/row.bin", "i1")]
        for name in SPLITS
    }
    train = set(written["train"])
    wanted = reference(rows, 3, lambda number, _: number in train or rows_of == "all")
    check(tmp_path / "out", [wanted[n] for name in SPLITS for n in written[name]])


def test_rows_that_are_no_events_see_some(tmp_path):
    rows = random_rows(11)
    path = write_rows(tmp_path / "t.csv", rows)
    build(tmp_path / "out", described(path, filter="CAST(rating AS DOUBLE) >= 4"))
    check(tmp_path / "out", reference(rows, 3, lambda _, row: row.rating in ("4", "5")))
    report = json.loads((tmp_path / "out/report.json").read_text())["sequences"]["past"]
    known = [row for row in rows if row.user and row.time]
    assert report["filtered"] == sum(row.rating not in ("4", "5") for row in known)
    build(tmp_path / "none", described(path, filter="1 = 0"))
    check(tmp_path / "none", [[]] * 80)


@pytest.mark.parametrize("zone", ["UTC", "America/New_York"])
def test_times_count_in_whole_seconds_of_utc_in_any_zone(tmp_path, monkeypatch, zone):
    monkeypatch.setenv("TZ", zone)
    moments = np.array([0, 400, 1000, 1900, 2000, -500], "datetime64[ms]")
    columns = {
        "y": [0, 1] * 3,
        "user": ["u"] * 6,
        "item": [f"i{n}" for n in range(6)],
        "naive": pa.array(moments),
        "aware": pa.array(moments, pa.timestamp("ms", tz="Asia/Tokyo")),
        "millis": moments.astype("i8"),
    }
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    orders = {"a": "naive", "b": "aware", "c": "millis / 1000.0", "d": "CAST(naive AS DATE)"}
    log = {"of": ["item"], "by": '"user"', "length": 9}
    table = {
        "sources": {"t": {"files": str(tmp_path / "t.parquet")}},
        "label": {"name": "y"},
        "categorical": ["item"],
        "sequence": [log | {"name": name, "order_by": by} for name, by in orders.items()],
        "split": {"train": 0.5},
    }
    build(tmp_path / "out", table, "vocabulary=all")
    names = {i: value for value, i in ids_of(tmp_path / "out", "item").items()}
    for name in "abc":
        seen, found = stored(tmp_path / "out", name)
        assert found == [0, 0, 1, 1, 2, -1]
        # Events of the same second are of the same time.
        assert [[names[i] for i, _ in events] for events in seen] == [
            ["i5"], ["i5"], ["i5", "i0", "i1"], ["i5", "i0", "i1"],
            ["i5", "i0", "i1", "i2", "i3"], [],
        ]  # fmt: skip
    seen, found = stored(tmp_path / "out", "d")
    assert found == [0, 0, 0, 0, 0, -86_400]
    assert [len(events) for events in seen] == [1] * 5 + [0]


ZONES = {"Z": 0, "+05:30": 19_800, "-03": -10_800, "": 0}


@pytest.mark.parametrize(
    "order_by",
    [
        *("CAST(time AS TIMESTAMP)", "time::timestamp", "try_cast(time as Timestamp )"),
        *("CAST(time AS DATETIME)", "time::timestamp_s", "CAST(time AS TIMESTAMP_NS)"),
        *("time::TIMESTAMP(3)", 'CAST(time AS "timestamp")'),
        "CAST(time AS Timestamp Without Time Zone)",
    ],
)
def test_texts_of_times_count_by_the_zones_that_they_name(tmp_path, order_by):
    """DuckDB's cast drops them without a word, and a row would see events of hours that are still to come."""
    draw = random.Random(7)
    rows = [replace(row, time=row.time or "5") for row in random_rows(7)]
    lines = ["y,user,item,shop,time,rating"]
    for row in rows:
        zone = draw.choice([*ZONES])
        at = datetime(1970, 1, 1) + timedelta(seconds=int(row.time) + ZONES[zone])
        lines.append(f"{row.label},{row.user},{row.item},{row.shop},{at}{zone},{row.rating}")
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    table = described(tmp_path / "t.csv", order_by=order_by)
    late = f"CASE WHEN {order_by} < TIMESTAMP '1970-01-01 00:00:15' THEN 'train' ELSE 'test' END"
    build(tmp_path / "out", table)
    moments = check(tmp_path / "out", reference(rows))
    assert moments == [int(row.time) if row.user else 0 for row in rows]
    build(tmp_path / "divided", table | {"split": {"by": "column", "expression": late}})
    _, moments = stored(tmp_path / "divided")
    trained = [int(row.time) if row.user else 0 for row in rows if int(row.time) < 15]
    assert 0 < len(trained) < len(rows)
    assert moments[: FeatureSpec.load(tmp_path / "divided").rows_of("train")] == trained
    # The order of the rows and of a history's events, too.
    of_item = {"name": "last", "of": "item", "by": '"user"', "order_by": order_by, "length": 2}
    table |= {"order_by": [order_by, "order_"], "history": [of_item]}
    build(tmp_path / "sorted", table)
    in_order = sorted(rows, key=lambda row: int(row.time))
    moments = check(tmp_path / "sorted", reference(in_order))
    assert moments == [int(row.time) if row.user else 0 for row in in_order]
    items = ids_of(tmp_path / "sorted", "item")
    last = [np.fromfile(tmp_path / f"sorted/{s}/last.bin", "i1").reshape(-1, 2) for s in SPLITS]
    wanted = [[items.get(e[0], 0) for e in seen[:-3:-1]] for seen in reference(in_order)]
    assert np.concatenate(last).tolist() == [[*ids, 0, 0][:2] for ids in wanted]


def test_events_of_another_source(tmp_path, capsys):
    rows, views = random_rows(3), random_rows(4, 120)
    table = described(write_rows(tmp_path / "t.csv", rows), source="views", numbers=[])
    halves = [write_rows(tmp_path / f"v{n}.csv", views[60 * n : 60 * n + 60]) for n in range(2)]
    table["sources"]["views"] = {"files": list(map(str, halves))}
    number = {"name": "rating", "expression": "CAST(rating AS DOUBLE)"}
    [log] = table["sequence"]
    table["sequence"] = [log | {"numbers": [number], "filter": "shop = '1'"}]
    table |= {"query": "SELECT *, order_ AS place FROM t", "order_by": ["place"]}
    build(tmp_path / "out", table, "frequency_limit=3")
    check(
        tmp_path / "out",
        reference(rows, 3, lambda _, event: event.shop == "1", events=views),
    )
    report = json.loads((tmp_path / "out/report.json").read_text())["sequences"]["past"]
    assert report["read"] == 120
    bad = (tmp_path / "v1.csv").read_text().splitlines()
    (tmp_path / "v1.csv").write_text("\n".join([*bad[:5], "1,u,a,1,7,good", *bad[5:]]) + "\n")
    table["sequence"] = [log | {"numbers": ["rating"]}]
    with pytest.raises(Refused, match=r"v1.csv, row 5: .* 'rating' is good, wanted a number"):
        build(tmp_path / "bad", table)
    with (tmp_path / "v1.csv").open("a") as stream:
        stream.write("1,u,a\n")
    capsys.readouterr()
    build(tmp_path / "skipped", table, "on_bad=quarantine")
    printed = " ".join(capsys.readouterr().out.split())
    assert "'views': 1 lines cannot be read and are left out" in printed
    assert "'views': 1 bad rows are left out" in printed
    # Also one for which an expression fails.
    table["sequence"] = [log | {"numbers": [number]}]
    build(tmp_path / "failing", table, "on_bad=skip")
    assert "'views': 1 bad rows are left out" in " ".join(capsys.readouterr().out.split())
    slices = [tmp_path / name / "train/past.slices.bin" for name in ("failing", "skipped")]
    assert slices[0].read_bytes() == slices[1].read_bytes()
    (tmp_path / "v1.csv").write_text("y,user,item,time,rating\n1,u,a,7,5\n")
    table["sources"]["views"] = {"files": str(tmp_path / "v1.csv")}
    with pytest.raises(Refused, match=r"'past': source 'views': .*shop"):
        build(tmp_path / "bad", table)


def test_a_later_day_sees_the_events_of_the_days_before(tmp_path):
    """Users pause, items get ids and retire, and rows arrive late."""
    days: list[list[Row]] = []
    for day in range(4):
        draw = random.Random(day)
        rows = random_rows(day, 60, range(100 * day, 100 * day + 20))
        # Another user is away each day, and the items move on.
        rows = [r for r in rows if r.user != "uvwx"[day]]
        move = {"a": f"a{day // 2}", "b": f"b{draw.randint(0, 1)}"}
        days.append([Row(r.user, move.get(r.item, r.item), *(r.shop, r.time, r.rating, r.label)) for r in rows])  # fmt: skip
        path = write_rows(tmp_path / f"{day}.csv", days[-1])
        options = ["frequency_limit=4"]
        if day:
            options = ["mode=extend", f"fitted={tmp_path / f'out{day - 1}'}", "retire_after=1"]
        build(tmp_path / f"out{day}", described(path), *options)
        earlier = [row for rows in days for row in rows]
        check(tmp_path / f"out{day}", reference(days[-1], 3, events=earlier))
        preproc("mode=verify", f"path={tmp_path / f'out{day}'}")
    # The days are such that every rule acted.
    vocabularies = [ids_of(tmp_path / f"out{day}", "item") for day in range(4)]
    assert "a0" in vocabularies[1].keys() - vocabularies[3].keys()
    assert set(vocabularies[0]) < set(vocabularies[1]) | {"a0"}
    report = json.loads((tmp_path / "out3/report.json").read_text())["sequences"]["past"]
    assert report["carried"] == 3 * 5
    with pytest.raises(Refused, match=r"read already"):
        build(tmp_path / "x", described(path), *options[:1], f"fitted={tmp_path / 'out3'}")


def test_no_late_row_of_a_later_day_sees_an_event_of_its_time_or_later(tmp_path):
    first = [Row("u", f"i{n}", "1", str(10 + n), "5", n % 2) for n in range(6)]
    late = [Row("u", f"i{n}", "1", time, "4", n % 2) for n, time in enumerate(["9", "14", "15", "14"])]  # fmt: skip
    build(tmp_path / "0", described(write_rows(tmp_path / "0.csv", first)), "vocabulary=all")
    options = ["mode=extend", f"fitted={tmp_path / '0'}"]
    build(tmp_path / "1", described(write_rows(tmp_path / "1.csv", late)), *options)
    # Of equal times the event of the earlier day is the older one. Day 0 has handed on times 13, 14 and 15.
    names = {i: value for value, i in ids_of(tmp_path / "1", "item").items()}
    seen = [[(names[e[0]], e[3]) for e in events] for events in stored(tmp_path / "1")[0]]
    assert seen[:2] == [[], [("i0", 9), ("i3", 13)]]
    assert seen[2] == [("i4", 14), ("i1", 14), ("i3", 14)]
    assert seen[3] == seen[1]


def test_users_in_another_writing_are_refused(tmp_path):
    """5.0 is no user 5: its rows would see nothing, without a word."""
    first, other = tmp_path / "0.parquet", tmp_path / "1.parquet"
    for path, user in ((first, 5), (other, 5.0)):
        row = {"user": user, "item": "a", "shop": "1", "rating": 5.0}
        rows = [row | {"time": time, "y": time % 2} for time in range(8)]
        pq.write_table(pa.Table.from_pylist(rows), path)
    message = "'past: by': 5 would be the value '5.0', and in the fit it was '5'"
    table = described(first) | {"categorical": ["item", "shop"]}
    build(tmp_path / "out", table)
    options = "mode=extend", f"fitted={tmp_path / 'out'}"
    with pytest.raises(Refused, match=message):
        build(tmp_path / "x", table | {"sources": {"t": {"files": str(other)}}}, *options)
    table |= {"query": "SELECT *, order_ AS place FROM t", "order_by": ["place"]}
    table["sources"] |= {"views": {"files": str(other)}}
    table["sequence"] = [table["sequence"][0] | {"source": "views"}]
    with pytest.raises(Refused, match=f"source 'views': {message}"):
        build(tmp_path / "x", table)


def write_shape(shape: str, directory: Path, rows: Sequence[Row]) -> dict:
    """Write rows as a public log has them; return its sources, and a query that gives the columns of `write_rows`."""
    log, items = directory / "log", directory / "items"
    if shape == "taobao":  # UserBehavior.csv, without a header
        log.write_text("".join(f"{r.user},{r.item},{r.shop},{r.rating},{r.time}\n" for r in rows))
        columns = ["u", "i", "c", "behavior", "ts"]
        source = {"files": str(log), "format": "csv", "header": False, "columns": columns}
        query = 'SELECT u AS "user", i AS item, c AS shop, ts AS "time", behavior AS rating, order_ FROM log'
        return {"sources": {"log": source}, "query": query}
    names = ("user_id", "video_id", "time_ms", "play")
    if shape == "amazon":
        names = ("reviewerID", "asin", "unixReviewTime", "overall")
    scale = 1000 if shape == "kuairand" else 1  # milliseconds; reviews as JSON lines
    values = [(r.user, r.item, int(r.time) * scale, float(r.rating)) for r in rows]
    shops = sorted({(r.item, r.shop) for r in rows})
    kind = "csv" if shape == "kuairand" else "jsonl"
    for path, header, lines in ((log, names, values), (items, (names[1], "author"), shops)):
        of_json = [json.dumps(dict(zip(header, line, strict=True))) for line in lines]
        of_csv = [",".join(map(str, line)) for line in (header, *lines)]
        path.write_text("\n".join(of_csv if kind == "csv" else of_json) + "\n")
    user, item, time, rating = (f"log.{name}" for name in names)
    query = (
        f'SELECT {user} AS "user", {item} AS item, author AS shop, CAST({time} AS BIGINT) / {scale} AS "time", '
        f"CAST({rating} AS DOUBLE) AS rating, log.order_ FROM log LEFT JOIN items ON {item} = items.{names[1]}"
    )
    sources = {n: {"files": str(directory / n), "format": kind} for n in ("log", "items")}
    return {"sources": sources, "query": query}


@pytest.mark.parametrize("shape", ["taobao", "kuairand", "amazon"])
def test_logs_in_the_shapes_of_public_ones(tmp_path, shape):
    draw = random.Random(1)
    items = [draw.choice("abcde") for _ in range(60)]
    rows = [
        Row(draw.choice("uvw"), i, str(ord(i) % 2), f"{draw.randrange(5, 25)}", "4", draw.randrange(2))
        for i in items
    ]  # fmt: skip
    table = described() | write_shape(shape, tmp_path, rows) | {"order_by": ["order_"]}
    table["label"] = {"name": "y", "expression": "item = 'a'"}
    table["sequence"][0]["numbers"] = [
        {"name": "rating", "expression": "CAST(rating AS DOUBLE)"},
    ]
    build(tmp_path / "out", table, "frequency_limit=0")
    check(tmp_path / "out", reference(rows))


@pytest.mark.parametrize(
    ("log", "where"),
    [
        ({"numbers": [{"name": "next", "expression": 'lead(y) OVER (PARTITION BY "user")'}]}, "numbers: 'next'"),
        ({"numbers": [{"name": "mean", "expression": "(SELECT avg(CAST(y AS INT)) FROM t)"}]}, "numbers: 'mean'"),
        ({"numbers": [{"name": "top", "expression": "(SELECT count(y) FROM (TABLE t))"}]}, "numbers: 'top'"),
        ({"numbers": [{"name": "far", "expression": "(SELECT count(*) FROM read_text('/proc/version'))"}]}, "numbers: 'far'"),
        ({"filter": "count(*) OVER (PARTITION BY item) > 2"}, "filter"),
        ({"order_by": "row_number() OVER ()"}, "order_by"),
        ({"of": ["popular"]}, "table.categorical: 'popular'"),
    ],
)  # fmt: skip
def test_what_events_know_comes_from_their_own_rows(tmp_path, log, where):
    """A window or a table has later rows too, and a server computes both over the events of a request."""
    table = described(write_rows(tmp_path / "t.csv", random_rows(2)), **log)
    popular = {"name": "popular", "expression": "ntile(3) OVER (PARTITION BY item)"}
    table["categorical"] += [popular] * ("of" in log)
    with pytest.raises(Refused, match=f"{where}.* reads other rows, later ones too") as caught:
        build(tmp_path / "out", table)
    assert "\n" not in caught.value.message


def test_windows_that_no_score_needs_and_tables_of_the_own_row_are_allowed(tmp_path):
    number = {"name": "most", "expression": "(SELECT max(x) FROM unnest([CAST(rating AS DOUBLE), 1]) AS q(x))"}  # fmt: skip
    hour = {"name": "hour", "expression": "extract(hour FROM to_timestamp(CAST(\"time\" AS BIGINT)))"}  # fmt: skip
    table = described(write_rows(tmp_path / "t.csv", random_rows(2)), numbers=[number, hour])
    table["numerical"] = [number]
    table["label"]["expression"] = "CAST(y AS INT) >= avg(CAST(y AS INT)) OVER ()"
    table["weight"] = {"name": "w", "expression": "1 / count(*) OVER (PARTITION BY item)"}
    place = "percent_rank() OVER (ORDER BY order_)"
    table["split"] = {"by": "column", "expression": f"CASE WHEN {place} < 0.8 THEN 'train' ELSE 'test' END"}  # fmt: skip
    build(tmp_path / "out", table)


def test_new_rows_see_events_of_their_own_sources(tmp_path):
    old, new = random_rows(14), random_rows(15)
    build(tmp_path / "fit", described(write_rows(tmp_path / "old.csv", old)), "frequency_limit=2")
    options = ("mode=transform", f"fitted={tmp_path / 'fit'}", "split_name=null")
    build(tmp_path / "out", described(write_rows(tmp_path / "new.csv", new)), *options)
    check(tmp_path / "out", reference(new))
    assert not (tmp_path / "out/latest").exists()
    with pytest.raises(Refused, match="fitted on other features"):
        build(tmp_path / "x", described(tmp_path / "new.csv", length=4), *options)
    with pytest.raises(
        ValueError,
        match=r"a row sees the events 'past' of the days before, too; make .* with mode=extend fitted=",
    ):
        open_transformed_rows(tmp_path / "fit", [tmp_path / "new.csv"])


def test_hashed_and_sharing_features(tmp_path):
    rows = random_rows(13)
    table = described(write_rows(tmp_path / "t.csv", rows), of=["again", "hashed", "key"])
    table["categorical"] += [
        {"name": "hashed", "expression": "item", "buckets": 4},
        {"name": "again", "expression": "item", "vocabulary_of": "item"},
        {"name": "key", "expression": "item", "vocabulary": "dynamic", "capacity": 9},
    ]
    build(tmp_path / "out", table)
    spec = FeatureSpec.load(tmp_path / "out")
    tables = {name: [f.name for f in of] for name, of in spec.table_features.items()}
    assert tables["item"] == ["item", "again", "past_again"]
    assert tables["hashed"] == ["hashed", "past_hashed"]
    columns = {"hashed": "i1", "key": "<i8"}
    of_item = {}
    for name, dtype in columns.items():
        ids = [np.fromfile(tmp_path / f"out/{s}/{name}.bin", dtype) for s in SPLITS]
        items = [row.item for row in rows]
        of_item[name] = dict(zip(items, np.concatenate(ids).tolist(), strict=True))
    of_item["again"] = ids_of(tmp_path / "out", "item")
    wanted = [
        [(*(of_item[name][item] for name in ("again", "hashed", "key")), *more) for item, _, *more in events]
        for events in reference(rows)
    ]  # fmt: skip
    assert stored(tmp_path / "out")[0] == wanted


def test_a_log_is_written_in_pieces_and_a_stopped_run_resumes(tmp_path, monkeypatch):
    rows = random_rows(17)
    table = described(write_rows(tmp_path / "t.csv", rows))
    wanted = build(tmp_path / "whole", table, "shuffle=true")
    latest = pq.read_table(tmp_path / "whole/latest/past.parquet")
    monkeypatch.setattr("preproc.table.output_files.BATCH_ROWS", 7)
    monkeypatch.setattr("preproc.table.log_files.GROUP_ROWS", 5)
    assert build(tmp_path / "out", table, "shuffle=true") == wanted
    assert pq.read_table(tmp_path / "out/latest/past.parquet").equals(latest)
    with monkeypatch.context() as patch:
        stop = OSError("stop")
        patch.setattr(
            "preproc.table.log_files._write_slices", lambda *_: (_ for _ in ()).throw(stop)
        )
        with pytest.raises(Refused, match="stop"):
            build(tmp_path / "again", table, "shuffle=true")
    assert build(tmp_path / "again", table, "shuffle=true") == wanted


def test_a_line_is_sorted_without_texts(tmp_path, monkeypatch):
    lines = {}

    def number(engine, query, order_by, path):
        lines[path.name] = dict(engine.columns(query))
        return sort(engine, query, order_by, path)

    sort = DuckDBEngine.number
    monkeypatch.setattr(DuckDBEngine, "number", number)
    rows = random_rows(23)
    build(tmp_path / "out", described(write_rows(tmp_path / "t.csv", rows)))
    check(tmp_path / "out", reference(rows, 3))
    assert lines["who_0"] == {"who_": "VARCHAR"}
    assert "VARCHAR" not in lines["line_0"].values()


@pytest.mark.parametrize("rows", [0, 1, 7, 300_000])
def test_texts_of_a_relation_are_an_array(tmp_path, rows):
    wanted = pa.array(["" if i % 5 == 0 else f"é{i}" for i in range(rows)], pa.string())
    (tmp_path / "r").mkdir()
    pq.write_table(pa.table({"value": wanted}), tmp_path / "r/0.parquet")
    files = object.__new__(TableFiles)
    files.directory, files._connection = tmp_path, duckdb.connect()
    assert files.texts("r", "value", "r").cast(pa.string()).equals(wanted)


@pytest.mark.skipif(not SHARED.exists(), reason=f"{SHARED} is not here")
def test_the_events_of_movielens_are_those_of_one_pass_in_the_order_of_time(tmp_path):
    source, output = SHARED / "movielens/ml-latest-small", tmp_path / "out"
    preproc("dataset=movielens_sequences", f"source={source}", f"output={output}")
    preproc("mode=verify", f"path={output}")
    ratings = duckdb.sql(
        f"SELECT userId, CAST(movieId AS STRING), rating, timestamp FROM '{source}/ratings.csv.gz' "
        "ORDER BY timestamp, userId, movieId"
    ).fetchall()
    ids = ids_of(output, "movieId")
    numbers = {u: sum(1 for _ in of) for u, of in groupby(sorted(r[0] for r in ratings))}
    past: dict[int, list[tuple[int, float, int]]] = {user: [] for user in numbers}
    train, test = [], []
    for _, same_time in groupby(ratings, key=lambda row: row[3]):
        rows = list(same_time)
        before = {user: list(past[user]) for user, *_ in rows}
        for user, movie, rating, time in rows:
            # The last fifth of every user's ratings tests.
            split = train if len(past[user]) < 0.8 * (numbers[user] - 1) else test
            split.append(before[user][-100:])
            past[user].append((ids.get(movie, 0), rating, time))
    seen, _ = stored(output, "history")
    assert [[(e[0], *e[-2:]) for e in events] for events in seen] == train + test


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"of": "item"}, "table.sequence: 'past': of: got 'item', want a list of texts"),
        ({"of": ["film"]}, "table.sequence: 'past': of: got 'film', which is no feature; want a categorical feature"),
        ({"of": ["tags"]}, "of: got 'tags', which is a list; want"),
        ({"of": ["item", "item"]}, "table: 'past_item' is named twice: a feature of 'past' and a feature of 'past'; rename one"),
        ({"numbers": ["stars"]}, "table.sequence: 'past': numbers: 'stars': got '\"stars\"': no column \"stars\" (an"),
        ({"numbers": ["item = 'a'"]}, "an expression has a name: {name: bought, expression: \"action = 'buy'\"}); correct"),
        ({"numbers": [{"expression": "item = 'a'"}]}, "table.sequence: 'past': numbers[0]: got no name; want at least name"),
        (
            {"numbers": [{"name": "r", "expression": "item"}]},
            "row 1: table.sequence: 'past': numbers: 'r' is a, wanted a number that float32 holds",
        ),
        ({"numbers": [{"name": "r", "expression": "1e39"}]}, "numbers: 'r' is 1e+39, wanted a number that float32 holds"),
        ({"numbers": [{"name": "r", "expression": "1 / 0::DOUBLE"}]}, "numbers: 'r' is inf, wanted a number"),
        ({"numbers": ["time"]}, "'past_time' is named twice: the time of an event of 'past' and the time of an event"),
        ({"numbers": "rating"}, "table.sequence: 'past': numbers: got 'rating', want a list"),
        ({"by": ""}, "'past': by: got '', want SQL, such as a column"),
        ({"order_by": '"time"'}, "table.sequence: 'past': order_by '\"time\"' is varchar, want a number, a date or a"),
        ({"filter": "rating"}, "'past': filter 'rating' is varchar, want a condition that is true or false"),
        ({"length": 0}, "'past': length: got 0, want a whole number, 1 to 1,048,576"),
        ({"rows": "test"}, "'past': rows: got 'test', want one of all, train"),
        ({"source": "views"}, "table.sequence: 'past': got source 'views', want one of 't'"),
        ({"source": "t", "rows": "train"}, "'past': rows: train is for events that are rows of the dataset"),
        ({"last": 3}, "table.sequence[0].last: no such key; want one of name, of, by"),
        ({"name": "item"}, "table: 'item' is named twice: a categorical feature and a sequence; rename one, and"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_log_is_named(tmp_path, change, message):
    table = described(write_rows(tmp_path / "t.csv", [Row("u", "a", "1", "3", "5", 0)] * 8), **change)  # fmt: skip
    table["categorical"].append({"name": "tags", "expression": "item", "separator": "|"})
    with pytest.raises(Refused, match=re.escape(message)) as caught:
        build(tmp_path / "out", table)
    assert "\n" not in caught.value.message
    assert not (tmp_path / "out").exists()
