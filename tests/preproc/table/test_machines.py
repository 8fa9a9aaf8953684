"""The same bytes on any machine: time zone, locale, threads, memory, and the order of a directory."""

import datetime
import random
import re
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from preproc.raw_files import find_files, natural_order
from preproc.transformed_rows import open_transformed_rows
from tests.helpers.preproc_command import data_files
from tests.preproc.table.test_pipeline import build

UTC = datetime.UTC
FIRST = datetime.datetime(2026, 3, 28, 20, tzinfo=UTC)
# One of the zones is 30 minutes off the hour, and one changes to summer time within the rows.
PLACES = [
    {"TZ": "UTC", "LC_ALL": "C.UTF-8"},
    {"TZ": "America/New_York", "LC_ALL": "de_DE.UTF-8"},
    {"TZ": "Asia/Kolkata", "LC_ALL": "tr_TR.UTF-8"},
]
FEATURES = {
    "label": {"name": "y"},
    "numerical": [
        {"name": "hr", "expression": "date_part('hour', CAST(t AS TIMESTAMPTZ))"},
        {"name": "since", "expression": "epoch(CAST(t AS TIMESTAMP)) % 1000"},
    ],
    "categorical": [
        {"name": "hour", "expression": "hour(CAST(t AS TIMESTAMPTZ))"},
        {"name": "day", "expression": "strftime(CAST(t AS TIMESTAMPTZ), '%A %Y-%m-%d')"},
        {"name": "text", "expression": "CAST(t AS TIMESTAMPTZ)", "buckets": 1000},
        {"name": "local", "expression": "CAST(t AS TIMESTAMP)", "buckets": 1000},
        {"name": "zoned", "expression": "CAST('2026-03-29 02:30:00' AS TIMESTAMPTZ)"},
    ],
    "keep": ["t"],
}


@pytest.fixture
def at(monkeypatch):
    """Return a function that moves this process to another place."""

    def move(place):
        for name, value in place.items():
            monkeypatch.setenv(name, value)
        time.tzset()

    yield move
    monkeypatch.undo()
    time.tzset()


def write_source(path: Path, start: int) -> Path:
    times = [FIRST + datetime.timedelta(minutes=37 * row) for row in range(start, start + 120)]
    labels = [row % 2 for row in range(120)]
    if path.suffix == ".parquet":
        pq.write_table(
            pa.table({"y": labels, "t": pa.array(times, pa.timestamp("us", "UTC"))}), path
        )
        return path
    zone = datetime.timezone(datetime.timedelta(hours=5, minutes=30))
    lines = [
        f"{y},{t.astimezone(zone).isoformat(sep=' ')}" for y, t in zip(labels, times, strict=True)
    ]
    path.write_text("\n".join(["y,t", *lines, ""]))
    return path


@pytest.mark.parametrize(("kind", "places"), [("parquet", PLACES), ("csv", PLACES[:2])])
def test_times_mean_the_same_in_every_place(tmp_path, at, kind, places):
    old = write_source(tmp_path / f"old.{kind}", 0)
    new = write_source(tmp_path / f"new.{kind}", 60)
    found = []
    for number, place in enumerate(places):
        at(place)
        tables = [{"sources": {"t": {"files": str(path)}}} | FEATURES for path in (old, new)]
        fit, out = tmp_path / f"fit_{number}", tmp_path / f"out_{number}"
        build(fit, tables[0])
        # The fit of the first place is applied at every other.
        options = ["mode=transform", f"fitted={tmp_path / 'fit_0'}"]
        build(out, tables[1], *options)
        with open_transformed_rows(tmp_path / "fit_0", [new], keep=["t"]) as rows:
            batches = [
                (features.to_pydict(), kept.schema, kept.to_pydict()) for features, kept in rows
            ]
        kept = [(out / "kept/test.parquet").read_bytes(), (fit / "kept/train.parquet").read_bytes()]
        found.append((data_files(fit), data_files(out), batches, kept))
    assert all(each == found[0] for each in found)
    first = found[0][2][0][0]
    assert first["hr"][:3] == [9, 9, 10]
    assert len(set(first["hour"])) > 20
    assert len(set(first["day"])) > 2


def test_threads_and_memory_do_not_change_a_byte(tmp_path):
    draw = random.Random(0)
    for part in range(2):
        rows = (
            f"{draw.randint(0, 1)},u{draw.randrange(500)},{draw.randrange(9000)},{draw.random():.6f},"
            + "|".join(draw.choices("abcdefgh", k=draw.randint(0, 4)))
            for _ in range(17_000)
        )
        (tmp_path / f"{part}.csv").write_text("\n".join(["y,user,t,x,tags", *rows, ""]))
    table = {
        "sources": {"t": {"files": f"{tmp_path}/*.csv"}},
        "order_by": "CAST(t AS INT)",
        "label": {"name": "y"},
        "numerical": [
            {"name": "x", "transforms": ["standardise"]},
            {"name": "low", "expression": "x", "transforms": [{"log": 1}, "minmax"]},
        ],
        "categorical": [
            "user",
            {"name": "tags", "separator": "|"},
            {"name": "both", "cross": ["user", "tags"], "max_size": 900},
        ],
        "history": [
            {"name": "past", "of": "both", "by": "user", "order_by": "CAST(t AS INT)", "length": 5}
        ],
        "keep": ["user", "x"],
    }
    found = {}
    for options in (("threads=1",), ("threads=2",), ("threads=3", "memory_limit=1GB")):
        output = tmp_path / "-".join(options).replace("=", "_")
        build(output, table, *options, "shuffle=true", "split=last_file")
        found[options] = {
            str(path.relative_to(output)): path.read_bytes()
            for path in output.rglob("*")
            if path.is_file() and path.name != "report.json"
        }
    first, *others = found.values()
    assert {"kept/test.parquet", "vocabulary/both.parquet", "preproc.json"} < set(first)
    for other in others:
        assert {name for name in first if other[name] != first[name]} == set()
        assert other.keys() == first.keys()


def test_the_order_of_a_directory_does_not_order_files(tmp_path, monkeypatch):
    for name in ("day_1", "day_01", "a", "b", "day_10"):
        (tmp_path / name).write_text(name)
    in_order = [[*map(str, sorted(tmp_path.iterdir(), reverse=back))] for back in (False, True)]
    found = []
    for names in in_order:
        monkeypatch.setattr("glob.glob", lambda *_, names=names, **__: names)
        found.append([file.path.name for file in find_files(f"{tmp_path}/*", "source")])
    assert found == [["a", "b", "day_01", "day_1", "day_10"]] * 2
    parts = [Path(name) for name in ("b.parquet", "a.parquet", "part_10", "part_2")]
    assert sorted(parts, key=natural_order) == sorted(parts[::-1], key=natural_order)


def test_one_function_opens_every_connection():
    root = Path(__file__).parents[3]
    opened = [
        str(path.relative_to(root))
        for room in ("preproc", "dataloading", "configs", "nn", "serving", "compare", "sweep")
        for path in (root / room).rglob("*.py")
        if re.search(r"duckdb\.(connect|sql|execute|query|read_\w+|from_\w+)\(", path.read_text())
    ]
    # A database without files evaluates the SQL of single rows.
    assert sorted(opened) == ["dataloading/row_sql.py", "preproc/work_directory.py"]
