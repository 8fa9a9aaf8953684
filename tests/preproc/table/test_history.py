"""Histories: the last values of a column for the same user before this row, as in ten lines of Python."""

import json
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import duckdb
import numpy as np
import pytest

from dataloading.dataset.feature_spec import FeatureSpec
from tests.helpers.preproc_command import Refused, preproc
from tests.preproc.table.test_pipeline import SHARED, build

SPLITS = ("train", "test")
ITEMS = ["", "a", "b", "c", "d", "e", "rare"]
SOME_ROWS = (
    "CASE WHEN CAST(time AS INT) % 2 = 0 THEN 'train' "
    "WHEN time IS NOT NULL AND rating IS NOT NULL THEN 'test' END"
)
USERS = ["", "u", "v", "w", "x"]


@dataclass(frozen=True)
class Row:
    """One row of a table; empty text is a missing value."""

    user: str
    item: str
    time: str
    rating: str
    label: int


def random_rows(seed: int, count: int = 80) -> list[Row]:
    """Return rows with equal times, missing values, and users with a single row."""
    draw = random.Random(seed)
    rows = [
        Row(
            draw.choice(USERS),
            draw.choices(ITEMS, [2, 8, 4, 4, 4, 4, 1])[0],
            draw.choice(["", *map(str, range(5, 25))]),
            draw.choice(["", "1", "3.5", "4", "5"]),
            draw.randint(0, 1),
        )
        for _ in range(count)
    ]
    rows[draw.randrange(count)] = Row("alone", "a", "9", "5", 1)
    return rows


def write_rows(path: Path, rows: list[Row]) -> Path:
    lines = [f"{r.label},{r.user},{r.item},{r.time},{r.rating}" for r in rows]
    path.write_text("\n".join(["y,user,item,time,rating", *lines]) + "\n")
    return path


def described(path: Path, *, split: dict | None = None, **history: object) -> dict:
    settings = {"name": "past", "of": "item", "by": '"user"', "length": 3}
    return {
        "sources": {"t": {"files": str(path)}},
        "label": {"name": "y"},
        "categorical": ["user", "item"],
        "history": [settings | {"order_by": 'CAST("time" AS BIGINT)'} | history],
        "split": split or {"train": 0.5},
    }


def reference(
    rows: list[Row], length: int, is_past: Callable[[int, Row], bool] = lambda *_: True
) -> list[list[str]]:
    """Return what every row sees, most recent first: slow and plain."""
    histories = []
    for row in rows:
        items = [
            (int(other.time), number, other.item)
            for number, other in enumerate(rows)
            if row.user and row.time and other.user == row.user and other.time and other.item
            if int(other.time) < int(row.time) and is_past(number, other)
        ]
        histories.append([item for *_, item in sorted(items, reverse=True)][:length])
    return histories


def stored(output: Path, name: str = "past") -> tuple[list[list[int]], list[int]]:
    """Return the ids of a history and its lengths, training rows first."""
    spec = FeatureSpec.load(output)
    feature = next(f for f in spec.categorical if f.name == name)
    numericals = [np.fromfile(output / s / "numerical.bin", "<f2") for s in SPLITS]
    column = spec.numerical.index(f"{name}_length")
    ids = [np.fromfile(output / s / f"{name}.bin", feature.dtype) for s in SPLITS]
    lengths = np.concatenate(numericals).reshape(-1, len(spec.numerical))[:, column]
    return (
        np.concatenate(ids).reshape(-1, feature.hotness).tolist(),
        lengths.astype(int).tolist(),
    )


def check(output: Path, wanted: list[list[str]], length: int, name: str = "past") -> None:
    """Compare ids and lengths of a dataset with histories of items."""
    vocabulary = duckdb.sql(f"SELECT value, id FROM '{output}/vocabulary/item.parquet'")
    ids = dict(vocabulary.fetchall())
    padded = [[*(ids.get(v, 0) for v in past), *[0] * (length - len(past))] for past in wanted]
    assert stored(output, name) == (padded, [len(past) for past in wanted])


@pytest.mark.parametrize("seed", range(4))
def test_histories_are_those_of_the_reference(tmp_path, seed):
    rows = random_rows(seed)
    table = described(write_rows(tmp_path / "t.csv", rows))
    lengths = {"past_1": 1, "past_3": 3, "past_200": 200}
    [history] = table["history"]
    table["history"] = [history | {"name": name, "length": of} for name, of in lengths.items()]
    # A rare value is an item with id 0; the length tells it from the end of the history.
    build(tmp_path / "out", table, "frequency_limit=3")
    spec = FeatureSpec.load(tmp_path / "out")
    item, *pasts = spec.categorical[1:]
    assert spec.table_features["item"] == (item, *pasts)
    for (name, length), past in zip(lengths.items(), pasts, strict=True):
        wanted = reference(rows, length)
        longest = max(map(len, wanted))
        assert 0 in map(len, wanted)
        assert longest == length if length < 200 else longest < length
        check(tmp_path / "out", wanted, length, name)
        assert (past.hotness, past.table, past.cardinality) == (length, "item", item.cardinality)
        assert not (tmp_path / f"out/vocabulary/{name}.parquet").exists()
    preproc("mode=verify", f"path={tmp_path / 'out'}")


