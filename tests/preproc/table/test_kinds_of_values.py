"""Kinds of categorical values: a note about floating-point numbers, a refusal of lists and structs in place of a value."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers.preproc_command import Refused
from tests.preproc.table.test_pipeline import build

LABELS = np.arange(40) % 2


def described(tmp_path, values: pa.Array, **feature) -> dict:
    pq.write_table(pa.table({"y": LABELS, "user": values}), tmp_path / "a.parquet")
    return {
        "sources": {"t": {"files": str(tmp_path / "a.parquet")}},
        "label": {"name": "y"},
        "categorical": [{"name": "user", **feature}],
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
