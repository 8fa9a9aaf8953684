"""Transforms of a user: in a fit, applied again, extended, and refused where a server would import them."""

import sys

import numpy as np
import pytest

from configs.table_schema import Label, Numerical, TableConfig
from configs.transforms import Transform
from serving.exporting.raw_values import _Inputs, _numerical
from serving.raw_description import _check_numerical
from serving.raw_records import RawNumber
from tests.helpers.preproc_command import Refused
from tests.preproc.table.test_pipeline import build

MODULE = """
from configs.transforms import Transform
ROOT = Transform(sql=lambda x, root: f"(CASE WHEN ({x}) >= 0 THEN power({x}, 1 / {root}) END)", arguments=1)
HALF = Transform(sql=lambda x, least, size: f"((({x}) - {least}) / {size} - 0.5)", fits="range")
NOTHING = 3
SILENT = Transform(sql=lambda x: None)
BROKEN = Transform(sql=lambda x: 1 / 0)
UNKNOWN = Transform(sql=lambda x: f"no_function({x})")
OPEN = Transform(sql=lambda x: f"(({x}")
TEXT = Transform(sql=lambda x: f"CAST({x} AS VARCHAR) || 'a'")
LATE = Transform(sql=lambda x: f"CAST(CASE WHEN {x} > 5 THEN 'x' ELSE '1' END AS DOUBLE)")
"""


@pytest.fixture(autouse=True)
def _roots(tmp_path, monkeypatch):
    (tmp_path / "roots_of_a_user.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("roots_of_a_user", None)


def table_of(tmp_path, name, ages, transforms) -> dict:
    lines = [f"{row % 2},{age},Rome" for row, age in enumerate(ages)]
    (tmp_path / name).write_text("\n".join(["bought,age,city", *lines]) + "\n")
    return {
        "sources": {"people": {"files": str(tmp_path / name)}},
        "label": {"name": "bought"},
        "numerical": [{"name": "age", "transforms": transforms}],
        "categorical": [{"name": "city"}],
        "split": {"by": "fraction", "train": 0.5},
    }


# Hydra wants the colon of a key escaped on the command line; a yaml file does not.
OWN = [{r"roots_of_a_user\:ROOT": 3}, {"fill": 0}, "roots_of_a_user:HALF"]


def numbers(files, split) -> list[float]:
    return np.frombuffer(files[f"{split}/numerical.bin"], "<f2").tolist()


def test_it_is_fitted_applied_and_extended(tmp_path, capsys):
    table = table_of(tmp_path, "people.csv", [0, 8, -1, 27, 64, 1, 8, 0], OWN)
    fit = build(tmp_path / "fit", table, "rare_counts=true")
    assert "roots_of_a_user:HALF" in (printed := capsys.readouterr().out)
    assert "cannot be exported for raw values" in " ".join(printed.split())
    # Cube roots of training rows 0, 2, missing, 3: the range is 3.
    want = [-0.5, 2 / 3 - 0.5, -0.5, 0.5], [4 / 3 - 0.5, 1 / 3 - 0.5, 2 / 3 - 0.5, -0.5]
    for split, wanted in zip(("train", "test"), want, strict=True):
        assert numbers(fit, split) == np.float16(wanted).tolist()
    more = table_of(tmp_path, "more.csv", [64, 1, 8, 27], OWN)
    want = np.float16([4 / 3 - 0.5, 1 / 3 - 0.5, 2 / 3 - 0.5, 0.5]).tolist()
    for mode, splits in (("transform", ["test"]), ("extend", ["train", "test"])):
        files = build(tmp_path / mode, more, f"mode={mode}", f"fitted={tmp_path / 'fit'}")
        assert [number for split in splits for number in numbers(files, split)] == want


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        ("roots_of_a_user:ROOT", "takes 1 finite number, got None"),
        ({r"roots_of_a_user\:HALF": 1}, "takes no number, got 1"),
        ("roots_of_a_user:NOTHING", "is a int, want a Transform"),
        ("roots_of_a_user:NONE", "has no NONE"),
        ("no_such_module_of_a_user:ROOT", "cannot be imported"),
        ("rott", "package.module:NAME"),
        ("roots_of_a_user:SILENT", "SILENT returns None, want a text of SQL"),
        ("roots_of_a_user:BROKEN", r"BROKEN has failed \(ZeroDivisionError: division by zero, at "),
    ],
)
def test_another_one_is_refused(tmp_path, transform, message):
    table = table_of(tmp_path, "people.csv", [0, 8, 1, 27], [transform])
    with pytest.raises(Refused, match=message):
        build(tmp_path / "out", table)


def test_a_server_imports_nothing_that_a_model_names():
    feature = {
        "name": "age",
        "column": "age",
        "transforms": [{"roots_of_a_user:ROOT": 3}],
        "fitted": [[]],
    }
    with pytest.raises(ValueError, match=r"want one of fill, clip, log, minmax, standardise$"):
        _check_numerical(RawNumber(**feature), {"age": 1})
    assert "roots_of_a_user" not in sys.modules


def test_an_export_for_raw_values_is_refused():
    feature = Numerical(name="age", transforms=[{"roots_of_a_user:ROOT": 3}])
    with pytest.raises(ValueError, match="'age' is not built in"):
        _numerical(feature, _Inputs(None, TableConfig(sources={}, label=[Label()]), {}))


def test_a_contradictory_record_is_refused():
    with pytest.raises(ValueError, match="takes no arguments"):
        Transform(sql=str, arguments=1, fits="range")


@pytest.mark.parametrize("name", ["UNKNOWN", "OPEN", "TEXT", "LATE"])
@pytest.mark.parametrize("more", [[], ["standardise"]])
def test_sql_that_duckdb_refuses_is_one_line(tmp_path, name, more):
    table = table_of(tmp_path, "people.csv", [0, 1, 2, 8], [f"roots_of_a_user:{name}", *more])
    with pytest.raises(
        Refused, match=r"table\.numerical: 'age': the SQL of its transforms: "
    ) as refused:
        build(tmp_path / "out", table)
    assert "\n" not in refused.value.message
