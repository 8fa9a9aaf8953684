"""New rows of a fit: one split in the order of the files, labels where there are any, and raw columns beside every row."""

import csv
import errno
import random
from datetime import date, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from configs.overrides import to_config
from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.dataset.kept_columns import KeptColumns, KeptWriter
from dataloading.dataset.open_dataset import open_dataset
from preproc.__main__ import refuse_idle_split
from tests.helpers.command import run_command
from tests.helpers.preproc_command import (
    Refused,
    compose_preproc,
    preproc,
    raw_line,
    write_lines,
)
from tests.preproc.table.test_pipeline import build

COLUMNS = ["order_id", "bought", "age", "city", "tags", "weight", "part"]


def write_shop(path: Path, first: int, count: int, columns: list[str] = COLUMNS) -> list[str]:
    """Write numbered orders; return the cities, which differ between all rows."""
    draw = random.Random(first)
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, columns, extrasaction="ignore")
        writer.writeheader()
        for number in range(first, first + count):
            row = {
                "order_id": f"o-{number:04}",
                "bought": draw.randint(0, 1),
                "age": draw.choice(["", "20", "35"]),
                "city": f"city {number}",
                "tags": "|".join(draw.sample("abcd", draw.randint(0, 3))),
                "weight": draw.randint(1, 3),
                "part": draw.choice(["train", "test"]),
            }
            writer.writerow(row)
    return [f"city {number}" for number in range(first, first + count)]


def shop(*files: Path, **more: object) -> dict:
    return {
        "sources": {"orders": {"files": [str(path) for path in files]}},
        "label": {"name": "bought"},
        "weight": {"name": "weight"},
        "numerical": [{"name": "age", "transforms": [{"fill": 40}, "standardise"]}],
        "categorical": ["city", {"name": "tags", "separator": "|"}],
        "split": {"by": "column", "expression": "part"},
    } | more


def cities_of(root: Path, split: str) -> list[str]:
    """Return the values of the ids of `city`, which tell the rows apart."""
    spec = FeatureSpec.load(root)
    rows = open_dataset(spec).read(split, np.array([[0, spec.rows_of(split)]]))
    vocabulary = pq.read_table(root / "vocabulary/city.parquet")["value"].to_pylist()
    return [vocabulary[i - 1] if i else "" for i in rows.ids[0]]