def test_no_row_sees_itself_its_future_or_a_row_of_its_time(tmp_path):
    times = [3, 1, 2, 2, 2, 3, 5, 4]
    rows = [Row("u", f"i{n}", str(time), "5", n % 2) for n, time in enumerate(times)]
    build(tmp_path / "out", described(write_rows(tmp_path / "t.csv", rows), length=8))
    wanted = [
        ["i4", "i3", "i2", "i1"],
        [],
        *[["i1"]] * 3,
        ["i4", "i3", "i2", "i1"],
        ["i7", "i5", "i0", "i4", "i3", "i2", "i1"],
        ["i5", "i0", "i4", "i3", "i2", "i1"],
    ]
    assert reference(rows, 8) == wanted
    check(tmp_path / "out", wanted, 8)


def test_rows_that_the_filter_leaves_out_see_a_history_but_are_in_none(tmp_path):
    rows = random_rows(11)
    path = write_rows(tmp_path / "t.csv", rows)
    build(tmp_path / "out", described(path, filter="CAST(rating AS DOUBLE) >= 4"))
    liked = reference(rows, 3, lambda _, row: row.rating in ("4", "5"))
    assert liked != reference(rows, 3)
    check(tmp_path / "out", liked, 3)


@pytest.mark.parametrize(
    "options",
    [
        {"split": {"by": "random", "train": 0.5, "validation": 0.0}},
        {"split": {"by": "column", "expression": SOME_ROWS}},
    ],
)  # fmt: skip
@pytest.mark.parametrize("shuffle", ["true", "false"])
def test_splits_and_shuffles_change_no_history(tmp_path, options, shuffle):
    rows = random_rows(12)
    table = described(write_rows(tmp_path / "t.csv", rows), **options)
    # The number of the row is a feature, so that rows are found again.
    table["categorical"].append({"name": "row", "expression": "order_"})
    [history] = table["history"]
    table["history"] = [history | {"name": of, "rows": of} for of in ("train", "all")]
    build(tmp_path / "out", table, f"shuffle={shuffle}", "vocabulary=all")
    vocabulary = duckdb.sql(f"SELECT id, value FROM '{tmp_path}/out/vocabulary/row.parquet'")
    number_of = {i: int(value) - 1 for i, value in vocabulary.fetchall()}
    written = {
        split: [number_of[i] for i in np.fromfile(tmp_path / f"out/{split}/row.bin", "i1")]
        for split in SPLITS
    }
    train = set(written["train"])
    for name in ("train", "all"):
        wanted = reference(rows, 3, lambda number, _, name=name: number in train or name == "all")
        seen = [wanted[n] for split in SPLITS for n in written[split]]
        check(tmp_path / "out", seen, 3, name)
    if "expression" in table["split"]:  # rows that are left out are in histories
        assert len(rows) > len(train) + len(written["test"])


def test_a_user_with_one_row_and_a_table_without_items(tmp_path):
    rows = [Row("u", "", str(n), "1", n % 2) for n in range(6)] + [Row("v", "a", "1", "1", 0)]
    build(tmp_path / "out", described(write_rows(tmp_path / "t.csv", rows)))
    check(tmp_path / "out", [[]] * 7, 3)
    none = described(tmp_path / "t.csv", filter="1 = 0")
    build(tmp_path / "none", none)
    check(tmp_path / "none", [[]] * 7, 3)


def test_bad_rows_are_in_no_history(tmp_path):
    rows = random_rows(18)
    lines = write_rows(tmp_path / "t.csv", rows).read_text().splitlines()
    lines.insert(20, "x,u,a,5,5")
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    table = described(tmp_path / "t.csv", filter="CAST(rating AS DOUBLE) >= 4")
    table["split"] = {"by": "last_file"}
    table["sources"]["t"]["files"] = [str(tmp_path / "t.csv"), str(tmp_path / "last.csv")]
    write_rows(tmp_path / "last.csv", random_rows(19, 6))
    build(tmp_path / "two", table, "on_bad=skip")
    wanted = reference([*rows, *random_rows(19, 6)], 3, lambda _, row: row.rating in ("4", "5"))
    check(tmp_path / "two", wanted[:83], 3)


