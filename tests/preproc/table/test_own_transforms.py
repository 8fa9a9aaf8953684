"""Transforms of a user: in a fit, applied again, extended, and refused where a server would import them."""

import sys
from types import SimpleNamespace

import duckdb
import numpy as np
import pytest

from configs.table_schema import Label, Numerical, TableConfig, arguments_of
from configs.transforms import TRANSFORMS, Transform
from preproc.table.expressions import double, transformed
from serving.exporting.raw_values import _Inputs, _numerical
from serving.raw_description import _check_numerical
from serving.raw_records import RawNumber
from tests.helpers.command import run_command, run_module
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


def no_inputs() -> _Inputs:
    return _Inputs(SimpleNamespace(table=TableConfig(sources={}, label=[Label()])), {})


def test_an_export_for_raw_values_is_refused():
    feature = Numerical(name="age", transforms=[{"roots_of_a_user:ROOT": 3}])
    with pytest.raises(ValueError, match="'age' is not built in"):
        _numerical(feature, no_inputs())


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_server_computes_what_the_engine_does(name):
    values = [None, -1e30, -7.3, -0.0, 1e-12, 0.1, 3.0, 41.7, 2.5e17]
    fitted = [0.3, 7.1] if TRANSFORMS[name].fits else []
    argument = [[0.1, 3.3], 1.7][TRANSFORMS[name].arguments == 1]
    transform = {name: argument} if TRANSFORMS[name].arguments else name
    rows = ", ".join("(NULL)" if x is None else f"({double(x)})" for x in values)
    sql = transformed("x", transform, fitted)
    found = duckdb.sql(f"SELECT {sql} FROM (VALUES {rows}) AS rows_(x)").fetchall()
    ours = TRANSFORMS[name].python(values, *arguments_of(transform, fitted))
    # Logarithms of two libraries may differ in the last bit of a double; what is stored and served is float32 or float16.
    stored = [None if x is None else np.float32(x) for (x,) in found]
    assert [None if x is None else np.float32(x) for x in ours] == stored


def test_a_built_in_one_without_python_is_refused_for_raw_values(monkeypatch):
    """Not served as another one."""
    monkeypatch.setitem(TRANSFORMS, "cube", Transform(sql=lambda x: f"power({x}, 3)"))
    with pytest.raises(ValueError, match="the transform cube of 'age' is not built in with its"):
        _numerical(Numerical(name="age", transforms=["cube"]), no_inputs())
    feature = RawNumber(name="age", column="age", transforms=["cube"], fitted=[[]])
    with pytest.raises(ValueError, match="got transform 'cube', want one of fill, clip"):
        _check_numerical(feature, {"age": 1})
    monkeypatch.setitem(TRANSFORMS, "cube", Transform(sql=str, python=list))
    assert _check_numerical(feature, {"age": 1})


def test_a_contradictory_record_is_refused():
    with pytest.raises(ValueError, match="takes no arguments"):
        Transform(sql=str, arguments=1, fits="range")
    with pytest.raises(ValueError, match="counts is emptied, clipped or None, without counted"):
        Transform(sql=str, counted=str)


@pytest.mark.parametrize("name", ["UNKNOWN", "OPEN", "TEXT", "LATE"])
@pytest.mark.parametrize("more", [[], ["standardise"]])
def test_sql_that_duckdb_refuses_is_one_line(tmp_path, name, more):
    table = table_of(tmp_path, "people.csv", [0, 1, 2, 8], [f"roots_of_a_user:{name}", *more])
    with pytest.raises(
        Refused, match=r"table\.numerical: 'age': the SQL of its transforms: "
    ) as refused:
        build(tmp_path / "out", table)
    assert "\n" not in refused.value.message


def test_a_model_of_a_user_s_transform_is_no_server_of_raw_values(tmp_path):
    """Trained and exported as it is; with the fit, refused in one line."""
    data, run = tmp_path / "data", tmp_path / "run"
    ages = np.random.default_rng(3).integers(0, 90, 80).tolist()
    build(data, table_of(tmp_path, "people.csv", ages, OWN))
    small = ["model.embedding_dim=8", "model.bottom_mlp=[8]", "model.top_mlp=[8,1]", "device=cpu"]
    paths = [f"data.path={data}", f"run_dir={run}", "train.batch_size=8", "train.max_steps=3"]
    ended = run_command(*paths, *small, "log.pictures=false")
    assert ended.exit_code == 0, ended.err
    command = ["serving.export", f"checkpoint={run / 'checkpoints/best'}"]
    refused = run_module(*command, f"output={tmp_path / 'raw'}", f"fitted={data}")
    assert refused.exit_code == 2
    (line,) = refused.err.splitlines()
    assert "the transform roots_of_a_user:ROOT of 'age' is not built in" in line
    assert not (tmp_path / "raw").exists()
    assert run_module(*command, f"output={tmp_path / 'model'}").exit_code == 0
