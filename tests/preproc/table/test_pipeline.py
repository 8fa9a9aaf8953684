"""Tables of any kind to a dataset: sources, transforms, vocabularies, splits, and applying a fit again."""

import errno
import gzip
import hashlib
import json
import math
import os
import random
import re
from collections import Counter
from pathlib import Path

import duckdb
import numpy as np
import pytest
import yaml

from configs.table_schema import TableConfig
from dataloading.dataset.feature_spec import FeatureSpec
from preproc import work_directory
from preproc.table.pipeline.journal import Journal
from tests.helpers.preproc_command import Refused, data_files, preproc

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data"


def build(output: Path, table: dict, *overrides: str) -> dict[str, bytes]:
    """Run layout=table with this `table` section and return the dataset's files."""
    preproc("dataset=any", f"table={_hydra(table)}", f"output={output}", *overrides)
    return data_files(output)


def _hydra(value) -> str:
    """Write a value in the grammar of Hydra's overrides."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_hydra(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_hydra, value)) + "]"
    if isinstance(value, str):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    # Not by a dictionary: 0 equals False, and 1 equals True.
    return (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )


def ids_of(files: dict[str, bytes], name: str, dtype: str = "<i1") -> list[int]:
    return np.frombuffer(files[name], dtype).tolist()


@pytest.fixture
def people(tmp_path):
    """Return eight rows with quotes, commas within quotes, missing fields and non-ASCII text."""
    source = tmp_path / "people.csv"
    source.write_text(
        "bought,age,city,tags\n"
        '1,30,Rome,"a|b"\n0,,"Köln, am Rhein",b\n1,50,Rome,\n0,10,,"a|c|a"\n'
        '1,20,"say ""hi""",c\n0,40,Rome,b\n1,1000,Oslo,"d|a"\n0,25,Rome,a\n'
    )
    return source


def described(source: Path, **more) -> dict:
    return {
        "sources": {"people": {"files": str(source)}},
        "label": {"name": "bought"},
        "categorical": ["city"],
        "split": {"train": 0.75},
    } | more


def test_eight_rows_written_by_hand_give_these_bytes(tmp_path, people):
    table = described(
        people,
        numerical=[{"name": "age", "transforms": [{"fill": 0}, "minmax"]}],
        categorical=["city", {"name": "tags", "separator": "|"}],
    )
    files = build(tmp_path / "out", table)
    assert files["train/label.bin"] == bytes([1, 0, 1, 0, 1, 0])
    assert files["test/label.bin"] == bytes([1, 0])
    # In training: Rome three times, the two others once, by their bytes; Oslo is unseen.
    assert ids_of(files, "train/city.bin") == [1, 2, 1, 0, 3, 1]
    assert ids_of(files, "test/city.bin") == [0, 1]
    # a and b three times, c twice.
    assert ids_of(files, "train/tags.bin") == [1, 2, 2, 1, 3, 1, 3, 2]
    assert ids_of(files, "train/tags.offsets.bin", "<i8") == [0, 2, 3, 3, 6, 7, 8]
    assert ids_of(files, "test/tags.bin") == [0, 1, 1]
    assert ids_of(files, "test/tags.offsets.bin", "<i8") == [0, 2, 3]
    # The training rows run from 0 (filled in) to 50; the test rows need not stay within.
    age = np.frombuffer(files["train/numerical.bin"] + files["test/numerical.bin"], "<f2")
    assert age.tolist() == np.array([0.6, 0, 1, 0.2, 0.4, 0.8, 20, 0.5], "<f2").tolist()
    spec = FeatureSpec.load(tmp_path / "out")
    assert [(f.name, f.cardinality, f.hotness) for f in spec.categorical] == [
        ("city", 4, 1),
        ("tags", 4, None),
    ]