def test_two_histories_of_a_hashed_and_a_sharing_feature(tmp_path):
    rows = random_rows(13)
    table = described(write_rows(tmp_path / "t.csv", rows))
    table["categorical"] += [
        {"name": "hashed", "expression": "item", "buckets": 4},
        {"name": "again", "expression": "item", "vocabulary_of": "item"},
    ]
    table["numerical"] = [{"name": "rating", "transforms": [{"fill": 0}]}]
    first = table["history"][0]
    table["history"] = [
        first | {"of": "again"},
        first | {"name": "hashes", "of": "hashed", "length": 2},
    ]
    build(tmp_path / "out", table)
    check(tmp_path / "out", reference(rows, 3), 3)
    ids, lengths = stored(tmp_path / "out", "hashes")
    hashed = np.concatenate([np.fromfile(tmp_path / f"out/{s}/hashed.bin", "i1") for s in SPLITS])
    bucket_of = dict(zip((row.item for row in rows), hashed.tolist(), strict=True))
    wanted = reference(rows, 2)
    assert ids == [[*(bucket_of[v] for v in p), *[0] * (2 - len(p))] for p in wanted]
    assert lengths == [len(past) for past in wanted]
    spec = FeatureSpec.load(tmp_path / "out")
    assert spec.numerical == ("rating", "past_length", "hashes_length")
    tables = {name: [f.name for f in of] for name, of in spec.table_features.items()}
    assert tables == {
        "user": ["user"],
        "item": ["item", "again", "past"],
        "hashed": ["hashed", "hashes"],
    }
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert report["columns"]["past"]["missing"] == np.mean([not p for p in wanted[:40]])
    assert set(report["splits"]["test"]["unseen"]) == {f.name for f in spec.categorical}


def test_a_fit_is_applied_to_the_histories_of_new_rows(tmp_path):
    old, new = random_rows(14), random_rows(15)
    build(tmp_path / "fit", described(write_rows(tmp_path / "old.csv", old)), "frequency_limit=2")
    options = ("mode=transform", f"fitted={tmp_path / 'fit'}", "split_name=null")
    path = write_rows(tmp_path / "new.csv", new)
    build(tmp_path / "out", described(path), *options)
    check(tmp_path / "out", reference(new, 3), 3)
    preproc("mode=verify", f"path={tmp_path / 'out'}", f"fitted={tmp_path / 'fit'}")
    # Old rows that the split leaves out are the past of the new ones.
    new_rows = "CASE WHEN file_ = 0 THEN NULL WHEN order_ <= 40 THEN 'train' ELSE 'test' END"
    both = described(path, split={"by": "column", "expression": new_rows})
    both["sources"]["t"]["files"] = [str(tmp_path / "old.csv"), str(path)]
    build(tmp_path / "both", both, *options)
    check(tmp_path / "both", reference([*old, *new], 3)[len(old) :], 3)
    with pytest.raises(Refused, match="fitted on other features"):
        build(tmp_path / "x", described(path, length=4), *options)


@pytest.mark.skipif(not SHARED.exists(), reason=f"{SHARED} is not here")
def test_the_histories_of_movielens_are_those_of_one_pass_in_the_order_of_time(tmp_path):
    source = SHARED / "movielens/ml-latest-small"
    preproc("dataset=movielens_history", f"source={source}", f"output={tmp_path / 'out'}")
    preproc("mode=verify", f"path={tmp_path / 'out'}")
    ratings = duckdb.sql(
        f"SELECT userId, CAST(movieId AS STRING), rating, timestamp FROM '{source}/ratings.csv.gz' "
        "ORDER BY timestamp, userId, movieId"
    ).fetchall()
    vocabulary = duckdb.sql(f"SELECT value, id FROM '{tmp_path}/out/vocabulary/movieId.parquet'")
    ids = dict(vocabulary.fetchall())
    liked: dict[int, list[int]] = {}
    numbers, seen = Counter(user for user, *_ in ratings), Counter()
    train, test = [], []
    for _, same_time in groupby(ratings, key=lambda row: row[3]):
        rows = list(same_time)
        for user, *_ in rows:
            # The last fifth of every user's ratings tests.
            split = train if seen[user] < 0.8 * (numbers[user] - 1) else test
            split.append(liked.get(user, [])[:-51:-1])
            seen[user] += 1
        for user, movie, rating, _ in rows:
            if rating >= 4:
                liked.setdefault(user, []).append(ids.get(movie, 0))
    assert round(len(test) / len(ratings), 3) == 0.202
    wanted = train + test
    found, lengths = stored(tmp_path / "out", "history")
    assert lengths == [len(past) for past in wanted]
    assert found == [past + [0] * (50 - len(past)) for past in wanted]


