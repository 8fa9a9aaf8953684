"""The package that programs import: its names, and what else a process may have under ours."""

import subprocess
import sys
from importlib import import_module
from types import ModuleType

import pytest

public = import_module("hybrid_parallel_recsys")
PROMISED = {
    "Observer",
    "ModelConfig",
    "Run",
    "Training",
    "Model",
    "option",
    "TableRule",
    "DenseRule",
    "Metric",
    "RunLogger",
}


def test_every_name_is_that_of_its_module():
    assert {*PROMISED, "write_dataset"} <= set(public.__all__)
    assert set(public.__all__) == set(public.MODULES) == set(dir(public))
    for name, module in public.MODULES.items():
        assert getattr(public, name) is getattr(import_module(module), name)
    with pytest.raises(AttributeError, match="has no Trainer; it has DenseRule"):
        _ = public.Trainer


def test_the_import_alone_brings_no_library():
    code = "import sys, hybrid_parallel_recsys; print([m for m in ('torch', 'numpy', 'hydra') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_package_of_the_user_with_a_name_of_ours_is_refused_if_it_came_first(
    monkeypatch, tmp_path
):
    theirs = ModuleType("configs")
    theirs.__path__ = [str(tmp_path)]
    monkeypatch.setitem(sys.modules, "configs", theirs)
    with pytest.raises(ImportError, match=f"the name configs, under which {tmp_path} was imported"):
        public._load("configs")