def test_csv_tsv_parquet_gzip_and_a_query_are_one_dataset(tmp_path, people):
    wanted = build(tmp_path / "csv", described(people))
    table = duckdb.read_csv(str(people))
    table.write_parquet(str(tmp_path / "p.parquet"))
    (tmp_path / "g.csv.gz").write_bytes(gzip.compress(people.read_bytes()))
    tsv = "\n".join("\t".join("" if v is None else str(v) for v in r) for r in table.fetchall())
    (tmp_path / "t.tsv").write_text(tsv + "\n")
    lines = people.read_text().splitlines()
    for part, text in enumerate((lines[:4], lines[:1] + lines[4:])):
        (tmp_path / f"part_{part}.csv").write_text("\n".join(text))
    columns = ["bought", "age", "city", "tags"]
    for source in (
        {"files": f"{tmp_path}/p.parquet", "format": "parquet"},
        {"files": f"{tmp_path}/g.csv*"},
        # Names of columns take the place of a header line.
        {"files": f"{tmp_path}/t.tsv", "format": "tsv", "columns": columns},
        {"files": f"{tmp_path}/part_*.csv"},
    ):
        table = described(people, sources={"people": source})
        assert build(tmp_path / "out", table, "overwrite=true") == wanted
    (tmp_path / "g.csv").write_bytes(people.read_bytes())
    with pytest.raises(Refused, match=r"g\.csv are one file, packed and unpacked"):
        build(
            tmp_path / "x", described(people, sources={"people": {"files": f"{tmp_path}/g.csv*"}})
        )
    query = "SELECT * FROM people WHERE file_ = 0"
    joined = described(people, query=query, order_by=["order_"])
    assert build(tmp_path / "out", joined, "overwrite=true") == wanted


@pytest.mark.parametrize("hotness", [None, 3])
def test_the_note_counts_values_of_lists_and_not_rows(tmp_path, capfd, hotness):
    rows = [f"{i % 2},{'a|b|c' if i < 15 else 'x|y|a'}\n" for i in range(20)]
    (tmp_path / "r.csv").write_text("y,tags\n" + "".join(rows))
    table = {
        "sources": {"rows": {"files": str(tmp_path / "r.csv")}},
        "label": {"name": "y"},
        "categorical": [{"name": "tags", "separator": "|"} | ({"hotness": 3} if hotness else {})],
        "split": {"train": 0.75},
    }
    build(tmp_path / "out", table)
    out = capfd.readouterr().out
    note = "note: 66.7 % of the values of 'tags' in the test rows, and 0.0 % in the training rows, have no id: they"
    assert note in out.replace("\n", " ")
    [counts] = [line.split() for line in out.splitlines() if line.split()[:1] == ["tags"]]
    assert counts[-2:] == ["0.00", "66.67"]


