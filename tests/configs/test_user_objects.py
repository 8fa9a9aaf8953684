"""Objects named as `package.module:NAME`: the user's faults are one line, the project's own are errors as they are."""

import sys

import pytest

from configs.user_objects import load_user_object


def test_the_place_of_a_fault_in_a_users_module_is_named(tmp_path, monkeypatch):
    (tmp_path / "broken_recipe.py").write_text("X = 1\nY = X / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ValueError, match=r"ZeroDivisionError: division by zero, at .*broken_recipe\.py:2"
    ):
        load_user_object("broken_recipe:X", "model.name")


def test_a_fault_of_the_project_keeps_its_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "nn.models.dlrm", None)
    with pytest.raises(ImportError):
        load_user_object("nn.models.dlrm:DLRM", "model.name")
