"""`mode=transform` uses nothing of a fitted dataset before it is compared with its records."""

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from configs.overrides import to_config
from configs.table_schema import TableConfig
from dataloading.dataset.feature_spec import FeatureSpec
from preproc import vocabulary_file
from preproc.dataset_writer import checksum
from preproc.fitted_state import load_fitted
from preproc.transformed_rows import open_transformed_rows
from preproc.vocabulary_file import check_vocabulary
from tests.helpers.preproc_command import Refused, compose_preproc, data_files, preproc
from tests.preproc.table.test_pipeline import _hydra

CITY = "vocabulary/city.parquet"
ROWS = ["Rome"] * 5 + ["Oslo"] * 3 + ["Bern"] * 3 + ["", ""]


def table(source: Path) -> dict:
    return {
        "sources": {"people": {"files": str(source)}},
        "label": {"name": "bought"},
        "numerical": [{"name": "age", "transforms": [{"fill": 0}, "minmax"]}],
        "categorical": [
            "city",
            {"name": "tags", "separator": "|"},
            {"name": "first", "expression": "tags", "separator": "|", "hotness": 1},
            {"name": "h", "buckets": 4},
        ],
        "split": {"train": 0.9},
    }


@pytest.fixture(scope="module")
def people(tmp_path_factory) -> Path:
    """Return rows, and beside them the dataset `fit` of them."""
    source = tmp_path_factory.mktemp("people") / "people.csv"
    lines = [f"{i % 2},{i},{city},a|b,{i}" for i, city in enumerate([*ROWS, "Rome", "Paris"])]
    source.write_text("bought,age,city,tags,h\n" + "\n".join(lines) + "\n")
    build(source, source.with_name("fit"))
    return source


def build(source: Path, output: Path, *options: str) -> None:
    preproc("dataset=any", f"table={_hydra(table(source))}", f"output={output}", *options)


@pytest.fixture
def fit(people, tmp_path) -> Path:
    """Return a copy of the fitted dataset, to be damaged."""
    shutil.copytree(people.with_name("fit"), tmp_path / "fit")
    return tmp_path / "fit"


def load(people: Path, fit: Path) -> None:
    """Load the fitted state."""
    options = ["dataset=any", f"table={_hydra(table(people))}", "output=x"]
    config = to_config(compose_preproc(*options, "mode=transform", f"fitted={fit}"))
    load_fitted(fit, TableConfig.of(config.table))


def change_spec(fit: Path, change) -> None:
    path = fit / "feature_spec.yaml"
    document = yaml.safe_load(path.read_text())
    change(document)
    path.write_text(yaml.safe_dump(document))


def record_again(fit: Path, *names: str) -> None:
    """Give the spec the checksums of the damaged files, as one who means it would."""
    new = {name: checksum(fit / name) for name in names}
    change_spec(fit, lambda document: document["metadata"]["files"].update(new))


def rewrite(path: Path, **columns) -> None:
    """Replace columns of a vocabulary."""
    values = pq.read_table(path).to_pydict()
    assert values["value"] == ["Rome", "Bern", "Oslo"]
    pq.write_table(pa.table({**values, **columns}), path)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def replaced(make):
    def damage(fit: Path) -> None:
        (fit / CITY).unlink()
        make(fit / CITY)

    return damage


def linked_elsewhere(path: Path) -> None:
    outside = path.parents[2] / "outside.parquet"
    shutil.copy(path.with_name("tags.parquet"), outside)
    path.symlink_to(outside)