def test_a_single_source_is_ordered_and_a_note_says_if_a_split_has_other_values(tmp_path, capfd):
    rows = [f"{i % 2},u{i // 5},{(7 * i) % 20}\n" for i in range(20)]
    (tmp_path / "r.csv").write_text("y,user,time\n" + "".join(rows))
    table = {
        "sources": {"rows": {"files": str(tmp_path / "r.csv")}},
        "label": {"name": "y"},
        "categorical": ["user"],
        "split": {"train": 0.75},
    }
    build(tmp_path / "by_file", table)
    note = "note: 100.0 % of the values of 'user' in the test rows, and 0.0 % in the training rows, have no id: they"
    assert note in capfd.readouterr().out.replace("\n", " ")
    by_time = build(tmp_path / "by_time", table | {"order_by": "CAST(time AS INT) // 2"})
    assert "have no id" not in capfd.readouterr().out
    # Pairs of one time keep the order of the file.
    order = sorted(range(20), key=lambda i: (7 * i % 20) // 2)
    labels = by_time["train/label.bin"] + by_time["test/label.bin"]
    assert [*labels] == [i % 2 for i in order]
    with pytest.raises(Refused, match="rows has y, user, time"):
        build(tmp_path / "x", table | {"query": "SELECT foo FROM rows", "order_by": "y"})
    with pytest.raises(Refused, match=r"columns of text files are text: CAST\(name AS DOUBLE\)"):
        build(tmp_path / "x", table | {"label": {"name": "y", "expression": "time > 5"}})


def test_transforms_follow_one_another(tmp_path):
    source = tmp_path / "x.csv"
    values = [1.0, 5.0, None, -7.0, 100.0, 2.5, 3.0, 4.0, 6.0, 8.0]
    shown = ["" if v is None else v for v in values]
    source.write_text("y,c,x\n" + "".join(f"{i % 2},a,{v}\n" for i, v in enumerate(shown)))
    chains = {
        "log": [{"log": 3}, {"fill": -1}],
        "clip": [{"clip": [0, 10]}, {"fill": 5}],
        "standard": [{"fill": 0}, {"clip": [-10, 10]}, "standardise"],
    }
    table = {
        "sources": {"t": {"files": str(source)}},
        "label": {"name": "y"},
        "categorical": ["c"],
        "numerical": [
            {"name": name, "expression": "x", "transforms": chain} for name, chain in chains.items()
        ],
        "split": {"train": 0.8},
    }
    files = build(tmp_path / "out", table, "numerical_dtype=float32")
    got = np.frombuffer(files["train/numerical.bin"] + files["test/numerical.bin"], "<f4")
    got = got.reshape(-1, 3)
    log = [math.log(v + 3) if v is not None and v > -3 else -1 for v in values]
    clip = [5 if v is None else min(max(v, 0), 10) for v in values]
    filled = np.array([0 if v is None else min(max(v, -10), 10) for v in values])
    standard = (filled - filled[:8].mean()) / filled[:8].std()
    assert got[:, 0].tolist() == np.float32(log).tolist()
    assert got[:, 1].tolist() == np.float32(clip).tolist()
    np.testing.assert_allclose(got[:, 2], standard, rtol=1e-6, atol=1e-6)


def test_vocabularies_can_be_limited_crossed_hashed_and_cut(tmp_path):
    draw = random.Random(0)
    rows = [
        (draw.randint(0, 1), draw.choice("aaabbcd"), draw.choice(["", "x", "y", "zz"]))
        for _ in range(400)
    ]
    source = tmp_path / "t.csv"
    source.write_text("y,a,b\n" + "".join(f"{y},{a},{b}\n" for y, a, b in rows))
    table = {
        "sources": {"t": {"files": str(source)}},
        "label": {"name": "y"},
        "categorical": [
            {"name": "rare", "expression": "a", "frequency_limit": 60},
            {"name": "two", "expression": "a", "max_size": 2},
            {"name": "both", "cross": ["a", "b"]},
            {"name": "hashed", "expression": "b", "buckets": 5},
            {"name": "many", "expression": "a || ',' || b", "separator": ",", "hotness": 3},
            {"name": "key", "expression": "b", "vocabulary": "dynamic", "capacity": 50},
        ],
        "split": {"train": 0.5},
    }
    files = build(tmp_path / "out", table)

    def reference(values, keep=lambda rank, count: True):
        counts = Counter(v for v in values[:200] if v)
        ranked = sorted(counts, key=lambda v: (-counts[v], v.encode()))
        ids = {v: i for i, v in enumerate(ranked, start=1) if keep(i, counts[v])}
        return [ids.get(v, 0) for v in values]

    both = {
        name: ids_of(files, f"train/{name}.bin") + ids_of(files, f"test/{name}.bin")
        for name in ("rare", "two", "both", "hashed", "many")
    }
    a = [row[1] for row in rows]
    assert both["rare"] == reference(a, lambda rank, count: count >= 60)
    assert both["two"] == reference(a, lambda rank, count: rank <= 2)
    crossed = [f"{a}\x1f{b}" if b else "" for _, a, b in rows]
    assert both["both"] == reference(crossed)
    hashes = {value: h for (_, _, value), h in zip(rows, both["hashed"], strict=True)}
    assert hashes[""] == 0
    assert set(hashes.values()) <= set(range(6))
    assert [hashes[row[2]] for row in rows] == both["hashed"]
    keys = [
        int.from_bytes(hashlib.md5(b.encode()).digest()[:8], "big", signed=True) if b else 0
        for _, _, b in rows
    ]
    written = [np.frombuffer(files[f"{split}/key.bin"], "<i8") for split in ("train", "test")]
    assert np.concatenate(written).tolist() == keys
    many = np.array(both["many"]).reshape(-1, 3)
    assert (many[:, 2] == 0).all()
    assert ((many[:, 1] == 0) == [not row[2] for row in rows]).all()
    spec = FeatureSpec.load(tmp_path / "out")
    assert [f.cardinality for f in spec.categorical][1] == 3
    assert [f.cardinality for f in spec.categorical][3] == 6
    assert [f.cardinality for f in spec.categorical if f.is_dynamic] == [50]


def numbered(path: Path, rows: int) -> Path:
    """Write rows whose category is their row number, so that they can be followed."""
    path.write_text("y,n,part\n" + "".join(f"{i % 2},{i:05},{'abc'[i % 3]}\n" for i in range(rows)))
    return path


def rows_of(output: Path, split: str) -> list[int]:
    """Return the numbers of the rows of a split, from its ids and the vocabulary of all rows."""
    names = duckdb.sql(f"SELECT value FROM '{output}/vocabulary/n.parquet' ORDER BY id").fetchall()
    feature = FeatureSpec.load(output).categorical[0]
    ids = np.fromfile(output / split / "n.bin", feature.dtype)
    return [int(names[i - 1][0]) for i in ids]


def test_rows_can_be_split_by_a_column_at_random_or_by_file(tmp_path):
    source = numbered(tmp_path / "n.csv", 3000)
    table = {
        "sources": {"t": {"files": str(source)}},
        "label": {"name": "y"},
        "categorical": ["n"],
    }
    by_column = "CASE part WHEN 'a' THEN 'train' WHEN 'b' THEN 'test' END"
    build(
        tmp_path / "c",
        table | {"split": {"by": "column", "expression": by_column}},
        "vocabulary=all",
    )
    assert rows_of(tmp_path / "c", "train") == list(range(0, 3000, 3))
    assert rows_of(tmp_path / "c", "test") == list(range(1, 3000, 3))
    by_chance = table | {"split": {"by": "random", "train": 0.8, "validation": 0.1}}
    for name, seed in (("r1", 1), ("again", 1), ("r2", 2)):
        build(tmp_path / name, by_chance, "vocabulary=all", f"seed={seed}")
    splits = {s: rows_of(tmp_path / "r1", s) for s in ("train", "test", "validation")}
    assert sorted(row for rows in splits.values() for row in rows) == list(range(3000))
    assert all(rows == sorted(rows) for rows in splits.values())
    assert abs(len(splits["train"]) - 2400) < 120
    assert abs(len(splits["test"]) - 300) < 90
    assert data_files(tmp_path / "r1") == data_files(tmp_path / "again")
    assert splits["test"] != rows_of(tmp_path / "r2", "test")
    (tmp_path / "m.csv").write_text(
        "y,n,part\n" + "".join(f"1,{i:05},a\n" for i in range(3000, 3011))
    )
    files = {"sources": {"t": {"files": [str(source), str(tmp_path / "m.csv")]}}}
    build(tmp_path / "f", table | files | {"split": {"by": "last_file"}}, "vocabulary=all")
    assert rows_of(tmp_path / "f", "train") == list(range(3000))
    assert rows_of(tmp_path / "f", "test") == list(range(3000, 3005))
    assert rows_of(tmp_path / "f", "validation") == list(range(3005, 3011))


def test_training_rows_can_be_shuffled(tmp_path):
    source = numbered(tmp_path / "n.csv", 500)
    table = {"sources": {"t": {"files": str(source)}}, "label": {"name": "y"}, "categorical": ["n"]}
    build(tmp_path / "out", table, "shuffle=true", "vocabulary=all")
    train = rows_of(tmp_path / "out", "train")
    assert sorted(train) == list(range(450))
    assert abs(np.corrcoef(train, range(450))[0, 1]) < 0.2
    assert rows_of(tmp_path / "out", "test") == list(range(450, 500))


def test_a_transform_does_not_resume_after_the_fit_has_changed(tmp_path, people, monkeypatch):
    features = {"numerical": [{"name": "age", "transforms": [{"fill": 0}, "minmax"]}]}
    table = described(people, **features)
    build(tmp_path / "fit", table)
    options = ("mode=transform", f"fitted={tmp_path / 'fit'}")
    with monkeypatch.context() as patch:
        patch.setattr("preproc.table.pipeline.writing.TableFiles", None)
        with pytest.raises(TypeError):
            build(tmp_path / "out", table, *options)
    other = tmp_path / "other.csv"
    other.write_text("bought,age,city,tags\n" + "1,7,Rome,a\n0,9,Oslo,b\n" * 4)
    build(tmp_path / "fit", described(other, **features), "overwrite=true")
    files = build(tmp_path / "out", table, *options)
    assert files == build(tmp_path / "wanted", table, *options)


def test_a_fit_is_applied_to_new_rows_and_unseen_values_are_counted(tmp_path, people):
    features = {
        "numerical": [{"name": "age", "transforms": [{"fill": 0}, "minmax"]}],
        "categorical": ["city", {"name": "tags", "separator": "|"}],
    }
    build(tmp_path / "fit", described(people, **features))
    new = tmp_path / "new.csv"
    new.write_text("bought,age,city,tags\n1,50,Rome,b\n0,100,Paris,z|a\n1,,Rome,\n0,25,Paris,c\n")
    table = described(new, **features) | {"split": {"train": 0.5}}
    fitted = ("mode=transform", f"fitted={tmp_path / 'fit'}", "split_name=null")
    files = build(tmp_path / "out", table, *fitted)
    assert ids_of(files, "train/city.bin") == [1, 0]
    assert ids_of(files, "test/city.bin") == [1, 0]
    assert ids_of(files, "train/tags.bin") == [2, 0, 1]
    assert np.frombuffer(files["train/numerical.bin"], "<f2").tolist() == [1, 2]
    assert FeatureSpec.load(tmp_path / "out").fingerprint() == (
        FeatureSpec.load(tmp_path / "fit").fingerprint()
    )
    splits = json.loads((tmp_path / "out" / "report.json").read_text())["splits"]
    assert splits["train"]["unseen"] == {"city": 1, "tags": 1}
    assert splits["test"]["unseen"] == {"city": 1, "tags": 0}
    other = described(new) | {"split": {"train": 0.5}}
    with pytest.raises(Refused, match="fitted on other features or transforms"):
        build(tmp_path / "no", other, *fitted)


@pytest.mark.parametrize("on_bad", ["fail", "skip", "quarantine"])
def test_rows_without_a_label_or_with_text_for_a_number_are_bad(tmp_path, people, on_bad):
    bad = tmp_path / "bad.csv"
    lines = people.read_text().splitlines()
    bad.write_text(
        "\n".join([*lines[:3], ",1,x,y", "2,1,x,y", "1,old,x,y", "1,inf,x,y", *lines[3:]])
    )
    table = described(people, numerical=["age"])
    spoiled = described(bad, numerical=["age"])
    if on_bad == "fail":
        with pytest.raises(Refused, match=re.escape(f"{bad}, row 3: the label is missing")):
            build(tmp_path / "out", spoiled)
        assert not list(tmp_path.glob(".out*"))
        return
    wanted = build(tmp_path / "wanted", table)
    assert build(tmp_path / "out", spoiled, f"on_bad={on_bad}") == wanted
    assert json.loads((tmp_path / "out/report.json").read_text())["rows"]["bad"] == 4
    if on_bad == "quarantine":
        kept = [
            line.split("\t") for line in (tmp_path / "out/bad_rows.tsv").read_text().splitlines()
        ]
        assert [(row, reason) for _, row, reason in kept] == [
            ("3", "the label is missing"),
            ("4", "the label is 2, wanted 0 or 1"),
            ("5", "age is old, wanted a number"),
            ("6", "age is inf, wanted a number"),
        ]


def test_lines_with_other_columns_or_no_utf8_are_bad(tmp_path, people):
    lines = people.read_bytes().splitlines()
    bad = tmp_path / "bad.csv"
    bad.write_bytes(
        b"\n".join([*lines[:3], b"1,2,x", *lines[3:5], b"1,2,\xff,y", b"1,2,x,y,z", *lines[5:]])
    )
    with pytest.raises(
        Refused, match=f"{bad}, line 4: Expected Number of Columns: 4 Found: 3; correct or"
    ):
        build(tmp_path / "out", described(bad))
    wanted = build(tmp_path / "wanted", described(people))
    assert build(tmp_path / "out", described(bad), "on_bad=quarantine") == wanted
    kept = [line.split("\t") for line in (tmp_path / "out/bad_rows.tsv").read_text().splitlines()]
    assert [(file, int(line)) for file, line, *_ in kept] == [
        (str(bad), 4),
        (str(bad), 7),
        (str(bad), 8),
    ]
    assert json.loads((tmp_path / "out/report.json").read_text())["rows"]["bad"] == 3


@pytest.mark.parametrize("query", [None, "SELECT * FROM people"])
def test_rows_for_which_an_expression_fails_are_bad(tmp_path, people, query):
    lines = people.read_text().splitlines()
    more = {"numerical": [{"name": "years", "expression": "CAST(age AS INT)"}, "age"]}
    more["weight"] = {
        "name": "w",
        "expression": "1 + coalesce(CAST(isnan(CAST(age AS DOUBLE)) AS INT), 0)",
    }
    if query:
        more |= {"query": query, "order_by": ["CAST(age AS INT)", "length(bought)", "length(city)"]}
    wanted = build(tmp_path / "wanted", described(people, **more))
    bad = tmp_path / "bad.csv"
    bad.write_text("\n".join([*lines[:3], "1,2,x", "1,old,x,y", "yes,new,x,y", *lines[3:]]))
    assert build(tmp_path / "out", described(bad, **more), "on_bad=quarantine") == wanted
    kept = [line.split("\t") for line in (tmp_path / "out/bad_rows.tsv").read_text().splitlines()]
    fails = f"table.weight: 'w': expression {more['weight']['expression']!r} fails for "
    reasons = [fails + "old", fails + "new", "Expected Number of Columns: 4 Found: 3"]
    assert [reason for _, _, reason, *_ in kept] == reasons
    assert json.loads((tmp_path / "out/report.json").read_text())["rows"]["bad"] == 3


def test_a_failing_cast_of_the_query_is_no_row_to_skip(tmp_path, people):
    people.write_text(people.read_text().replace("1,50,", "1,old,"))
    more = {"numerical": ["years"], "order_by": ["order_"]}
    more["query"] = "SELECT *, CAST(age AS INT) AS years FROM people"
    with pytest.raises(Refused, match=r"Could not convert string 'old' .* try_cast gives null"):
        build(tmp_path / "out", described(people, **more), "on_bad=skip")
    more["query"] = more["query"].replace("CAST", "try_cast")
    assert build(tmp_path / "out", described(people, **more), "on_bad=skip")


@pytest.mark.parametrize("first", ["people", "homes"])
def test_bad_lines_of_several_sources_are_in_the_order_of_the_sources(tmp_path, people, first):
    lines = people.read_text().splitlines()
    people.write_text("\n".join([*lines, "1,2,x", "1,2,y"]))
    homes = tmp_path / "[1]" / "homes.csv"
    homes.parent.mkdir()
    homes.write_text("city,size\nRome,5\nOslo,6,7\n")
    # DuckDB shortens a path with signs of a pattern.
    named = {"people": {"files": str(people)}, "homes": {"files": f"{tmp_path}/[[]1]/../[[]1]/h*"}}
    sources = {name: named[name] for name in sorted(named, reverse=first == "people")}
    query = "SELECT * FROM people LEFT JOIN homes USING (city)"
    table = described(people, sources=sources, query=query, order_by=["CAST(age AS INT)"])
    build(tmp_path / "out", table, "on_bad=quarantine")
    kept = [line.split("\t") for line in (tmp_path / "out/bad_rows.tsv").read_text().splitlines()]
    of_people, of_homes = [("people.csv", "10"), ("people.csv", "11")], [("homes.csv", "3")]
    wanted = of_people + of_homes if first == "people" else of_homes + of_people
    assert [(Path(file).name, number) for file, number, *_ in kept] == wanted


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"label": {"name": "sold"}}, r'.*"sold".*'),
        ({"categorical": ["town"]}, r'.*"town".*'),
        ({"categorical": []}, "table.categorical: none; want at least one"),
        ({"query": "SELECT * FROM people"}, "table.order_by: the rows of a query have no order.*"),
        (
            {"numerical": [{"name": "age", "transforms": ["sqrt"]}]},
            ".*got transform 'sqrt', want.*",
        ),
        ({"numerical": [{"name": "age", "transforms": [{"clip": 3}]}]}, ".*clip takes 2 numbers.*"),
        (
            {"numerical": [{"name": "age", "kind": "x"}]},
            r"table.numerical\[0\].kind: no such key.*",
        ),
        (
            {"categorical": [{"name": "a/b", "expression": "city"}]},
            "table: feature 'a/b' cannot name a file: no slash.*",
        ),
        (
            {"categorical": ["bought"]},
            "table: 'bought' is named twice: a categorical feature and a label; rename one.*",
        ),
        ({"split": {"by": "day"}}, "table.split.by: got 'day', want one of .*"),
        ({"split": {"by": "column", "expression": "city"}}, "table.split: got split 'Köln.*"),
        ({"split": {"train": 0.001}}, "table.split: no rows are left for train of 8.*"),
    ],
)
def test_an_invalid_description_is_refused(tmp_path, people, change, message):
    with pytest.raises(Refused) as caught:
        build(tmp_path / "out", described(people) | change)
    assert re.fullmatch(f"error: {message}", caught.value.message, re.DOTALL), caught.value.message
    assert not (tmp_path / "out").exists()


