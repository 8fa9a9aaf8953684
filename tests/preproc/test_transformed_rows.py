"""Rows of raw files are transformed as they are read, to the bits that `mode=transform` writes."""

import gzip
import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import csv

from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.lineage import vocabularies
from preproc import transformed_rows
from preproc.raw_tables import RawTables
from preproc.table import staging
from preproc.transformed_rows import open_transformed_rows
from tests.helpers.preproc_command import Refused, preproc, raw_line, write_lines
from tests.preproc.table.test_new_rows import shop, write_shop
from tests.preproc.table.test_pipeline import _hydra, build

CATEGORICAL = [
    "city",
    {"name": "tags", "separator": "|"},
    {"name": "two", "expression": "tags", "separator": "|", "hotness": 2},
    {"name": "first", "expression": "tags[1]", "vocabulary_of": "tags"},
    {"name": "hashed", "expression": "city", "buckets": 50},
    {"name": "keys", "expression": "city", "vocabulary": "dynamic", "capacity": 50},
    {"name": "tag_keys", "expression": "tags", "separator": "|", "vocabulary_of": "keys"},
    {"name": "both", "cross": ["age", "tags"]},
]


@pytest.fixture(autouse=True)
def few_rows_at_once(monkeypatch):
    monkeypatch.setattr(transformed_rows, "CHUNK_ROWS", 2048)


def read(fitted: Path, sources: list[Path], keep: list[str] = ()) -> tuple[pa.Table, pa.Table]:
    """Return all features and all kept columns."""
    with open_transformed_rows(fitted, sources, keep) as rows:
        assert rows.spec.fingerprint() == FeatureSpec.load(fitted).fingerprint()
        batches = list(rows)
    assert all(batch.features.num_rows for batch in batches)
    features, kept = zip(*batches, strict=True)
    return pa.Table.from_batches(features), pa.Table.from_batches(kept)


