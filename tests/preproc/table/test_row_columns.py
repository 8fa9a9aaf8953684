"""Tables with several labels, a weight and a keep rate."""

import numpy as np
import pytest

from configs.table_schema import TableConfig
from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.dataset.row_columns import Channel, RowColumn
from tests.helpers.preproc_command import Refused
from tests.preproc.table.test_pipeline import build

ROWS = [
    # user, click, stars, importance, share
    ("a", "1", "4.5", "1", "0.25"),
    ("b", "false", "-2", "0", "1"),
    ("a", "0", "0.125", "2.5", "1"),
    ("c", "true", "3", "1", "0.5"),
]
COLUMNS = {
    "label": [
        {"name": "click"},
        {"name": "rating", "kind": "regression", "expression": "stars"},
    ],
    "weight": {"name": "importance"},
    "keep_rate": {"name": "kept", "expression": "share"},
    "teacher": ["share", {"name": "half", "expression": "CAST(share AS DOUBLE) / 2"}],
}


def table(path, rows=ROWS, **more):
    lines = ["user,click,stars,importance,share", *(",".join(row) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return {
        "sources": {"rows": {"files": str(path)}},
        "categorical": ["user"],
        "split": {"by": "fraction", "train": 0.5},
        **COLUMNS,
        **more,
    }


def test_every_column_is_written_and_named(tmp_path):
    files = build(tmp_path / "out", table(tmp_path / "rows.csv"))
    spec = FeatureSpec.load(tmp_path / "out")
    number = np.dtype(np.float32)
    assert spec.labels == (RowColumn("click"), RowColumn("rating", dtype=number))
    assert spec.weight == RowColumn.of("importance", Channel.weight)
    assert spec.keep_rate == RowColumn.of("kept", Channel.keep_rate)
    wanted = {
        "click": np.array([1, 0, 0, 1], "u1"),
        "rating": np.array([4.5, -2, 0.125, 3], "<f4"),
        "importance": np.array([1, 0, 2.5, 1], "<f4"),
        "kept": np.array([0.25, 1, 1, 0.5], "<f4"),
        "share": np.array([0.25, 1, 1, 0.5], "<f4"),
        "half": np.array([0.125, 0.5, 0.5, 0.25], "<f4"),
    }
    for name, values in wanted.items():
        stored = files[f"train/{name}.bin"] + files[f"test/{name}.bin"]
        assert stored == values.tobytes()
    assert "train/label.bin" not in files
    assert [column.name for column in spec.teachers] == ["share", "half"]


def test_new_rows_may_lack_the_scores_of_teachers(tmp_path):
    teacher = {"teacher": ["click_score"]}
    rows = table(tmp_path / "rows.csv") | {"teacher": [{"name": "old", "expression": "share"}]}
    build(tmp_path / "out", rows | {"keep_rate": None})
    lines = (tmp_path / "rows.csv").read_text().splitlines()
    (tmp_path / "rows.csv").write_text("\n".join(line.rpartition(",")[0] for line in lines) + "\n")
    build(
        tmp_path / "new", rows | {"keep_rate": None}, "mode=transform", f"fitted={tmp_path / 'out'}"
    )
    spec = FeatureSpec.load(tmp_path / "new")
    assert spec.splits["test"].absent == {"old"}
    with pytest.raises(Refused, match=r"table.teacher: 'click_score'.* no column"):
        build(tmp_path / "more", rows | teacher | {"keep_rate": None})


def test_one_regression_label_is_the_file_of_labels(tmp_path):
    rating = {"name": "stars", "kind": "regression"}
    files = build(
        tmp_path / "out", table(tmp_path / "rows.csv", label=rating, weight=None, keep_rate=None)
    )
    assert files["train/label.bin"] == np.array([4.5, -2], "<f4").tobytes()


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        (1, "2", "row 2: the label click is 2, wanted 0 or 1"),
        (
            2,
            "much",
            "row 2: the label rating is much, wanted a finite number",
        ),
        (2, "1_0", "row 2: the label rating is 1_0, wanted a finite number"),
        (2, "", "row 2: the label rating is missing"),
        (
            3,
            "-1",
            "row 2: the weight importance is -1.*, wanted a finite number that is not negative",
        ),
        (4, "0", "row 2: the keep_rate kept is 0.*, wanted a number above 0 and at most 1"),
        (4, "1.5", "row 2: the keep_rate kept is 1.5, wanted a number above 0 and at most 1"),
        (5, "1.5", "row 2: the teacher old is 1.5, wanted a number from 0 to 1"),
        (5, "-0.1", "row 2: the teacher old is -0.1, wanted a number from 0 to 1"),
        (5, "", "row 2: the teacher old is missing"),
    ],
)
def test_a_bad_value_is_named_with_its_row(tmp_path, column, value, message):
    rows = [[*row, "0.5"] for row in ROWS]
    rows[1][column] = value
    described = table(tmp_path / "rows.csv", rows, teacher=["old"])
    text = (tmp_path / "rows.csv").read_text()
    (tmp_path / "rows.csv").write_text(text.replace(",share\n", ",share,old\n"))
    with pytest.raises((Refused, ValueError), match=message):
        build(tmp_path / "out", described)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"label": [{"name": "x", "kind": "ordinal"}]},
            "table.label: 'x': kind: got 'ordinal', want one of binary,",
        ),
        ({"label": []}, None),
        ({"label": [{"name": "user"}]}, "'user' is named twice: a categorical feature and a label"),
        (
            {"label": ["x", "numerical"], "numerical": ["n"]},
            "table.label: 'numerical' would share a file",
        ),
        ({"weight": {"expression": "1"}}, "table.weight: .*name"),
        ({"keep_rate": {"name": "k", "rate": 1}}, "table.keep_rate.rate: no such key"),
    ],
)
def test_a_contradictory_description_is_refused(content, message):
    base = {"sources": {"rows": {"files": "rows.csv"}}, "categorical": ["user"]}
    if message is None:
        assert [label.name for label in TableConfig.of(base | content).label] == ["label"]
        return
    with pytest.raises(ValueError, match=message):
        TableConfig.of(base | content)