def test_a_stopped_table_run_resumes(tmp_path, people, monkeypatch):
    from preproc.table.output_files import TableFiles

    wanted = build(tmp_path / "wanted", described(people))
    with monkeypatch.context() as patch:
        patch.setattr(
            TableFiles, "write_row_columns", lambda *_: (_ for _ in ()).throw(OSError("stop"))
        )
        with pytest.raises(Refused, match="stop"):
            build(tmp_path / "out", described(people))
    monkeypatch.setattr(
        "preproc.table.duckdb_engine.DuckDBEngine.read", None
    )  # the source is not read again
    assert build(tmp_path / "out", described(people)) == wanted
    assert not list(tmp_path.glob(".out*"))


def test_a_run_stopped_after_any_relation_resumes_without_its_source(tmp_path, people, monkeypatch):
    people.write_text(people.read_text() + "maybe,3,Rome,a\n")
    table = described(people, numerical=[{"name": "age", "transforms": ["minmax"]}])
    options = ("shuffle=true", "on_bad=quarantine")
    wanted = build(tmp_path / "wanted", table, *options)
    once, written = Journal.once, []

    def stopping(journal, name, write):
        once(journal, name, write)
        if name not in written:
            written.append(name)
            raise OSError("stop")

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "once", stopping)
        with pytest.raises(Refused, match="stop"):
            build(tmp_path / "out", table, *options)
        patch.setattr("preproc.table.duckdb_engine.DuckDBEngine.read", None)
        for _ in range(5):
            with pytest.raises(Refused, match="stop"):
                build(tmp_path / "out", table, *options)
        assert build(tmp_path / "out", table, *options) == wanted
    assert written == ["all_", "staged_", "rows_", "counts_0", "vocabulary_0", "ids_0"]
    bad = [(tmp_path / name / "bad_rows.tsv").read_text() for name in ("out", "wanted")]
    assert bad[0] == bad[1] != ""


