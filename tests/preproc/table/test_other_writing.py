"""Values of later rows that are those of the fit in another writing: refused with the cast, however the rows are read."""

from collections import Counter
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataloading.dataset.feature_spec import FeatureSpec
from preproc.raw_tables import RawTables
from preproc.table.known_values import note_of_twins, text_of_five, written_alike
from preproc.transformed_rows import open_transformed_rows
from serving.exporting.raw_values import write_raw_values
from serving.inference.raw_values import RawValues
from serving.inference.requests import InputError
from tests.helpers.preproc_command import Refused
from tests.preproc.table.test_pipeline import build
from tests.serving.raw_manifest import raw_manifest

LABELS = np.arange(40) % 2
ITEMS = pa.array(range(100, 140))
KINDS = {
    "float": (ITEMS.cast(pa.float64()), "5.0"),
    "decimal": (ITEMS.cast(pa.decimal128(22, 2)), "5.00"),
}


def described(source: Path, **more) -> dict:
    return {
        "sources": {"t": {"files": str(source)}},
        "label": {"name": "y"},
        "categorical": ["item", {"name": "hashed", "expression": "item", "buckets": 9}],
        "split": {"train": 0.5},
    } | more


def write(path: Path, items: pa.Array) -> Path:
    table = pa.table({"y": LABELS[: len(items)], "item": items})
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        rows = zip(*table.to_pydict().values(), strict=True)
        path.write_text("".join(f"{a},{b}\n" for a, b in [("y", "item"), *rows]))
    return path


@pytest.fixture(scope="module")
def fits(tmp_path_factory):
    """Return a fit of integers in Parquet, and one of the same items in a text file."""
    root = tmp_path_factory.mktemp("fits")
    for name, file in (("integers", "a.parquet"), ("texts", "a.csv")):
        build(root / name, described(write(root / file, ITEMS)), "rare_counts=true")
    return root


@pytest.mark.parametrize(
    ("kind", "zero"), [("decimal(4,2)", "0.00"), ("DECIMAL(2,2)", ".00"), ("decimal(2,2)[]", ".00")]
)
def test_decimals_without_a_whole_digit_have_another_text(kind, zero):
    ((found,),) = duckdb.sql(f"SELECT CAST(0 AS {kind.removesuffix('[]')})::VARCHAR").fetchall()
    assert found == zero
    assert text_of_five(kind) == zero.replace("0.", "5.")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["extend", "transform"])
def test_numbers_of_another_type_are_refused(fits, tmp_path, mode, kind):
    items, five = KINDS[kind]
    table = described(write(tmp_path / "b.parquet", items))
    with pytest.raises(
        Refused, match=f"'item': 5 would be the value '{five}', and in the fit it was '5'.*CAST"
    ) as refused:
        build(tmp_path / "out", table, f"mode={mode}", f"fitted={fits / 'integers'}")
    assert refused.value.exit_code == 2
    # The cast that the message names has the ids of the fit.
    table |= {
        "query": "SELECT * REPLACE (CAST(item AS BIGINT) AS item) FROM t",
        "order_by": ["file_", "order_"],
    }
    files = build(tmp_path / "out", table, f"mode={mode}", f"fitted={fits / 'integers'}")
    split = "train" if mode == "extend" else "test"
    assert np.frombuffer(files[f"{split}/item.bin"], "i1")[:20].tolist() == list(range(1, 21))


def test_texts_of_other_numbers_are_refused_by_their_count(fits, tmp_path):
    fitted = f"fitted={fits / 'texts'}"
    for file in ("b.csv", "b.parquet"):
        table = described(write(tmp_path / file, KINDS["float"][0]))
        for mode, count in (("extend", 20), ("transform", 40)):
            wanted = f"'item': {count} of {count} values are not in the fit, and 20 of them are there .*: '100.0' here"
            with pytest.raises(Refused, match=wanted):
                build(tmp_path / "out", table, f"mode={mode}", fitted)


def test_predicted_rows_and_tables_are_refused_alike(fits, tmp_path):
    items, _ = KINDS["float"]
    source = write(tmp_path / "b.parquet", items)
    for name, wanted in (
        ("integers", "5 would be the value '5.0'"),
        ("texts", "there in other writing: '100.0' here"),
    ):
        with (
            pytest.raises(ValueError, match=f"'item': .*{wanted}"),
            open_transformed_rows(fits / name, [source]) as rows,
        ):
            list(rows)
        with pytest.raises(ValueError, match=f"'item': .*{wanted}"):
            RawTables(fits / name).transformed(pa.table({"item": items}))


def test_a_server_takes_integers_for_integers_only(tmp_path):
    for five, items in (("5", ITEMS), *((five, items) for items, five in KINDS.values())):
        data, model = tmp_path / f"data {five}", tmp_path / five
        table = described(write(tmp_path / "a.parquet", items))
        build(data, table | {"categorical": ["item"]}, "overwrite=true")
        model.mkdir()
        spec = FeatureSpec.load(data)
        description = write_raw_values(model, str(data), spec, {})
        raw = RawValues.load(model, raw_manifest(spec, description, model, "y"), {})
        texts = [str(item) for item in items.slice(0, 3).to_pylist()]
        assert raw.rows({"item": texts}, {"item": (3,)}, 3).ids.tolist() == [[1], [2], [3]]
        numbers = {"item": np.array([100, 101, 102])}
        if five == "5":
            assert raw.rows(numbers, {"item": (3,)}, 3).ids.tolist() == [[1], [2], [3]]
            continue
        with pytest.raises(
            InputError, match=f"'item' had numbers with a point .* 5 is the text '{five}'"
        ):
            raw.rows(numbers, {"item": (3,)}, 3)


