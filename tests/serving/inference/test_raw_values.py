"""Raw values at a server are the features that preprocessing makes of them: the same numbers and ids."""

import csv
import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from configs.transforms import TRANSFORMS, Transform
from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.dataset.open_dataset import open_dataset
from serving.exporting.raw_values import write_raw_values
from serving.inference.raw_columns import split
from serving.inference.raw_values import RawValues
from serving.inference.requests import InputError
from serving.manifest import Manifest, ModelError
from serving.vocabulary import Vocabulary, write_vocabulary
from tests.helpers.preproc_command import preproc
from tests.preproc.table.test_pipeline import build
from tests.serving.raw_manifest import raw_manifest

COLUMNS = ["click", "age", "price", "city", "shop", "tags", "words", "code"]
TABLE = """{
  sources: {logs: {files: '%s'}},
  missing: [NA],
  label: {name: click},
  numerical: [
    {name: age, transforms: [{log: 3}, {fill: 0.5}]},
    {name: scaled, expression: age, transforms: [{clip: [0, 60]}, minmax]},
    {name: price, transforms: [{fill: 1}, {clip: [-5, inf]}, standardise]},
  ],
  categorical: [
    city,
    {name: shop, frequency_limit: 3},
    {name: town, expression: city, vocabulary_of: city},
    {name: tags, separator: '|'},
    {name: words, separator: ' ', hotness: 2, max_size: 4, take: last, length: true},
    {name: hashed, expression: code, buckets: 50},
    {name: city_shop, cross: [city, shop]},
  ],
}"""


def written_rows(count: int) -> list[list[str]]:
    """Return rows with unseen values, missing ones, several per field, and texts that are awkward."""
    generator = np.random.default_rng(7)
    cities = ["Rome", "Köln, am Rhein", 'say "hi"', "NA", "", "東京", " Rome", "O'Hare", "rome"]
    ages = ["1", "30", "", "NA", "-7", "1e1", " 12 ", ".5", "5.", "nan", "+4", "1000", "-3"]

    def pick(values: list[str]) -> str:
        return values[generator.integers(len(values))]

    rows = []
    for number in range(count):
        tags = "|".join(
            pick(["a", "b", "c", "", "é", f"t{number}"]) for _ in range(generator.integers(5))
        )
        words = " ".join(
            pick(["x", "y", "z", "NA", "w", "v"]) for _ in range(generator.integers(4))
        )
        rows.append(
            [
                str(number % 2),
                pick(ages),
                f"{generator.normal() * 9:.6g}",
                pick(cities),
                pick([f"s{number % 9}", "s1", f"new{number}"]),
                tags,
                words,
                pick([f"c{number}", "k"]),
            ]
        )
    return rows


