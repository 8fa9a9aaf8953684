"""Logs of listens: Yambda's files against the rules written plainly, the hash of crosses, and synthetic logs.

pytest tests/preproc/test_listens.py
"""

import shutil

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq
import pytest

from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.dataset.open_dataset import open_dataset
from preproc.listens import rows, synthetic, yambda_files
from preproc.listens.xxh64 import xxh64
from tests.helpers.datasets import make_loader
from tests.helpers.preproc_command import Refused, data_files, preproc

SIZES = "table_rows=[60,20,30,40,100,50,50,50,40,30,20]"
KINDS = ["listen", "like", "dislike", "unlike", "undislike"]
SCAN, HISTORY = 14, 9


def test_the_hash_is_xxh64():
    """Numbers of the reference's crosses, and the package xxhash where it is installed."""

    def crossed(*keys):
        return int(xxh64([np.array([key]) for key in keys])[0])

    assert crossed(123, 456) % 100_000_000 == 66_563_913
    assert crossed(123, 7) % 24_000_000 == 8_130_127
    assert crossed(1, 2, 3) % 40_000_000 == 35_187_706
    package = pytest.importorskip("xxhash")
    rows = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, (200, 3))
    for count in (1, 2, 3):
        wanted = [package.xxh64_intdigest(row[:count].tobytes()) for row in rows]
        assert xxh64(list(rows.T[:count])).tolist() == wanted


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Write a small log in Yambda's published layout, in no order, and return its directory and its columns."""
    root, draw, count = tmp_path_factory.mktemp("yambda"), np.random.default_rng(3), 700
    times = draw.integers(0, 4 * 86_400, count) // 300 * 300
    # Some events are of one second, and the last ones belong to Yambda's own test.
    times[:5] = yambda_files.END + np.arange(5)
    kinds = draw.choice(5, count, p=[0.8, 0.1, 0.05, 0.03, 0.02])
    ratio = [None if kind or draw.random() < 0.1 else int(draw.integers(0, 101)) for kind in kinds]
    columns = {
        "uid": pa.array(draw.integers(1, 12, count), pa.uint32()),
        "timestamp": pa.array(times, pa.uint32()),
        "item_id": pa.array(draw.integers(0, 60, count), pa.uint32()),
        "is_organic": pa.array(draw.integers(0, 2, count), pa.uint8()),
        "played_ratio_pct": pa.array(ratio, pa.uint16()),
        "track_length_seconds": pa.array(draw.integers(30, 300, count), pa.uint32()),
        "event_type": pa.array([KINDS[kind] for kind in kinds]).dictionary_encode(),
    }
    (root / "flat/5b").mkdir(parents=True)
    table = pa.table(columns)
    pq.write_table(table, root / "flat/5b/multi_event.parquet", row_group_size=100)
    for name, most in (("artist", 20), ("album", 30)):
        # Item 59 has none, item 3 has two, and item 99 is in no log.
        items = [*range(59), 3, 99]
        of = draw.integers(1, most, len(items))
        pq.write_table(
            pa.table(
                {f"{name}_id": pa.array(of, pa.uint32()), "item_id": pa.array(items, pa.uint32())}
            ),
            root / f"{name}_item_mapping.parquet",
        )
    return root, table.to_pylist()