DAMAGED_BYTES = {
    "exchanged": lambda fit: rewrite(fit / CITY, value=["Bern", "Rome", "Oslo"]),
    "outside": lambda fit: rewrite(fit / CITY, id=[1, 2, 900]),
    "truncated": lambda fit: os.truncate(fit / CITY, 300),
    "empty": lambda fit: os.truncate(fit / CITY, 0),
    "flipped": lambda fit: flip(fit / CITY, 30),
    "another feature's": lambda fit: shutil.copy(fit / "vocabulary/tags.parquet", fit / CITY),
    "missing": lambda fit: (fit / CITY).unlink(),
    "a directory": replaced(Path.mkdir),
    "a FIFO": replaced(os.mkfifo),
    "a link to itself": replaced(lambda path: path.symlink_to(path)),
    "a link to nowhere": replaced(lambda path: path.symlink_to("nowhere")),
    "a link outside": replaced(linked_elsewhere),
    "statistics": lambda fit: (fit / "preproc.json").write_text(
        (fit / "preproc.json").read_text().replace("[]", "[1.0, 2.0]")
    ),
    "no json": lambda fit: os.truncate(fit / "preproc.json", 20),
    "no spec": lambda fit: (fit / "feature_spec.yaml").write_text("["),
    "a list for a spec": lambda fit: (fit / "feature_spec.yaml").write_text("[]"),
    "files": lambda fit: change_spec(fit, lambda d: d["metadata"].update(files=["x"])),
    "a checksum": lambda fit: change_spec(fit, lambda d: d["metadata"]["files"].update({CITY: 5})),
    "rows": lambda fit: change_spec(fit, lambda d: d["feature_spec"]["city"].update(cardinality=9)),
    "no entry": lambda fit: change_spec(fit, lambda d: d["feature_spec"].pop("city")),
}


@pytest.mark.parametrize("damage", DAMAGED_BYTES)
def test_a_damaged_fit_is_refused_by_its_checksums(people, fit, damage):
    DAMAGED_BYTES[damage](fit)
    with pytest.raises(ValueError, match=f"{fit}|city.parquet") as refused:
        load(people, fit)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 600


@pytest.mark.parametrize(
    "damage",
    ["exchanged", "outside", "truncated", "empty", "another feature's", "statistics", "no json"],
)
def test_a_damaged_fit_is_refused_with_right_checksums(people, fit, damage):
    DAMAGED_BYTES[damage](fit)
    record_again(fit, CITY, "preproc.json")
    with pytest.raises(ValueError, match=r"city\.parquet|preproc\.json"):
        load(people, fit)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"id": [1, 2, 2]}, "id 2 in row 2, want 3"),
        ({"id": [2, 1, 3]}, "id 2 in row 0, want 1"),
        ({"id": [0, 1, 2]}, "id 0 in row 0, want 1"),
        ({"id": [1, 2, None]}, "row 2 has no value"),
        ({"value": ["Rome", "Oslo", "Bern"]}, "so ids were exchanged"),
        ({"count": [3, 5, 3]}, "so ids were exchanged"),
        ({"count": [1.5, 1.0, 1.0]}, "want value, id and count"),
        ({"value": [1, 2, 3]}, "want value, id and count"),
        ({"value": ["\x1b[2J\n" * 90, "b", "a"], "count": [1, 1, 1]}, "so ids were exchanged"),
    ],
)
@pytest.mark.parametrize("batch_rows", [1, 2, 100])
def test_a_vocabulary_is_dense_and_in_order(fit, monkeypatch, columns, message, batch_rows):
    monkeypatch.setattr(vocabulary_file, "BATCH_ROWS", batch_rows)
    assert check_vocabulary(fit / CITY, "x") == 3
    rewrite(fit / CITY, **columns)
    with pytest.raises(ValueError, match=message) as refused:
        check_vocabulary(fit / CITY, "fit again")
    assert str(refused.value).startswith(f"{fit / CITY}: ")
    assert str(refused.value).endswith("; fit again")
    assert str(refused.value).isprintable()


@pytest.mark.parametrize(
    "content",
    [
        [],
        5,
        {},
        {"features": []},
        {"features": {"numerical": 3, "categorical": []}},
        {"features": {"numerical": [3], "categorical": []}},
        {"statistics": []},
        {"statistics": {}},
        {"statistics": {"age": []}},
        {"statistics": {"age": [[], [1.0]]}},
        {"statistics": {"age": [[], [1.0, float("nan")]]}},
        {"statistics": {"age": [[], [True, "x"]]}},
        {"statistics": {"age": [[], {"0": 1, "1": 2}]}},
        {"statistics": {"age": [[0.0, 1.0], [0.0, 1.0]]}},
    ],
)
def test_statistics_of_another_shape_are_refused(people, fit, content):
    path = fit / "preproc.json"
    whole = json.loads(path.read_text())
    path.write_text(
        json.dumps(whole | content if isinstance(content, dict) and content else content)
    )
    record_again(fit, "preproc.json")
    with pytest.raises(ValueError, match=f"{path}: ") as refused:
        load(people, fit)
    assert str(refused.value).isprintable()