@pytest.fixture(scope="module")
def fitted(tmp_path_factory) -> tuple[Path, list[list[str]]]:
    """Return a dataset that is fitted on 300 rows, and its rows of the test split as texts."""
    root = tmp_path_factory.mktemp("raw")
    rows = written_rows(400)
    with (root / "logs.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([COLUMNS, *rows])
    # The grammar of overrides has no comma at the end of a list.
    table = re.sub(r",\s*([\]}])", r"\1", TABLE % (root / "logs.csv"))
    preproc(
        "dataset=any",
        f"table={' '.join(table.split())}",
        f"output={root / 'data'}",
        "train_fraction=0.75",
    )
    return root / "data", rows[300:]


@pytest.fixture(scope="module")
def raw(fitted, tmp_path_factory) -> RawValues:
    directory = tmp_path_factory.mktemp("model")
    return RawValues.load(directory, manifest_of(directory, fitted[0]), {})


def manifest_of(directory: Path, data: Path) -> Manifest:
    """Return the manifest of a model of a dataset, whose raw values are written."""
    spec = FeatureSpec.load(data)
    description = write_raw_values(directory, str(data), spec, {})
    return raw_manifest(spec, description, directory, "click")


def columns_of(rows: list[list[str]]) -> dict[str, list[str]]:
    columns = dict(zip(COLUMNS, map(list, zip(*rows, strict=True)), strict=True))
    del columns["click"]
    return columns


def featured(raw: RawValues, columns: dict):
    shapes = {name: (len(values),) for name, values in columns.items()}
    return raw.rows(columns, shapes, len(next(iter(columns.values()))))


def test_served_values_are_those_of_preprocessing(fitted, raw):
    root, rows = fitted
    spec = FeatureSpec.load(root)
    wanted = open_dataset(spec).read("test", np.array([[0, len(rows)]]))
    got = featured(raw, columns_of(rows))
    assert spec.numerical == ("age", "scaled", "price", "words_length")
    np.testing.assert_array_equal(got.numerical.numpy(), wanted.numerical)
    assert np.unique(wanted.numerical[:, 0]).size > 5
    for feature, ids, lengths in zip(spec.categorical, wanted.ids, wanted.lengths, strict=True):
        if lengths is None:
            found = got.ids[:, raw._manifest.id_slices()[feature.name]].flatten()
        else:
            found = got.ragged[feature.name].values
        np.testing.assert_array_equal(found.numpy(), ids, err_msg=feature.name)
        assert (0 in ids) != (feature.name == "hashed"), "unseen and missing values are among them"
        if lengths is not None:
            np.testing.assert_array_equal(got.ragged[feature.name].lengths.numpy(), lengths)
            assert 0 in lengths


def test_every_transform_of_the_registry_is_served(tmp_path, monkeypatch):
    """Also one that stands nowhere else."""
    added = Transform(
        sql=lambda x, low, size: f"((({x}) - {low}) / {size} - 0.5)",
        python=lambda values, low, size: [
            x if x is None else (x - low) / size - 0.5 for x in values
        ],
        fits="range",
    )
    monkeypatch.setitem(TRANSFORMS, "added", added)
    numerical = []
    for name, transform in TRANSFORMS.items():
        numbers = [0.5, 40.0][: transform.arguments]
        one = {name: numbers[0] if len(numbers) == 1 else numbers} if numbers else name
        numerical.append({"name": f"by_{name}", "expression": "age", "transforms": [one]})
    ages = [*np.random.default_rng(2).normal(20, 20, 90).tolist(), *[""] * 10] * 2
    lines = [f"{row % 2},{age},Rome" for row, age in enumerate(ages)]
    (tmp_path / "people.csv").write_text("\n".join(["click,age,city", *lines]) + "\n")
    table = {
        "sources": {"people": {"files": str(tmp_path / "people.csv")}},
        "label": {"name": "click"},
        "numerical": numerical,
        "categorical": ["city"],
        "split": {"train": 0.5},
    }
    build(tmp_path / "data", table, "numerical_dtype=float32", "plot=false")
    (tmp_path / "model").mkdir()
    manifest = manifest_of(tmp_path / "model", tmp_path / "data")
    raw = RawValues.load(tmp_path / "model", manifest, {})
    found = featured(raw, {"age": [*map(str, ages[100:])], "city": ["Rome"] * 100})
    stored = open_dataset(FeatureSpec.load(tmp_path / "data")).read("test", np.array([[0, 100]]))
    np.testing.assert_array_equal(found.numerical.numpy(), stored.numerical)


@pytest.mark.parametrize(
    "text", ["ten", "1_0", "0x10", "inf", "-Infinity", "1e999", "1,5", "NaN(1)"]
)
def test_what_is_no_number_is_refused_as_in_preprocessing(fitted, raw, text, tmp_path):
    rows = [list(fitted[1][0])]
    rows[0][1] = text
    with pytest.raises(InputError, match="wanted a number"):
        featured(raw, columns_of(rows))


def test_an_infinite_number_is_refused_as_its_text_is(fitted, raw):
    columns = columns_of(fitted[1][:2]) | {"price": np.array([1, np.inf])}
    with pytest.raises(InputError, match="row 1: 'price' is infinite, wanted a number"):
        featured(raw, columns)


def test_a_number_beyond_float16_is_refused(fitted, raw):
    columns = columns_of(fitted[1][:2]) | {"price": ["1", "1e8"]}
    with pytest.raises(
        InputError, match=r"'price', row 1: 'price' is .* more than the model has seen"
    ):
        featured(raw, columns)


def test_numbers_need_not_be_texts(fitted, raw):
    columns = columns_of(fitted[1][:3]) | {"code": ["17", "17", "4"], "age": ["1", "30", ""]}
    wanted = featured(raw, columns)
    got = featured(raw, columns | {"code": np.array([17, 17, 4]), "age": np.array([1, 30, np.nan])})
    assert got.numerical.equal(wanted.numerical)
    assert got.ids.equal(wanted.ids)
    with pytest.raises(
        InputError, match="'code' has floating-point numbers; send it as integers or BYTES"
    ):
        featured(raw, columns | {"code": np.array([17.0, 17, 4])})


NUMBERS = [
    "1_0",
    "1_0.5",
    "1e1_0",
    "_1",
    "1_",
    "1__0",
    "0x10",
    "0b1",
    "1d",
    "1f",
    "1e",
    "1e+",
    "e1",
    ".",
]
NUMBERS += [
    "1,000",
    "1 0",
    "--1",
    "+-1",
    "inf",
    "-Infinity",
    "1e400",
    "nan(1)",
    "one",
    "\xa01",
    "\uff11",
    "1L",
]
NUMBERS += [
    " 12 ",
    "\t3",
    "+4",
    "-0",
    ".5",
    "5.",
    "1e1",
    "1E-3",
    "+.5e+2",
    "007",
    "nan",
    " NaN ",
    "-nan",
    "",
    "9" * 30,
]


def test_a_text_is_a_number_to_preprocessing_and_to_the_server_alike(tmp_path):
    with (tmp_path / "logs.csv").open("w", newline="") as stream:
        lines = csv.writer(stream, quoting=csv.QUOTE_ALL)
        lines.writerow(["click", "x", "place"])
        lines.writerows([[place % 2, text, place] for place, text in enumerate(NUMBERS)])
        lines.writerows([[n % 2, "1", 99] for n in range(40)])
    table = f"{{sources: {{logs: {{files: '{tmp_path}/logs.csv'}}}}, label: {{name: click}}, "
    table += "numerical: [x, place], categorical: [{name: c, expression: place, buckets: 2}]}"
    options = ("dataset=any", f"table={table}", "train_fraction=0.9")
    preproc(*options, f"output={tmp_path / 'data'}", "on_bad=skip", "numerical_dtype=float32")
    spec = FeatureSpec.load(tmp_path / "data")
    source = open_dataset(spec)
    stored = source.read("train", np.array([[0, source.num_rows("train")]])).numerical
    wanted = {int(place): x for x, place in stored if place < 99}
    directory = tmp_path / "model"
    directory.mkdir()
    manifest = manifest_of(directory, tmp_path / "data")
    raw = RawValues.load(directory, manifest, {})
    found = {}
    for place, text in enumerate(NUMBERS):
        try:
            rows = featured(raw, {"x": [text], "place": [str(place)]})
        except InputError:
            continue
        found[place] = rows.numerical[0, 0].item()
    assert {NUMBERS[place] for place in found} == {NUMBERS[place] for place in wanted}
    assert found == wanted
    assert NUMBERS.index("1_0") not in found


def test_columns_are_named(fitted, raw):
    columns = columns_of(fitted[1][:1])
    with pytest.raises(InputError, match="there is no column 'city'"):
        featured(raw, {name: values for name, values in columns.items() if name != "city"})
    with pytest.raises(InputError, match="no column 'country' in the model"):
        featured(raw, columns | {"country": ["IT"]})


def test_an_expression_is_refused_at_export(tmp_path):
    (tmp_path / "logs.csv").write_text("click,city\n" + "1,Rome\n0,Oslo\n" * 10)
    table = f"{{sources: {{logs: {{files: '{tmp_path}/logs.csv'}}}}, label: {{name: click}}, "
    table += "categorical: [{name: town, expression: 'md5(city)'}]}"
    preproc("dataset=any", f"table={table}", f"output={tmp_path / 'data'}")
    (tmp_path / "model").mkdir()
    with pytest.raises(ValueError, match=r"'town' is the SQL expression 'md5\(city\)'"):
        write_raw_values(
            tmp_path / "model", str(tmp_path / "data"), FeatureSpec.load(tmp_path / "data"), {}
        )


def test_values_of_one_checksum_are_told_apart(tmp_path):
    # Texts of equal CRC-32.
    texts = ["plumless", "buckeroo", "other", ""]
    size = write_vocabulary(tmp_path / "v", iter([texts[:2], texts[2:3]]))
    found = Vocabulary(tmp_path / "v", size).ids(
        ["buckeroo", "plumless", None, "unseen", "other", ""]
    )
    assert found.tolist() == [2, 1, 0, 0, 3, 0]


def test_an_empty_vocabulary_knows_nothing(tmp_path):
    assert write_vocabulary(tmp_path / "v", iter([])) == 0
    assert Vocabulary(tmp_path / "v", 0).ids(["a", None]).tolist() == [0, 0]


def test_a_text_of_too_many_values_is_refused_before_it_is_split():
    assert split("a||b", "|") == ["a", None, "b"]
    with pytest.raises(InputError, match="a text has 65,538 values; want at most 65,536"):
        split("|" * 65_537, "|")


def test_retired_ids_are_found_by_no_value_and_share_no_checksum(tmp_path):
    batches = [["a", None, None], [None, "b"]]
    vocabulary = Vocabulary(tmp_path / "v", write_vocabulary(tmp_path / "v", iter(batches)))
    assert vocabulary.ids(["b", "a", "", "2", "\xff2", "\x00retired", None]).tolist() == [
        *(5, 1, 0, 0, 0, 0, 0)
    ]
    assert len(np.unique(vocabulary._hashes)) == 5


EXPRESSIONS = """{
  sources: {logs: {files: '%s'}},
  missing: [NA],
  label: {name: y},
  numerical: [
    {name: half, expression: 'CAST(n AS DOUBLE) * 0.5 + 0.1', transforms: [standardise]},
    {name: third, expression: 'TRY_CAST(N AS DOUBLE) / 3', transforms: [{fill: 7}]},
    {name: decimal, expression: 'CAST(n AS DECIMAL(9, 2)) * 1.5'},
    {name: digits, expression: "regexp_extract(t, '[0-9]+')", transforms: [{log: 3}]},
  ],
  categorical: [
    {name: hour, expression: 'hour(CAST(ts AS TIMESTAMP))'},
    {name: weekday, expression: 'dayofweek(to_timestamp(epoch(CAST(ts AS TIMESTAMP))))'},
    {name: ratio, expression: 'TRY_CAST(n AS DOUBLE) / 4'},
    {name: words, expression: 'lower(t)', separator: ' '},
    {name: kind, expression: "CASE WHEN t LIKE 'a%%' THEN 'first' ELSE upper(left(t, 1)) END"},
    {name: hashed, expression: "t || '-' || coalesce(n, '?')", buckets: 50},
    n,
  ],
}"""


def expression_rows(count: int) -> list[list[str]]:
    draw = np.random.default_rng(3)
    numbers = ["1", "2.5", "-0.3", "", "NA", "1e3", "0.1", "7"]
    texts = ["a1 b", "B22", "", "aa9", "Ünder 5", "zz 0 a"]
    moments = ["2026-11-26 23:59:59", "2024-02-29", "1969-12-31 00:30:00", "2026-03-29T02:30:00"]
    pick = [draw.choice(values, count) for values in (numbers, texts, moments)]
    return [[str(i % 2), *map(str, row)] for i, row in enumerate(zip(*pick, strict=True))]


def matches(raw: RawValues, data: Path, columns: dict, count: int) -> None:
    """Compare the features of raw values with those of the rows of the split test."""
    spec = FeatureSpec.load(data)
    wanted = open_dataset(spec).read("test", np.array([[0, count]]))
    got = featured(raw, columns)
    np.testing.assert_array_equal(got.numerical.numpy(), wanted.numerical)
    for feature, ids, lengths in zip(spec.categorical, wanted.ids, wanted.lengths, strict=True):
        found = got.ragged[feature.name].values if lengths is not None else None
        if found is None:
            found = got.ids[:, raw._manifest.id_slices()[feature.name]].flatten()
        np.testing.assert_array_equal(found.numpy(), ids, err_msg=feature.name)
        assert len(np.unique(ids)) > 1


def test_expressions_are_evaluated_with_the_bits_of_preprocessing(tmp_path, capsys):
    rows = expression_rows(200)
    with (tmp_path / "logs.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([["y", "n", "t", "ts"], *rows])
    table = " ".join(re.sub(r",\s*([\]}])", r"\1", EXPRESSIONS % (tmp_path / "logs.csv")).split())
    preproc(
        "dataset=any", f"table={table}", f"output={tmp_path / 'data'}", "numerical_dtype=float32"
    )
    assert "cannot be served" not in capsys.readouterr().out
    raw = RawValues.load(tmp_path, manifest_of(tmp_path, tmp_path / "data"), {})
    assert [entry["name"] for entry in raw.describe_inputs()] == ["n", "t", "ts"]
    test = rows[180:]
    columns = dict(zip(["n", "t", "ts"], map(list, list(zip(*test, strict=True))[1:]), strict=True))
    matches(raw, tmp_path / "data", columns, len(test))
    with pytest.raises(InputError, match=r"invalid timestamp field format: \"noon\""):
        featured(raw, columns | {"ts": ["noon"] * len(test)})


def test_expressions_of_parquet_have_the_types_of_the_fit(tmp_path, capsys):
    draw = np.random.default_rng(1)
    moments = np.datetime64("2026-01-01") + draw.integers(0, 10**7, 100).astype("timedelta64[s]")
    table = pa.table(
        {
            "y": draw.integers(0, 2, 100),
            "n": draw.integers(-5, 5, 100),
            "x": draw.normal(size=100).astype(np.float32),
            "ts": moments.astype("datetime64[us]"),
        }
    )
    pq.write_table(table, tmp_path / "logs.parquet")
    described = (
        f"{{sources: {{logs: {{files: '{tmp_path}/logs.parquet'}}}}, label: {{name: y}}, "
        "numerical: [{name: product, expression: 'n * x / 3'}], categorical: "
        "[{name: hour, expression: 'hour(ts)'}, {name: remainder, expression: 'n % 3'}, {name: odd, expression: 'hex(n)'}]}"
    )
    preproc("dataset=any", f"table={described}", f"output={tmp_path / 'all'}")
    assert (
        "note: raw values cannot be served: feature 'odd' is the SQL expression 'hex(n)', which the server does "
        "not evaluate (" in capsys.readouterr().out
    )
    with pytest.raises(ValueError, match="feature 'odd' is the SQL expression"):
        manifest_of(tmp_path, tmp_path / "all")
    served = described.replace(", {name: odd, expression: 'hex(n)'}", "")
    data = tmp_path / "data"
    preproc("dataset=any", f"table={served}", f"output={data}", "numerical_dtype=float32")
    shutil.rmtree(tmp_path / "vocabulary")
    manifest = manifest_of(tmp_path, data)
    raw = RawValues.load(tmp_path, manifest, {})
    rows = table.slice(90)
    texts = [str(moment) for moment in moments[90:]]
    columns = {"n": rows["n"].to_numpy(), "x": rows["x"].to_numpy(), "ts": texts}
    matches(raw, data, columns, 10)
    columns["n"] = [str(n) for n in columns["n"]]
    matches(raw, data, columns, 10)
    with pytest.raises(InputError, match=r"row 0: 'n' is '2\.5', wanted a whole number"):
        featured(raw, columns | {"n": ["2.5"] * 10})
    for expression in ("read_text('/etc/passwd')", "n) FROM range(9) AS t(n", "(SELECT 1) + n"):
        description = manifest.raw | {
            "numerical": [manifest.raw["numerical"][0] | {"expression": expression}]
        }
        with pytest.raises(ValueError, match=r"function read_text|no SQL of one|subquery"):
            raw_manifest(FeatureSpec.load(data), description, tmp_path, "y")
    manifest.raw["numerical"][0]["expression"] = "lower(n) * ts * x"
    with pytest.raises(ModelError, match=r"raw values are malformed: .*lower"):
        RawValues.load(tmp_path, manifest, {})
