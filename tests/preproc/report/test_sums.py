"""The report adds up: rows, labels and columns of the sources, each counted once, for every kind of dataset."""

import json
from pathlib import Path

import numpy as np
import pytest

from dataloading.dataset.feature_spec import FeatureSpec
from preproc.vocabulary_sql import COLUMNS
from tests.helpers.preproc_command import preproc, raw_line, write_lines
from tests.preproc.table.test_pipeline import build

HEAD = "click,buy,stars,price,user,day,id,spare,when"


def written(path: Path, rows: int = 60) -> Path:
    """Write rows of which 4 are bad: 2 have another number of columns, 2 a bad label; and 6 are of no split."""
    lines = [
        f"{i % 2},{int(i % 10 == 0)},{i % 5},{i - 20},u{i % 7},{i},{i},x,{i % 3}"
        for i in range(rows)
    ]
    lines[3], lines[50] = "1,0", "1," * 20
    lines[4] = lines[4].replace("0", "maybe", 1)
    lines[51] = lines[51][1:]
    return write_lines(path, [HEAD, *lines])


def described(source: Path, **more) -> dict:
    return {
        "sources": {"t": {"files": str(source)}},
        "label": [
            {"name": "click"},
            {"name": "buy"},
            {"name": "rating", "expression": 'CAST("stars" AS DOUBLE)', "kind": "regression"},
        ],
        "weight": {"name": "w", "expression": "1 + CAST(Price AS INT) * 0"},
        "numerical": ["price"],
        "categorical": ["user"],
        "history": [
            {
                "name": "past",
                "of": "user",
                "by": "user",
                "order_by": "CAST(day AS INT)",
                "length": 3,
            }
        ],
        "split": {
            "by": "column",
            "expression": 'CASE WHEN CAST("when" AS INT) = 2 AND CAST(day AS INT) < 20 THEN NULL '
            "WHEN CAST(day AS INT) < 40 THEN 'train' ELSE 'test' END",
        },
        "keep": ["id"],
    } | more


def check(output: Path, read: int) -> dict:
    """Assert that the rows and labels of a report are those of the files, and return it."""
    report, spec = json.loads((output / "report.json").read_text()), FeatureSpec.load(output)
    rows = report["rows"]
    assert rows["read"] == read
    assert rows["read"] == rows["written"] + rows["bad"] + rows["without_split"]
    assert rows["written"] == sum(split["rows"] for split in report["splits"].values())
    for name, split in report["splits"].items():
        assert split["rows"] == spec.rows_of(name)
        assert [*split["labels"]] == [label.name for label in spec.labels]
        for label in spec.labels:
            values = np.fromfile(spec.splits[name].columns[label.name], label.stored)
            found = split["labels"][label.name]
            if label.is_binary:
                assert found == {"ones": int(values.sum()), "rate": values.sum() / len(values)}
            else:
                assert found == {"mean": pytest.approx(values.mean())}
    return report


@pytest.mark.parametrize("on_bad", ["skip", "quarantine"])
def test_rows_labels_and_columns_of_a_table_add_up(tmp_path, on_bad, capsys):
    build(tmp_path / "out", described(written(tmp_path / "t.csv")), f"on_bad={on_bad}", "plot=true")
    report = check(tmp_path / "out", 60)
    assert report["rows"]["bad"] == 4
    assert report["rows"]["without_split"] == 6
    assert report["source_columns"] == {
        **{
            "click": "label",
            "buy": "label",
            "stars": "label",
            "price": "weight",
            "user": "feature",
        },
        **{"day": "history", "id": "kept", "spare": "unused", "when": "split"},
    }
    printed = capsys.readouterr().out
    assert "rows: 60 read = 50 written + 4 bad + 6 without a split" in printed
    assert "columns that are not used: 'spare'" in printed
    for name, split in report["splits"].items():
        for label in ("click", "buy"):
            found = split["labels"][label]
            assert f"{label} {found['ones']} {100 * found['rate']:.3f}" in " ".join(
                printed.split()
            ), name
    assert "click rate" not in printed
    if on_bad == "quarantine":
        assert len((tmp_path / "out/bad_rows.tsv").read_text().splitlines()) == 4


def test_a_query_names_the_columns_of_its_sources(tmp_path):
    write_lines(tmp_path / "names.csv", ["user,name,born", *(f"u{i},n{i},1990" for i in range(7))])
    written(tmp_path / "t.csv")
    table = described(tmp_path / "t.csv")
    table["sources"]["names"] = {"files": str(tmp_path / "names.csv")}
    table |= {
        "query": "SELECT t.*, n.name FROM t JOIN names AS n ON t.user = n.user",
        "order_by": ["CAST(day AS INT)"],
    }
    build(tmp_path / "out", table, "on_bad=skip")
    report = check(tmp_path / "out", 60)
    columns = report["source_columns"]
    assert {name for name, role in columns.items() if role == "unused"} == {"spare", "name"}
    assert columns["names.born"] == "query"  # t.* may be any column


def test_raw_logs_and_their_transform_add_up(tmp_path):
    lines = [raw_line(i % 2, i1=i, i2=-(i % 6), c1=f"{i % 5:08x}") for i in range(50)]
    lines[7], lines[9] = "1\t2", raw_line("x")
    source = write_lines(tmp_path / "raw.tsv", lines)
    options = [f"source={source}", "on_bad=skip"]
    preproc(*options, f"output={tmp_path / 'out'}")
    report = check(tmp_path / "out", 50)
    assert report["rows"]["bad"] == 2
    assert [*report["source_columns"]] == [*COLUMNS]
    preproc(*options, f"output={tmp_path / 'new'}", "mode=transform", f"fitted={tmp_path / 'out'}")
    again = check(tmp_path / "new", 50)
    assert again["rows"] == report["rows"]
    assert again["source_columns"] == report["source_columns"]
    # -3, -4 and -5 have no ln(x + 3); the bad lines have 0 - 7 % 6 and nothing.
    emptied = [[split["emptied"] for split in of["splits"].values()] for of in (report, again)]
    wanted = sum(i % 6 >= 3 for i in range(50) if i not in (7, 9))
    for splits in emptied:
        assert sum(split["num_1"] for split in splits) == wanted
        assert not any(split["num_0"] or split["num_12"] for split in splits)


def test_verification_and_conversion_print_every_label(tmp_path, capsys):
    build(tmp_path / "out", described(written(tmp_path / "t.csv")), "on_bad=skip")
    capsys.readouterr()
    preproc("mode=verify", f"path={tmp_path / 'out'}")
    verified = capsys.readouterr().out
    preproc("mode=convert", f"path={tmp_path / 'out'}", "to=parquet", f"output={tmp_path / 'p'}")
    converted = capsys.readouterr().out
    preproc("mode=verify", f"path={tmp_path / 'p'}")
    tables = [
        [
            line
            for line in text.splitlines()
            if line.split()[:1] in (["train"], ["test"], ["buy"], ["rating"])
        ]
        for text in (verified, converted, capsys.readouterr().out)
    ]
    assert tables[0] == tables[1] == tables[2]
    assert len(tables[0]) == 6