def test_a_relation_that_cannot_be_synced_ends_the_run_and_is_written_again(
    tmp_path, people, monkeypatch
):
    table, sync = described(people), work_directory.sync_file
    wanted = build(tmp_path / "wanted", table)

    def full(path):
        if "vocabulary_0" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        sync(path)

    with monkeypatch.context() as patch:
        patch.setattr(work_directory, "sync_file", full)
        with pytest.raises(Refused, match="No space left on device"):
            build(tmp_path / "out", table)
    state = json.loads((tmp_path / ".out.preproc" / "state.json").read_text())["state"]
    # What was written behind it is not recorded before it.
    assert state["relations"] == ["all_", "counts_0"]
    assert build(tmp_path / "out", table) == wanted


@pytest.mark.skipif(not SHARED.exists(), reason=f"{SHARED} is not here")
@pytest.mark.parametrize(
    ("dataset", "source", "rows"),
    [
        ("movielens", "movielens/ml-latest-small", 100_836),
        ("avazu", "avazu_head_10k.csv.gz", 9_999),
        ("criteo_wdl", "criteo_1tb_day_0_head.tsv.gz", 10_000),
    ],
)
def test_a_shipped_dataset_is_built(tmp_path, dataset, source, rows):
    preproc(f"dataset={dataset}", f"source={SHARED / source}", f"output={tmp_path / 'out'}")
    spec = FeatureSpec.load(tmp_path / "out")
    assert sum(split.num_rows for split in spec.splits.values()) == rows