def test_a_fit_from_before_an_option_is_used_and_one_without_checksums_is_not(people, fit):
    path = fit / "preproc.json"
    saved = json.loads(path.read_text())
    del saved["features"]["categorical"][0]["max_size"]  # as if the option were new
    path.write_text(json.dumps(saved))
    record_again(fit, "preproc.json")
    load(people, fit)
    change_spec(fit, lambda document: document["metadata"].pop("files"))
    with pytest.raises(ValueError, match=r"lists no checksum of preproc\.json; copy the dataset"):
        load(people, fit)


def test_a_fit_is_applied_with_its_description(people, fit, tmp_path):
    with pytest.raises(Refused, match="want the description of the fit, with the new files"):
        preproc("dataset=any", "mode=extend", f"fitted={fit}", f"output={tmp_path / 'out'}")


def test_a_fit_is_not_replaced_by_what_extends_it(people, fit):
    before = data_files(fit)
    with pytest.raises(Refused, match=r"would replace fitted=.*which the run reads"):
        build(people, fit, "mode=extend", f"fitted={fit}", "overwrite=true")
    assert data_files(fit) == before


def test_a_fit_whose_rows_were_removed_is_still_used(people, fit):
    for split in ("train", "test"):
        shutil.rmtree(fit / split)
    (fit / "report.json").unlink()
    load(people, fit)


def test_nothing_of_a_refused_fit_remains_and_the_repaired_one_is_used(people, fit, tmp_path):
    command = (people, tmp_path / "out", "mode=transform", f"fitted={fit}")
    build(people, tmp_path / "wanted", "mode=transform", f"fitted={people.with_name('fit')}")
    # A value with two ids: dense and in order, with a right checksum.
    rewrite(fit / CITY, value=["Rome", "Bern", "Rome"], count=[5, 4, 3])
    record_again(fit, CITY)
    with pytest.raises(Refused, match=r"city.parquet: a value has two ids") as refused:
        build(*command)
    assert refused.value.exit_code == 2
    shutil.copy(people.with_name("fit") / CITY, fit / CITY)
    with pytest.raises(Refused, match="has changed since it was written"):
        build(*command)
    record_again(fit, CITY)
    build(*command)
    assert data_files(tmp_path / "out") == data_files(tmp_path / "wanted")


def test_a_fit_that_changes_while_it_is_copied_is_not_recorded(people, fit, tmp_path, monkeypatch):
    copyfile = shutil.copyfile

    def exchanging(source, target):
        # Files of several features are copied at once, by threads: only this one changes, and once.
        if Path(source) == fit / CITY:
            rewrite(fit / CITY, value=["Bern", "Rome", "Oslo"])
        copyfile(source, target)

    command = (people, tmp_path / "out", "mode=transform", f"fitted={fit}", "split_name=null")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", exchanging)
        with pytest.raises(Refused, match="has changed during this run"):
            build(*command)
    with pytest.raises(Refused, match="has changed since it was written"):
        build(*command)
    shutil.copy(people.with_name("fit") / CITY, fit / CITY)
    build(*command)
    ids = np.fromfile(
        tmp_path / "out" / "test" / "city.bin", FeatureSpec.load(fit).categorical[0].dtype
    )
    assert ids.tolist() == [1, 0]


def exchanged_ids(directory: Path) -> None:
    """Exchange ids 1 and 2 of the training rows, with a right checksum."""
    path = directory / "train" / "city.bin"
    ids = np.fromfile(path, "i1")
    np.array([0, 2, 1, 3], "i1")[ids].tofile(path)
    record_again(directory, "train/city.bin")


def exchanged_values(directory: Path) -> None:
    rewrite(directory / CITY, value=["Bern", "Rome", "Oslo"], count=[3, 5, 3])
    record_again(directory, CITY)