def test_a_stopped_run_with_histories_resumes(tmp_path, monkeypatch):
    from preproc.table.output_files import TableFiles

    table = described(write_rows(tmp_path / "t.csv", random_rows(16)))
    wanted = build(tmp_path / "wanted", table, "shuffle=true")
    with monkeypatch.context() as patch:
        stop = OSError("stop")
        patch.setattr(TableFiles, "write_history", lambda *_: (_ for _ in ()).throw(stop))
        with pytest.raises(Refused, match="stop"):
            build(tmp_path / "out", table, "shuffle=true")
    assert build(tmp_path / "out", table, "shuffle=true") == wanted


def test_a_history_is_written_in_pieces(tmp_path, monkeypatch):
    rows = random_rows(17)
    table = described(write_rows(tmp_path / "t.csv", rows))
    monkeypatch.setattr("preproc.table.output_files.CHUNK_ROWS", 7)
    monkeypatch.setattr("preproc.table.output_files.BATCH_ROWS", 7)
    build(tmp_path / "out", table)
    check(tmp_path / "out", reference(rows, 3), 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"of": "film"}, "table.history: 'past': of: got 'film', which is no feature; want a categorical feature with one value"),
        ({"of": "y"}, "got 'y', which is no feature; want a categorical feature with one value per row, one of 'user', 'item'"),
        ({"of": "rating"}, "of: got 'rating', which is a numerical feature; want"),
        ({"of": "tags"}, "of: got 'tags', which is a list; want"),
        ({"of": "past"}, "of: got 'past', which is a history; want"),
        ({"of": ["item"]}, "of: got ['item'], want text"),
        ({"order_by": None}, "table.history[0]: got no order_by; want at least name, of, by, order_by, length"),
        ({"by": ""}, "'past': by: got '', want SQL, such as a column"),
        ({"by": "nobody"}, "table.history: 'past': by: got 'nobody': no column \"nobody\"; correct it; the columns are"),
        ({"order_by": '"time"'}, "'past': order_by '\"time\"' is varchar, want a number, a date or a timestamp"),
        ({"order_by": "CAST(time AS HUGEINT)"}, "is hugeint, want a number, a date or a timestamp"),
        ({"filter": "rating"}, "'past': filter 'rating' is varchar, want a condition that is true or false"),
        ({"filter": "stars > 3"}, "table.history: 'past': filter: got 'stars > 3': no column \"stars\""),
        ({"filter": 3}, "'past': filter: got 3, want text"),
        ({"length": 0}, "'past': length: got 0, want a whole number, 1 to 2,048"),
        ({"length": 2049}, "'past': length: got 2049, want a whole number, 1 to 2,048"),
        ({"length": True}, "'past': length: got True, want a whole number, 1 to 2,048"),
        ({"rows": "test"}, "'past': rows: got 'test', want one of all, train"),
        ({"last": 3}, "table.history[0].last: no such key; want one of name, of, by, order_by, length, filter, rows"),
        ({"name": "item"}, "table: 'item' is named twice: a categorical feature and a history; rename one"),
        ({"name": "rating"}, "table: 'rating' is named twice: a history and a numerical feature; rename one"),
        ({"name": "numerical"}, "table.history: 'numerical' would share a file with the numericals; rename it"),
        ({"name": "a/b"}, "table: feature 'a/b' cannot name a file"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_history_is_named(tmp_path, change, message):
    table = described(write_rows(tmp_path / "t.csv", random_rows(0, 8)), **change)
    table["numerical"] = ["rating"]
    table["categorical"].append({"name": "tags", "expression": "item", "separator": "|"})
    with pytest.raises(Refused, match=re.escape(message)) as caught:
        build(tmp_path / "out", table)
    assert "\n" not in caught.value.message
    assert not (tmp_path / "out").exists()


def test_a_history_without_a_time_is_refused(tmp_path):
    table = described(write_rows(tmp_path / "t.csv", random_rows(0, 8)))
    del table["history"][0]["order_by"]
    with pytest.raises(
        Refused, match=r"table\.history\[0\]: got no order_by; want at least name, of, by, "
    ):
        build(tmp_path / "out", table)


def test_a_length_has_a_name_of_its_own(tmp_path):
    table = described(write_rows(tmp_path / "t.csv", random_rows(0, 8)))
    table["numerical"] = [{"name": "past_length", "expression": "rating"}]
    with pytest.raises(Refused, match="'past_length' is named twice"):
        build(tmp_path / "out", table)