def test_every_shipped_dataset_describes_a_table_or_has_its_own_layout():
    for path in (Path(__file__).parents[3] / "configs" / "dataset").glob("*.yaml"):
        content = yaml.safe_load(path.read_text())
        if content["layout"] == "table" and content["table"]:
            TableConfig.of(content["table"])


def test_the_same_rows_give_the_same_spec_byte_for_byte(tmp_path):
    """Whatever the time, the place of input and output, the threads and the picture."""
    rows = random.Random(4)
    lines = [
        f"{rows.random() < 0.3:d},{rows.random() * 1e3},{rows.randrange(400)},{rows.randrange(40)},{i}"
        for i in range(6000)
    ]
    text, day_text = (
        "\n".join(["y,price,item,user,t", *part[:50], "a bad line", *part[50:], ""])
        for part in (lines[:3000], lines[3000:])
    )
    found = []
    for name, options in (("one", ["threads=1", "plot=true"]), ("two", ["threads=3"])):
        (tmp_path / name).mkdir()
        source = tmp_path / name / f"{name}.csv"
        source.write_text(text)
        table = {
            "sources": {"rows": {"files": "${source}"}},
            "label": {"name": "y"},
            "numerical": [{"name": "price", "transforms": ["standardise"]}],
            "categorical": ["item"],
            "history": [
                {
                    "name": "past",
                    "of": "item",
                    "by": "user",
                    "length": 3,
                    "order_by": "CAST(t AS INT)",
                }
            ],
            "keep": ["user"],
        }
        output = tmp_path / name / f"out_{name}"
        build(output, table, f"source={source}", "on_bad=quarantine", "rare_counts=true", *options)
        new = tmp_path / name / f"new_{name}.csv"
        new.write_text(day_text)
        day = [f"fitted={output}", "mode=extend", *options]
        build(tmp_path / name / "day", table, f"source={new}", "on_bad=skip", *day)
        for dataset in (output, tmp_path / name / "day"):
            preproc("mode=verify", f"path={dataset}")
        files = {p.relative_to(tmp_path / name): p for p in (tmp_path / name).rglob("*.*")}
        found.append(
            {
                str(path).replace(f"out_{name}", "out"): file.read_bytes()
                for path, file in files.items()
                if file.is_file() and file.suffix not in (".png", ".csv", ".tsv")
            }
        )
    one, two = found
    assert one.keys() == two.keys() >= {"out/feature_spec.yaml", "day/feature_spec.yaml"}
    assert [name for name in one if one[name] != two[name]] == []
