"""`vocabulary_of`: features that share a vocabulary have one id per value, counted over both, and one table."""

import random
import re
from collections import Counter
from pathlib import Path

import duckdb
import numpy as np
import pytest
import yaml

from dataloading.dataset.feature_spec import FeatureSpec
from tests.helpers.preproc_command import Refused, preproc
from tests.preproc.table.test_pipeline import build

SPLITS = ("train", "test")
FRUIT = ["", "apple", "pear", "fig", "kiwi", "é", "plum", "quince"]


def write_baskets(path: Path, seed: int, rows: int = 60) -> list[tuple[str, str, list[str]]]:
    """Write rows (bought, seen, wishes) of fruit; the wishes are a list."""
    draw = random.Random(seed)
    baskets = [
        (draw.choice(FRUIT), draw.choice(FRUIT[2:]), draw.choices(FRUIT[1:], k=draw.randint(0, 3)))
        for _ in range(rows)
    ]
    lines = [f"{i % 2},{a},{b},{'|'.join(c)}" for i, (a, b, c) in enumerate(baskets)]
    path.write_text("\n".join(["y,bought,seen,wishes", *lines]) + "\n")
    return baskets


def described(path: Path, **limits: object) -> dict:
    return {
        "sources": {"t": {"files": str(path)}},
        "label": {"name": "y"},
        # The feature that has the vocabulary need not be the first.
        "categorical": [
            {"name": "seen", "vocabulary_of": "wishes"},
            {"name": "wishes", "separator": "|"} | limits,
            "y2",
            {"name": "bought", "vocabulary_of": "wishes"},
            {"name": "wish", "expression": "wishes", "separator": "|", "hotness": 2}
            | {"vocabulary_of": "wishes"},
        ],
        "split": {"train": 0.5},
    }


def with_labels(table: dict) -> dict:
    """Give the feature of its own a column."""
    table["categorical"][2] = {"name": "y2", "expression": "y"}
    return table


def ids_in(output: Path, name: str) -> list[int]:
    spec = FeatureSpec.load(output)
    dtype = next(f.dtype for f in spec.categorical if f.name == name)
    return np.concatenate([np.fromfile(output / s / f"{name}.bin", dtype) for s in SPLITS]).tolist()