def plain_rows(root, events):
    """Return what each row of the benchmark has, by its rules, in its order, and the number of windows."""
    maps = {}
    for name in ("artist", "album"):
        pairs = pq.read_table(root / f"{name}_item_mapping.parquet").to_pylist()
        maps[name] = {pair["item_id"]: pair[f"{name}_id"] for pair in pairs}
    users: dict[int, list] = {}
    for event in sorted(events, key=lambda event: (event["uid"], event["timestamp"])):
        if event["timestamp"] < yambda_files.END:
            listen, ratio = event["event_type"] == "listen", event["played_ratio_pct"] or 0
            action = (1 if ratio >= 50 else 4) if listen else 2 * (event["event_type"] == "like")
            users.setdefault(event["uid"], []).append({**event, "action": action, "listen": listen})
    found = []
    for uid, log in users.items():
        for at, event in enumerate(log):
            if at < HISTORY or not event["listen"]:
                continue
            scanned, seen = range(max(at - SCAN, 0), at), []
            for action in (1, 2, 4):
                seen += [i for i in scanned if log[i]["action"] == action][-(HISTORY // 3) :]
            found.append((event["timestamp"], uid, at, event, [log[i] for i in sorted(seen)]))
    first = min(row[0] for row in found)
    found.sort(key=lambda row: ((row[0] - first) // 86_400, row[1], row[2]))
    windows = [(row[0] - first) // 86_400 for row in found]
    return found, windows, maps


@pytest.mark.parametrize("chunk", [1 << 20, 2048])
def test_yambdas_files_become_the_rows_of_the_rules(source, tmp_path, monkeypatch, chunk):
    root, events = source
    monkeypatch.setattr(rows, "SCAN", SCAN)
    monkeypatch.setattr(yambda_files, "CHUNK_EVENTS", chunk)
    monkeypatch.setattr(rows, "CHUNK_ROWS", 50)
    output = tmp_path / "out"
    preproc(
        "dataset=yambda", f"source={root}", f"output={output}", SIZES, f"yambda.history={HISTORY}"
    )
    preproc("mode=verify", f"path={output}")
    wanted_rows, windows, maps = plain_rows(root, events)
    number = windows.count(windows[-1])
    spec = FeatureSpec.load(output)
    names = [feature.name for feature in spec.categorical]
    assert {name: files.num_rows for name, files in spec.splits.items()} == {
        "train": len(wanted_rows) - number,
        "test": number,
    }
    for split, wanted in (("train", wanted_rows[:-number]), ("test", wanted_rows[-number:])):
        read = open_dataset(spec).read(split, np.array([[0, len(wanted)]]))
        ids = dict(zip(names, (column.tolist() for column in read.ids), strict=True))
        seen = [event for row in wanted for event in row[4]]
        assert read.labels.tolist() == [row[3]["action"] == 1 for row in wanted]
        assert ids["uid"] == [row[1] for row in wanted]
        for prefix, of in (("", [row[3] for row in wanted]), ("hist_", seen)):
            items = [event["item_id"] for event in of]
            assert ids[f"{prefix}item_id"] == items
            for name in ("artist", "album"):
                assert ids[f"{prefix}{name}_id"] == [maps[name].get(item, 0) for item in items]
        assert read.lengths[-1].tolist() == [len(row[4]) for row in wanted]
        assert read.events[1].tolist() == [event["action"] for event in seen]
        # A second more than the difference, so that events of the row's own second are before it.
        ages = [row[0] + 1 - event["timestamp"] for row in wanted for event in row[4]]
        assert read.events[0].tolist() == ages
        queries = [row[4][-1]["timestamp"] if row[4] else row[0] for row in wanted]
        assert (
            read.numerical[:, 0].tolist() == (np.array(queries) / 3600).astype(np.float32).tolist()
        )
        # As the reference's seconds, of which the numbers in float32 lack less than one.
        assert read.numerical[:, 0].astype(int).tolist() == [query // 3600 for query in queries]
        hours = [row[0] // 3600 % 24 for row in wanted]
        keys = [np.array(ids["item_id"]), np.array(hours)]
        assert ids["item_x_hour"] == (xxh64(keys) % 50).tolist()
        organic = np.array([row[3]["is_organic"] for row in wanted])
        assert ids["user_x_is_organic"] == (xxh64([np.array(ids["uid"]), organic]) % 20).tolist()


def test_a_synthetic_log_is_like_yambda_and_the_same_again(tmp_path, monkeypatch, capsys):
    options = [
        *("dataset=yambda", "yambda.users=40", "yambda.mean_events=150", "yambda.history=60"),
        "table_rows=[5000,500,1500,61,3000,2000,2000,2000,1000,900,122]",
    ]
    preproc(*options, f"output={tmp_path / 'one'}")
    printed = capsys.readouterr().out
    monkeypatch.setattr(rows, "CHUNK_ROWS", 1000)
    monkeypatch.setattr(synthetic, "CHUNK_EVENTS", 1000)
    preproc(*options, f"output={tmp_path / 'two'}")
    assert data_files(tmp_path / "one") == data_files(tmp_path / "two")
    figures = {
        line[:42].strip(): line[42:].split()[0]
        for line in printed.splitlines()
        if line[42:].strip()
    }
    # So few users like few artists.
    assert float(figures["listens of at least half"][:-1]) == pytest.approx(61.3, abs=10)
    assert float(figures["likes"][:-1]) == pytest.approx(1.9, abs=0.5)
    spec = FeatureSpec.load(tmp_path / "one")
    read = open_dataset(spec).read("train", np.array([[0, spec.splits["train"].num_rows]]))
    users = read.ids[[f.name for f in spec.categorical].index("uid")]
    # User-major inside each window of a day.
    assert 20 < (np.diff(users) < 0).sum() < 300
    assert 20 < spec.categorical[-1].mean_hotness < 60
    # Resumed in a window, and on two ranks, the rows are the same.
    source = open_dataset(spec)
    whole = make_loader(source, "train", batch_size=32)
    labels = [batch.labels.tolist() for batch in whole.batches(0, 9)]
    assert labels == read.labels[: 9 * 32].reshape(9, 32).tolist()
    assert [batch.labels.tolist() for batch in whole.batches(5, 4)] == labels[5:]
    ranks = [make_loader(source, "train", batch_size=32, rank=r, world_size=2) for r in range(2)]
    assert [value for of in ranks for value in of.batch(7).labels.tolist()] == labels[7]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["yambda.users=2", "yambda.mean_events=5"],
            "yambda.history earlier events of their user are of 0 windows of a day; want 2 or more",
        ),
        (["table_rows=[5,5]"], "dataset=yambda needs table_rows, 11 positive numbers"),
        (["mode=extend", "fitted=DIR"], "mode=extend is for raw logs with vocabularies"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, options, message):
    with pytest.raises(Refused, match=message):
        preproc("dataset=yambda", f"output={tmp_path / 'out'}", SIZES, *options)
    assert not (tmp_path / "out").exists()


def changed(column, value):
    """Return a change of a table: its first value in a column; the column goes where that is `...`."""

    def change(table):
        number = table.column_names.index(column)
        if value is ...:
            return table.remove_column(number)
        values = pa.array([value, *table[column].to_pylist()[1:]], pa.int64())
        return table.set_column(number, column, values)

    return change


EVENTS, ARTISTS = "flat/5b/multi_event.parquet", "artist_item_mapping.parquet"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (EVENTS, changed("item_id", 60), r"1 rows have no item_id from 0 to 59 \(table_rows\); corr"),
        (EVENTS, changed("item_id", None), r"event.parquet: 1 rows have no item_id from 0 to 59"),
        (EVENTS, changed("uid", -1), "1 rows have no uid from 0 to 39"),
        (EVENTS, changed("timestamp", None), "1 rows have no timestamp; correct the file"),
        (EVENTS, changed("is_organic", ...), r'"is_organic" not found .*; want Yambda\'s file'),
        (EVENTS, changed("played_ratio_pct", ...), '"played_ratio_pct" not found'),
        (ARTISTS, changed("item_id", ...), r'mapping.parquet cannot be read .*"item_id" not found'),
        (ARTISTS, changed("artist_id", 20), "1 rows have no artist_id from 0 to 19"),
        (EVENTS, lambda table: table.filter(pa.compute.less(table["timestamp"], 86_400)), "1 windows of a day"),
    ],
)  # fmt: skip
def test_files_that_are_not_yambdas_are_refused(source, tmp_path, name, change, message):
    root = shutil.copytree(source[0], tmp_path / "yambda")
    pq.write_table(change(pq.read_table(root / name)), root / name)
    options = f"source={root}", f"output={tmp_path / 'out'}", SIZES, "yambda.history=3"
    with pytest.raises(Refused, match=message) as refused:
        preproc("dataset=yambda", *options)
    assert "\n" not in refused.value.message
    assert not (tmp_path / "out").exists()