def one_value_less(directory: Path) -> None:
    rewrite(directory / CITY, value=["Rome", "Bern"], id=[1, 2], count=[5, 3])
    record_again(directory, CITY)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (exchanged_ids, "its counts are not those of the ids in train"),
        (exchanged_values, "so ids were exchanged"),
        (one_value_less, "2 values, but a table of 4 rows"),
    ],
)
def test_verification_compares_ids_and_vocabularies(fit, capsys, damage, message):
    preproc("mode=verify", f"path={fit}")
    damage(fit)
    with pytest.raises(SystemExit) as ended:
        preproc("mode=verify", f"path={fit}")
    assert ended.value.code == 1
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("wrong: ")]
    assert line.startswith(f"wrong: {fit / CITY}: ")
    assert message in line


def test_verification_compares_with_the_fit_that_was_applied(people, fit, tmp_path, capsys):
    build(people, tmp_path / "out", "mode=transform", f"fitted={fit}")
    preproc("mode=verify", f"path={tmp_path / 'out'}", f"fitted={fit}")
    same = pq.read_table(fit / CITY)
    other = pa.schema([field.with_nullable(not field.nullable) for field in same.schema])
    pq.write_table(same.cast(other), fit / CITY, row_group_size=2)
    preproc("mode=verify", f"path={tmp_path / 'out'}", f"fitted={fit}")
    rewrite(fit / CITY, value=["Rome", "Bern", "Riga"])
    with pytest.raises(SystemExit):
        preproc("mode=verify", f"path={tmp_path / 'out'}", f"fitted={fit}")
    assert "city.parquet: other values than those of" in capsys.readouterr().out
    (fit / CITY).write_bytes(b"PAR1")
    with pytest.raises(Refused, match=r"fit/vocabulary/city\.parquet: "):
        preproc("mode=verify", f"path={tmp_path / 'out'}", f"fitted={fit}")


def test_a_damaged_dataset_is_not_converted(fit, tmp_path):
    exchanged = (
        (fit / "train" / "city.bin").read_bytes().translate(bytes([0, 2, 1, *range(3, 256)]))
    )
    (fit / "train" / "city.bin").write_bytes(exchanged)
    for name in ("vocabulary", "report.json"):
        path = fit / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(Refused, match=r"city\.bin has changed since it was written"):
        preproc("mode=convert", f"path={fit}", f"output={tmp_path / 'out'}")
    record_again(fit, "train/city.bin")
    preproc("mode=convert", f"path={fit}", f"output={tmp_path / 'out'}")


def no_text(path: Path, value: bytes) -> None:
    """Make a value of a vocabulary no UTF-8: Arrow reads the file all the same, DuckDB does not."""
    data = path.read_bytes()
    assert value in data
    path.write_bytes(data.replace(value, b"\xff" + value[1:]))


def test_a_file_that_only_one_reader_takes_is_named(people, fit, tmp_path):
    no_text(fit / CITY, b"Rome")
    record_again(fit, CITY)
    message = f"{fit / CITY}: damaged Parquet data (Invalid"
    with pytest.raises(Refused) as refused:
        build(people, tmp_path / "out", "mode=transform", f"fitted={fit}")
    assert f"error: {message}" in refused.value.message
    with pytest.raises(ValueError, match=re.escape(message)):
        open_transformed_rows(fit, [people])


def test_damaged_counts_of_the_day_before_are_named(people, tmp_path):
    options = ["rare_counts=true", "frequency_limit=4"]
    build(people, tmp_path / "fit", *options)
    rare = tmp_path / "fit/rare/city.parquet"
    no_text(rare, b"Oslo")
    record_again(tmp_path / "fit", "rare/city.parquet")
    day = ["mode=extend", f"fitted={tmp_path / 'fit'}"]
    later = people.with_name("later.csv")
    later.write_text(people.read_text() + people.read_text().splitlines()[-1] + "\n")
    with pytest.raises(Refused, match=re.escape(f"{rare}: damaged Parquet data (Invalid")):
        build(later, tmp_path / "out", *day)
