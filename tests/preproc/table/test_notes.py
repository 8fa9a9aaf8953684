"""Lines of the report on a numerical feature that nobody scaled, and on labels that are all the same."""

import io
import json
from types import SimpleNamespace

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from rich.console import Console

from configs.transforms import TRANSFORMS
from preproc.report.console import NumericalRange, print_notes
from preproc.table.duckdb_engine import DuckDBEngine
from tests.preproc.table.test_pipeline import build

CHANGING = (("log", {"log": 1}), ("clip", {"clip": [0, 9]}))


def notes(*batches):
    found, stream = NumericalRange(), io.StringIO()
    for batch in batches:
        found.add(np.asarray(batch, np.float32))
    print_notes(Console(file=stream, width=80), {"x": found})
    return stream.getvalue()


@pytest.mark.parametrize(
    ("values", "large"),
    [
        (np.arange(400), True),
        (np.full(100, 1990), True),
        (np.linspace(18, 80, 63), True),
        ([0] * 9999 + [60000], True),
        (-np.arange(400), True),
        (np.linspace(0, 1, 100), False),
        (np.random.default_rng(0).standard_normal(1000), False),
        (np.arange(24), False),
        (np.linspace(0.5, 5, 10), False),
        # Criteo's logarithm of integers as large as they get.
        (np.log(np.geomspace(1, 2.0**40, 1000) + 3), False),
        ([0.0] * 10, False),
    ],
)
def test_only_a_large_feature_has_a_note(values, large):
    text = notes(values[: len(values) // 2], values[len(values) // 2 :])
    assert bool(text) == large
    assert text.count("\n") == large
    if large:
        for number in (min(values), max(values)):
            assert f"{number:g}" in text
        assert f"mean {np.mean(values):.4g}, standard deviation {np.std(values):.4g} " in text


def test_the_note_of_a_table_counts_training_rows_after_their_transforms(tmp_path, capsys):
    rows = [f"{i % 2},a,{i if i < 400 else 10**4}" for i in range(800)]
    (tmp_path / "t.csv").write_text("\n".join(["y,c,x", *rows]) + "\n")
    chains = {"raw": [], "[bold]$x\x1b": [], "log": [{"log": 1}], "mm": ["minmax"]}
    table = {
        "sources": {"t": {"files": str(tmp_path / "t.csv")}},
        "label": {"name": "y"},
        "categorical": ["c"],
        "numerical": [
            {"name": name, "expression": "x", "transforms": chain} for name, chain in chains.items()
        ],
        "split": {"train": 0.5},
    }
    files = build(tmp_path / "out", table, "plot=true")
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note")]
    assert [line.partition(" is not")[0] for line in printed] == [
        "note: numerical feature 'raw'",
        r"note: numerical feature '[bold]$x\x1b'",
    ]
    assert "0 to 399, mean 199.5, standard deviation 115.5 in the training rows" in printed[0]
    options = ("mode=transform", f"fitted={tmp_path / 'out'}", "split_name=null")
    assert build(tmp_path / "again", table, *options) == files
    assert "note:" not in capsys.readouterr().out


@pytest.mark.parametrize(("name", "numbers"), [("log", (1,)), ("clip", (0, 9)), ("clip", (3, 3))])
def test_what_a_transform_changes_is_counted_by_its_condition_as_by_its_result(name, numbers):
    of, arguments = TRANSFORMS[name], [f"CAST({number} AS DOUBLE)" for number in numbers]
    values = (
        "(VALUES (-2e300), (-1), (-0.5), (0), (3), (9), (9.5), ('inf'), ('-inf'), ('nan'), (NULL))"
    )
    rows = f"(SELECT CAST(col0 AS DOUBLE) AS x FROM {values})"
    result = of.sql("x", *arguments)
    by_result = f"x IS NOT NULL AND {result} IS NULL" if name == "log" else f"{result} <> x"
    counts = f"count_if({of.counted('x', *arguments)}), count_if({by_result})"
    (found,) = duckdb.sql(f"SELECT {counts} FROM {rows}").fetchall()
    assert found[0] == found[1] > 2


def test_no_value_of_a_column_that_is_missing_is_changed(tmp_path):
    (tmp_path / "t.csv").write_text("\n".join(["y,c,x", *(f"{i % 2},a," for i in range(8))]) + "\n")
    numerical = [{"name": kind, "expression": "x", "transforms": [of]} for kind, of in CHANGING]
    table = {
        "sources": {"t": {"files": str(tmp_path / "t.csv")}},
        "label": {"name": "y"},
        "categorical": ["c"],
        "numerical": numerical,
        "split": {"train": 0.5},
    }
    build(tmp_path / "out", table)
    for split in json.loads((tmp_path / "out/report.json").read_text())["splits"].values():
        assert split["emptied"] == {"log": 0}
        assert split["clipped"] == {"clip": 0}


def test_values_that_a_transform_empties_are_counted(tmp_path, capsys):
    rows = [f"{i % 2},a,{i - 20 if i % 5 else ''}" for i in range(80)]
    (tmp_path / "t.csv").write_text("\n".join(["y,c,x", *rows]) + "\n")
    (tmp_path / "day.csv").write_text("\n".join(["y,c,x", *rows[:60]]) + "\n")
    table = {
        "sources": {"t": {"files": str(tmp_path / "t.csv")}},
        "label": {"name": "y"},
        "categorical": ["c"],
        "numerical": [
            {"name": "x", "transforms": [{"log": 1}, {"fill": 3}]},
            {"name": "good", "expression": "x", "transforms": [{"clip": [0, 9]}, {"log": 1}]},
        ],
        "split": {"train": 0.5},
    }
    day = table | {"sources": {"t": {"files": str(tmp_path / "day.csv")}}}
    fitted = f"fitted={tmp_path / 'out'}"
    # Of x < 0 four of five are no empty field: ln(x + 1) has no value.
    for name, described, options, counts in (
        ("out", table, (), {"train": 16, "test": 0}),
        ("transform", table, ("mode=transform", fitted), {"test": 16}),
        ("extend", day, ("mode=extend", fitted), {"train": 16, "test": 0}),
    ):
        files = build(tmp_path / name, described, *options)
        report = json.loads((tmp_path / name / "report.json").read_text())
        assert {s: found["emptied"]["x"] for s, found in report["splits"].items()} == counts
        assert not any(found["emptied"]["good"] for found in report["splits"].values())
        assert sum(found["clipped"]["good"] for found in report["splits"].values()) > 16
        first = files[f"{next(iter(counts))}/numerical.bin"]
        assert np.frombuffer(first, "<f2").reshape(-1, 2)[:20, 0].tolist() == [3] * 20
        lines = [line for line in capsys.readouterr().out.splitlines() if "log is not" in line]
        (line,) = lines
        assert (
            f"note: log is not defined for 16 of {80 if name != 'extend' else 60} values of 'x'"
            in line
        )


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ("0101", []),
        ("0001", [("train", 0, "learn")]),
        ("0111", [("test", 1, "score")]),
        ("0000", [("train", 0, "learn"), ("test", 0, "score")]),
    ],
)
def test_labels_that_are_all_the_same_have_a_note(labels, expected, tmp_path, capsys):
    (tmp_path / "t.csv").write_text("y,c\n" + "".join(f"{label},a\n" for label in labels))
    table = {
        "sources": {"t": {"files": str(tmp_path / "t.csv")}},
        "label": {"name": "y"},
        "categorical": ["c"],
        "split": {"train": 0.5},
    }
    build(tmp_path / "out", table)
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note")]
    assert printed == [
        f"note: every label of the {split} rows is {label}: nothing to {use}; check the column or expression of the label"
        for split, label, use in expected
    ]