def test_a_day_of_new_values_is_noted_and_made(fits, tmp_path, capsys):
    table = described(write(tmp_path / "b.parquet", pa.array(range(500, 540))))
    for mode in ("extend", "transform"):
        build(tmp_path / mode, table, f"mode={mode}", f"fitted={fits / 'integers'}")
        assert "values of 'item' are not in the fit: nearly all are new" in capsys.readouterr().out
    # A feature that had no value yet has its first day.
    none = described(write(tmp_path / "none.csv", pa.array([None] * 40).cast(pa.string())))
    (tmp_path / "none.csv").write_text((tmp_path / "none.csv").read_text().replace("None", ""))
    build(tmp_path / "none", none, "rare_counts=true")
    capsys.readouterr()
    build(tmp_path / "first", table, "mode=extend", f"fitted={tmp_path / 'none'}")
    assert "are not in the fit" not in capsys.readouterr().out


def test_the_same_files_are_no_other_day(fits, tmp_path):
    table = described(fits / "a.parquet")
    first = f"fitted={fits / 'integers'}"
    with pytest.raises(
        Refused, match=r"a.parquet was read already by .*integers or a day before it"
    ):
        build(tmp_path / "out", table, "mode=extend", first)
    build(
        tmp_path / "day",
        described(write(tmp_path / "b.parquet", ITEMS.slice(10))),
        "mode=extend",
        first,
    )
    with pytest.raises(Refused, match="was read already by"):
        build(tmp_path / "out", table, "mode=extend", f"fitted={tmp_path / 'day'}")
    # The log of a day before, beside a new one.
    new = write(tmp_path / "c.parquet", ITEMS.slice(20))
    both = table | {"sources": {"t": {"files": [str(new), str(fits / "a.parquet")]}}}
    with pytest.raises(Refused, match=r"a.parquet was read already by"):
        build(tmp_path / "out", both, "mode=extend", first)
    build(tmp_path / "rows", table, "mode=transform", first)


def test_a_log_is_no_other_day_with_another_table_beside_it(tmp_path):
    log, side = tmp_path / "log.parquet", tmp_path / "side.parquet"
    table = described(write(log, ITEMS)) | {
        "sources": {"t": {"files": str(log)}, "side": {"files": str(side)}},
        "query": "SELECT t.* FROM t JOIN side ON t.item = side.item",
        "order_by": ["item"],
    }
    write(side, ITEMS)
    build(tmp_path / "fit", table, f"source={log}", "rare_counts=true")
    day = ["mode=extend", f"fitted={tmp_path / 'fit'}", f"source={log}"]
    write(side, pa.array(range(105, 145)))
    with pytest.raises(Refused, match=r"log.parquet was read already by"):
        build(tmp_path / "out", table, *day)
    # The log of another day, with a table that stays.
    write(side, ITEMS)
    write(log, ITEMS.slice(5))
    build(tmp_path / "out", table, *day)


def test_only_plain_decimal_numbers_are_numbers_in_other_writing():
    """Spark also casts 12d and 12f to a number, and DuckDB 1_2; codes such as 1e5 are texts."""
    alike = {" 5.00": "5", "+5": "5", "-3.0": "-3", "1.2E7": "12000000", "007": "7", ".0": "0"}
    alike |= {text: text for text in ("12d", "12f", "1_2", "0012e003", "5.5", ".", "inf", "", "a")}
    texts = ", ".join(f"('{value}')" for value in alike)
    found = duckdb.sql(f"SELECT v, {written_alike('v')} FROM (VALUES {texts}) AS t(v)").fetchall()
    assert dict(found) == alike


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        # Seven is in neither of its writings a plain 7; nine and b have one writing.
        (
            "5| 5|5.0|7.0|07|9.0|b |c",
            "5 values of 'f' are 2 in other writing, such as ' 5' and '5.0'",
        ),
        ("9.0|b |c", None),
    ],
)
def test_values_in_other_writing_are_counted_with_the_plain_one(values, wanted):
    counts = duckdb.sql("SELECT unnest($1) AS value", params=[values.split("|")])
    note = note_of_twins(lambda query: counts.query("counts", query).fetchall(), "counts", "f")
    assert (note and note.removeprefix("note: ").partition(": ")[0]) == wanted


def test_every_value_that_is_written_in_another_way_is_compared():
    draw = np.random.default_rng(0)
    texts = sorted(
        {"".join(draw.choice([*"0057.+-eE x\u00a0~"], draw.integers(1, 6))) for _ in range(9_000)}
    )
    texts = [text for text in texts if text.strip()]
    counts = duckdb.sql("SELECT unnest($1) AS value", params=[texts])
    alike = dict(duckdb.sql(f"SELECT value, {written_alike('value')} FROM counts").fetchall())
    groups = Counter(alike.values())
    wanted = [count for count in groups.values() if count > 1]
    note = note_of_twins(lambda query: counts.query("counts", query).fetchall(), "counts", "f")
    assert len(wanted) > 100
    assert note.startswith(
        f"note: {sum(wanted):,} values of 'f' are {len(wanted):,} in other writing"
    )
