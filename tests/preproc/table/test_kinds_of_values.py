"""Kinds of categorical values: a note about floating-point numbers, a refusal of lists and structs in place of a value."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from preproc.transformed_rows import open_transformed_rows
from tests.helpers.preproc_command import Refused
from tests.preproc.table.test_pipeline import build

LABELS = np.arange(40) % 2


def described(tmp_path, values: pa.Array, **feature) -> dict:
    pq.write_table(pa.table({"y": LABELS, "user": values}), tmp_path / "a.parquet")
    return {
        "sources": {"t": {"files": str(tmp_path / "a.parquet")}},
        "label": {"name": "y"},
        "categorical": [{"name": "user"} | feature],
        "split": {"train": 0.5},
    }


@pytest.mark.parametrize(
    ("kind", "five"),
    [
        (pa.float32(), "floating-point numbers, so 5 is the text 5.0,"),
        (pa.float64(), "floating-point numbers, so 5 is the text 5.0,"),
        (pa.decimal128(22, 2), "decimals, so 5 is the text 5.00,"),
        (pa.decimal128(22, 0), ""),
    ],
)
def test_values_with_a_point_have_a_note(tmp_path, kind, five, capsys):
    values = pa.array([None, *range(1, 40)], pa.int64()).cast(kind)
    build(tmp_path / "out", described(tmp_path, values))
    printed = capsys.readouterr().out
    assert f"note: the values of 'user' are {five}" in printed or not five
    assert ("note: the values" in printed) == bool(five)
    if not five:
        return
    whole = described(tmp_path, values, expression="CAST(user AS BIGINT)")
    files = build(tmp_path / "whole", whole)
    assert "note: the values" not in capsys.readouterr().out
    assert files == build(tmp_path / "integers", described(tmp_path, values.cast(pa.int64())))


@pytest.mark.parametrize(
    ("kind", "feature", "what"),
    [
        (pa.binary(), {}, "bytes"),
        (pa.binary(2), {"expression": "user", "buckets": 9}, "bytes"),
        (pa.list_(pa.binary()), {"list": True}, "bytes"),
        (pa.binary(), {"name": "pair", "cross": ["user", "y"]}, "bytes"),
        (pa.list_(pa.list_(pa.int64())), {"list": True}, "a list with lists or structs"),
        (pa.list_(pa.struct({"a": pa.int64()})), {"list": True}, "a list with lists or structs"),
    ],
)
def test_values_without_a_text_of_their_own_are_refused(tmp_path, kind, feature, what):
    table = described(tmp_path, pa.nulls(40, kind), **feature)
    with pytest.raises(Refused, match=f": a value is {what}, want text or numbers; .*as by"):
        build(tmp_path / "out", table)


def test_later_bytes_in_the_place_of_text_are_refused(tmp_path):
    text = pa.array(["a", "b"] * 20)
    build(tmp_path / "fit", described(tmp_path, text))
    later = described(tmp_path, text.cast(pa.binary()))
    for mode in ("transform", "extend"):
        with pytest.raises(Refused, match="'user': a value is bytes, want text or numbers"):
            build(tmp_path / mode, later, f"mode={mode}", f"fitted={tmp_path / 'fit'}")
    with (
        pytest.raises(ValueError, match="'user': a value is bytes, want text or numbers"),
        open_transformed_rows(tmp_path / "fit", [tmp_path / "a.parquet"]),
    ):
        pass


def test_bytes_of_utf8_are_decoded_and_items_with_a_scale_are_values(tmp_path):
    text = described(tmp_path, pa.array(["é"] * 40).cast(pa.binary()), expression="decode(user)")
    build(tmp_path / "out", text)
    assert pq.read_table(tmp_path / "out/vocabulary/user.parquet")["value"].to_pylist() == ["é"]
    prices = pa.array([[1]] * 40).cast(pa.list_(pa.decimal128(22, 2)))
    build(tmp_path / "prices", described(tmp_path, prices, list=True))


def test_a_time_is_no_number(tmp_path):
    table = described(tmp_path, pa.array([0] * 40, pa.timestamp("us")))
    table |= {"categorical": [{"name": "c", "expression": "y"}], "numerical": ["user"]}
    with pytest.raises(Refused, match=r"wanted a number such as epoch\(...\) of it; correct"):
        build(tmp_path / "out", table)


@pytest.mark.parametrize(
    ("values", "what"),
    [
        (pa.array([[i, 2] for i in range(40)]), "a list"),
        (pa.array([{"id": i} for i in range(40)]), "a struct"),
    ],
)
@pytest.mark.parametrize("feature", [{}, {"vocabulary": "dynamic", "capacity": 9}])
def test_several_values_are_no_single_one(tmp_path, values, what, feature):
    with pytest.raises(Refused, match=f"'user': a value is {what}, want one value") as refused:
        build(tmp_path / "out", described(tmp_path, values, **feature))
    assert refused.value.exit_code == 2


def test_more_raw_keys_than_rows_have_a_warning(tmp_path, capsys):
    table = described(tmp_path, pa.array(range(40)), vocabulary="dynamic", capacity=9)
    build(tmp_path / "out", table)
    assert "warning: 'user' has 20 values and rows for 8 keys" in capsys.readouterr().out
    table["categorical"][0]["capacity"] = 99
    build(tmp_path / "more", table)
    assert "rows for" not in capsys.readouterr().out