def vocabulary(baskets: list, limit: int, max_size: int | None) -> dict[str, int]:
    """Return the id of every value, counted in all columns of the training rows."""
    train = baskets[: len(baskets) // 2]
    counts = Counter(a for a, _, _ in train if a) + Counter(b for _, b, _ in train)
    # The wishes are two columns.
    counts += Counter(2 * [value for *_, c in train for value in c])
    ranked = sorted(counts, key=lambda value: (-counts[value], value.encode()))
    kept = [value for value in ranked if counts[value] >= limit][:max_size]
    return {value: number for number, value in enumerate(kept, start=1)}


@pytest.mark.parametrize(("limit", "max_size"), [(0, None), (20, None), (0, 3)])
def test_ids_are_those_of_all_values_counted_together(tmp_path, limit, max_size):
    baskets = write_baskets(tmp_path / "t.csv", seed=limit)
    table = with_labels(described(tmp_path / "t.csv", frequency_limit=limit, max_size=max_size))
    build(tmp_path / "out", table)
    ids = vocabulary(baskets, limit, max_size)
    assert 2 < len(ids) < 8
    assert ids_in(tmp_path / "out", "bought") == [ids.get(a, 0) for a, _, _ in baskets]
    assert ids_in(tmp_path / "out", "seen") == [ids.get(b, 0) for _, b, _ in baskets]
    wanted = [ids.get(value, 0) for *_, c in baskets for value in c]
    assert ids_in(tmp_path / "out", "wishes") == wanted
    spec = FeatureSpec.load(tmp_path / "out")
    tables = {name: [f.name for f in of] for name, of in spec.table_features.items()}
    assert tables == {"wishes": ["seen", "wishes", "bought", "wish"], "y2": ["y2"]}
    assert {f.cardinality for f in spec.table_features["wishes"]} == {len(ids) + 1}
    stored = duckdb.sql(f"SELECT value, id FROM '{tmp_path}/out/vocabulary/wishes.parquet'")
    assert dict(stored.fetchall()) == ids
    assert sorted(p.stem for p in (tmp_path / "out/vocabulary").iterdir()) == ["wishes", "y2"]


def test_a_shared_vocabulary_is_applied_to_new_rows_and_verified(tmp_path):
    baskets = write_baskets(tmp_path / "old.csv", seed=1)
    more = write_baskets(tmp_path / "new.csv", seed=2)
    cut = described(tmp_path / "old.csv")
    table = with_labels(cut | {"categorical": cut["categorical"][:4]})
    build(tmp_path / "fit", table)
    build(
        tmp_path / "out",
        table | {"sources": {"t": {"files": str(tmp_path / "new.csv")}}},
        "mode=transform",
        f"fitted={tmp_path / 'fit'}",
        "split_name=null",
    )
    stored = duckdb.sql(f"SELECT value, id FROM '{tmp_path}/fit/vocabulary/wishes.parquet'")
    ids = dict(stored.fetchall())
    assert ids_in(tmp_path / "fit", "bought") == [ids.get(a, 0) for a, _, _ in baskets]
    assert ids_in(tmp_path / "out", "bought") == [ids.get(a, 0) for a, _, _ in more]
    for name in ("fit", "out"):
        preproc("mode=verify", f"path={tmp_path / name}", f"fitted={tmp_path / 'fit'}")


def test_verification_finds_ids_that_the_shared_counts_do_not_have(tmp_path, capsys):
    write_baskets(tmp_path / "t.csv", seed=3)
    table = described(tmp_path / "t.csv")
    build(tmp_path / "out", with_labels(table | {"categorical": table["categorical"][:4]}))
    ids = np.fromfile(tmp_path / "out/train/seen.bin", "i1")
    np.where(ids == 1, 2, ids).astype("i1").tofile(tmp_path / "out/train/seen.bin")
    # Without checksums only the counts can tell.
    spec = yaml.safe_load((tmp_path / "out/feature_spec.yaml").read_text())
    del spec["metadata"]["files"]
    (tmp_path / "out/feature_spec.yaml").write_text(yaml.safe_dump(spec))
    with pytest.raises(SystemExit):
        preproc("mode=verify", f"path={tmp_path / 'out'}")
    assert (
        "vocabulary/wishes.parquet: its counts are not those of the ids" in capsys.readouterr().out
    )


def test_hashes_are_shared_too(tmp_path):
    baskets = write_baskets(tmp_path / "t.csv", seed=4)
    table = with_labels(described(tmp_path / "t.csv", buckets=5))
    build(tmp_path / "out", table)
    bought = ids_in(tmp_path / "out", "bought")
    pairs = {(a, i) for (a, _, _), i in zip(baskets, bought, strict=True)}
    seen = ids_in(tmp_path / "out", "seen")
    pairs |= {(b, i) for (_, b, _), i in zip(baskets, seen, strict=True)}
    assert len(pairs) == len({value for value, _ in pairs}) == len(FRUIT)
    assert {f.cardinality for f in FeatureSpec.load(tmp_path / "out").categorical[:2]} == {6}


def test_a_fit_without_shared_vocabularies_keeps_the_bytes_of_its_description(tmp_path):
    write_baskets(tmp_path / "t.csv", seed=5)
    table = described(tmp_path / "t.csv") | {"categorical": ["bought"]}
    build(tmp_path / "out", table)
    assert "vocabulary_of" not in (tmp_path / "out/preproc.json").read_text()


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (["bought", {"name": "seen", "vocabulary_of": "x"}], "got 'x', want another categorical feature, one of 'bought'"),
        ([{"name": "seen", "vocabulary_of": "seen"}, "bought"], "got 'seen', want another categorical feature"),
        ([{"name": "seen", "vocabulary_of": 3}, "bought"], "vocabulary_of: got 3, want text"),
        (
            ["bought", {"name": "seen", "vocabulary_of": "bought"}, {"name": "wishes", "vocabulary_of": "seen"}],
            "'seen' shares the vocabulary of 'bought'; name that one",
        ),
        (
            ["bought", {"name": "seen", "vocabulary_of": "bought", "max_size": 4}],
            "'seen': vocabulary_of: got max_size too; set it at 'bought', which has the vocabulary",
        ),
        (["bought", {"name": "seen", "vocabulary_of": "bought", "buckets": 4}], "got buckets too"),
    ],
)  # fmt: skip
def test_a_vocabulary_of_no_feature_is_refused(tmp_path, features, message):
    write_baskets(tmp_path / "t.csv", seed=0)
    with pytest.raises(Refused, match=re.escape(message)):
        build(tmp_path / "out", described(tmp_path / "t.csv") | {"categorical": features})