def written(root: Path, output: Path) -> pa.Table:
    """Return the features of a dataset of one split, as a Parquet dataset has them."""
    preproc("mode=convert", f"path={root}", f"output={output}", "to=parquet")
    table = pq.read_table(output / "test/part_0.parquet")
    return table.drop_columns([name for name in ("bought", "weight") if name in table.column_names])


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Return a folder with old orders, their fit, and new orders in two files, one of them compressed and labelled."""
    root = tmp_path_factory.mktemp("stream")
    write_shop(root / "old.csv", 0, 300)
    build(root / "fit", shop(root / "old.csv", categorical=CATEGORICAL), "frequency_limit=1")
    write_shop(root / "one.csv", 100, 5000)
    columns = ["tags", "age", "order_id", "city"]
    write_shop(root / "two.csv", 250, 700, columns)
    write_shop(root / "three.csv", 200, 3000, columns)
    packed = root / "three.csv.gz"
    packed.write_bytes(gzip.compress((root / "three.csv").read_bytes()))
    return root


def transform(root: Path, output: Path, *sources: Path) -> Path:
    table = shop(*sources, categorical=CATEGORICAL, keep=["order_id", "city"])
    build(output, table, "mode=transform", f"fitted={root / 'fit'}", "frequency_limit=1")
    return output


def test_rows_of_several_files_are_those_of_a_dataset(root, tmp_path):
    sources = [root / "two.csv", root / "three.csv.gz"]
    out = transform(root, tmp_path / "out", *sources)
    features, kept = read(root / "fit", sources, ["order_id", "city"])
    assert features.equals(written(out, tmp_path / "parquet"))
    assert kept.equals(pq.read_table(out / "kept/test.parquet"))
    # Ids of new rows are known and unknown ones.
    assert 0 < sum(bool(i) for i in features["city"].to_pylist()) < 3700


def test_labels_are_not_read(root, tmp_path):
    out = transform(root, tmp_path / "out", root / "one.csv")
    features, kept = read(root / "fit", [root / "one.csv"])
    assert features.equals(written(out, tmp_path / "parquet"))
    assert kept.num_columns == 0
    lines = (root / "one.csv").read_text().splitlines()
    without = [lines[0]] + [
        line.replace(",0,", ",,", 1).replace(",1,", ",,", 1) for line in lines[1:]
    ]
    (tmp_path / "empty.csv").write_text("\n".join(without))
    again, _ = read(root / "fit", [tmp_path / "empty.csv"])
    assert again["city"].equals(features["city"])


def test_a_join_takes_the_source_in_its_files(tmp_path):
    for name, count in (("old", 200), ("new", 60)):
        (tmp_path / name).mkdir()
        write_shop(tmp_path / name / "orders.csv", 0, count)
        lines = ["city,land", *(f"city {i},land {i % 3}" for i in range(0, 200, 2))]
        write_lines(tmp_path / name / "cities.csv", lines)
    table = shop() | {
        "sources": {
            "orders": {"files": "${source}/orders.csv*"},
            "cities": {"files": "${source}/cities.csv*"},
        },
        "query": "SELECT o.*, c.land FROM orders AS o LEFT JOIN cities AS c ON o.city = c.city",
        "order_by": ["text_order(order_id)"],
        "categorical": ["city", "land"],
    }
    options = ("dataset=any", f"table={_hydra(table)}")
    preproc(*options, f"source={tmp_path / 'old'}", f"output={tmp_path / 'fit'}")
    fitted = ("mode=transform", f"fitted={tmp_path / 'fit'}", f"output={tmp_path / 'out'}")
    preproc(*options, f"source={tmp_path / 'new'}", *fitted)
    features, kept = read(tmp_path / "fit", [tmp_path / "new"], ["land", "order_id"])
    assert features.equals(written(tmp_path / "out", tmp_path / "parquet"))
    assert kept["order_id"].to_pylist() == [f"o-{i:04}" for i in range(60)]
    with pytest.raises(ValueError, match="got 2 sources, want one in its place"):
        open_transformed_rows(tmp_path / "fit", [tmp_path / "new", tmp_path / "old"])


COUNT = "count(*) OVER (PARTITION BY tags)"


@pytest.mark.parametrize(
    ("more", "where"),
    [
        ({"numerical": [{"name": "n", "expression": COUNT}]}, "table.numerical: 'n'"),
        ({"numerical": [{"name": "n", "expression": "(SELECT count(*) FROM orders)"}]}, "table.numerical: 'n'"),
        ({"categorical": [{"name": "c", "expression": COUNT}]}, "table.categorical: 'c'"),
        ({"keep_rate": {"name": "k", "expression": f"1 / {COUNT}"}}, "table.keep_rate: 'k'"),
    ],
)  # fmt: skip
def test_what_scores_need_of_other_rows_is_refused(tmp_path, monkeypatch, more, where):
    """Ten rows of the fit counted others than alone; a fit of an earlier version is refused wherever it is applied."""
    write_shop(tmp_path / "old.csv", 0, 200)
    write_shop(tmp_path / "new.csv", 0, 10)
    told = f"{where}: expression .* reads other rows, .*; compute it from its own row, or join it"
    table = shop(tmp_path / "old.csv", **more)
    with pytest.raises(Refused, match=told) as caught:
        build(tmp_path / "fit", table)
    assert "\n" not in caught.value.message
    with monkeypatch.context() as earlier:
        earlier.setattr(staging, "reads_other_rows", lambda sql: False)
        build(tmp_path / "fit", table)
    new = shop(tmp_path / "new.csv", **more)
    with pytest.raises(Refused, match=told):
        build(tmp_path / "out", new, "mode=transform", f"fitted={tmp_path / 'fit'}")
    with pytest.raises(ValueError, match=told):
        read(tmp_path / "fit", [tmp_path / "new.csv"])
    with pytest.raises(ValueError, match=f"{told}|Table with name orders"):
        RawTables(tmp_path / "fit").transformed(csv.read_csv(tmp_path / "new.csv"))


@pytest.mark.parametrize(
    ("query", "noted"),
    [
        (f"SELECT *, {COUNT} AS n FROM orders", True),
        ("WITH c AS (SELECT tags, count(*) AS m FROM orders GROUP BY tags) "
         "SELECT orders.*, m + 1 AS N FROM orders JOIN c USING (tags);", True),
        ("SELECT *, (SELECT max(CAST(age AS INT)) FROM orders) AS n FROM orders", True),
        (f"SELECT *, length(tags) AS n, {COUNT} AS place FROM orders", False),
        ("SELECT *, length(tags) AS n FROM orders", False),
    ],
)  # fmt: skip
def test_a_note_names_features_of_windows_and_aggregates_of_the_query(
    tmp_path, capsys, query, noted
):
    write_shop(tmp_path / "old.csv", 0, 100)
    numerical = [{"name": "n"}, {"name": "age"}, {"name": "twice", "expression": "n * 2"}]
    more = {"query": query, "order_by": ["text_order(order_id)"], "numerical": numerical}
    table = shop(tmp_path / "old.csv", **more, keep=["n"])
    build(tmp_path / "fit", table)
    told = (
        "note: table.numerical: 'n', table.numerical: 'twice': windows or aggregates in table.query"
    )
    assert (told in one_line(capsys.readouterr())) == noted
    fitted = ("mode=transform", f"fitted={tmp_path / 'fit'}")
    build(tmp_path / "out", table, *fitted)
    assert "aggregates" not in one_line(capsys.readouterr())


def one_line(captured) -> str:
    return " ".join((captured.out + captured.err).split())


def test_raw_criteo_logs_with_and_without_the_label(tmp_path):
    lines = [raw_line(i % 2, i1=i, i2=-i, c3=f"{i % 3:08x}", c4="x") for i in range(90)]
    source = write_lines(tmp_path / "raw.tsv", lines)
    bare = write_lines(tmp_path / "bare.tsv", [line.partition("\t")[2] for line in lines])
    preproc(f"source={source}", f"output={tmp_path / 'fit'}")
    fitted = ("mode=transform", f"fitted={tmp_path / 'fit'}")
    preproc(f"source={bare}", *fitted, f"output={tmp_path / 'out'}")
    wanted = written(tmp_path / "out", tmp_path / "parquet")
    for path in (source, bare):
        features, _ = read(tmp_path / "fit", [path])
        assert features.equals(wanted)
    # A model of the fit scores these rows, though DuckDB wrote their vocabularies and kernels those of the fit.
    fit, out = (vocabularies(FeatureSpec.load(tmp_path / name).metadata) for name in ("fit", "out"))
    assert fit == out
    assert len(fit) == 26


def test_mistakes_are_one_line(root, tmp_path):
    def message(sources=("two.csv",), keep=(), fitted=root / "fit") -> str:
        with pytest.raises(ValueError, match=r"\w") as error:
            read(fitted, [root / source for source in sources], keep)
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "no such file" in message(["absent.csv"])
    assert "table.keep: 'ordr': got column 'ordr'" in message(keep=["ordr"])
    assert "fitted=/none: no dataset with a preproc.json there" in message(fitted=Path("/none"))
    write_shop(root / "lacks.csv", 0, 3, ["age", "tags", "order_id"])
    assert "table.categorical: 'city': got column 'city': no column" in message(["lacks.csv"])
    lines = (root / "two.csv").read_text().splitlines()
    for name, bad, wanted in (
        ("text.csv", "a,old,o-1,Rome", "text.csv, row 301: age is old, wanted a number; correct or remove it"),
        ("short.csv", "a,7", "short.csv, line 302: Expected Number of Columns: 4 Found: 2; correct"),
        ("large.csv", "a,1e30,o-1,Rome", "large.csv, row 301: numerical feature 'age' is 1e+30,"),
    ):  # fmt: skip
        (root / name).write_text("\n".join([*lines[:301], bad, *lines[301:]]))
        assert wanted in message([name])
        # The commands that score have no such option.
        assert "on_bad" not in message([name])
    mixed = b"\r\n".join(line.encode() for line in lines[:3]) + b"\r\n" + lines[3].encode() + b"\n"
    (root / "mixed.csv").write_bytes(mixed)
    wanted = "mixed.csv: not all of its lines end with \\r\\n as the first does"
    assert wanted in message(["mixed.csv"])
    (root / "none.csv").write_text(lines[0] + "\n")
    assert "the sources have no rows" in message(["none.csv"])
    shutil.copytree(root / "fit", tmp_path / "fit")
    path = tmp_path / "fit/vocabulary/city.parquet"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert "city.parquet has changed since it was written" in message(fitted=tmp_path / "fit")
    shutil.rmtree(tmp_path / "fit")
    shutil.copytree(root / "fit", tmp_path / "fit")
    saved = json.loads((tmp_path / "fit/preproc.json").read_text())
    del saved["rows"]
    (tmp_path / "fit/preproc.json").write_text(json.dumps(saved))
    assert "rows: got None, want a mapping as mode=fit writes it" in message(
        fitted=tmp_path / "fit"
    )


def test_histories_are_refused(root, tmp_path):
    history = {"name": "past", "of": "city", "by": "age", "order_by": "order_", "length": 2}
    build(tmp_path / "fit", shop(root / "old.csv", history=[history]))
    with pytest.raises(
        ValueError, match="history 'past' of a row takes all rows before it; make a"
    ):
        open_transformed_rows(tmp_path / "fit", [root / "two.csv"])