def test_rows_that_order_by_does_not_tell_apart_are_counted(tmp_path, capsys):
    times = [3, "", 1, 3, "", 2, 3, 1]
    (tmp_path / "t.csv").write_text("\n".join(["y,c,ts", *(f"1,a,{t}" for t in times)]) + "\n")
    table = {
        "sources": {"t": {"files": str(tmp_path / "t.csv")}},
        "label": {"name": "y"},
        "categorical": ["c"],
        "query": "SELECT * FROM t",
        "order_by": ["CAST(ts AS BIGINT)"],
        "split": {"train": 0.5},
    }
    build(tmp_path / "out", table)
    assert "note: 4 rows have the same table.order_by as the row before" in capsys.readouterr().out
    build(tmp_path / "apart", table | {"order_by": [*table["order_by"], "order_"]})
    assert "table.order_by" not in capsys.readouterr().out


def test_ties_are_counted_over_the_parts_of_a_stream():
    rows = pa.table({"a": [1, 1, 1, 2, 2, None, None, None], "b": [5, 5, 6, 6, 6, 1, None, None]})
    for size in (1, 3, 8):
        counted = SimpleNamespace(num_ties=0)
        parts = [*rows.to_batches(max_chunksize=size), rows.to_batches()[0][:0]]
        assert [*DuckDBEngine._counting_ties(counted, iter(parts), ["a", "b"])] == parts
        assert counted.num_ties == 3