def kept_of(root: Path, split: str, name: str) -> list:
    num_rows = FeatureSpec.load(root).rows_of(split)
    rows = KeptColumns(root, split, num_rows).read(0, num_rows, [name])
    return rows.column(name).to_pylist()


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Return a folder with old orders, new ones without a label, and the fit of the old ones."""
    root = tmp_path_factory.mktemp("shop")
    write_shop(root / "old.csv", 0, 300)
    write_shop(root / "more.csv", 200, 70)
    write_shop(root / "new.csv", 150, 80, ["city", "age", "tags", "order_id"])
    build(root / "fit", shop(root / "old.csv", keep=["order_id", "age"]), "shuffle=true")
    return root


def new_rows(root: Path, output: Path, table: dict, *more: str) -> Path:
    build(output, table, "mode=transform", f"fitted={root / 'fit'}", *more)
    return output


def test_the_file_of_kept_columns_is_closed_on_a_full_disk(root, tmp_path, monkeypatch):
    begun = []

    def full(writer: KeptWriter, rows: pa.Table) -> None:
        begun.append(writer)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(KeptWriter, "append", full)
    with pytest.raises(Refused, match="No space left"):
        build(tmp_path / "out", shop(root / "old.csv", keep=["order_id"]))
    # One that is open writes its end when it is collected, and prints a traceback.
    assert [writer.writer.is_open for writer in begun] == [False]


def test_kept_columns_go_with_their_rows_through_splits_and_shuffles(root):
    spec = FeatureSpec.load(root / "fit")
    assert {"kept/train.parquet", "kept/test.parquet"} <= set(spec.metadata["files"])
    orders = kept_of(root / "fit", "train", "order_id")
    # Every city is one order, and training rows are out of order.
    assert [f"o-{int(city.split()[1]):04}" for city in cities_of(root / "fit", "train")] == orders
    assert orders != sorted(orders)
    tests = kept_of(root / "fit", "test", "order_id")
    assert tests == sorted(tests)
    assert sorted(orders + tests) == [f"o-{i:04}" for i in range(300)]
    with (root / "old.csv").open() as stream:
        ages = {row["order_id"]: row["age"] or None for row in csv.DictReader(stream)}
    assert kept_of(root / "fit", "train", "age") == [ages[order] for order in orders]


def test_new_rows_are_one_split_in_the_order_of_the_files(root, tmp_path):
    table = shop(root / "more.csv", root / "new.csv", root / "old.csv", keep=["order_id"])
    table["sources"]["orders"]["files"].pop(1)
    out = new_rows(root, tmp_path / "out", table)
    spec = FeatureSpec.load(out)
    assert list(spec.splits) == ["test"]
    assert kept_of(out, "test", "order_id") == [
        f"o-{i:04}" for i in (*range(200, 270), *range(300))
    ]
    known = {*cities_of(root / "fit", "train")}
    assert [bool(c) for c in cities_of(out, "test")[:70]] == [
        f"city {i}" in known for i in range(200, 270)
    ]
    spec.require_labels("test")
    out = new_rows(root, tmp_path / "train", shop(root / "more.csv"), "split_name=train")
    assert list(FeatureSpec.load(out).splits) == ["train"]
    out = new_rows(root, tmp_path / "split", shop(root / "more.csv"), "split_name=null")
    assert list(FeatureSpec.load(out).splits) == ["train", "test"]


def test_a_typed_split_of_rows_that_become_one_is_refused():
    new = ["dataset=criteo_1tb", "source=a", "output=b", "mode=transform", "fitted=c"]
    config = to_config(compose_preproc(*new))
    # The split of the yaml file is that of the fit.
    refuse_idle_split(config, [*new, "split=null", "table.split=null"])
    for typed in ("split=last_file", "train_fraction=0.5", "+table.split.by=random"):
        with pytest.raises(ValueError, match=r"divides no rows.* set split_name=null"):
            refuse_idle_split(config, [*new, typed])
        for more in ("split_name=null", "test_source=d"):
            if not typed.startswith("train_fraction"):
                refuse_idle_split(to_config(compose_preproc(*new, more)), [*new, more, typed])


@pytest.mark.parametrize("by_files", ["test_source=d", "split=last_file"])
def test_a_typed_fraction_beside_test_rows_of_files_is_refused(by_files):
    options = ["dataset=criteo_1tb", "source=a", "output=b", by_files]
    config = to_config(compose_preproc(*options))
    refuse_idle_split(config, options)
    with pytest.raises(ValueError, match=rf"with {by_files.partition('=d')[0]} the test rows"):
        refuse_idle_split(config, [*options, "train_fraction=0.8"])


def test_rows_without_a_label_give_the_features_of_rows_with_one(root, tmp_path, capsys):
    labelled = root / "labelled.csv"
    write_shop(labelled, 150, 80)
    wanted = new_rows(root, tmp_path / "wanted", shop(labelled))
    capsys.readouterr()
    out = new_rows(root, tmp_path / "out", shop(root / "new.csv", keep=["order_id"]))
    assert "note: the sources lack the label (bought), so the dataset has no labels" in (
        capsys.readouterr().out.replace("\n", " ")
    )
    for name in ("numerical.bin", "city.bin", "tags.bin", "tags.offsets.bin"):
        assert (out / "test" / name).read_bytes() == (wanted / "test" / name).read_bytes()
    spec = FeatureSpec.load(out)
    assert spec.splits["test"].absent == {"bought", "weight"}
    assert spec.fingerprint() == FeatureSpec.load(wanted).fingerprint()
    assert kept_of(out, "test", "order_id") == [f"o-{i:04}" for i in range(150, 230)]
    preproc("mode=verify", f"path={out}", f"fitted={root / 'fit'}")
    assert "no labels" in capsys.readouterr().out


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_training_and_evaluation_refuse_rows_without_labels(root, tmp_path, mode):
    out = new_rows(root, tmp_path / "out", shop(root / "new.csv"), "split_name=train")
    ended = run_command(f"data.path={out}", f"mode={mode}", "eval.split=train")
    assert ended.exit_code == 2
    assert "the rows of split 'train' have no labels (bought)" in ended.err
    assert ended.err.count("\n") == 1


def test_columns_of_parquet_are_kept_with_their_types(root, tmp_path):
    table = pa.table(
        {
            "order_id": pa.array(range(80), pa.int16()),
            "big": pa.array([2**63 + i for i in range(80)], pa.uint64()),
            "price": pa.array([i / 8 if i % 9 else None for i in range(80)], pa.float64()),
            "day": pa.array([date(2026, 1, 1) + timedelta(i) for i in range(80)]),
            "at": pa.array([1_700_000_000_000_000 + i for i in range(80)], pa.timestamp("us")),
            "note": pa.array([f"n{i}" if i else None for i in range(80)]),
            "city": [f"city {i}" for i in range(80)],
            "age": pa.array([20] * 80),
            "tags": ["a|b"] * 80,
        }
    )
    pq.write_table(table, tmp_path / "new.parquet")
    names = ["order_id", "big", "price", "day", "at", "note", "city"]
    out = new_rows(root, tmp_path / "out", shop(tmp_path / "new.parquet", keep=names))
    assert KeptColumns(out, "test").read(0, 80, names).equals(table.select(names))


def test_a_line_of_criteo_logs_may_begin_with_the_first_integer(tmp_path):
    """As in test.txt of the Kaggle challenge."""
    lines = [raw_line(i % 2, i1=i, c3=f"{i % 3:08x}") for i in range(40)]
    source = write_lines(tmp_path / "raw.tsv", lines)
    bare = write_lines(tmp_path / "bare.tsv", [line.partition("\t")[2] for line in lines])
    preproc(f"source={source}", f"output={tmp_path / 'fit'}")
    for path, name in ((source, "labelled"), (bare, "bare")):
        fitted = ("mode=transform", f"fitted={tmp_path / 'fit'}")
        preproc(f"source={path}", *fitted, f"output={tmp_path / name}")
    files = sorted(path.name for path in (tmp_path / "bare/test").iterdir())
    assert "label.bin" not in files
    assert len(files) == 27
    for name in files:
        bare_bytes = (tmp_path / "bare/test" / name).read_bytes()
        assert bare_bytes == (tmp_path / "labelled/test" / name).read_bytes()
    with pytest.raises(Refused, match=r"bare.tsv, line 1: 39 columns, wanted 40"):
        preproc(f"source={bare}", f"output={tmp_path / 'no'}")


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"keep": ["ordr"]}, [], "table.keep: 'ordr': got column 'ordr': no column \"ordr\"; correct it; the columns are"),
        ({"keep": ["city", "City"]}, [], "table.keep: got ['City'] twice or without a name"),
        ({"keep": "city"}, [], "table.keep: got 'city', want a list"),
        ({"keep": ["more"], "sources": {"o": {"files": "LISTS"}}}, [], "table.keep: 'more' is varchar[], want numbers, text"),
        ({"sources": {"o": {"files": "TAGS"}}}, [], "table.categorical: 'tags': a value is a list, want one value"),
        ({"numerical": [{"name": "age", "transforms": [{"fill": 0}]}]}, [], "fitted on other features or transforms"),
        ({"categorical": [{"name": "town", "expression": "city"}]}, [], "fitted on other features or transforms"),
        ({"sources": {"o": {"files": "LACKS"}}}, [], "table.categorical: 'city': got column 'city': no column \"city\""),
        ({"label": [{"name": "bought"}, {"name": "order_id"}]}, ["split_name=null"],
         "table.label: 'bought': got column 'bought': no column"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(root, tmp_path, changes, options, message):
    table = shop(root / "new.csv", **changes)
    write_shop(tmp_path / "lacks.csv", 0, 5, ["age", "tags"])
    lists = pa.table({"city": ["a"], "age": ["1"], "tags": ["a"], "more": [["a"]]})
    pq.write_table(lists, tmp_path / "lists.parquet")
    pq.write_table(lists.set_column(2, "tags", lists["more"]), tmp_path / "tags.parquet")
    files = table["sources"]
    for source in files.values():
        paths = {"LISTS": tmp_path / "lists.parquet", "LACKS": tmp_path / "lacks.csv"}
        paths["TAGS"] = tmp_path / "tags.parquet"
        if isinstance(source["files"], str):
            source["files"] = str(paths[source["files"]])
    with pytest.raises(Refused) as refused:
        new_rows(root, tmp_path / "out", table, *options)
    assert message in refused.value.message
    assert "\n" not in refused.value.message
    assert refused.value.exit_code == 2


def test_raw_criteo_logs_have_no_other_columns_to_keep(tmp_path):
    with pytest.raises(Refused, match="describes files of your own, and Criteo's logs have their"):
        preproc("source=x", f"output={tmp_path / 'out'}", "+table.keep=[user]")
